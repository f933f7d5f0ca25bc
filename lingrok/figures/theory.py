"""Figures of the theory of recall: first steps, key-query gradients, trajectories, memories. Numbers in, Figure out."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

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
    letters,
    new_figure,
    replicas_note,
    styled,
)

ENTRIES = {'ff_noise': ('F[τ, q]', RED), 'value_other': ('V[τ, j]', BLUE), 'value_noise': ('V[τ, τ]', PURPLE),
           'value_trigger': ('V[τ, q]', SKY), 'value_copy': ('V[k, k]', GREEN), 'copy': ('V[k, k] − V[k, j]', GREEN)}
MARGINS = {'margin_ff': ('FF', RED), 'margin_attn': ('attention', BLUE)}


def last(series: Mapping) -> dict:
    """name -> values of the last step, (S, ...)."""
    return {name: x.values[-1] for name, x in series.items()}


@styled
def first_step(series: Mapping) -> Figure:
    """The first gradient step from zero stores noise in the feed-forward (FF), a little in the values, no copy.

    F, V: feed-forward and value matrix, rows outputs, columns inputs; τ noise, q trigger, j, k ordinary tokens. Dots:
    measured, with 95 % intervals over replicas; lines: the derived leading-order formulas, in d exact expectations.
    a: standard deviation over repetitions against the number m of sequences. b: logit of the noise minus the best other
    one on test sequences, against the number N of tokens, T = 2 N. c: standard deviation of V[τ, j] for every N, T.
    d: mean entries against the noise probability. e: mean over standard deviation against m, of the noise in FF and
    values and of the copy (mean over k); grey: 1. f: entries with random embeddings of width d over the exact
    expectation for orthonormal ones, mean and standard deviation over draws of embeddings and sequences.
    """
    found = last(series)
    figure, axes = new_figure(2, 3, height=4.6)
    (spread, margin, scaling), (level, ratio, width) = axes
    m = found['by_size/size'][0]
    for name in ('ff_noise', 'value_other', 'value_noise', 'value_copy'):
        label, color = ENTRIES[name]
        dots(spread, m, found[f'by_size/sd/{name}'], color=color, label=label)
        spread.plot(m, found[f'by_size/predicted/sd/{name}'][0], color=color, linewidth=0.8)
    spread.set(xscale='log', yscale='log', xlabel='sequences m', ylabel='standard deviation')

    N, T, is_two = (found[f'grid/{name}'][0] for name in ('num_tokens', 'length', 'is_two'))
    chosen = is_two > 0
    for name, (label, color) in MARGINS.items():
        dots(margin, N[chosen], found[f'grid/mean/{name}'][:, chosen], color=color, label=label)
        margin.plot(N[chosen], found[f'grid/predicted/mean/{name}'][0, chosen], color=color, linewidth=0.8)
    margin.set(xscale='log', yscale='log', xlabel='ordinary tokens N', ylabel='margin of one step')

    scale = np.sqrt(1 / N**2 + 1 / (T * N))
    sizes = found['grid/size'][0]
    for color, marker, part in zip(COLORS, 'os^D', np.unique(T / N), strict=False):
        here = part == T / N
        dots(scaling, scale[here], found['grid/sd/value_other'][:, here] * np.sqrt(sizes[here]), color=color,
             marker=marker, label=f'T = {part:g} N')
    ends = np.array([scale.min(), scale.max()])
    middle = np.median(found['grid/predicted/sd/value_other'][0] * np.sqrt(sizes) / scale)
    scaling.plot(ends, middle * ends, color=GREY, linewidth=0.8, label='slope 1')
    scaling.set(xscale='log', yscale='log', xlabel='(1/N² + 1/(T N))$^{1/2}$', ylabel='√m · sd of V[τ, j]')

    alpha = found['by_noise/noise_prob'][0]
    for name in ('ff_noise', 'value_trigger', 'value_other', 'value_noise'):
        label, color = ENTRIES[name]
        dots(level, alpha, found[f'by_noise/mean/{name}'], color=color, label=label)
        level.plot(alpha, found[f'by_noise/exact/{name}'][0], color=color, linewidth=0.8)
    level.set(yscale='log', xlabel='noise probability α', ylabel='mean entry')

    for name, color in (('ff_noise', RED), ('value_other', BLUE), ('copy', GREEN)):
        share = found[f'by_size/mean/{name}'] / found[f'by_size/sd/{name}']
        dots(ratio, m, share, color=color, label=ENTRIES[name][0])
    ratio.axhline(1, color=GREY, linewidth=0.8, linestyle=':')
    ratio.set(xscale='log', yscale='log', xlabel='sequences m', ylabel='mean / sd of one step')

    d = found['by_width/width'][0]
    for k, name in enumerate(('ff_noise', 'value_other', 'value_noise')):
        label, color = ENTRIES[name]
        share = found[f'by_width/mean/{name}'] / found[f'exact/{name}'][0]
        width.errorbar(d * 1.08 ** (k - 1), share.mean(0), share.std(0, ddof=1), color=color, label=label, marker='o',
                       markersize=3, linestyle='none', linewidth=0.8)
    width.axhline(1, color=GREY, linewidth=0.8, linestyle=':')
    width.set(xscale='log', xlabel='width d of random embeddings', ylabel='entry / orthonormal')
    width.set_xticks(d, [f'{x:g}' for x in d], rotation=90)
    width.minorticks_off()
    for axis in axes.flat:
        axis.legend(loc='best', handletextpad=0.3, fontsize=6)
    letters(axes)
    figure.suptitle(f'first step of the one-layer model: {replicas_note(len(found["by_size/sd/ff_noise"]))}',
                    fontsize=8)
    return figure


KEY_ENTRIES = {'trigger': 'E(q)', 'noise': 'E(τ)', 'other': 'E(j)', 'after_trigger': 'E~(q)', 'after_noise': 'E~(τ)'}


@styled
def key_query(series: Mapping) -> Figure:
    """What the trigger's query learns to look at in the second step: row q of minus the gradient of W_KQ.

    Columns: keys by their token, E(.), or by the token before, E~(.); j: mean over ordinary tokens. One panel a
    setting: N tokens, length T, noise probability α, feed-forward untrained or already predicting noise with
    probability α. Dots: every seed; bars: mean and 95 % interval. E~(q) above zero: attention moves to what followed
    the trigger; E(τ) below zero: away from noise.
    """
    found = last(series)
    settings = [name.removesuffix('/other') for name in found if name.endswith('/other') and '1e5' not in name]
    figure, axes = new_figure(1, len(settings), height=2.4)
    for axis, setting in zip(axes[0], settings, strict=True):
        values_SE = np.stack([found[f'{setting}/{name}'] for name in KEY_ENTRIES], 1) * 1e5
        place = np.arange(len(KEY_ENTRIES))
        axis.plot(np.tile(place, (len(values_SE), 1)) - 0.2, values_SE, '.', color=GREY, markersize=2)
        dots(axis, place, values_SE, color=RED if 'untrained' in setting else BLUE)
        axis.axhline(0, color='black', linewidth=0.5)
        axis.set_xticks(place, KEY_ENTRIES.values(), rotation=90)
        axis.set_xlim(-0.6, len(place) - 0.4)
        axis.set_title(setting.replace(', FF', '\nFF'), fontsize=6.5)
    axes[0, 0].set_ylabel('−dL/dW$_{KQ}$, row q (10$^{-5}$)')
    figure.suptitle(f'second step: {replicas_note(len(values_SE))}', fontsize=8)
    return figure


@styled
def trajectories(series: Mapping) -> Figure:
    """Training all three matrices from zero, one column an optimiser: the feed-forward (FF) takes the noise first.

    Rows: loss on fresh sequences, with the Bayes predictor and the one that knows the law alone; probability of the
    noise and of the target (where it has been shown), with and without the logits of the FF; attention of the last
    position on targets and on noise tokens that follow the trigger; noise logit minus the best other one stored in the
    FF for q, and in the values for ordinary tokens. Lines: means over seeds, bands 95 % intervals; sparse dots: the
    solution by hand with queries on what followed q, at the strength of least loss (not optimal beyond that).
    """
    optimizers = [name.removesuffix('/loss/bayes') for name in series if name.endswith('/loss/bayes')]
    rows = {
        'loss (nats)': [('loss/model', BLUE, '-', 'model'), ('loss/bayes', GREY, ':', 'Bayes'),
                        ('loss/distribution_only', GREY, '-.', 'law alone')],
        'probability': [('p_noise', RED, '-', 'noise'), ('p_target', GREEN, '-', 'target'),
                        ('p_noise/no_ff', ORANGE, '--', 'noise, no FF'),
                        ('p_target/no_ff', SKY, '--', 'target, no FF')],
        'attention': [('attention_target', GREEN, '-', 'on targets'), ('attention_noise', RED, '-', 'on noise')],
        'noise margin (nats)': [('margin/ff', RED, '-', 'in FF, after q'), ('margin/value', BLUE, '-', 'in values')],
    }
    figure = Figure(figsize=(TWO_COLUMNS, 6.4), layout='constrained')
    axes = figure.subplots(len(rows), len(optimizers), sharey='row', sharex=True, squeeze=False)
    for line, (label, curves) in zip(axes, rows.items(), strict=True):
        for axis, optimizer in zip(line, optimizers, strict=True):
            for name, color, style, text in curves:
                steps, values_TS = series[f'{optimizer}/{name}']
                if style in (':', '-.'):
                    axis.axhline(values_TS.mean(), color=color, linestyle=style, linewidth=0.9, label=text)
                    continue
                band(axis, steps, values_TS, color=color, linestyle=style, label=text)
                if f'by hand/{name}' in series and '/no_ff' not in name and not name.startswith('margin'):
                    axis.axhline(series[f'by hand/{name}'].values.mean(), color=color, linestyle=(0, (1, 3)),
                                 linewidth=0.9)
            axis.set_xscale('symlog', linthresh=1, linscale=0.3)
            axis.set_xticks([0, 1, 10, 100], ['0', '1', '10', '100'])
            axis.set_xlim(0, steps[-1])
            axis.axhline(0, color='black', linewidth=0.4)
        line[0].set_ylabel(label)
        handles, labels = line[-1].get_legend_handles_labels()
        line[-1].legend(handles, labels, loc='center left', bbox_to_anchor=(1.02, 0.5))
    for axis, optimizer in zip(axes[0], optimizers, strict=True):
        axis.set_title(optimizer)
    for axis in axes[-1]:
        axis.set_xlabel('step')
    count = series[f'{optimizers[0]}/loss/model'].values.shape[1]
    figure.suptitle(f'one-layer model from zero: {replicas_note(count)}; sparse dots: the solution by hand', fontsize=8)
    return figure


REMOVALS = {'full': ('whole', GREY), 'bottom': ('bottom removed', BLUE), 'top': ('top removed', RED)}


@styled
def memory(series: Mapping) -> Figure:
    """Noise in a linear associative memory: removing the smallest direction helps early and with few inputs only.

    a: singular values along training, 5 inputs, noise .3: the common direction carries the noise; dotted: where it
    overtakes. b: the probability of the correct output (solid) and of the noise (dashed) for the whole memory, and
    without its bottom or its top singular direction. c: the same probabilities with random embeddings of width d,
    mean and 95 % interval over draws. d to f: log2 of the singular value of the common direction over that of the
    contrasts after 1, 100 and 10^4 steps; blue: remove the bottom direction, red: the top one. Line: 1/√(n+1), the
    threshold of the first step; dashes: 1/(n+1), where the noise starts at zero; dots: equal singular values.
    """
    figure, axes = new_figure(2, 3, height=4.6)
    (values, probability, width), maps = axes
    steps, common = series['time/sigma_common']
    values.plot(steps, common[:, 0], color=RED, label='common (noise)')
    values.plot(steps, series['time/sigma_contrast'].values[:, 0], color=BLUE, label='contrast (mapping)')
    values.axvline(series['time/crossing'].values[-1, 0], color=GREY, linewidth=0.9, linestyle=':')
    values.set(xscale='log', yscale='log', xlabel='step', ylabel='singular value')
    for kind, (label, color) in REMOVALS.items():
        probability.plot(steps, series[f'time/{kind}/p_correct'].values[:, 0], color=color, label=label)
        probability.plot(steps, series[f'time/{kind}/p_noise'].values[:, 0], color=color, linestyle='--')
        d = series['width/width'].values[-1, 0]
        dots(width, d, series[f'width/{kind}/p_correct'].values[-1], color=color, label=label)
        dots(width, d, series[f'width/{kind}/p_noise'].values[-1], color=color, marker='x')
    probability.axvline(series['time/crossing'].values[-1, 0], color=GREY, linewidth=0.9, linestyle=':')
    probability.set(xscale='log', xlabel='step', ylabel='probability (noise dashed)', ylim=(0, 1))
    width.set(xscale='log', xlabel='width d', ylabel='probability (noise ×)', ylim=(0, 1))
    width.set_xticks(d, [f'{x:g}' for x in d], rotation=90)
    width.minorticks_off()
    n, alpha = (series[f'map/{name}'].values[-1, 0] for name in ('num_inputs', 'noise_prob'))
    for axis, (step, ratio_NA) in zip(maps, zip(*series['map/log_ratio'], strict=True), strict=True):
        ratio_NA = np.maximum(ratio_NA, -99)  # the common direction is exactly 0 where the noise starts at zero
        image = axis.pcolormesh(n, alpha, ratio_NA[0].T, cmap='RdBu_r', vmin=-3, vmax=3, shading='nearest',
                                rasterized=True)
        axis.contour(n, alpha, ratio_NA[0].T, [0], colors='black', linewidths=0.5, linestyles=':')
        axis.plot(n, (n + 1) ** -0.5, color='black', linewidth=1)
        axis.plot(n, 1 / (n + 1), color='black', linewidth=0.8, linestyle='--')
        axis.set(xlabel='inputs n', ylabel='noise probability', title=f'step {step}', ylim=(alpha[0], alpha[-1]))
    figure.colorbar(image, ax=maps, label='log2 common / contrast', fraction=0.05)
    values.legend(loc='lower right', fontsize=6)
    figure.legend(*probability.get_legend_handles_labels(), loc='outside lower center', ncols=3)
    letters(axes)
    count = series['width/full/p_noise'].values.shape[1]
    figure.suptitle(f'a, b, d to f: exact, nothing is drawn at random; c: {replicas_note(count)}', fontsize=8)
    return figure


@styled
def network(series: Mapping, cfg: Config) -> Figure:
    """Does a step on the last feed-forward (FF) favour the noise token more than one on the last values?

    Change by a step of unit rate on the FF alone, or on value and output matrix of the last attention alone, along
    the gradient of the training loss on m sequences. Reading: noise logit minus mean other logit. Left: of the part's
    own answer to the embedding of a trigger; middle: of the model at repeated triggers of clean sequences; mean over
    minibatches. Right: mean over standard deviation of the change in one minibatch; dashed: of the middle reading.
    95 % intervals over replicas.
    """
    found = last(series)
    figure, (axes,) = new_figure(1, 3, height=2.4)
    m = found['size'][0]
    for part, (label, color) in {'ff': ('FF', RED), 'attn': ('attention', BLUE)}.items():
        for axis, reading in zip(axes, ('alone', 'context'), strict=False):
            dots(axis, m, found[f'mean/{part}/{reading}'], color=color, label=label)
        for reading, style, marker in (('alone', '-', 'o'), ('context', '--', 's')):
            values_SX = found[f'ratio/{part}/{reading}']
            dots(axes[2], m, values_SX, color=color, marker=marker, label=label if reading == 'alone' else '')
            axes[2].plot(m, values_SX.mean(0), color=color, linestyle=style, linewidth=0.8)
    for axis, title in zip(axes, ('answer to the trigger alone', 'logits in context', 'signal to noise'), strict=True):
        axis.set(xscale='log', xlabel='sequences m', title=title)
        axis.set_xticks(m, [f'{x:g}' for x in m])
        axis.minorticks_off()
        axis.axhline(0, color='black', linewidth=0.5)
    axes[0].set_ylabel('change of lead (nats)')
    axes[2].set_ylabel('mean / sd')
    axes[0].legend(loc='best')
    letters(axes)
    count = min(map(len, cfg.groups().values()))
    figure.suptitle(f'{cfg.name}, step {series["size"].steps[-1]}: {replicas_note(count)}', fontsize=8)
    return figure
