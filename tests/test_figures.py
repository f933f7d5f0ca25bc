"""Figures show what they are given: curves, bands, floors and labels."""

import csv

import matplotlib
import numpy as np
import pytest
from conftest import get_config

from lingrok import cli, figures
from lingrok.config import from_config_dict
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
