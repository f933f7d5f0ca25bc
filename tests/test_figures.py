"""Figures show what they are given: curves, bands, floors and labels."""

import csv

import matplotlib
import numpy as np
import pytest
from conftest import ROOT, get_config

from lingrok import cli, figures, model, sweep
from lingrok.analysis import settings
from lingrok.config import ModelConfig, from_config_dict
from lingrok.figures import language
from lingrok.log import Series
from lingrok.metrics import interval

STEPS = np.array([0, 10, 20])


def recall_series(replicas: int) -> dict[str, Series]:
    rng = np.random.default_rng(0)
    last = 'blocks.1'
    names = ['noisy/loss', 'noisy/loss/bayes', 'noisy/loss/distribution_only', 'clean/p_noise', 'clean/p_correct']
    names += [f'clean/{q}/{last}.mlp_in@0.0' for q in ('p_noise', 'p_correct')]
    names += ['noise_margin/blocks.0', f'noise_margin/{last}']
    names += [f'noisy/attention_{q}/{last}' for q in ('target', 'noise', 'uniform')]
    return {name: Series(STEPS, rng.uniform(size=(3, replicas))) for name in names}


def modular_series(cfg) -> dict[str, Series]:
    rng, replicas, series = np.random.default_rng(0), cfg.num_replicas, {}
    for split in cfg.task.splits:
        for name in ('loss', 'accuracy_last', 'accuracy_last_not_covered'):
            series[f'{split}/{name}'] = Series(STEPS, rng.uniform(size=(3, replicas)))
        for name in ('ratio', 'copy', 'chance', 'kernel', 'bayes_uniform'):
            series[f'{split}/accuracy_last/{name}'] = Series(STEPS, rng.uniform(size=(3, replicas)))
            series[f'{split}/accuracy_by_shot/{name}'] = Series(STEPS, rng.uniform(size=(3, replicas, 4)))
        series[f'{split}/accuracy_last_not_covered/kernel'] = Series(STEPS, rng.uniform(size=(3, replicas)))
        series[f'{split}/accuracy_by_shot'] = Series(STEPS, rng.uniform(size=(3, replicas, 4)))
    return series


def test_recall_figure_draws_means_bands_and_floors(smoke):
    series = recall_series(4)
    axes = figures.TRAINING['recall'](series, from_config_dict(smoke)).axes
    curve = axes[0].lines[0]
    np.testing.assert_allclose(curve.get_ydata(), interval(series['noisy/loss'].values)[0])
    floors = {round(float(line.get_ydata()[0]), 6) for line in axes[0].lines[1:]}
    for name in ('bayes', 'distribution_only'):
        assert round(series[f'noisy/loss/{name}'].values[-1].mean(), 6) in floors
    bands = [len(axis.collections) for axis in axes]
    assert bands == [1, 4, 2, 3]  # one a curve
    assert all(axis.get_xlabel() == 'step' and axis.get_ylabel() for axis in axes)
    assert '(nats)' in axes[0].get_ylabel()


def test_one_seed_has_no_error_bars_and_says_so(smoke):
    figure = figures.TRAINING['recall'](recall_series(1), from_config_dict(smoke))
    assert not any(axis.collections for axis in figure.axes)
    assert 'no error bars' in figure.get_suptitle()


def test_two_seeds_are_both_drawn(smoke):
    series = recall_series(2)
    axes = figures.TRAINING['recall'](series, from_config_dict(smoke)).axes
    assert not axes[0].collections
    drawn = np.stack([line.get_ydata() for line in axes[0].lines[1:3]], -1)
    np.testing.assert_allclose(drawn, series['noisy/loss'].values)


def test_what_was_not_measured_stays_out(smoke):
    series = {name: x for name, x in recall_series(2).items() if '@' not in name and 'margin' not in name}
    axes = figures.TRAINING['recall'](series, from_config_dict(smoke)).axes
    assert not axes[2].get_legend_handles_labels()[0]


def test_modular_figure_groups_replicas_by_setting():
    cfg = from_config_dict(get_config('modular.py:smoke'))
    series = modular_series(cfg)
    axes = figures.TRAINING['modular'](series, cfg).axes
    labels = axes[0].get_legend_handles_labels()[1]
    assert {label.split(':')[0] for label in labels} == set(cfg.groups()) == {'num_tasks=36', 'num_tasks=8'}
    (replica,) = cfg.groups()['num_tasks=8']
    curve = next(line for line in axes[0].lines if line.get_label() == 'num_tasks=8: unseen')
    np.testing.assert_allclose(curve.get_ydata(), series['ood_train/accuracy_last'].values[:, replica])
    assert axes[2].get_xlabel() == 'shots'


