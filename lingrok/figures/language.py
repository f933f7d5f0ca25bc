"""Figures of pretrained language models. Numbers in, Figure out; the replica axis of a series are prompts."""

from collections.abc import Mapping

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lingrok.config import parse_truncation
from lingrok.figures.style import BLUE, COLORS, GREY, RED, TWO_COLUMNS, band, finish, letters, new_figure, styled
from lingrok.lm.gsm8k import wilson
from lingrok.metrics import interval

NAMES = {'io': 'IO', 'subject': 'S', 'the': '"the"', 'generic': 'generic', 'answer': 'answer'}
HEIGHT = 0.075  # inches of a row of a heat map


def models(series: Mapping) -> list[str]:
    """The models of a series, the whole one first: what stands before '/p/' or '/log_p/' in its names."""
    return list(dict.fromkeys(name.rpartition('/')[0].rpartition('/')[0] for name in series if '/log_p/' in name))


def words(series: Mapping) -> list[str]:
    """The words of a series: what stands behind '/p/' or '/log_p/' in its names."""
    return list(dict.fromkeys(name.rpartition('/')[2] for name in series if '/log_p/' in name or '/p/' in name))


def pair(series: Mapping) -> tuple[str, str]:
    """The word that is asked for, and the generic one that stands against it."""
    return ('io', 'the') if 'io' in words(series) else ('answer', 'generic')


@styled
def comparison(series: Mapping) -> Figure:
    """What a language model says next, whole and with truncated matrices.

    a: probability of each word after every prompt (points), its median (bar) and quartiles (box). b: prompt by prompt,
    by how many nats the word asked for leads the generic one in the whole model (across) and in an edited one (up);
    above the diagonal the edit helps. "generic": in sentences with two names the words the, a, his, her, them and him
    together.

    series: '<model>/p/<word>', '<model>/log_p/<word>' with values (1, B).
    """
    names, found = models(series), {name: x.values[-1] for name, x in series.items()}
    figure, ((left, right),) = new_figure(1, 2, height=2.9)
    rng, shown = np.random.default_rng(0), words(series)
    spread = 0.8 / len(names)
    for i, (name, color) in enumerate(zip(names, COLORS, strict=False)):
        for place, word in enumerate(shown):
            values = found[f'{name}/p/{word}']
            x = place + (i - (len(names) - 1) / 2) * spread
            left.plot(x + 0.3 * spread * rng.uniform(-1, 1, len(values)), values, '.', color=color, markersize=2,
                      alpha=0.5, label=name if place == 0 else None)
            low, middle, high = np.percentile(values, (25, 50, 75))
            left.add_patch(Rectangle((x - 0.4 * spread, low), 0.8 * spread, high - low, fill=False, color=color))
            left.plot([x - 0.4 * spread, x + 0.4 * spread], [middle, middle], color=color, linewidth=2)
    left.set_xticks(range(len(shown)), [f'P({NAMES[word]})' for word in shown])
    left.set_ylabel('probability')
    left.set_ylim(-0.02, 1)
    answer, generic = pair(series)
    leads = {name: found[f'{name}/log_p/{answer}'] - found[f'{name}/log_p/{generic}'] for name in names}
    for name, color in list(zip(names, COLORS, strict=False))[1:]:
        right.plot(leads[names[0]], leads[name], '.', color=color, markersize=3)
    ends = [min(map(np.min, leads.values())) - 0.5, max(map(np.max, leads.values())) + 0.5]
    right.plot(ends, ends, color=GREY, linewidth=0.9, linestyle=':')
    right.axhline(0, color=GREY, linewidth=0.4)
    right.axvline(0, color=GREY, linewidth=0.4)
    right.set_xlabel(f'lead of {NAMES[answer]} over {NAMES[generic]}, whole (nats)')
    right.set_ylabel('the same, truncated (nats)')
    if len(names) == 1:
        right.text(0.5, 0.5, 'no truncated model asked for', ha='center', transform=right.transAxes)
    letters((left, right))
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=3, markerscale=4)
    figure.suptitle(f'{len(next(iter(leads.values())))} prompts, a point each', fontsize=8)
    return figure


