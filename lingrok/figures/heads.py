"""Figures of attention heads, of parts taken out, and of activations put in. Numbers in, Figure out."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from lingrok.analysis.patching import CONDITIONS, GROUPS
from lingrok.config import Config
from lingrok.figures.modular import NAMES
from lingrok.figures.style import (
    COLORS,
    GREY,
    TWO_COLUMNS,
    band,
    picture,
    replicas_note,
    styled,
)
from lingrok.metrics import interval

MARKERS = 'os^Dv<>*'
KIND_NAMES = {'mean_all': 'mean over positions', 'zero': 'zero', 'resample': 'another row'}
SPLIT_NAMES = {**NAMES, 'ood_forced': 'unseen tasks, forced queries', 'id_forced': 'training tasks, forced queries'}
PAIRS = {'labels': 'other task', 'query': 'other query', 'both': 'other task\nand query',
         'coordinates': 'other task, query\nand coordinates'}
ANSWERS = {'base': 'as the base', 'source': 'as the source', 'coefficients': 'source query,\nbase labels',
           'labels': 'base query,\nsource labels', 'tokens': 'source tokens,\nbase examples'}
CRITERIA = ('self', '1 back', '2 back', '3 back', 'first\ntoken', 'own\nslot')


def dots(axis, x, values_SX, *, color: str, label: str = '', marker: str = 'o') -> None:
    """Means over replicas as dots with 95 % intervals."""
    mean, half = interval(values_SX, 0)
    axis.errorbar(x, mean, np.where(np.isfinite(half), half, 0), color=color, label=label, marker=marker, markersize=3,
                  linestyle='none', linewidth=0.8)


@styled
def attention(series: Mapping, cfg: Config) -> Figure:
    """Attention of every head on one row (Fig 6a, 11), and what the heads of a layer look at most.

    Maps: one replica of the first and of the last setting, rows are layers. Below, left: the largest mass that any
    head of a layer puts on a token so far back, on token 0, or on tokens of its own slot; heads have no order that
    seeds share. Grey: a uniform pattern. Right: mass of the y queries of the last layer by distance, of the first
    replica mapped; period 6 is every second example.
    """
    layers, heads = cfg.model.num_layers, cfg.model.num_heads
    groups = cfg.groups()
    shown = list(dict.fromkeys((list(groups)[0], list(groups)[-1]))) if heads <= 4 else list(groups)[:1]
    size = min(1.4, TWO_COLUMNS / (heads * len(shown)))
    figure = Figure(figsize=(TWO_COLUMNS, layers * (size + 0.25) + 3), layout='constrained')
    maps, below = figure.subfigures(2, 1, height_ratios=(layers * (size + 0.25) + 0.3, 2.5))
    *parts, bar = maps.subfigures(1, len(shown) + 1, width_ratios=[1] * len(shown) + [0.11 * len(shown)])
    for part, setting in zip(parts, shown, strict=True):
        replica = groups[setting][0]
        row = {name: series[f'map/{name}'].values[-1, replica] for name in ('pattern', 'tokens', 'task', 'unseen')}
        panels = part.subplots(layers, heads, squeeze=False)
        for (layer, head), axis in np.ndenumerate(panels):
            image = picture(axis, row['pattern'][layer, head], title=f'{layer}.{head}', vmin=0, vmax=1)
            axis.set_aspect('equal')
        panels[-1, 0].set_xlabel('key')
        panels[-1, 0].set_ylabel('query')
        kind = 'unseen task' if row['unseen'] else 'training task'
        part.suptitle(f'{setting or "model"}, replica {replica}: {kind} ({row["task"][0]}, {row["task"][1]}), '
                      f'{len(row["tokens"])} tokens', fontsize=7)
    bar.colorbar(image, cax=bar.subplots(), label='attention, block.head')

    most, distance = below.subplots(1, 2, width_ratios=(1.5, 1))
    for k, (setting, replicas) in enumerate(groups.items()):
        for layer in range(layers):
            shift = ((k * layers + layer + 0.5) / (len(groups) * layers) - 0.5) * 0.7
            dots(most, np.arange(6) + shift, series['attention/best'].values[-1, replicas, layer],
                 color=COLORS[k % len(COLORS)], marker=MARKERS[layer % len(MARKERS)],
                 label=f'{setting + ", " if setting else ""}block {layer}')
    for place, value in enumerate(series['attention/uniform'].values[-1, 0]):
        most.hlines(value, place - 0.4, place + 0.4, color=GREY, linewidth=0.9, linestyle=':',
                    label='uniform pattern' if place == 0 else None)
    most.set_xticks(np.arange(6), CRITERIA)
    most.set_ylabel('mass, best head of a block')
    most.set_ylim(-0.02, 1.02)
    below.legend(*most.get_legend_handles_labels(), loc='outside upper left', ncols=5)
    curves_HO = series['attention/by_offset'].values[-1, groups[shown[0]][0], -1, :, 1]
    for head, (color, curve) in enumerate(zip(COLORS, curves_HO, strict=False)):
        distance.plot(np.arange(len(curve)), curve, color=color, linewidth=0.9, label=f'{layers - 1}.{head}')
    distance.set_xticks(np.arange(2, curves_HO.shape[1], 6))
    distance.set_xlabel('distance from y query (tokens)')
    distance.set_ylabel(f'mass of y queries, {shown[0] or "model"}')
    distance.legend(loc='lower left', bbox_to_anchor=(0, 1), ncols=4)
    figure.suptitle(f'{cfg.name}: dots: {replicas_note(min(map(len, groups.values())))}; maps and curves: one replica',
                    fontsize=8)
    return figure


def previous_map(axis, values: Mapping, cfg: Config) -> None:
    """Frame of a film: the map of the head that looks most at the token before."""
    layer, head = values['attention/previous_head']
    picture(axis, values['map/pattern'][layer, head], vmin=0, vmax=1)
    axis.set_xlabel(f'head {layer}.{head}', fontsize=6)


@styled
def ablation(series: Mapping, cfg: Config) -> Figure:
    """What a model can do without some of its parts (last shot), one setting a row.

    Left: without one head (those of a block sorted by effect, as seeds share no order), one feed-forward (FF), all
    heads, all feed-forwards. Colours: mean ablation, on each set of rows; grey: other replacements, on unseen tasks.
    Right: mean ablation of more and more heads, least harmful first. Strokes at the left edge: intact model. Grey
    lines: ratio matching on the rows of unseen tasks, and chance.
    """
    groups = dict(list(cfg.groups().items())[:3])
    layers, heads = cfg.model.num_layers, cfg.model.num_heads
    splits = [split for split in SPLIT_NAMES if f'{split}/intact' in series]
    last = {name: x.values[-1] for name, x in series.items()}
    judge = 'ood_train' if 'ood_train' in splits else splits[0]
    figure = Figure(figsize=(TWO_COLUMNS, 2.3 * len(groups) + 0.7), layout='constrained')
    panels = figure.subplots(len(groups), 2, squeeze=False, width_ratios=(2.2, 1), sharey=True)
    labels = [f'{layer}{"abcdefghijklmnop"[head]}' for layer in range(layers) for head in range(heads)]
    labels += [*(f'FF {layer}' for layer in range(layers)), 'all\nheads', 'all\nFF']
    place = np.arange(len(labels)) + np.repeat([0, 0.6, 1.2], [layers * heads, layers, 2])
    for (single, cumulative), (setting, replicas) in zip(panels, groups.items(), strict=True):
        effect_SNH = np.argsort(last[f'{judge}/mean/head'][replicas], -1)

        def parts(split, kind, replicas=replicas, effect_SNH=effect_SNH):
            head_SNH = np.take_along_axis(last[f'{split}/{kind}/head'][replicas], effect_SNH, -1)
            rest = (last[f'{split}/{kind}/{name}'][replicas].reshape(len(replicas), -1)
                    for name in ('mlp', 'heads', 'mlps'))
            return np.concatenate([head_SNH.reshape(len(replicas), -1), *rest], -1)

        for k, (split, color) in enumerate(zip(splits, COLORS, strict=False)):
            shift = (k - (len(splits) - 1) / 2) * 0.5 / len(splits)
            dots(single, place + shift, parts(split, 'mean'), color=color, label=SPLIT_NAMES[split])
            intact = last[f'{split}/intact'][replicas]
            single.hlines(interval(intact)[0], -0.9, -0.5, color=color)
            curve_SC = np.concatenate([intact[:, None], last[f'{split}/cumulative'][replicas]], 1)
            band(cumulative, np.arange(curve_SC.shape[1]), curve_SC.T, color=color, label='')
        for kind, marker in (('mean_all', '_'), ('zero', 'x'), ('resample', '+')):
            single.plot(place, interval(parts(judge, kind), 0)[0], marker, color=GREY, markersize=5,
                        markeredgewidth=0.7, label=KIND_NAMES[kind])
        for axis in (single, cumulative):
            axis.axhline(np.nanmean(last[f'{judge}/ratio'][replicas]), color=GREY, linewidth=0.8, linestyle='--',
                         label='ratio matching')
            axis.axhline(1 / cfg.task.p, color=GREY, linewidth=0.8, linestyle=':', label='chance')
        cumulative.xaxis.get_major_locator().set_params(integer=True)
        single.set_xticks(place, labels, rotation=90 if len(labels) > 16 else 0)
        single.set_ylim(-0.03, 1.03)
        single.set_ylabel(f'accuracy{", " if setting else ""}{setting}')
    single.set_xlabel('part taken out')
    cumulative.set_xlabel('heads taken out')
    figure.legend(*single.get_legend_handles_labels(), loc='outside lower center', ncols=4)
    figure.suptitle(f'{cfg.name}: {replicas_note(min(map(len, groups.values())))}', fontsize=8)
    return figure


def without_heads(axis, values: Mapping, cfg: Config) -> None:
    """Frame of a film: accuracy on unseen tasks without each head, layers downwards."""
    picture(axis, values['ood_train/mean/head'], vmin=0, vmax=1)


@styled
def patching(series: Mapping, cfg: Config) -> Figure:
    """Whose answer follows when residuals of a source prompt are put into a base prompt, by depth and tokens.

    Maps, one row a kind of prompt pair: share of prompts with each answer, in one replica, the most able one of the
    most able setting; chance is marked on the colour bar. Depth: in front of block 0, 1, ... and behind the last one
    (out). Curves, in the colours of the titles: the whole query exchanged, mean and 95 % interval of the replicas;
    dotted: chance. Pairs count where the answers differ and both prompts are solved.
    """
    last = {name: x.values[-1] for name, x in series.items()}
    setting, replicas = max(cfg.groups().items(), key=lambda item: np.mean(last['both/kept'][item[1]]))
    replica = replicas[int(np.argmax(last['both/kept'][replicas]))]
    figure = Figure(figsize=(TWO_COLUMNS, 1.3 * len(CONDITIONS) + 0.9), layout='constrained')
    panels = figure.subplots(len(CONDITIONS), len(ANSWERS) + 1, squeeze=False,
                             width_ratios=[1] * len(ANSWERS) + [1.5])
    chance = 1 / cfg.task.p
    depths = [*range(cfg.model.num_layers), 'out']
    for line, condition in zip(panels, CONDITIONS, strict=True):
        curve = line[-1]
        for axis, (answer, label), color in zip(line, ANSWERS.items(), COLORS, strict=False):
            if f'{condition}/{answer}' not in last:
                axis.set_axis_off()
                continue
            share_SNG = last[f'{condition}/{answer}']
            image = picture(axis, share_SNG[replica], vmin=0, vmax=1)
            axis.set_title(label, fontsize=7, pad=2, color=color)
            band(curve, np.arange(share_SNG.shape[1]), share_SNG[replicas, :, -1].T, color=color, label=label)
        line[0].set_ylabel(f'{PAIRS[condition]}\ndepth', fontsize=7)
        line[0].set_yticks(range(len(depths)), depths)
        curve.axhline(chance, color=GREY, linewidth=0.8, linestyle=':')
        curve.set_ylim(-0.03, 1.03)
        curve.set_ylabel('share')
        curve.set_xticks(range(len(depths)), depths)
        kept, _ = interval(last[f'{condition}/kept'][replicas])
        curve.set_title(f'{100 * kept:.0f} % of pairs count', fontsize=7, pad=2)
    for axis in panels[-1, :-1]:
        axis.set_xticks(range(len(GROUPS)), GROUPS, rotation=90)
    curve.set_xlabel('depth')
    bar = figure.colorbar(image, ax=panels, label='share of prompts', location='right', fraction=0.02)
    bar.set_ticks([0, chance, 0.5, 1], labels=['0', 'chance', '0.5', '1'])
    figure.suptitle(f'{cfg.name}{", " if setting else ""}{setting}: maps of replica {replica}; curves: '
                    f'{replicas_note(len(replicas))}', fontsize=8)
    return figure


def mixed_map(axis, values: Mapping, cfg: Config) -> None:
    """Frame of a film: share of answers with the source's coefficients and the base's labels, depth downwards."""
    picture(axis, values['both/coefficients'], vmin=0, vmax=1)
