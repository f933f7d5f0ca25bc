"""Figures of recall models that are truncated, edited or fine-tuned, and of their attention. Numbers in, Figure out."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from lingrok.analysis.attention import KINDS
from lingrok.analysis.editing import LOW
from lingrok.analysis.finetune import PARTS
from lingrok.analysis.truncation import KEPT, entries
from lingrok.config import Config
from lingrok.figures.heads import dots
from lingrok.figures.style import (
    BLUE,
    COLORS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    TWO_COLUMNS,
    band,
    first_replica,
    floor,
    picture,
    replicas_note,
    styled,
)
from lingrok.metrics import interval

QUANTITIES = {'p_noise': 'P(noise)', 'p_correct': 'P(target)', 'loss_bigram': 'loss off triggers'}
METHOD_STYLES = {
    'edit/whitened': ('edit, whitened', BLUE, '-'),
    'edit/context': ('edit, mean in context', SKY, '-'),
    'edit/embedding': ('edit, embedding alone', PURPLE, '-'),
    '{first}/top': ('first matrix, top kept', RED, '-'),
    '{first}/bottom': ('first matrix, bottom kept', ORANGE, '-'),
    'mlp_out/top': ('second matrix, top kept', RED, ':'),
    'mlp_out/bottom': ('second matrix, bottom kept', ORANGE, ':'),
}
KIND_NAMES = {'target': 'target', 'noise': 'noise', 'trigger': 'same\ntrigger', 'rest': 'rest'}
MAPPED = 64  # tokens of an attention map, at most


def _last(series: Mapping) -> tuple[dict, int, str]:
    """The last step of a series: arrays (S, ...), number of replicas, and what the error bars are."""
    last = {name: x.values[-1] for name, x in series.items()}
    count = len(next(iter(last.values())))
    return last, count, replicas_note(count)


def _matrices(last: Mapping, cfg: Config) -> dict[str, str]:
    """Name in the figure of every truncated matrix, by name in the series."""
    roles = {'mlp_in': 'FF in', 'mlp_gate': 'FF gate', 'mlp_out': 'FF out', 'mlp_linear': 'FF'}
    named = {f'blocks.{layer}.{role}': f'{layer} {roles.get(role, role)}' for layer, role in entries(cfg.model)}
    return {name: label for name, label in named.items() if f'clean/p_noise/{name}/top' in last}


@styled
def truncation(series: Mapping, cfg: Config) -> Figure:
    """What is left of noise, recall and bigrams when a matrix keeps a fraction of its singular directions (clean).

    Curves: the first matrix of the last and of the first feed-forward (FF), and value times output (ov) of the last
    attention; solid: top directions kept, dashed: bottom; mean and 95 % interval of the replicas. Grey: the whole model
    and references. Maps: every matrix (layer, role), means over replicas. Loss off triggers: cross-entropy where the
    next token follows the bigram law; not trained in runs whose loss is on triggers only.
    """
    last, count, note = _last(series)
    fractions = last['truncation/fractions'][0]
    places = np.arange(len(fractions))
    named = _matrices(last, cfg)
    feed = [name for name in named if name.rpartition('.')[2] in ('mlp_in', 'mlp_linear')]
    values = [name for name in named if name.rpartition('.')[2] == 'ov'] or [n for n in named if n.endswith('.v')]
    drawn = dict.fromkeys([*feed[-1:], *feed[:1], *values[-1:]])
    figure = Figure(figsize=(TWO_COLUMNS, 2.3 + 2 * (0.35 + 0.14 * len(named))), layout='constrained')
    panels = figure.subplots(3, 3, height_ratios=(1.9, *(0.1 + 0.14 * len(named),) * 2), sharex=True)
    for column, (quantity, label) in enumerate(QUANTITIES.items()):
        curve, *maps = panels[:, column]
        for name, color in zip(drawn, (RED, ORANGE, BLUE), strict=False):
            for keep, linestyle in zip(KEPT, ('-', '--'), strict=True):
                band(curve, places, last[f'clean/{quantity}/{name}/{keep}'].T, color=color, linestyle=linestyle,
                     label=f'{named[name]}, {keep}')
        whole = last[f'clean/{quantity}/whole'].mean()
        curve.axhline(whole, color=GREY, linewidth=0.9, linestyle=':')
        curve.set_title(f'{"abc"[column]}   {label}, whole {whole:.2f}', loc='left')
        if quantity == 'loss_bigram':
            floor(curve, last['clean/loss_bigram/bayes'].mean(), 'Bayes')
            floor(curve, np.log(cfg.task.vocab_size), 'uniform', below=True)
        else:
            curve.set_ylim(0, 1)
        shown = {keep: np.array([interval(last[f'clean/{quantity}/{name}/{keep}'], 0)[0] for name in named])
                 for keep in KEPT}
        low, high = (0, 1) if quantity != 'loss_bigram' else (min(map(np.min, shown.values())),
                                                              max(map(np.max, shown.values())))
        for axis, keep in zip(maps, KEPT, strict=True):
            image = picture(axis, shown[keep], vmin=low, vmax=high)
            if column == 0:
                axis.set_yticks(range(len(named)), named.values(), fontsize=6)
                axis.set_ylabel(f'{keep} kept')
        if column:  # the first two share their colours
            figure.colorbar(image, ax=maps, fraction=0.05, pad=0.02, label='nats' if column == 2 else 'probability')
        maps[-1].set_xticks(places, [f'{x:g}' for x in fractions], rotation=90)
        maps[-1].set_xlabel('fraction of directions kept')
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=6)
    figure.suptitle(f'{cfg.name}: {note}; maps: means', fontsize=8)
    return figure


def noise_map(axis, values: Mapping, cfg: Config) -> None:
    """Frame of a film: P(noise) on clean data by matrix (downwards) and fraction of its top directions kept."""
    named = _matrices(values, cfg)
    picture(axis, np.array([values[f'clean/p_noise/{name}/top'] for name in named]), vmin=0, vmax=1)
    axis.set_xlabel('fraction', fontsize=6)


def _methods(last: Mapping) -> dict[str, tuple[str, str, str]]:
    """(label, colour, line style) of the methods that were measured."""
    first = 'mlp_in' if 'mlp_in/top/p_noise' in last else 'mlp_linear'
    styles = {name.format(first=first): style for name, style in METHOD_STYLES.items()}
    return {name: style for name, style in styles.items() if f'{name}/p_noise' in last}


@styled
def editing(series: Mapping, cfg: Config) -> Figure:
    """Rank-one edits of one feed-forward beside its truncations, on clean sequences, and what each feed-forward adds.

    a, b: P(noise) and P(target) at repeated triggers, where the edited model may depart from the model by so many nats
    (KL divergence) on all other text; of the amounts within the budget the one with the least P(noise) on sequences
    apart. c: departure needed until P(noise) is half of what it was (dots) and below .05 (crosses); a method that never
    gets there in some replica is shown by the replicas that do, n of them. d: noise logit minus the best other one that
    a feed-forward adds: in context (logits with minus without it at repeated triggers), and of the trigger's embedding
    alone. Lines, dots: means over replicas, bands, bars: 95 % intervals.
    """
    last, count, note = _last(series)
    budgets = last['budget/nats'][0]
    methods = _methods(last)
    figure = Figure(figsize=(TWO_COLUMNS, 5.2), layout='constrained')
    panels = figure.subplots(2, 2)
    for axis, quantity in zip(panels[0], ('p_noise', 'p_correct'), strict=True):
        for method, (label, color, linestyle) in methods.items():
            band(axis, budgets, last[f'budget/kl_text/{quantity}/{method}'].T, color=color, linestyle=linestyle,
                 label=label)
        whole, removed = (last[f'{kind}/{quantity}'].mean() for kind in ('whole', 'removed'))
        axis.set_xscale('log')
        _level(axis, whole, 'model', below=quantity == 'p_correct')
        _level(axis, removed, 'without the feed-forward')
        axis.set_xlabel('budget: KL off triggers (nats)')
        axis.set_ylabel(f'{QUANTITIES[quantity]}, clean')
        axis.set_ylim(0, None if quantity == 'p_noise' else 1.02)
    least, margin = panels[1]
    for place, (method, (_, color, _)) in enumerate(methods.items()):
        for shift, level, marker in ((-0.15, 'half', 'o'), (0.15, 'low', 'X')):
            values_S = last[f'least/kl_text/{level}/{method}']
            reached = np.isfinite(values_S)
            if reached.any():
                _log_dot(least, place + shift, values_S[reached], color=color, marker=marker)
            if not reached.all():
                least.annotate(f'n={reached.sum()}', (place + shift, 1), xycoords=('data', 'axes fraction'),
                               fontsize=5.5, ha='center', va='bottom', color=color)
    least.set_yscale('log')
    least.set_xticks(range(len(methods)), [label.replace(', ', ',\n') for label, *_ in methods.values()], rotation=90,
                     fontsize=6)
    least.set_ylabel('KL off triggers (nats)\nuntil P(noise) is half (o), < .05 (x)')
    layers = [layer for layer, kind in enumerate(cfg.model.mlp_kind) if kind != 'none']
    for place, layer in enumerate(layers):
        for shift, kind, label, color, marker in ((-0.12, 'context', 'in context', BLUE, 'o'),
                                                  (0.12, 'alone', 'embedding alone', ORANGE, 's')):
            dots(margin, [place + shift], last[f'margin/{kind}/blocks.{layer}'][:, None], color=color, marker=marker,
                 label=label if place == 0 else '')
    margin.axhline(0, color='black', linewidth=0.5)
    margin.set_xticks(range(len(layers)), [f'FF {layer}' for layer in layers])
    margin.set_xlim(-0.6, len(layers) - 0.4)
    margin.set_ylabel('noise margin (nats)')
    margin.legend(loc='best')
    for letter, axis in zip('abcd', panels.flat, strict=True):
        axis.set_title(letter, loc='left', fontweight='bold')
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=4)
    figure.suptitle(f'{cfg.name}: {note}', fontsize=8)
    return figure


def _level(axis, value: float, label: str, *, below: bool = False) -> None:
    """A horizontal reference line with its name at the left end, where small budgets change nothing."""
    axis.axhline(value, color=GREY, linewidth=0.9, linestyle=':')
    axis.annotate(label, (0, value), xycoords=('axes fraction', 'data'), xytext=(2, -2 if below else 2),
                  textcoords='offset points', va='top' if below else 'bottom', fontsize=6.5, color=GREY)


def _log_dot(axis, x: float, values_S, *, color: str, marker: str) -> None:
    """Geometric mean and its 95 % interval, of positive values, for a logarithmic axis."""
    mean, half = interval(np.log(np.maximum(values_S, 1e-7)))
    half = half if np.isfinite(half) else 0
    middle = np.exp(mean)
    axis.errorbar([x], [middle], [[middle - np.exp(mean - half)], [np.exp(mean + half) - middle]], color=color,
                  marker=marker, markersize=4, linewidth=0.8, linestyle='none')


@styled
def finetune(series: Mapping, cfg: Config) -> Figure:
    """One part of a noisy model fine-tuned on clean sequences: what it loses and keeps, and how many updates it takes.

    a to c: P(noise) and P(target) at repeated triggers and loss off triggers, against updates; means and 95 % intervals
    over replicas. Dotted in a: the level that counts as gone. d: updates until it is reached, each replica, and the
    mean with its interval; n: replicas that reach it, where not all do. Loss off triggers is not trained in runs whose
    loss is on triggers only.
    """
    last, count, note = _last(series)
    steps = last['finetune/steps'][0]
    parts = [name.removesuffix('/p_noise') for name in last if name.endswith('/p_noise') and '/change/' not in name]
    parts = [*(part for part in PARTS if part in parts), *(part for part in parts if part not in PARTS)]
    figure = Figure(figsize=(TWO_COLUMNS, 4.6), layout='constrained')
    panels = figure.subplots(2, 2)
    for axis, (quantity, label) in zip(panels.flat, QUANTITIES.items(), strict=False):
        for part, color in zip(parts, COLORS, strict=False):
            band(axis, steps, last[f'{part}/{quantity}'].T, color=color, label=part)
        axis.set_xlabel('updates on clean data')
        axis.set_ylabel(f'{label} (nats)' if quantity == 'loss_bigram' else label)
        axis.set_xlim(0, steps[-1])
    panels[0, 0].set_ylim(bottom=0)
    panels[0, 1].set_ylim(0, 1)
    floor(panels[0, 0], LOW, f'{LOW:g}')
    needed = panels[1, 1]
    for place, (part, color) in enumerate(zip(parts, COLORS, strict=False)):
        steps_S = last[f'{part}/steps']
        reached = np.isfinite(steps_S)
        needed.plot(np.full(len(steps_S), place - 0.15), steps_S, '.', color=color, markersize=3, alpha=0.6)
        if reached.any():
            dots(needed, [place + 0.1], steps_S[reached, None], color=color)
        if not reached.all():
            needed.annotate(f'n={reached.sum()} of {count}', (place, 0.98), xycoords=('data', 'axes fraction'),
                            fontsize=6, ha='center', va='top', color=color)
    needed.set_xticks(range(len(parts)), parts)
    needed.set_xlim(-0.5, len(parts) - 0.5)
    needed.set_ylim(0, steps[-1] * 1.08)
    needed.set_ylabel(f'updates until P(noise) < {LOW:g}')
    for letter, axis in zip('abcd', panels.flat, strict=True):
        axis.set_title(letter, loc='left', fontweight='bold')
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=5)
    figure.suptitle(f'{cfg.name}: {note}', fontsize=8)
    return figure


def _glyphs(tokens, cfg: Config) -> list[str]:
    """One visible symbol a token."""
    symbols = (*cfg.task.symbols, 'extra')
    shown = {' ': '\u2423', '\n': '\u21b5', '\t': '\u21e5', 'extra': '\u2205'}
    return [shown.get(symbols[token], symbols[token]) for token in tokens]


@styled
def attention(series: Mapping, cfg: Config) -> Figure:
    """Attention of the last layer on a noisy sequence, and where repeated triggers look.

    Map, of one replica: row: query, column: key; colour: attention on a square-root scale. Triggers are blue, what
    followed them is green (the target) or red (the noise token). Arrows mark the repeated triggers, whose next token
    can be recalled. Right: mass by kind of key, and share of queries whose largest weight is there; means and 95 %
    intervals over replicas, beside a uniform pattern. Queries are the repeated triggers that have both a target and a
    noise token to look at. Its title: target over target and noise, beside a pattern that does not tell them apart.
    """
    last, _, note = _last(series)
    length = min(MAPPED, last['map/tokens'].shape[1])
    tokens, occurrence = (last[f'map/{name}'][0, :length] for name in ('tokens', 'occurrence'))
    figure = Figure(figsize=(TWO_COLUMNS, 4.4), layout='constrained')
    shown, statistics = figure.subplots(1, 2, width_ratios=(2.2, 1))
    pattern_LM = np.sqrt(last['map/pattern'][0, :length, :length])
    image = picture(shown, np.where(np.tri(length, dtype=bool), pattern_LM, np.nan), cmap='magma_r', vmin=0, vmax=1)
    shown.set_aspect('equal')
    glyphs = _glyphs(tokens, cfg)
    shown.set_xticks(range(length), glyphs, fontsize=4.5)
    shown.set_yticks(range(length), glyphs, fontsize=4.5)
    shown.tick_params(length=0, pad=1)
    behind = np.concatenate([[False], occurrence[:-1] > 0])
    answers = np.where(tokens == cfg.task.noise_id, RED, GREEN)
    colors = np.where(occurrence > 0, BLUE, np.where(behind, answers, 'black'))
    for labels in (shown.get_xticklabels(), shown.get_yticklabels()):
        for label, color in zip(labels, colors, strict=True):
            label.set_color(color)
            label.set_fontweight('bold' if color != 'black' else 'normal')
    for row in np.flatnonzero(occurrence >= 2):
        shown.annotate('', (row + 0.6, row), xytext=(row + 3.6, row),
                       arrowprops={'arrowstyle': '->', 'color': BLUE, 'linewidth': 0.6})
    shown.set_xlabel('key')
    shown.set_ylabel('query')
    bar = figure.colorbar(image, cax=shown.inset_axes((0.45, 0.93, 0.5, 0.025)), orientation='horizontal')
    bar.set_ticks(np.sqrt([0, 0.05, 0.2, 0.5, 1]), labels=['0', '.05', '.2', '.5', '1'])
    bar.set_label('attention')
    for place, kind in enumerate(KINDS):
        for shift, name, label, color, marker in ((-0.12, 'mass', 'mass', BLUE, 'o'),
                                                  (0.12, 'argmax', 'largest weight', ORANGE, 's')):
            dots(statistics, [place + shift], last[f'{name}/{kind}'][:, None], color=color, marker=marker,
                 label=label if place == 0 else '')
        statistics.hlines(last[f'uniform/{kind}'].mean(), place - 0.4, place + 0.4, color=GREY, linewidth=0.9,
                          linestyle=':', label='uniform pattern' if place == 0 else None)
    statistics.set_xticks(range(len(KINDS)), [KIND_NAMES[kind] for kind in KINDS])
    statistics.set_ylim(-0.02, 1.02)
    statistics.set_ylabel('share, repeated triggers')
    statistics.legend(loc='upper right')
    selective, blind = (interval(last[name]) for name in ('selective', 'selective/blind'))
    statistics.set_title(f'target / (target + noise): {selective[0]:.2f}\nblind to which: {blind[0]:.2f}', fontsize=7)
    figure.suptitle(f'{cfg.name}, layer {cfg.model.num_layers - 1}: map of {first_replica(cfg)}; {note}', fontsize=8)
    return figure


def pattern_map(axis, values: Mapping, cfg: Config) -> None:
    """Frame of a film: the map of the last layer."""
    picture(axis, np.sqrt(values['map/pattern']), cmap='magma_r', vmin=0, vmax=1)
