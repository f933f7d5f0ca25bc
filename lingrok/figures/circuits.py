"""Figures of what a pretrained language model does with an indirect object. Numbers in, Figure out.

Maps have layers along the horizontal axis and heads down the vertical one; values are means over sentences.
"""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from lingrok.figures.style import BLUE, GREEN, GREY, ORANGE, RED, TWO_COLUMNS, band, letters, styled
from lingrok.lm.circuits import GROUPS
from lingrok.metrics import interval

CRITERIA = {
    'IO': 'last position to IO', 'S1': 'last position to S1', 'S2': 'last position to S2',
    'first': 'last position to first token', 'induction': 'repeated: induction',
    'duplicate': 'repeated: duplicate', 'previous': 'repeated: token before',
}
SHOWN = ('IO', 'S2', 'induction', 'previous')  # heads whose map is enlarged
ABLATED = {'lead': 'logit difference', 'IO': 'log P(IO)', 'the': 'log P(" the")'}
WORDS = (('IO', BLUE), ('S', RED), ('" the"', GREEN))
UNCLIPPED = 99  # percent of a map's cells that keep their own colour: one cell would pale all others


def _last(series: Mapping) -> dict[str, np.ndarray]:
    """Values (B, ...) of the last step, by name."""
    return {name: x.values[-1] for name, x in series.items()}


def _note(count: int) -> str:
    return f'mean of {count} sentences, 95 % intervals'