@styled
def heat_map(series: Mapping) -> Figure:
    """What truncating one matrix changes: a panel a role, layers down, kept fraction of the rank across.

    First row: by how many nats the lead of the word asked for over the generic one grows (mean over prompts). Second
    row: change of its own log-probability. Third row, where a text was given: KL of the edited model from the whole one
    on that text (nats a token), the cost. A frame marks the best truncation of the prompts that choose, circles those
    composed.

    series: 'whole/log_p/<word>' and '<truncation>/log_p/<word>' (1, B), '<truncation>/kl' (1, W), 'chosen/<truncation>'
    and 'composed/<truncation>'.
    """
    found = {name: x.values[-1] for name, x in series.items()}
    answer, generic = pair(series)
    entries = {name: parse_truncation(name) for name in models(series) if name != 'whole' and '+' not in name}
    columns = list(dict.fromkeys((role, keep) for _, role, _, keep in entries.values()))
    fractions = sorted({fraction for _, _, fraction, _ in entries.values()})
    layers = sorted({layer for layer, *_ in entries.values()})

    def change(name, quantity):
        return np.mean(found[f'{name}/{quantity}']) - np.mean(found[f'whole/{quantity}'])

    rows = {
        f'lead of {NAMES[answer]} over {NAMES[generic]},\nchange (nats)':
            lambda name: change(name, f'log_p/{answer}') - change(name, f'log_p/{generic}'),
        f'log P({NAMES[answer]}),\nchange (nats)': lambda name: change(name, f'log_p/{answer}'),
    }
    if any(name.endswith('/kl') for name in found):
        rows['cost: KL on text\n(nats, log scale)'] = lambda name: np.log10(max(np.mean(found[f'{name}/kl']), 1e-4))
    figure, axes = new_figure(len(rows), len(columns), height=len(rows) * (0.55 + max(HEIGHT * len(layers), 1.3)))
    for row, (axes_row, (title, value)) in enumerate(zip(axes, rows.items(), strict=True)):
        is_cost = title.startswith('cost')
        tables = {}
        for column in columns:
            table = np.full((len(layers), len(fractions)), np.nan)
            for name, (layer, role, fraction, keep) in entries.items():
                if (role, keep) == column:
                    table[layers.index(layer), fractions.index(fraction)] = value(name)
            tables[column] = table
        size = max(np.nanmax(np.abs(np.clip(table, -3, 3))) for table in tables.values())
        low, high, colors = (-4, 1, 'viridis') if is_cost else (-size, size, 'RdBu_r')
        for axis, (column, table) in zip(axes_row, tables.items(), strict=True):
            image = axis.imshow(table, aspect='auto', interpolation='nearest', origin='lower', cmap=colors, vmin=low,
                                vmax=high)
            axis.set_xticks(range(len(fractions)), [f'{100 * x:g}' for x in fractions],
                            fontsize=6 if len(columns) > 4 else None)
            every = max(1, len(layers) // 6)
            axis.set_yticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])
            if row == 0:
                axis.set_title(f'{column[0]},\n{column[1]} kept')
            if row == len(rows) - 1:
                axis.set_xlabel('rank kept (%)')
            for name, (layer, role, fraction, keep) in entries.items():
                place = fractions.index(fraction), layers.index(layer)
                if (role, keep) == column and f'chosen/{name}' in found:
                    axis.add_patch(Rectangle((place[0] - 0.5, place[1] - 0.5), 1, 1, fill=False, linewidth=1.4))
                if (role, keep) == column and f'composed/{name}' in found:
                    axis.plot(*place, 'o', color='black', fillstyle='none', markersize=4)
        axes_row[0].set_ylabel('layer')
        bar = figure.colorbar(image, ax=list(axes_row), label=title, extend='neither' if is_cost else 'both')
        if is_cost:
            bar.set_ticks(range(-4, 2), labels=['.0001', '.001', '.01', '.1', '1', '10'])
    figure.suptitle(f'mean over {len(found["whole/log_p/" + answer])} prompts', fontsize=8)
    return figure


@styled
def edits(series: Mapping) -> Figure:
    """One association taken out of a feed-forward, beside truncation at equal cost.

    a: P(generic word) that is left, b: P(word asked for), of the edited model that, among those whose KL on the text is
    within a budget, has the least P(generic) on one half of the prompts; means over the other half, 95 % intervals.
    Dotted: the whole model.

    series: 'budget/nats' (1, 1, C); 'budget/<family>/p/<word>' (1, B, C), 'whole/p/<word>' (1, B) of the same prompts.
    """
    budget_C = series['budget/nats'].values[-1, 0]
    figure, ((left, right),) = new_figure(1, 2, height=2.5)
    families = list(dict.fromkeys(name.split('/')[1] for name in series if name.count('/') == 3))
    for axis, word in zip((left, right), reversed(pair(series)), strict=True):
        for family, color in zip(families, COLORS, strict=False):
            band(axis, budget_C, series[f'budget/{family}/p/{word}'].values[-1].T, color=color, label=family)
        axis.axhline(series[f'whole/p/{word}'].values[-1].mean(), color=GREY, linestyle=':', linewidth=0.9)
        axis.set_xscale('log')
        axis.set_ylabel(f'P({NAMES[word]})')
        axis.set_ylim(bottom=0)
    count = series[f'whole/p/{pair(series)[0]}'].values.shape[1]
    finish(figure, (left, right), xlabel='allowed KL on text (nats a token)', one_legend=True,
           note=f'mean over {count} prompts that did not choose, 95 % intervals')
    return figure


