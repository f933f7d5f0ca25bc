"""Figures of the recall task. Numbers in, Figure out."""

import textwrap
from collections import Counter
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from lingrok.config import Config
from lingrok.figures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    band,
    finish,
    floor,
    new_figure,
    replicas_note,
    styled,
)
from lingrok.metrics import interval


@styled
def training(series: Mapping, cfg: Config) -> Figure:
    """How noise and recall are learned, in four panels.

    FF: feed-forward. a: loss at the scored positions of noisy data, with the losses of two exact predictors. b: mean
    probability of the noise token and of the target at repeated triggers of clean data. c: noise logit minus the best
    other logit when a feed-forward sees the embedding of the trigger alone. d: attention of repeated triggers on what
    followed the same trigger earlier.

    series: the metrics of a run, name -> (steps (T,), values (T, S)). Lines are means over replicas, bands 95 %
    Student intervals of the mean. A curve that was not measured stays out.
    """
    layer = cfg.model.num_layers - 1
    figure, axes = new_figure(2, 2, height=4.8)
    (loss, clean), (margin, attention) = axes

    def draw(axis, name, color, label, linestyle='-'):
        if name in series:
            band(axis, *series[name], color=color, label=label, linestyle=linestyle)

    draw(loss, 'noisy/loss', BLUE, 'model')
    floor(loss, series['noisy/loss/bayes'].values[-1].mean(), 'Bayes', below=True)
    floor(loss, series['noisy/loss/distribution_only'].values[-1].mean(), 'distribution only')
    loss.set_ylabel('loss (nats)')
    loss.set_ylim(bottom=0)

    without = f'blocks.{layer}.mlp_in@0.0'
    draw(clean, 'clean/p_noise', RED, 'noise')
    draw(clean, 'clean/p_correct', GREEN, 'target')
    draw(clean, f'clean/p_noise/{without}', RED, f'noise, no FF {layer}', '--')
    draw(clean, f'clean/p_correct/{without}', GREEN, f'target, no FF {layer}', '--')
    clean.axhline(cfg.task.noise_prob, color=GREY, linewidth=0.9, linestyle=':', label='noise probability')
    clean.set_ylabel('probability on clean data')
    clean.set_ylim(0, 1)

    for number, color in zip(range(layer + 1), (ORANGE, PURPLE, BLUE, GREEN, RED, SKY), strict=False):
        draw(margin, f'noise_margin/blocks.{number}', color, f'FF {number}')
    margin.axhline(0, color='black', linewidth=0.5)
    margin.set_ylabel('noise margin (nats)')

    draw(attention, f'noisy/attention_target/blocks.{layer}', GREEN, 'on targets')
    draw(attention, f'noisy/attention_noise/blocks.{layer}', RED, 'on noise')
    draw(attention, f'noisy/attention_uniform/blocks.{layer}', GREY, 'on targets if uniform', ':')
    attention.set_ylabel(f'attention, layer {layer}')
    attention.set_ylim(0, 1)

    for axis in axes.flat:
        axis.set_xlim(0, cfg.train.num_steps)
    count = series['noisy/loss'].values.shape[1]
    finish(figure, axes, xlabel='step', note=f'{cfg.name}: {replicas_note(count)}')
    return figure


# What `comparison` shows of a setting: title, axis label, and for each marker the quantities of which the first that
# was measured is taken: without the last feed-forward, whatever its kind and layer.
LAYERS = tuple(range(5, -1, -1))
WITHOUT = tuple(f'blocks.{layer}.{role}@0.0' for layer in LAYERS for role in ('mlp_in', 'mlp_linear'))
CUT = tuple(f'blocks.{layer}.ov@0.1' for layer in LAYERS)
MODELS = {'whole': ('',), 'without the last feed-forward': tuple(f'/{x}' for x in WITHOUT),
          'attention cut to a tenth': tuple(f'/{x}' for x in CUT)}
PANELS = {
    'P(noise), clean data': {name: [f'clean/p_noise{x}' for x in found] for name, found in MODELS.items()},
    'P(target), clean data': {name: [f'clean/p_correct{x}' for x in found] for name, found in MODELS.items()},
    'attention on targets': {'whole': [f'noisy/attention_target/blocks.{layer}' for layer in LAYERS]},
    'noise margin (nats)': {'whole': [f'noise_margin/blocks.{layer}' for layer in LAYERS]},
}
QUANTITIES = tuple(name for panel in PANELS.values() for names in panel.values() for name in names)


def compared(point) -> dict[tuple[str, str], float]:
    """(panel, marker) -> value at the last step of a `settings.Point`, NaN for what was not measured."""
    return {(title, marker): next((point.values[name][-1] for name in names if np.isfinite(point.values[name][-1])),
                                  np.nan)
            for title, panel in PANELS.items() for marker, names in panel.items()}


