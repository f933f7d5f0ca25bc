"""Figures of what representations of the modular task look like. Numbers in, Figure out."""

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from lingrok.analysis.characters import VIEWS, log_table, neuron_layers, random_shares
from lingrok.analysis.neurons import KINDS, SHARES
from lingrok.analysis.probes import probed_shots
from lingrok.config import Config
from lingrok.figures.style import (
    BLUE,
    COLORS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    TWO_COLUMNS,
    finish,
    first_replica,
    floor,
    new_figure,
    picture,
    replicas_note,
    styled,
)
from lingrok.metrics import interval

CYCLE = LinearSegmentedColormap.from_list('cycle', (BLUE, PURPLE, RED, ORANGE, GREEN, BLUE))

VIEW = VIEWS.index('x at y')


def errorbars(axis, x, values_S, *, color: str, label: str = '', fmt: str = 'o') -> None:
    """Mean over replicas (S, ...) with 95 % intervals."""
    mean, half = interval(values_S, 0)
    axis.errorbar(x, mean, _bar(half), fmt=fmt, color=color, label=label or None, markersize=3, linewidth=1.0,
                  capsize=1.5, elinewidth=0.8)


def _bar(half):
    """Half widths of error bars; None, and no bar, for one seed."""
    return half if np.isfinite(half).any() else None


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
    count = min(map(len, groups.values()))
    note = f'{cfg.name}, p = {cfg.task.p}; spectra: one line a seed; concentration: {replicas_note(count)}'
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


def part_of(names) -> str:
    """'heads' of the quantity 'heads/ring'."""
    return next(name.partition('/')[0] for name in names if name.endswith('/ring') and not name.startswith('best'))


@styled
def pca(series: Mapping, cfg: Config) -> Figure:
    """Principal components of what a part of the model adds at two tokens, one example running over all inputs.

    Scatters: the head with the highest ring score of the first and of the last block (replica 0), components 1 and 2, 3
    and 4, with their shares of variance. One point an input (x, y), coloured by the logarithm of x, which stands at the
    mean of its class; grey: x = 0. Thin lines join y in the order of its logarithm; the hollow point is y = 0. c: the
    same of token embeddings. f: share of variance that one frequency of log x explains, of the best head of each block;
    dotted: residues x in random order.
    """
    last, groups, root = {name: x.values[-1] for name, x in series.items()}, cfg.groups(), _root(series)
    part, count = part_of(series), min(map(len, groups.values()))
    figure, axes = new_figure(2, 3, height=4.9)
    one = {name: values[0] for name, values in last.items()}
    num_layers = one[f'{part}/ring'].shape[0]
    for row, layer in zip(axes, (0, num_layers - 1), strict=True):
        head = int(np.argmax(one[f'{part}/ring'][layer]))
        scores_B4, share = one[f'{part}/scores'][layer, head], one[f'{part}/variance'][layer, head]
        name = f'head {head}' if part == 'heads' else part
        for axis, first in zip(row, (0, 2), strict=False):
            circles(axis, scores_B4[:, first : first + 2], cfg.task.p, root)
            axis.set_title(f'block {layer}, {name}: {share[first]:.0%}, {share[first + 1]:.0%}', pad=4)
            axis.set_xlabel(f'component {first + 1}')
            axis.set_ylabel(f'component {first + 2}')
    embed, share, log = one['embedding/scores'], one['embedding/variance'], log_table(cfg.task.p, root)
    axes[0, 2].scatter(*embed[:, :2].T, s=10, c=_colors(cfg.task.p, root))
    for r in range(cfg.task.p):
        axes[0, 2].annotate(str(log[r]), embed[r, :2], xytext=(2, 2), textcoords='offset points', fontsize=6)
    axes[0, 2].set_title(f'embedding: {share[0]:.0%}, {share[1]:.0%}', pad=4)
    axes[0, 2].set_xlabel('component 1')
    axes[0, 2].set_ylabel('component 2')
    axes[0, 2].set_aspect('equal', 'datalim')
    for color, (setting, replicas) in zip(COLORS, groups.items(), strict=False):
        best = np.argmax(last[f'{part}/ring'][replicas], -1)[..., None]
        ring_SN, shuffled_SN = (np.take_along_axis(last[f'{part}/{name}'][replicas], best, -1)[..., 0]
                                for name in ('ring', 'shuffled'))
        errorbars(axes[1, 2], np.arange(num_layers), ring_SN, color=color, label=setting or 'model', fmt='o-')
        axes[1, 2].plot(np.arange(num_layers), shuffled_SN.mean(0), ':', color=color)
    axes[1, 2].set_ylabel('ring score')
    axes[1, 2].set_ylim(0, 1.02)
    axes[1, 2].set_xticks(range(num_layers))
    axes[1, 2].set_xlabel('block')
    axes[1, 2].legend(loc='best')
    for letter, axis in zip('abcdef', axes.flat, strict=True):
        axis.annotate(letter, (0, 1), xycoords='axes fraction', xytext=(-24, 4), textcoords='offset points',
                      fontweight='bold', fontsize=9)
    shown = f'scatters of {first_replica(cfg)}; f: {replicas_note(count)}'
    figure.suptitle(f'{cfg.name}, p = {cfg.task.p}: {shown}', fontsize=8)
    return figure


