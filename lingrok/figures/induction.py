"""Figures of how an induction head is learned. Numbers in, Figure out."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from lingrok.analysis.three_steps import ORDERS
from lingrok.config import Config
from lingrok.figures.style import (
    BLUE,
    COLORS,
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

MEMORIES = {'wo1': (BLUE, 'copy, wo1'), 'wk1': (RED, 'trigger, wk1'), 'wk0': (GREEN, 'previous, wk0')}
EVENTS = {
    'association/ff1': (ORANGE, 'bigrams, ff1'), 'association/wo1': MEMORIES['wo1'],
    'association/wk1': MEMORIES['wk1'], 'association/wk0': MEMORIES['wk0'],
    'noisy/argmax_follows': (PURPLE, 'layer 1 finds'), 'noisy/argmax_previous': (SKY, 'layer 0 looks back'),
    'clean/accuracy': (GREY, 'accuracy'),
}

QUANTITIES = {'clean/accuracy': 'accuracy', **{f'association/{name}': label for name, (_, label) in MEMORIES.items()}}


@styled
def training(series: Mapping, cfg: Config) -> Figure:
    """How the parts of an induction head are learned, in four panels.

    a: memories: share of right answers of the output matrix (copy the token read) and of the key matrices of layer 1
    (a trigger finds what followed it) and layer 0 (a position finds the one before it), read off the weights; thin:
    wk0 on the first 64 positions where there are more; dotted: chance. b: at repeated triggers, accuracy on clean
    data, with targets uniform or from bigrams whatever training had, and the share at which layer 1 looks most at a
    token behind the same trigger; behind triggers, that at which layer 0 looks most at the trigger. c: loss at
    the scored positions and at all that are no trigger, with exact predictors; ff1: divergence of the feed-forward
    from the bigrams. d: step at which each has passed half of its way. Bands and bars: 95 % intervals over seeds.
    """
    figure, axes = new_figure(2, 2, height=4.9)
    (memory, behaviour), (loss, order) = axes

    def draw(axis, name, color, label, linestyle='-'):
        if name in series and np.isfinite(series[name].values).any():
            band(axis, *series[name], color=color, label=label, linestyle=linestyle)

    for name, (color, label) in MEMORIES.items():
        draw(memory, f'association/{name}', color, label)
    if cfg.task.seq_len > 65:
        draw(memory, 'association/wk0_early', GREEN, 'wk0, first 64', '--')
    floor(memory, 1 / min(cfg.model.vocab_size, max(cfg.model.max_len - 1, 1)), 'chance at most')
    memory.set_ylabel('share of associations')

    draw(behaviour, 'clean/accuracy', GREY, 'accuracy')
    draw(behaviour, 'transfer/uniform', BLUE, 'uniform targets', '--')
    draw(behaviour, 'transfer/bigram', ORANGE, 'bigram targets', '--')
    draw(behaviour, 'noisy/argmax_follows', PURPLE, 'layer 1 finds')
    draw(behaviour, 'noisy/argmax_previous', SKY, 'layer 0 looks back')
    behaviour.set_ylabel('share of positions')
    for axis in (memory, behaviour):
        axis.set_ylim(-0.03, 1.03)

    draw(loss, 'noisy/loss', BLUE, 'scored')
    floor(loss, series['noisy/loss/bayes'].values[-1].mean(), 'Bayes')
    floor(loss, series['noisy/loss/distribution_only'].values[-1].mean(), 'distribution only', below=True)
    if cfg.task.loss_on == 'all':
        draw(loss, 'noisy/loss_bigram', RED, 'no trigger')
        floor(loss, series['noisy/loss_bigram/bayes'].values[-1].mean(), 'bigrams', below=True)
        draw(loss, 'association/ff1', ORANGE, 'ff1')
    loss.set_ylabel('nats')
    loss.set_ylim(bottom=0)
    for axis in (memory, behaviour, loss):
        axis.set_xlim(0, cfg.train.num_steps)

    events = [name for name in EVENTS if np.isfinite(series.get(f'half/{name}', (0, [np.nan]))[1]).any()]
    for place, name in enumerate(events):
        color, _ = EVENTS[name]
        values_S = series[f'half/{name}'].values[-1]
        mean, half = interval(values_S)
        order.errorbar(mean, -place, xerr=np.nan_to_num(half), color=color, marker='o', markersize=3.5, linewidth=1)
        order.plot(values_S, np.full(len(values_S), -place - 0.25), '|', color=color, markersize=4)
    order.set_yticks([-place for place in range(len(events))], [EVENTS[name][1] for name in events])
    order.set_ylim(-len(events) + 0.4, 0.6)
    order.set_xlim(left=0)
    finish(figure, axes, xlabel='step', note=f'{cfg.name}: {replicas_note(cfg.num_replicas)}', one_legend=True)
    order.set_xlabel('half-way step')
    return figure


@styled
def three_steps(series: Mapping) -> Figure:
    """One gradient step on each memory of the simplified model, from zero, in two orders.

    Share of right answers of each memory, read off the weights, and accuracy at the query of fresh sequences, after
    each step; below, the matrix that the step moved (o: output, k: key; layer). Dotted: chance. Mean of the seeds
    with 95 % intervals.
    """
    figure, axes = new_figure(1, len(ORDERS), height=2.7)
    chance = series['chance'].values[-1, 0]
    for axis, (order, roles) in zip(axes[0], ORDERS.items(), strict=True):
        for (name, (color, label)), shift in zip((*MEMORIES.items(), ('accuracy', (GREY, 'accuracy'))),
                                                 (-0.09, -0.03, 0.03, 0.09), strict=True):
            mean, half = interval(series[f'{order}/{name}'].values[-1], 0)
            axis.errorbar(np.arange(4) + shift, mean, np.nan_to_num(half), color=color, label=label, marker='o',
                          markersize=3, linewidth=1)
        axis.axhline(chance, color=GREY, linewidth=0.8, linestyle=':')
        axis.set_xticks(range(4), ['start', *(f'{role[-1]}, layer {role[7]}' for role in roles)])
        axis.set_ylim(-0.03, 1.05)
        axis.set_ylabel(f'share, {order.replace("_", " ")}')
    count = len(series[f'{order}/accuracy'].values[-1])
    finish(figure, axes, xlabel='step on', note=replicas_note(count), one_legend=True)
    return figure


@styled
def comparison(table: Mapping[str, Mapping[str, list]], name: str) -> Figure:
    """Settings of a sweep side by side: accuracy at repeated triggers and the memories, along training.

    table: setting -> {quantity: (steps (T,), values (T, S))}. Lines are means over seeds, bands 95 % intervals.
    """
    shown = [key for key in QUANTITIES if any(np.isfinite(row[key][1]).any() for row in table.values())]
    figure, axes = new_figure(1, len(shown), height=2.6)
    for axis, key in zip(axes[0], shown, strict=True):
        for i, (setting, row) in enumerate(table.items()):
            band(axis, *row[key], color=COLORS[i % len(COLORS)], label=setting,
                 linestyle=('-', '--')[i // len(COLORS) % 2])
        axis.set_ylabel(QUANTITIES[key])
        axis.set_ylim(-0.03, 1.03)
        axis.set_xlim(left=0)
    count = min(row[shown[0]][1].shape[1] for row in table.values())
    finish(figure, axes, xlabel='step', note=f'{name}: {replicas_note(count)}', one_legend=True)
    return figure