def _map(figure: Figure, axis, image_HN: np.ndarray, *, label: str, title: str = '', rows=None, limits=None) -> None:
    """A map with its colour bar: sequential within `limits`, or diverging around 0 up to the 99th percentile; the cells
    beyond it are named in the title."""
    reach = np.percentile(np.abs(image_HN), UNCLIPPED) or 1.0
    beyond = [] if limits else [tuple(place) for place in np.argwhere(np.abs(image_HN) > reach)]
    shown = axis.imshow(image_HN, cmap='viridis' if limits else 'RdBu', interpolation='nearest', aspect='auto',
                        vmin=limits[0] if limits else -reach, vmax=limits[1] if limits else reach)
    bar = figure.colorbar(shown, ax=axis, label=label, extend='both' if beyond else 'neither', fraction=0.05, pad=0.02)
    bar.outline.set_linewidth(0.4)
    _layers(axis, image_HN.shape[1])
    if rows is None:
        axis.set_yticks(range(0, len(image_HN), 1 + len(image_HN) // 6))
        axis.set_ylabel('head')
        largest = sorted(beyond, key=lambda place: -abs(image_HN[place]))
        named = ', '.join(f'{layer}.{head}: {image_HN[head, layer]:+.2g}' for head, layer in largest[:3])
        title += f'  [{named}]' if named else ''
    else:
        axis.set_yticks(range(len(rows)), rows)
    axis.set_title(title, fontsize=7, pad=2)


def _layers(axis, count: int) -> None:
    axis.set_xticks(range(0, count, 1 if count <= 8 else 5 if count > 16 else 2))
    axis.set_xlabel('layer')


@styled
def attention(series: Mapping) -> Figure:
    """Attention of every head on one sentence; queries downwards, keys to the right.

    Top: all heads, one small map each, light where a query reads. Bottom: the heads that attend most from the last
    position to IO and to S2, and those with the highest induction and previous-token scores on random repeated tokens,
    means over other sentences; names of the sentence and its last token are marked.
    """
    last = _last(series)
    pattern_NHLM, places, shown = last['map/pattern'][0], last['map/places'][0], last['map/heads'][0].astype(int)
    layers, heads, length, _ = pattern_NHLM.shape
    blocks = max(1, round(layers / heads))  # side by side, so that the whole is not higher than wide
    deep = -(-layers // blocks)
    cell = length + 2
    mosaic = np.full((deep * cell, (heads * blocks + blocks - 1) * cell), np.nan)
    figure = Figure(figsize=(TWO_COLUMNS, 2.3 + TWO_COLUMNS * 0.95 * mosaic.shape[0] / mosaic.shape[1]),
                    layout='constrained')
    top, bottom = figure.subfigures(2, 1, height_ratios=(mosaic.shape[0] / mosaic.shape[1] * TWO_COLUMNS * 0.95, 2.0))
    for layer, head in np.ndindex(layers, heads):
        row, column = layer % deep, layer // deep * (heads + 1) + head
        mosaic[row * cell : row * cell + length, column * cell : column * cell + length] = pattern_NHLM[layer, head]
    axis = top.subplots()
    image = axis.imshow(mosaic**0.5, cmap='viridis', vmin=0, vmax=1, interpolation='nearest')
    axis.set_axis_off()
    for block in range(blocks):
        for row in range(min(deep, layers - block * deep)):
            axis.annotate(f'{block * deep + row}', (block * (heads + 1) * cell - 3, row * cell + length / 2),
                          fontsize=5, ha='right', va='center', annotation_clip=False)
    axis.set_title('all heads; rows: layers, columns: heads 0, 1, ...', fontsize=7, pad=3)
    panels = bottom.subplots(1, len(SHOWN))
    for axis, name, (layer, head) in zip(panels, SHOWN, shown, strict=True):
        axis.imshow(pattern_NHLM[layer, head] ** 0.5, cmap='viridis', vmin=0, vmax=1, interpolation='nearest')
        axis.set_title(f'{CRITERIA[name]}\nhead {layer}.{head}', fontsize=7, pad=2)
        axis.set_xticks(places, ('IO', 'S1', 'S2', 'last'), rotation=90, fontsize=6)
        axis.set_yticks(places, ('IO', 'S1', 'S2', 'last'), fontsize=6)
        axis.set_xlabel('key')
    panels[0].set_ylabel('query')
    bar = bottom.colorbar(image, ax=panels, label='attention', fraction=0.02, pad=0.02)
    bar.set_ticks(np.array([0, 0.1, 0.5, 1]) ** 0.5, labels=['0', '.1', '.5', '1'])
    figure.suptitle(f'one sentence of {length} tokens, {layers} layers of {heads} heads', fontsize=8)
    return figure


@styled
def heads(series: Mapping) -> Figure:
    """Where the heads of every layer look.

    Maps: attention from the last position to the names and to the first token, on sentences; induction, duplicate-token
    and previous-token score on random tokens that are repeated (a head that always looks there: 1). Last panel: for
    every criterion the strongest head of half of the sentences, its value on the other half with a 95 % interval, and
    (grey) what a uniform pattern puts there.
    """
    last = _last(series)
    figure = Figure(figsize=(TWO_COLUMNS, 5.6), layout='constrained')
    panels = figure.subplots(4, 2)
    for axis, (name, title) in zip(panels.flat, CRITERIA.items(), strict=False):
        _map(figure, axis, np.mean(last[name], 0).T, label='attention', title=title, limits=(0, 1))
    axis = panels[-1, -1]
    for place, name in enumerate(CRITERIA):
        mean, half = interval(last[f'best/{name}'])
        floor = np.mean(last['uniform/repeated' if name in ('induction', 'duplicate', 'previous') else
                             'uniform/sentence'])
        axis.errorbar(place, mean, np.nan_to_num(half), color=BLUE, marker='o', markersize=3, linewidth=0.8)
        axis.hlines(floor, place - 0.35, place + 0.35, color=GREY, linewidth=1.2)
    axis.set_xticks(range(len(CRITERIA)), CRITERIA, rotation=40, ha='right', fontsize=6)
    axis.set_ylim(0, 1.06)
    axis.set_ylabel('attention')
    axis.set_title('strongest head, on sentences it was not chosen on', fontsize=7, pad=2)
    letters(panels)
    figure.suptitle(f'maps: mean of {len(last["IO"])} sentences, {len(last["induction"])} random sequences', fontsize=8)
    return figure


@styled
def lens(series: Mapping) -> Figure:
    """Logit lens: what the final norm and the unembedding make of the residual stream at each depth.

    a: log-probability of IO, S and " the" at the last position; that of the bare embedding, far below, is left out. b:
    their rank among all tokens, geometric mean, 1 for the most likely. Depth n: before block n; the last one is the
    model. Bands: 95 % intervals over sentences.
    """
    last = _last(series)
    figure = Figure(figsize=(TWO_COLUMNS, 2.5), layout='constrained')
    panels = figure.subplots(1, 2)
    depth = np.arange(last['rank'].shape[1])
    for word, (label, color) in enumerate(WORDS):
        band(panels[0], depth[1:], last['log_prob'][:, 1:, word].T, color=color, label=label)
        band(panels[1], depth, np.log10(last['rank'][..., word]).T, color=color, label=label)
    panels[0].set_ylabel('log-probability (nats)')
    panels[1].set_ylabel('rank')
    powers = np.arange(np.ceil(np.log10(last['rank'].max())) + 1)
    panels[1].set_yticks(powers, [f'$10^{int(power)}$' for power in powers])
    panels[1].invert_yaxis()
    for axis in panels:
        axis.set_xlabel('depth (blocks passed)')
        axis.legend(loc='best')
    letters(panels)
    figure.suptitle(_note(len(last['rank'])), fontsize=8)
    return figure


@styled
def attribution(series: Mapping) -> Figure:
    """Direct logit attribution: what every part adds to logit(IO) - logit(S), the final norm's scale being frozen.

    a: heads; blue ones speak for IO. Colours end at the 99th percentile; the strongest heads beyond are named as
    layer.head. b: attention and feed-forward of every layer. c: the sum of all that was added up to a layer, embedding
    and bias of the final norm included; dotted: the logit difference of the model, where it ends. Bands: 95 % intervals
    over sentences.
    """
    last = _last(series)
    attention_BN = last['heads'].sum(-1) + last['attn_bias']
    layer = np.arange(attention_BN.shape[1])
    figure = Figure(figsize=(TWO_COLUMNS, 4.4), layout='constrained')
    top, bottom = figure.subfigures(2, 1)
    axis = top.subplots()
    _map(top, axis, np.mean(last['heads'], 0).T, label='contribution (nats)')
    parts, total = bottom.subplots(1, 2)
    band(parts, layer, attention_BN.T, color=BLUE, label='attention')
    band(parts, layer, last['mlps'].T, color=ORANGE, label='feed-forward')
    parts.axhline(0, color=GREY, linewidth=0.5)
    parts.set_ylabel('contribution (nats)')
    parts.legend(loc='best')
    start_B1 = (last['embed'] + last['norm_bias'])[:, None]
    band(total, layer, (start_B1 + np.cumsum(attention_BN + last['mlps'], 1)).T, color='black', label='')
    total.axhline(np.mean(last['total']), color=GREY, linewidth=0.9, linestyle=':')
    total.set_ylabel('sum so far (nats)')
    for panel in (parts, total):
        _layers(panel, len(layer))
    letters([axis, parts, total])
    figure.suptitle(_note(len(last['total'])), fontsize=8)
    return figure


@styled
def patching(series: Mapping) -> Figure:
    """Activation patching: how much of the logit difference, IO over S, clean activations restore in corrupted runs.

    0: as corrupted, 1: as clean. a: residual stream before each block, by group of positions. b: each head's output
    before the output matrix. c: all of what attention or the feed-forward of a layer adds. Bands: 95 % intervals over
    sentences. Colours end at the 99th percentile; the strongest heads beyond are named as layer.head.
    """
    last = _last(series)
    figure = Figure(figsize=(TWO_COLUMNS, 4.4), layout='constrained')
    (residual, curve), (heads_axis, unused) = figure.subplots(2, 2, width_ratios=(1.35, 1))
    grid = unused.get_gridspec()
    curve.remove()
    unused.remove()
    curve = figure.add_subplot(grid[:, 1])
    _map(figure, residual, np.mean(last['residual'], 0).T, label='restored (1 = clean)', rows=GROUPS,
         title='residual stream before the block, by position')
    _map(figure, heads_axis, np.mean(last['heads'], 0).T, label='restored (1 = clean)', title='heads')
    layer = np.arange(last['heads'].shape[1])
    for name, color, label in (('attn_out', BLUE, 'attention'), ('mlp_out', ORANGE, 'feed-forward')):
        band(curve, layer, last[name].T, color=color, label=label)
    curve.axhline(0, color=GREY, linewidth=0.5)
    curve.set_ylabel('restored (1 = clean)')
    curve.legend(loc='best')
    _layers(curve, len(layer))
    letters([residual, heads_axis, curve])
    figure.suptitle(f'logit difference: clean {np.mean(last["clean"]):.2f}, corrupted {np.mean(last["corrupted"]):.2f} '
                    f'nats; {_note(len(last["clean"]))}', fontsize=8)
    return figure


@styled
def ablation(series: Mapping) -> Figure:
    """What is lost without one head, or without one feed-forward: change by mean ablation, ablated minus intact.

    Maps: heads, replaced before the output matrix; red: the quantity falls without the head. Colours end at the 99th
    percentile; the strongest heads beyond are named as layer.head. Curves: feed-forwards, on an axis that is linear
    within 1 nat and logarithmic beyond; bands: 95 % intervals over sentences.
    """
    last = _last(series)
    figure = Figure(figsize=(TWO_COLUMNS, 4.4), layout='constrained')
    panels = figure.subplots(2, 2)
    for axis, (name, title) in zip(panels.flat, ABLATED.items(), strict=False):
        _map(figure, axis, np.mean(last[f'heads/{name}'], 0).T, label='change (nats)', title=title)
    axis = panels[-1, -1]
    layer = np.arange(last['mlps/lead'].shape[1])
    for (name, label), color in zip(ABLATED.items(), (BLUE, RED, GREEN), strict=True):
        band(axis, layer, last[f'mlps/{name}'].T, color=color, label=label)
    axis.axhline(0, color=GREY, linewidth=0.5)
    axis.set_yscale('symlog', linthresh=1)
    axis.yaxis.set_major_formatter(lambda value, _: f'{value:g}')
    axis.set_ylabel('change (nats)')
    axis.legend(loc='lower right')
    axis.set_title('feed-forwards', fontsize=7, pad=2)
    _layers(axis, len(layer))
    letters(panels)
    figure.suptitle(_note(len(last['mlps/lead'])), fontsize=8)
    return figure