@pytest.mark.parametrize('setting', [{'font.size': 30}, {'axes.spines.top': True}])
def test_style_does_not_depend_on_the_users_settings(smoke, setting):
    with matplotlib.rc_context(setting):
        axis = figures.TRAINING['recall'](recall_series(2), from_config_dict(smoke)).axes[0]
    assert axis.yaxis.label.get_size() == 8
    assert not axis.spines['top'].get_visible()


def test_written_figure_has_its_numbers_beside_it(smoke, tmp_path):
    series = recall_series(2)
    path = cli.write_figure(figures.TRAINING['recall'](series, from_config_dict(smoke)), tmp_path, 'x', series)
    assert path.read_bytes().startswith(b'\x89PNG') and (tmp_path / 'x.pdf').read_bytes().startswith(b'%PDF')
    with (tmp_path / 'x.csv').open() as file:
        rows = [row for row in csv.DictReader(file) if row['quantity'] == 'noisy/loss']
    found = np.array([float(row['value']) for row in rows]).reshape(3, 2)
    np.testing.assert_allclose(found, series['noisy/loss'].values, rtol=1e-5)


def sweep_points(shapes, quantities):
    """Three seeds of every shape, with random numbers."""
    rng = np.random.default_rng(0)
    return [settings.Point({**shape, 'seed': seed}, np.array([10]), {name: rng.uniform(size=1) for name in quantities})
            for shape in shapes for seed in range(3)]


def test_recall_comparison_takes_the_last_feed_forward_there_is():
    quantities = figures.recall.QUANTITIES
    point, _, _ = sweep_points([{}], quantities)
    values = {name: np.array([np.nan]) for name in quantities}
    values |= {'clean/p_noise': np.array([0.5]), 'clean/p_noise/blocks.0.mlp_in@0.0': np.array([0.1]),
               'noise_margin/blocks.0': np.array([1.0]), 'noise_margin/blocks.1': np.array([2.0])}
    found = figures.recall.compared(point._replace(values=values))
    assert found['P(noise), clean data', 'whole'] == 0.5
    assert found['P(noise), clean data', 'without the last feed-forward'] == 0.1
    assert found['noise margin (nats)', 'whole'] == 2
    assert np.isnan(found['P(target), clean data', 'whole'])
    table = {label: {key: np.array([value] * 3) for key, value in found.items()} for label in ('one', 'two, three')}
    figure = figures.recall.comparison(table, 'a sweep')
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ['one', 'two, three']


def test_budget_counts_the_parameters_of_a_layer():
    shapes = [{'model.d_model': 64, 'model.d_mlp': 256, 'model.d_head': 64, 'model.query': 'identity'},
              {'model.d_model': 64, 'model.d_mlp': 16, 'model.d_head': 8, 'model.query': 'full'}]
    shares = [figures.recall.feed_forward_share(shape) for shape in shapes]
    np.testing.assert_allclose(shares, [8 / 11, 2 * 64 * 16 / (2 * 64 * 16 + 4 * 64 * 8)])
    for shape, share in zip(shapes, shares, strict=True):  # the same by the model itself
        cfg = ModelConfig(num_layers=1, vocab_size=3, max_len=2, **{key[6:]: x for key, x in shape.items()})
        sizes = {name: np.prod(spec.shape) for name, spec in model.block_specs(cfg, 0).items()}
        assert share == pytest.approx((sizes['mlp_in'] + sizes['mlp_out']) / sum(sizes.values()))
    figure = figures.recall.budget(sweep_points(shapes, figures.recall.BUDGET_NAMES), 'a sweep')
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ['width free', 'width fixed']
    assert 'mean of 3 seeds' in figure.get_suptitle()


def test_budget_of_the_config_keeps_the_total():
    file = sweep.load_config_file(ROOT / 'configs' / 'recall.py')
    _, _, groups = sweep.resolve(file.get_config('budget').to_dict(), file.get_sweep('budget'))
    totals = {'identity': [], 'full': []}
    for group in groups:
        cfg = group.config.model
        totals[cfg.query].append(sum(np.prod(spec.shape) for spec in model.block_specs(cfg, 0).values()))
    for found in totals.values():
        assert len(found) >= 4 and max(found) < 1.02 * min(found)