def pca_frame(axis, values: Mapping, cfg: Config) -> None:
    """Components 1 and 2 of the head of the first block with the highest ring score at this step."""
    part = part_of(values)
    head = int(np.argmax(values[f'{part}/ring'][0]))
    circles(axis, values[f'{part}/scores'][0, head, :, :2], cfg.task.p, _root(values), labels=False)
    axis.set_xticks([])
    axis.set_yticks([])


def circles(axis, scores_B2, p: int, root: int | None, *, labels: bool = True) -> None:
    """Points (p^2, 2) of inputs (x, y) coloured by log x, with y joined in the order of its logarithm."""
    log, colors = log_table(p, root), _colors(p, root)
    points_xy2, order = scores_B2.reshape(p, p, 2), np.argsort(log)
    round_y = [*order[1:], order[1]]  # the first is 0
    axis.set_aspect('equal', 'datalim')
    for x in range(p):
        axis.plot(*points_xy2[x, round_y].T, color=colors[x], linewidth=0.4, zorder=1)
        axis.scatter(*points_xy2[x, 1:].T, s=40 / p, color=colors[x], linewidths=0, zorder=2)
        axis.scatter(*points_xy2[x, :1].T, s=60 / p, facecolors='white', edgecolors=[colors[x]], linewidths=0.6,
                     zorder=3)
        if labels and (p <= 13 or log[x] % 4 == 0):
            axis.annotate(str(log[x]), points_xy2[x, 1:].mean(0), ha='center', va='center', fontsize=6.5, zorder=4)


def _colors(p: int, root: int | None) -> np.ndarray:
    """A colour for every residue, round the circle by its logarithm; 0 is grey."""
    colors = CYCLE(log_table(p, root) / (p - 1))
    colors[0] = (0.5, 0.5, 0.5, 1)
    return colors


def _root(values: Mapping) -> int | None:
    """The primitive root that the measurement used."""
    root = values.get('root')
    return None if root is None else int(np.ravel(getattr(root, 'values', root))[0])


@styled
def cosine(series: Mapping, cfg: Config) -> Figure:
    """Similarity of the residual stream between inputs, one example running over all inputs (x, y).

    Left: correlation of the residual vectors after each block, or of the outputs of each head (a, b, ... in a block, in
    order of their contrast at the z token), for all pairs of inputs (replica 0), at the x token (inputs in the order of
    x) and at the y and z token (in the order of x p + y). a, b: mean correlation of inputs of equal ratio y / x minus
    that of others, of pairs that share neither x nor y and have no zero; dotted: 97.5 % quantile where ratios are dealt
    out at random.
    """
    last = {name: x.values[-1] for name, x in series.items()}
    num_rows, heads = last['y/contrast'].shape[1], cfg.model.num_heads
    places = [f'block {i}' for i in range(num_rows)]
    if num_rows > cfg.model.num_layers:
        places = [f'head {i // heads}{chr(97 + i % heads)}' for i in range(num_rows)]
    height = max(3.4, 0.5 + (1.45 if num_rows <= 4 else 0.9) * num_rows)
    figure = Figure(figsize=(TWO_COLUMNS, height), layout='constrained')
    left, right = figure.subfigures(1, 2, width_ratios=(2.2, 1))
    pictures = left.subplots(num_rows, 3, squeeze=False)
    for layer, row in enumerate(pictures):
        for axis, token in zip(row, 'xyz', strict=True):
            title = f'{token} token' if layer == 0 else ''
            shown = picture(axis, last[f'{token}/similarity'][0, layer], title=title, cmap='RdBu_r', vmin=-1, vmax=1)
            if layer == num_rows - 1:
                axis.set_xlabel('x' if token == 'x' else 'x p + y')
        row[0].set_ylabel(places[layer])
    left.colorbar(shown, ax=pictures, location='bottom', label='correlation', shrink=0.5, aspect=30)
    groups = cfg.groups()
    for letter, token, axis in zip('ab', 'yz', right.subplots(2, 1), strict=True):
        for color, (setting, replicas) in zip(COLORS, groups.items(), strict=False):
            errorbars(axis, np.arange(num_rows), last[f'{token}/contrast'][replicas], color=color,
                      label=setting or 'model', fmt='o-' if num_rows == cfg.model.num_layers else 'o')
            axis.plot(np.arange(num_rows), last[f'{token}/shuffled'][replicas].mean(0), ':', color=color)
        axis.axhline(0, color='black', linewidth=0.5)
        axis.set_ylim(-0.3, 1.05)
        axis.set_xticks(range(num_rows), [place.split()[1] for place in places])
        axis.set_ylabel(f'contrast, {token} token')
        axis.annotate(letter, (0, 1), xycoords='axes fraction', xytext=(-24, 6), textcoords='offset points',
                      fontweight='bold', fontsize=9)
    axis.set_xlabel('after block' if num_rows == cfg.model.num_layers else 'head')
    right.legend(*axis.get_legend_handles_labels(), loc='outside upper center', ncols=1)
    note = replicas_note(min(map(len, groups.values())))
    figure.suptitle(f'{cfg.name}, p = {cfg.task.p}: pictures of {first_replica(cfg)}; a, b: {note}', fontsize=8)
    return figure


