"""Figures of what representations of the modular task look like. Numbers in, Figure out."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from lingrok.analysis.characters import VIEWS, neuron_layers, random_shares
from lingrok.config import Config
from lingrok.figures.style import COLORS, GREY, finish, new_figure, replicas_note, styled
from lingrok.metrics import interval

VIEW = VIEWS.index('x at y')


def errorbars(axis, x, values_S, *, color: str, label: str = '', fmt: str = 'o') -> None:
    """Mean over replicas (S, ...) with 95 % intervals."""
    mean, half = interval(values_S, 0)
    axis.errorbar(x, mean, np.nan_to_num(half), fmt=fmt, color=color, label=label or None, markersize=3, linewidth=1.0,
                  capsize=1.5, elinewidth=0.8)


def _lines(axis, x, values_S, color: str, label: str) -> None:
    """One thin line a replica."""
    for i, values in enumerate(values_S):
        axis.plot(x, values, 'o-', color=color, markersize=2, linewidth=0.8, label=label if i == 0 and label else None)


@styled
def characters(series: Mapping, cfg: Config) -> Figure:
    """Power of the multiplicative characters in the token embedding, in attention heads and in MLP neurons.

    One row a setting; spectra have one line a seed, as every seed has its own frequencies. a: share of every frequency
    of the discrete logarithm in the embeddings of non-zero tokens. b: the same of head outputs at the y token as
    functions of x, in each block of the head whose largest frequency has the largest share. c: of all MLP neurons of a
    block, their power added up. d: share of the largest frequency, in the embedding (E), the same head of each block
    (H) and neurons (N, mean of single neurons, weighted by power); grey ticks: random numbers of the same shape.
    Dotted: expected of random numbers. The last frequency is the quadratic character.
    """
    groups, last = cfg.groups(), {name: x.values[-1] for name, x in series.items()}
    figure, axes = new_figure(len(groups), 4, height=0.5 + 1.75 * len(groups))
    frequency = np.arange(1, (cfg.task.p + 1) // 2)
    layers = neuron_layers(cfg.model)
    for (embed, heads, neurons, largest), (setting, replicas) in zip(axes, groups.items(), strict=True):
        _lines(embed, frequency, last['embedding/power'][replicas], COLORS[0], '')
        bars = [('E', last['embedding/concentration'][replicas], last['embedding/concentration/random'][replicas])]
        for n in range(cfg.model.num_layers):
            concentration_SH = last['heads/concentration'][replicas][:, VIEW, n]
            best_S = np.argmax(concentration_SH, -1)
            power_SF = last['heads/power'][replicas, :, VIEW, n, best_S]
            _lines(heads, frequency, power_SF, COLORS[n % 7], f'block {n}')
            bars.append((f'H{n}', np.max(concentration_SH, -1), last['heads/concentration/random'][replicas]))
        for i, n in enumerate(layers):
            _lines(neurons, frequency, last['neurons/power'][replicas][..., VIEW, i], COLORS[n % 7], f'block {n}')
            bars.append((f'N{n}', last['neurons/concentration'][replicas][:, VIEW, i],
                         last['neurons/concentration/random'][replicas]))
        for axis in (embed, heads, neurons):
            axis.plot(frequency, random_shares(cfg.task.p), ':', color=GREY, linewidth=0.9)
            axis.set_ylim(0, 1.02)
            axis.set_xticks(frequency[:: 1 + len(frequency) // 6])
        for i, (_, values_S, random_S) in enumerate(bars):
            errorbars(largest, [i], values_S[:, None], color=COLORS[0])
            largest.plot([i - 0.35, i + 0.35], [random_S.mean()] * 2, color=GREY)
        largest.set_xticks(range(len(bars)), [bar[0] for bar in bars])
        largest.set_ylim(0, 1.02)
        embed.set_ylabel(f'{setting}\nshare of power' if setting else 'share of power')
        largest.set_ylabel('largest share')
    names = 'embedding', 'best head, x at y', 'neurons, x at y', 'concentration'
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_title(name, pad=16)
    note = f'{cfg.name}, p = {cfg.task.p}; spectra: one line a seed; concentration: {replicas_note(min(map(len, groups.values())))}'
    finish(figure, axes, xlabel='frequency', note=note)
    for axis in axes[:, 3]:
        axis.set_xlabel('part and block')
    return figure


def characters_frame(axis, values: Mapping, cfg: Config) -> None:
    """Shares of the frequencies in the token embedding."""
    share_F = values['embedding/power']
    frequency = np.arange(1, len(share_F) + 1)
    axis.bar(frequency, share_F, color=COLORS[0])
    axis.plot(frequency, random_shares(cfg.task.p), ':', color=GREY, linewidth=0.9)
    axis.set_ylim(0, 1)
    axis.set_xlabel('frequency', fontsize=6.5)
    axis.set_yticks([0, 1] if axis.get_subplotspec().is_first_col() else [])