@pytest.mark.parametrize('settings_, expected', [
    ([{'a.x': 1, 'a.y': 'u'}, {'a.x': 1, 'a.y': 'v'}, {'a.x': 2, 'a.y': 'u'}, {'a.x': 2, 'a.y': 'v'}],
     ['x 1, y u', 'x 1, y v', 'x 2, y u', 'x 2, y v']),
    ([{'a.x': 1, 'a.f': ['p']}, {'a.x': 2, 'a.f': ['p']}, {'a.x': 1, 'a.f': ['p', 'q']}, {'a.x': 1, 'a.f': []}],
     ['as configured', 'x 2', 'f +q', 'f -p']),
    ([{'a.x': 1, 'a.k': ['u', 'u']}, {'a.x': 2, 'a.k': ['u', 'u']}, {'a.x': 1, 'a.k': ['u', 'v']},
      {'a.x': 1, 'a.k': ['v', 'u']}], ['as configured', 'x 2', 'k u v', 'k v u']),
    ([{'a.f': []}, {'a.f': ['p']}], ['f none', 'f p']),
    ([{'a.x': 1, 'eval.z': 1}, {'a.x': 1, 'eval.z': 2}], ['all', 'all']),
])
def test_settings_are_called_by_what_differs(settings_, expected):
    points = [settings.Point({**setting, 'seed': 1}, None, {}) for setting in settings_]
    assert settings.labels(points) == expected
    assert all(key.partition('.')[2] in ' '.join(expected) for key in settings.differing(points))
    assert (settings.differing(points) == []) == (expected == ['all', 'all'])


def test_expected_is_what_is_about_settings_that_differ():
    points = [settings.Point({'a.x': x, 'a.f': f, 'a.same': 'u'}, None, {}) for x, f in ((1, 'sgd'), (0, 'adamw'))]
    asked = {('a.f', 'adamw'): ('optimizers',), ('a.f', 'muon'): ('never',), ('a.same', 'u'): ('same',),
             ('a.x', ''): ('any', 'value'), ('a.none', ''): ('no key',)}
    assert settings.about(points, asked) == ['optimizers', 'any', 'value']


@pytest.mark.parametrize('steps', [(0,), (0, 54, 106, 400), (0, 1, 10, 10**6), tuple(range(0, 1000, 50)), (7,)])
def test_labels_of_steps_do_not_run_into_each_other(steps):
    figure, axes = figures.style.new_figure(1, 4, height=2)
    axes[0, 0].plot(steps, steps)
    figures.style.log_steps(axes[0, 0], steps)
    figure.draw_without_rendering()
    low, high = axes[0, 0].get_xlim()
    ticks = [tick for tick in axes[0, 0].xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = sorted((tick.label1.get_window_extent() for tick in ticks), key=lambda box: box.x0)
    assert all(left.x1 < right.x0 for left, right in zip(boxes, boxes[1:], strict=False))
    assert [tick.get_loc() for tick in ticks][:1] == [0] or steps == (7,)


def test_a_heat_map_names_matrix_and_fraction_of_every_column():
    rng, series = np.random.default_rng(0), {}
    entries = [f'blocks.{i}.{role}@{f}' for i in range(3) for role in ('mlp_in', 'q') for f in (0, 1)]
    for name in ('whole', *entries):
        for word in ('io', 'the'):
            series[f'{name}/log_p/{word}'] = Series(np.zeros(1, int), rng.normal(size=(1, 4)))
        series[f'{name}/kl'] = Series(np.zeros(1, int), rng.uniform(size=(1, 2)))
    drawn = language.heat_map(series | {f'chosen/{entries[0]}': Series(np.zeros(1, int), np.ones((1, 1)))})
    panels = [axis for axis in drawn.axes if axis.images]
    assert [axis.get_title() for axis in panels] == ['mlp_in,\ntop kept', 'q,\ntop kept', *4 * ['']]
    assert [axis.get_xlabel() for axis in panels] == [*4 * [''], *2 * ['rank kept (%)']]
    lead = {name: (series[f'{name}/log_p/io'].values - series[f'{name}/log_p/the'].values).mean() for name in entries}
    whole = (series['whole/log_p/io'].values - series['whole/log_p/the'].values).mean()
    shown = np.array(panels[1].images[0].get_array())
    np.testing.assert_allclose(shown, [[lead[f'blocks.{i}.q@{f}'] - whole for f in (0, 1)] for i in range(3)])