@styled
def comparison(table: Mapping[str, Mapping], name: str) -> Figure:
    """Settings of a sweep side by side at the last step: who holds the noise, who recalls.

    The whole model, without its last feed-forward, and with the value-output matrix of its last layer cut to a tenth of
    the rank. Means over seeds with 95 % intervals, small dots are seeds. The noise margin is that of the last
    feed-forward, seeing the trigger's embedding alone.

    table: setting -> {(panel, marker): values (S,)}, see `compared`.
    """
    figure, axes = new_figure(1, len(PANELS), height=1.2 + 0.36 * len(table))
    places = np.arange(len(table))[::-1]
    markers = {'whole': ('o', BLUE, 0.0), 'without the last feed-forward': ('s', RED, 0.2),
               'attention cut to a tenth': ('^', GREY, -0.2)}
    for axis, (title, panel) in zip(axes[0], PANELS.items(), strict=True):
        for marker in panel:
            form, color, shift = markers[marker]
            for place, row in zip(places, table.values(), strict=True):
                values = np.asarray(row[title, marker], float)
                mean, half = interval(values)
                height = place + (shift if len(panel) > 1 else 0)
                axis.plot(values, np.full(len(values), height), '.', color=color, markersize=2.5, alpha=0.5)
                axis.errorbar(mean, height, xerr=None if np.isnan(half) else half, fmt=form, color=color, markersize=4,
                              label=marker if place == places[0] else None)
        axis.set_title(title, fontsize=7)
        axis.set_ylim(-0.6, len(places) - 0.4)
        axis.set_yticks(places, [''] * len(places))
        axis.grid(axis='y', linewidth=0.3, alpha=0.6)
        if 'nats' in title:
            axis.axvline(0, color='black', linewidth=0.5)
        else:
            axis.set_xlim(-0.02, 1.02)
    axes[0, 0].set_yticks(places, [textwrap.fill(label, 30) for label in table])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=3)
    figure.suptitle(f'{name}: {replicas_note(min(len(x) for row in table.values() for x in row.values()))}',
                    fontsize=8)
    return figure


BUDGET = {
    'noisy/loss_bigram': ('loss off triggers, above Bayes (nats)', 'noisy/loss_bigram/bayes'),
    'noisy/loss_recall': ('loss at repeated triggers, above Bayes (nats)', 'noisy/loss_recall/bayes'),
    'clean/p_correct': ('P(target), clean data', None),
    'noisy/attention_target/blocks.1': ('attention on targets', None),
}
BUDGET_NAMES = tuple(name for quantity, (_, floor) in BUDGET.items() for name in (quantity, floor) if name)


def feed_forward_share(coordinates: Mapping) -> float:
    """Share of the trainable parameters of a layer that its two-matrix feed-forward has."""
    width, hidden = coordinates['model.d_model'], coordinates['model.d_mlp']
    attention = 4 * width * coordinates['model.d_head'] if coordinates['model.query'] == 'full' else 3 * width**2
    return 2 * width * hidden / (2 * width * hidden + attention)


@styled
def budget(points, name: str) -> Figure:
    """Parameters shifted between feed-forward and attention at a fixed total, at the last step.

    Full: the width follows from the budget, so that it falls as the feed-forward grows. Dashed: the width is fixed, and
    the head width gives what the feed-forward takes. Means over seeds with 95 % intervals.
    """
    figure, axes = new_figure(1, len(BUDGET), height=2.5)
    series = {'identity': ('width free', '-', BLUE), 'full': ('width fixed', '--', ORANGE)}
    for axis, (quantity, (label, floor_name)) in zip(axes[0], BUDGET.items(), strict=True):
        for query, (text, linestyle, color) in series.items():
            own = [point for point in points if point.coordinates['model.query'] == query]
            shares = sorted({feed_forward_share(point.coordinates) for point in own})
            values = [[point.values[quantity][-1] - (point.values[floor_name][-1] if floor_name else 0) for point in own
                       if feed_forward_share(point.coordinates) == share] for share in shares]
            if own:
                mean, half = np.array([interval(np.array(x)) for x in values]).T
                axis.errorbar(shares, mean, np.nan_to_num(half), fmt='o', linestyle=linestyle, color=color,
                              markersize=3.5, capsize=2, label=text)
        axis.set_title(textwrap.fill(label, 24), fontsize=7)
        axis.set_xlabel('share of feed-forward')
        axis.set_xlim(0, 1)
        axis.set_ylim(bottom=0)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=2)
    counts = Counter(tuple(sorted((key, str(value)) for key, value in point.coordinates.items() if key != 'seed'))
                     for point in points)
    figure.suptitle(f'{name}: {replicas_note(min(counts.values()))}', fontsize=8)
    return figure