def cosine_frame(axis, values: Mapping, cfg: Config) -> None:
    """Mean similarity by ratios of the two inputs, at the z token after the block with the highest contrast."""
    layer = int(np.argmax(values['z/contrast']))
    picture(axis, values['z/by_direction'][layer], cmap='RdBu_r', vmin=-1, vmax=1)
    axis.set_xlabel(f'ratio (block {layer})', fontsize=6.5)


@styled
def neurons(series: Mapping, cfg: Config) -> Figure:
    """Kinds of MLP neurons by what explains their activation as a function of one example (x, y).

    Pictures (replica 0): in each block the neuron that is explained best by which of x and y are 0; and, on inputs
    without a zero, by x, y, the ratio y / x, the product x y, the answer z, or one wave of a character in x and one in
    y. Numbers: share of variance, adjusted for the number of classes. x to the right, y upwards, dark to bright from
    the least to the largest activation, at the y or z token. Bars: share of all neurons of a block that zeros, or else
    the best of the others, explain by more than half; ticks: the same with the inputs in random order.
    """
    last, groups, layers = {name: x.values[-1] for name, x in series.items()}, cfg.groups(), neuron_layers(cfg.model)
    tall, low = 0.78 * 2 * len(layers) + 0.4, 1.5 * len(groups) + 0.6
    figure = Figure(figsize=(TWO_COLUMNS, tall + low), layout='constrained')
    top, bottom = figure.subfigures(2, 1, height_ratios=(tall, low))
    rows = [(token, i) for token in 'yz' for i in range(len(layers))]
    for n, (row, (token, i)) in enumerate(zip(top.subplots(len(rows), len(KINDS), squeeze=False), rows, strict=True)):
        for k, axis in enumerate(row):
            score = last[f'{token}/top_score'][0, i, k]
            title = f'{KINDS[k]}: {score:.2f}' if n == 0 else f'{score:.2f}'
            picture(axis, last[f'{token}/top'][0, i, k].T[::-1], title=title)
            axis.set_xlabel('x' if n == len(rows) - 1 else '', fontsize=7)
        row[0].set_ylabel(f'{token} token\nblock {layers[i]}', fontsize=7)
    axes, place = bottom.subplots(len(groups), 2, squeeze=False, sharey=True), np.arange(len(SHARES))
    width = 0.8 / len(layers)
    for row, (setting, replicas) in zip(axes, groups.items(), strict=True):
        for axis, token in zip(row, 'yz', strict=True):
            for i, n in enumerate(layers):
                at = place + (i + 0.5) * width - 0.4
                mean, half = interval(last[f'{token}/shares'][replicas, i], 0)
                axis.bar(at, mean, width, yerr=_bar(half), color=COLORS[n % 7], label=f'block {n}',
                         error_kw={'elinewidth': 0.8, 'capsize': 1.5})
                floor_K = last[f'{token}/shuffled'][replicas, i].mean(0)
                axis.hlines(floor_K, at - width / 2, at + width / 2, color=GREY, linewidth=1.2)
            axis.set_ylim(0, 1.02)
            axis.set_xticks(place, SHARES, rotation=30, ha='right')
            axis.set_title(f'{token} token{f", {setting}" if setting else ""}', pad=3)
        row[0].set_ylabel('share of neurons')
    bottom.legend(*axes[0, 1].get_legend_handles_labels(), loc='outside upper right', ncols=len(layers))
    note = replicas_note(min(map(len, groups.values())))
    figure.suptitle(f'{cfg.name}, p = {cfg.task.p}: pictures of {first_replica(cfg)}; bars: {note}', fontsize=8)
    return figure


