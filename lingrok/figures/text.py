"""Figures of the text task. Numbers in, Figure out."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

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
    log_steps,
    new_figure,
    replicas_note,
    styled,
)

FIRST, SECOND = 'first copy', 'second copy'


def _steps_axis(axes, steps) -> None:
    for axis in np.ravel(axes):
        log_steps(axis, steps)
        axis.set_xlim(0, max(1, steps[-1]))


def _level(series: Mapping, name: str) -> float:
    return float(np.nanmean(series[name].values[-1]))


@styled
def training(series: Mapping, cfg: Config) -> Figure:
    """How a model of text learns its table and its context, in four panels.

    a: loss on unseen text, with the losses of unigram, bigram and trigram law. b: Kullback-Leibler divergence (KL) of
    the model from the bigram law, on unseen text and on random characters. c: accuracy on the first and the second
    copy of repeated sequences. d: loss on the letters of a name behind the first letter, where it stands in the window
    for the first time and where it comes again, with those of the trigram law (dotted, in the same colours).

    series: the metrics of a run, name -> (steps (T,), values (T, S)). Lines are means over replicas, bands 95 %
    Student intervals of the mean.
    """
    figure, axes = new_figure(2, 2, height=4.8)
    (loss, table), (copy, names) = axes

    def draw(axis, name, color, label, linestyle='-'):
        band(axis, *series[name], color=color, label=label, linestyle=linestyle)

    draw(loss, 'test/loss', BLUE, 'unseen text')
    draw(loss, 'train_text/loss', SKY, 'training text', '--')
    for law in ('unigram', 'bigram', 'trigram'):
        floor(loss, _level(series, f'test/loss/{law}'), law)
    loss.set_ylabel('loss (nats)')

    draw(table, 'test/bigram_kl', BLUE, 'unseen text')
    draw(table, 'random_repeated/bigram_kl', ORANGE, 'random characters')
    floor(table, _level(series, 'test/bigram_kl/unigram'), 'unigram law')
    table.set_ylabel('KL from bigram law (nats)')
    table.set_ylim(bottom=0)

    for split, color, label in (('repeated', GREEN, 'text'), ('random_repeated', PURPLE, 'random')):
        draw(copy, f'{split}/accuracy', color, f'{label}, {SECOND}')
        draw(copy, f'{split}/accuracy_first', color, f'{label}, {FIRST}', '--')
    floor(copy, 1 / cfg.task.vocab_size, 'chance')
    copy.set_ylabel('accuracy')
    copy.set_ylim(0, 1)

    if np.isfinite(series['names/loss_name_again'].values).any():
        for name, color, label in (('first', ORANGE, 'first time'), ('again', RED, 'again')):
            draw(names, f'names/loss_name_{name}', color, label)
            names.axhline(_level(series, f'names/loss_name_{name}/trigram'), color=color, linewidth=0.9, linestyle=':')
    else:
        names.annotate('no name comes back', (0.5, 0.5), xycoords='axes fraction', ha='center', color=GREY)
    names.set_ylabel('loss on names (nats)')

    _steps_axis(axes, series['test/loss'].steps)
    finish(figure, axes, xlabel='step', note=f'{cfg.name}: {replicas_note(series["test/loss"].values.shape[1])}')
    return figure


@styled
def dynamics(series: Mapping, cfg: Config) -> Figure:
    """What each layer holds along training: the bigram law, copying, names.

    FF: feed-forward; layers are taken out by mean ablation. a: divergence (KL) from the bigram row of what a
    feed-forward, or the embedding, says of a token alone. b: divergence of the model from the bigram row in unseen
    text, without each layer. c: largest attention that a head puts on what followed the previous occurrence in random
    repeated sequences (induction), and on the token before; dotted: a uniform pattern. d: loss on the second copy of
    random sequences, without each layer; dotted: uniform guesses. e: loss on unseen text without each layer; dotted:
    unigram, bigram and trigram law. f: loss on the letters of a name that comes again, behind its first letter, without
    each layer; dashed: where the name stands in the window for the first time; dotted: trigram law.
    """
    figure, axes = new_figure(2, 3, height=5.2)
    (memory, table, head), (copy, loss, names) = axes
    steps = series['test/loss/intact'].steps
    marked = len(steps) == 1

    def draw(axis, name, color, label, linestyle='-', layer=None):
        values_TS = series[name].values if layer is None else series[name].values[..., layer]
        if np.isfinite(values_TS).any():
            band(axis, steps, values_TS, color=color, label=label, linestyle=linestyle)
            if marked:
                axis.lines[-1].set_marker('o')

    def without_each(axis, metric):
        """The model, and without each of its layers."""
        draw(axis, f'{metric}/intact', 'black', 'model')
        colors = iter(COLORS)
        for part, short in (('attention', 'attention'), ('feed_forward', 'FF')):
            for layer in range(cfg.model.num_layers):
                draw(axis, f'{metric}/mean/{part}', next(colors, GREY), f'no {short} {layer}', layer=layer)

    colors = iter(COLORS[cfg.model.num_layers:] + COLORS)
    for layer in range(cfg.model.num_layers):
        draw(memory, 'memory/feed_forward', next(colors), f'FF {layer} alone', layer=layer)
    draw(memory, 'memory/embedding', GREY, 'embedding alone', '--')
    floor(memory, _level(series, 'memory/unigram'), 'unigram law')
    memory.set_ylabel('KL from bigram law (nats)')
    memory.set_ylim(bottom=0)

    without_each(table, 'test/bigram_kl')
    floor(table, _level(series, 'test/bigram_kl/unigram'), 'unigram law')
    table.set_ylabel('KL in text (nats)')
    table.set_ylim(bottom=0)

    draw(head, 'induction/best_head', PURPLE, 'induction')
    draw(head, 'induction/best_previous', SKY, 'token before')
    floor(head, _level(series, 'induction/uniform'), 'uniform')
    head.set_ylabel('attention of the best head')
    head.set_ylim(0, 1)

    without_each(copy, 'random_repeated/loss')
    floor(copy, float(np.log(cfg.task.vocab_size)), 'uniform')
    copy.set_ylabel('loss, second copy (nats)')

    without_each(loss, 'test/loss')
    for law in ('unigram', 'bigram', 'trigram'):
        floor(loss, _level(series, f'test/loss/{law}'), law)
    loss.set_ylabel('loss, unseen text (nats)')

    without_each(names, 'names/loss_name_again')
    draw(names, 'names/loss_name_first/intact', 'black', 'model, name for the first time', '--')
    if np.isfinite(series['names/loss_name_again/trigram'].values).any():
        floor(names, _level(series, 'names/loss_name_again/trigram'), 'trigram')
    names.set_ylabel('loss, name again (nats)')

    _steps_axis(axes, steps)
    note = f'{cfg.name}: {replicas_note(series["test/loss/intact"].values.shape[1])}'
    finish(figure, axes, xlabel='step', note=note, one_legend=True)
    return figure