@styled
def dynamics(series: Mapping) -> Figure:
    """What a language model says next along its training, whole (solid) and truncated (dashed).

    a: mean probability of each word. b: by how many nats the word asked for leads the generic one. Bands: 95 %
    intervals of the mean over prompts. Across: the number at the end of a checkpoint's name.

    series: '<model>/p/<word>', '<model>/log_p/<word>' with values (T, B).
    """
    figure, ((left, right),) = new_figure(1, 2, width=TWO_COLUMNS, height=2.7)
    answer, generic = pair(series)
    for name, style in zip(models(series), ('-', '--', ':', '-.'), strict=False):
        for word, color in ((answer, BLUE), (generic, RED)):
            steps, values_TB = series[f'{name}/p/{word}']
            band(left, steps, values_TB, color=color, linestyle=style, label=f'{NAMES[word]}, {name}')
        lead_TB = series[f'{name}/log_p/{answer}'].values - series[f'{name}/log_p/{generic}'].values
        band(right, steps, lead_TB, color=GREY, linestyle=style, label=name)
    for axis in (left, right):
        axis.set_xscale('symlog', linthresh=1)
    left.set_ylabel('probability')
    left.set_ylim(bottom=0)
    right.set_ylabel(f'lead of {NAMES[answer]} over {NAMES[generic]} (nats)')
    right.axhline(0, color=GREY, linewidth=0.4)
    finish(figure, (left, right), xlabel='step', note=f'mean over {lead_TB.shape[1]} prompts, 95 % intervals',
           one_legend=True)
    return figure


@styled
def shots(series: Mapping) -> Figure:
    """Word problems by chain of thought against the number of worked examples in the prompt, a colour a model.

    a: share of problems solved, by the number after "The answer is" (strict, solid) or the last number (flexible,
    dashed), with 95 % intervals of Wilson; crosses are random choices of examples (strict). b: mean log-probability a
    token of the worked solutions behind the same prompts, of numbers (solid) and words (dashed). c: by how much
    truncation changes that, problem by problem. Intervals in b and c: 95 %, Student.

    series: '<model>/strict/<shots>', also flexible, numbers, words, with values (1, N problems); where the examples
    are a random choice, '/subset <seed>' stands behind.
    """
    found = {name: x.values[-1] for name, x in series.items()}
    names = list(dict.fromkeys(name.split('/')[0] for name in found))
    counts = sorted({int(name.split('/')[2]) for name in found})
    figure, (axes,) = new_figure(1, 3 if len(names) > 1 else 2, height=2.7)
    for i, (name, color) in enumerate(zip(names, COLORS, strict=False)):
        x_n = np.arange(len(counts)) + 0.07 * (i - (len(names) - 1) / 2)  # side by side, or bars would hide bars
        for kind, style in (('strict', '-'), ('flexible', '--')):
            solved = [found[f'{name}/{kind}/{count}'] for count in counts]
            bounds = [wilson(int(values.sum()), len(values)) for values in solved]
            shares = np.array([values.mean() for values in solved])
            axes[0].errorbar(x_n, shares, np.abs(np.transpose(bounds) - shares), color=color, linestyle=style,
                             marker='.', elinewidth=0.7, label=f'{kind}, {name}')
        for key, values in found.items():
            if key.startswith(f'{name}/strict/') and 'subset' in key:
                axes[0].plot(x_n[counts.index(int(key.split('/')[2]))], values.mean(), 'x', color=color, markersize=4)
        for kind, style in (('numbers', '-'), ('words', '--')):
            log_p = [found[f'{name}/{kind}/{count}'] for count in counts]
            changes = [values - found[f'{names[0]}/{kind}/{n}'] for values, n in zip(log_p, counts, strict=True)]
            for axis, rows in zip(axes[1:], (log_p, changes)[: 2 if i else 1], strict=False):
                mean, half = interval(np.array(rows))
                axis.errorbar(x_n, mean, half, color=color, linestyle=style, marker='.', elinewidth=0.7,
                              label=f'{kind}, {name}')
    for axis, label in zip(axes, ('share solved', 'log P (nats a token)', 'change of log P (nats)'),
                           strict=False):
        axis.set_ylabel(label)
        axis.set_xticks(range(len(counts)), counts)
    axes[0].set_ylim(-0.02, 1)
    for axis in axes[2:]:
        axis.axhline(0, color=GREY, linewidth=0.4)
    total = len(found[f'{names[0]}/strict/{counts[0]}'])
    with rc_context({'legend.handlelength': 3}):  # dashes show
        finish(figure, axes, xlabel='worked examples (shots)', note=f'n = {total} problems, 95 % intervals',
               one_legend=True)
    return figure