def neurons_frame(axis, values: Mapping, cfg: Config) -> None:
    """The neuron that the ratio y / x explains best at the z token, in the first block that has neurons."""
    kind = KINDS.index('ratio')
    picture(axis, values['z/top'][0, kind].T[::-1])
    axis.set_xlabel(f'ratio: {values["z/top_score"][0, kind]:.2f}', fontsize=6.5)


@styled
def probes(series: Mapping, cfg: Config) -> Figure:
    """Accuracy of linear probes on the residual stream, one colour a setting.

    E: embedding; numbers: after that block. a: the factor c between the x of two examples, none of them 0, read at the
    y token of the second one; dashed: a random class of each pair, which can only be learned by heart. b: the
    coefficients of two examples that combine to the query (c1 solid, c2 dashed), at its y token. c: the task (a solid,
    b dashed) at the y token against the number of examples before it, after the block where it is read best; probes are
    tested on other tasks than they are fitted to. d: r2 of every multiplicative character of c (solid) and c1 (dashed)
    at the y token, after the block where it is read best. Dotted: chance.
    """
    last, groups = {name: x.values[-1] for name, x in series.items()}, cfg.groups()
    blocks, shots = np.arange(cfg.model.num_layers + 1), probed_shots(cfg.task)
    frequency = np.arange(1, (cfg.task.p + 1) // 2)
    figure, axes = new_figure(2, 2, height=4.6)
    (factor, coefficient), (task, character) = axes

    def pairs(names):
        return [(name, linestyle) for name, linestyle in zip(names, ('-', '--'), strict=True) if f'{name}/r2' in last]

    for color, (setting, replicas) in zip(COLORS, groups.items(), strict=False):
        for axis, names in ((factor, ('c', 'c_control')), (coefficient, ('c1', 'c2'))):
            for name, linestyle in pairs(names):
                errorbars(axis, blocks, last[f'{name}/accuracy'][replicas, :, 1], color=color, fmt='o' + linestyle,
                          label=setting if linestyle == '-' else '')
        for name, linestyle in pairs(('a', 'b')):
            values_SPK = last[f'{name}/accuracy'][replicas]
            best = values_SPK.mean((0, 2)).argmax()
            errorbars(task, shots, values_SPK[:, best], color=color, fmt='o' + linestyle,
                      label=f'{setting or "model"}, {"E" if best == 0 else best - 1}' if linestyle == '-' else '')
        for name, linestyle in pairs(('c', 'c1')):
            best = last[f'{name}/accuracy'][replicas, :, 1].mean(0).argmax()
            errorbars(character, frequency, last[f'{name}/r2'][replicas, best, 1], color=color, fmt='o' + linestyle)
    for axis, label in ((factor, 'accuracy of c'), (coefficient, 'accuracy of c1, c2'), (task, 'accuracy of a, b')):
        axis.set_ylabel(label)
        axis.set_ylim(0, 1.02)
        floor(axis, 1 / (cfg.task.p - (axis is factor)), 'chance')
    character.set_ylabel('r2 of characters')
    floor(character, 0, 'chance', below=True)
    character.set_ylim(min(-0.1, character.get_ylim()[0]), 1.02)
    character.set_xticks(frequency[:: 1 + len(frequency) // 8])
    finish(figure, axes, xlabel='after block', note=f'{cfg.name}, p = {cfg.task.p}: '
           + replicas_note(min(map(len, groups.values()))))
    for axis in (factor, coefficient):
        axis.set_xticks(blocks, ['E', *blocks[:-1]])
    task.set_xlabel('shots')
    task.set_xticks(shots)
    character.set_xlabel('frequency')
    return figure


def probes_frame(axis, values: Mapping, cfg: Config) -> None:
    """Accuracy of c (blue) and its control (grey) by block, at the y token."""
    for name, color in (('c_control', GREY), ('c', BLUE)):
        axis.plot(values[f'{name}/accuracy'][:, 1], 'o-', color=color, markersize=2, linewidth=1)
    axis.axhline(1 / (cfg.task.p - 1), color=GREY, linewidth=0.8, linestyle=':')
    axis.set_ylim(0, 1.02)
    axis.set_xticks(range(cfg.model.num_layers + 1), ['E', *range(cfg.model.num_layers)])
    axis.set_yticks([0, 1] if axis.get_subplotspec().is_first_col() else [])
