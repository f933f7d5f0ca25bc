"""Figures of the modular task. Numbers in, Figure out."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lingrok.analysis import phases
from lingrok.config import Config
from lingrok.figures.style import (
    COLORS,
    GREY,
    TWO_COLUMNS,
    band,
    finish,
    floor,
    new_figure,
    replicas_note,
    styled,
)
from lingrok.metrics import interval

NAMES = {'id_train': 'training tasks', 'ood_train': 'unseen tasks', 'id_test': 'training tasks, unseen inputs',
         'ood_test': 'unseen tasks, unseen inputs'}


@styled
def training(series: Mapping, cfg: Config) -> Figure:
    """How well seen and unseen tasks are solved along training and along the row, one colour a setting.

    a: accuracy at the last shot on training tasks (dashed) and unseen tasks (solid). b: the same on queries forced out
    of every direction of the context, which need two examples to be combined. c: accuracy on unseen tasks by shot at
    the end. d: loss on training tasks and unseen tasks. Dotted: exact reference predictors on the same rows.
    """
    figure, axes = new_figure(2, 2, height=4.8)
    (accuracy, forced), (shots, loss) = axes
    ood = _reported_set(series, cfg)
    groups = cfg.groups()

    def draw(axis, name, replicas, color, label, linestyle='-'):
        if name in series:
            steps, values = series[name]
            band(axis, steps, values[:, replicas], color=color, label=label, linestyle=linestyle)

    for color, (setting, replicas) in zip(COLORS, groups.items(), strict=False):
        label = f'{setting}: ' if setting else ''
        draw(accuracy, f'{ood}/accuracy_last', replicas, color, f'{label}unseen')
        draw(accuracy, 'id_train/accuracy_last', replicas, color, f'{label}training', '--')
        draw(forced, 'ood_forced/accuracy_last_not_covered', replicas, color, f'{label}unseen')
        draw(forced, 'id_forced/accuracy_last_not_covered', replicas, color, f'{label}training', '--')
        draw(loss, f'{ood}/loss', replicas, color, f'{label}unseen')
        draw(loss, 'id_train/loss', replicas, color, f'{label}training', '--')
        by_shot_KS = series[f'{ood}/accuracy_by_shot'].values[-1][replicas].T
        band(shots, np.arange(len(by_shot_KS)), by_shot_KS, color=color, label=setting or 'model')
    shots.xaxis.set_major_locator(MaxNLocator(integer=True))

    for name, label, below in (('ratio', 'ratio matching', False), ('copy', 'copy', False), ('chance', 'chance', True)):
        floor(accuracy, series[f'{ood}/accuracy_last/{name}'].values[-1].mean(), label, below=below)
    if 'ood_forced/accuracy_last_not_covered/kernel' in series:
        floor(forced, np.nanmean(series['ood_forced/accuracy_last_not_covered/kernel'].values[-1]), 'kernel trick')
    for name, label, linestyle in (('ratio', 'ratio matching', ':'), ('bayes_uniform', 'Bayes, all tasks', '--')):
        curve = np.nanmean(series[f'{ood}/accuracy_by_shot/{name}'].values[-1], 0)
        shots.plot(np.arange(len(curve)), curve, color=GREY, linewidth=0.9, linestyle=linestyle, label=label)
    floor(loss, np.log(cfg.task.p), 'guess')

    for axis, label in ((accuracy, 'accuracy, last shot'), (forced, 'accuracy, forced queries'),
                        (shots, 'accuracy on unseen tasks')):
        axis.set_ylabel(label)
        axis.set_ylim(0, 1.02)
    loss.set_ylabel('loss (nats)')
    loss.set_ylim(bottom=0)
    for axis in (accuracy, forced, loss):
        axis.set_xlim(0, cfg.train.num_steps)
    finish(figure, axes, xlabel='step', note=f'{cfg.name}: {replicas_note(min(map(len, groups.values())))}')
    shots.set_xlabel('shots')
    return figure


@styled
def shots(series: Mapping, cfg: Config) -> Figure:
    """Accuracy and loss against the number of examples before the query, on seen and unseen tasks.


    One colour a setting. Dotted and dashed in grey: ratio matching and the Bayes predictor that holds all tasks for
    equally likely, on the same rows. What lies above ratio matching combines examples.
    """
    splits = [split for split in NAMES if f'{split}/accuracy_by_shot' in series]
    figure, axes = new_figure(2, len(splits), height=4.2)
    for split, (accuracy, loss) in zip(splits, axes.T, strict=True):
        for color, (setting, replicas) in zip(COLORS, cfg.groups().items(), strict=False):
            for axis, quantity in ((accuracy, 'accuracy'), (loss, 'loss')):
                values_SK = series[f'{split}/{quantity}_by_shot'].values[-1][replicas]
                band(axis, np.arange(values_SK.shape[1]), values_SK.T, color=color, label=setting or 'model')
        for name, label, linestyle in (('ratio', 'ratio matching', ':'), ('bayes_uniform', 'Bayes, all tasks', '--')):
            curve = np.nanmean(series[f'{split}/accuracy_by_shot/{name}'].values[-1], 0)
            accuracy.plot(np.arange(len(curve)), curve, color=GREY, linewidth=0.9, linestyle=linestyle, label=label)
        floor(loss, np.log(cfg.task.p), 'guess')
        accuracy.set_ylim(0, 1.02)
        accuracy.set_title(NAMES[split].replace(', ', ',\n'), pad=4)
        loss.set_ylim(bottom=0)
        for axis in (accuracy, loss):
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0, 0].set_ylabel('accuracy')
    axes[1, 0].set_ylabel('loss (nats)')
    smallest = min(map(len, cfg.groups().values()))
    finish(figure, axes, xlabel='shots', note=f'{cfg.name}: {replicas_note(smallest)}', one_legend=True)
    return figure


@styled
def learning_curves(series: Mapping, cfg: Config) -> Figure:
    """Accuracy at the last shot along training, one colour a number of tasks, one column a share of inputs.

    Top: training tasks and inputs. Middle: unseen tasks (and unused inputs, where there are any). Bottom: unseen tasks,
    query in a direction of no example. An accuracy on unseen tasks that rises and falls again is transient. Dotted:
    ratio matching, chance, kernel trick.
    """
    ood = _reported_set(series, cfg)
    rows = [('id_train/accuracy_last', 'training tasks'), (f'{ood}/accuracy_last', NAMES[ood].replace(', ', ',\n')),
            ('ood_forced/accuracy_last_not_covered', 'unseen tasks,\nforced queries')]
    rows = [(name, label) for name, label in rows if name in series]
    alphas = cfg.coordinates()['task.alpha']
    counts = cfg.coordinates()['task.num_tasks']
    columns = sorted(set(alphas))
    figure, axes = new_figure(len(rows), len(columns), height=1.1 + 1.3 * len(rows))
    for column, alpha in enumerate(columns):
        for color, count in zip(COLORS, dict.fromkeys(counts), strict=False):
            replicas = [r for r in range(cfg.num_replicas) if (counts[r], alphas[r]) == (count, alpha)]
            if not replicas:
                continue
            for axis, (name, _) in zip(axes[:, column], rows, strict=True):
                steps, values = series[name]
                band(axis, steps, values[:, replicas], color=color, label=f'{count:g} tasks')
        chosen = [r for r in range(cfg.num_replicas) if alphas[r] == alpha]
        for axis, (name, _) in zip(axes[:, column], rows, strict=True):
            lines = {'ood_forced': ('kernel',), 'id_train': ('chance',)}
            for line in lines.get(name.partition('/')[0], ('ratio', 'chance')):
                if f'{name}/{line}' in series:
                    label = {'ratio': 'ratio matching', 'kernel': 'kernel trick'}.get(line, line)
                    floor(axis, np.nanmean(series[f'{name}/{line}'].values[-1, chosen]), label, below=line != 'kernel')
            axis.set_ylim(0, 1.02)
            axis.set_xlim(0, cfg.train.num_steps)
        axes[0, column].set_title(f'{100 * alpha:g} % of the inputs', pad=4)
    for axis, (_, label) in zip(axes[:, 0], rows, strict=True):
        axis.set_ylabel(f'{label}')
    smallest = min(map(len, cfg.groups().values()))
    finish(figure, axes, xlabel='step', note=f'{cfg.name}: accuracy at the last shot, {replicas_note(smallest)}',
           one_legend=True)
    return figure


def _reported_set(series: Mapping, cfg: Config) -> str:
    """Unseen tasks on unused inputs where those were measured, else on training inputs."""
    return 'ood_test' if 'ood_test/accuracy_last' in series and cfg.task.alpha < 1 else 'ood_train'


PHASE_COLORS = ('#DDDDDD', '#CC79A7', '#E69F00', '#56B4E9', '#009E73')


@styled
def phase_diagram(points, threshold: float, *, at: str, name: str) -> Figure:
    """Accuracy at the last shot over number of training tasks and share of inputs, and the phase of every cell.

    Mean over seeds, with half of the 95 % interval below it where there is room. A cell counts as solved from the
    threshold on; its phase is the median of its seeds, and a dot marks cells whose seeds disagree. `not covered`:
    unseen tasks, query in a direction of no example, which ratio matching cannot answer. `ratio matching`: what
    matching ratios alone would give on unseen tasks and inputs.
    """
    counts = sorted({point.coordinates['task.num_tasks'] for point in points})
    alphas = sorted({point.coordinates['task.alpha'] for point in points}, reverse=True)
    panels = [(f'{part}/accuracy_last', label) for part, label in NAMES.items()]
    panels += [('ood_forced/accuracy_last_not_covered', 'unseen tasks, not covered'),
               ('ood_test/accuracy_last/ratio', 'ratio matching')]
    panels = [(quantity, label) for quantity, label in panels
              if any(np.isfinite(point.values.get(quantity, np.nan)).any() for point in points)]
    columns = 4 if len(panels) > 5 else 3
    figure, axes = new_figure(2, columns, width=TWO_COLUMNS, height=4.4)
    axes = axes.ravel()

    def members(count, alpha):
        return [p for p in points if (p.coordinates['task.num_tasks'], p.coordinates['task.alpha']) == (count, alpha)]

    def value(point, quantity):
        step = phases.best(point) if at == 'best' else -1
        return point.values[quantity][step] if quantity in point.values else np.nan

    room = len(counts) <= 4
    for axis, (quantity, label) in zip(axes, panels, strict=False):
        cells = [[interval(np.array([value(p, quantity) for p in members(count, alpha)])) for count in counts]
                 for alpha in alphas]
        image = axis.imshow([[mean for mean, _ in row] for row in cells], vmin=0, vmax=1, cmap='cividis', aspect='auto')
        for i, row in enumerate(cells):
            for j, (mean, half) in enumerate(row):
                if np.isfinite(mean):
                    spread = f'\n±{half:.2f}' if room and np.isfinite(half) else ''
                    text = (f'{mean:.2f}' + spread).replace('±0', '±').removeprefix('0')
                    axis.text(j, i, text, ha='center', va='center', fontsize=5.5, color='w' if mean < 0.55 else 'k')
        axis.set_title(label, fontsize=7)
    axis, shown = axes[len(panels)], len(panels) + 1
    numbers = np.full((len(alphas), len(counts)), np.nan)
    for i, alpha in enumerate(alphas):
        for j, count in enumerate(counts):
            found = [phases.phase({name: value(p, f'{name}/accuracy_last') for name in phases.SETS}, threshold)
                     for p in members(count, alpha)]
            found = [int(x) for x in found if np.isfinite(x)]
            if found:
                numbers[i, j] = sorted(found)[(len(found) - 1) // 2]
                if len(set(found)) > 1:
                    axis.plot(j, i, 'k.', markersize=4)
    if np.isnan(numbers).all():  # without unused inputs there are no phases
        shown -= 1
    axis.imshow(numbers, vmin=-0.5, vmax=4.5, cmap=ListedColormap(PHASE_COLORS), aspect='auto')
    axis.set_title(f'phase (solved: {threshold:g})', fontsize=7)
    for extra in axes[shown:]:
        extra.remove()
    for axis in axes[:shown]:
        for spine in axis.spines.values():
            spine.set_visible(False)
        axis.set_xticks(range(len(counts)), [f'{count:g}' for count in counts])
        axis.set_yticks(range(len(alphas)), [f'{alpha:g}' for alpha in alphas])
        axis.set_xlabel('training tasks')
        axis.tick_params(length=0)
    for axis in axes[:shown:columns]:
        axis.set_ylabel('share of inputs')
    figure.colorbar(image, ax=list(axes[:shown]), label='accuracy, last shot', shrink=0.6, aspect=30)
    handles = [Patch(color=color, label=label) for color, label in zip(PHASE_COLORS, phases.PHASES, strict=True)]
    if shown > len(panels):
        figure.legend(handles=handles, loc='outside lower center', ncols=5, fontsize=6.5)
    seeds = min(len(members(c, a)) for c in counts for a in alphas if members(c, a))
    when = 'at the step that is best on other unseen tasks' if at == 'best' else 'at the last step'
    figure.suptitle(f'{name}: {when}, {replicas_note(seeds)}', fontsize=8)
    return figure


@styled
def comparison(table: Mapping[str, Mapping], lines: Mapping[str, Mapping], name: str) -> Figure:
    """Accuracy at the last shot for every setting of a sweep: the mean over seeds, 95 % intervals, and each seed.

    table: setting -> {quantity: values (S,)}. lines: setting -> {quantity: what a reference predictor reaches on the
    same rows}.
    """
    quantities = list(dict.fromkeys(quantity for row in table.values() for quantity in row))
    figure, axes = new_figure(1, len(quantities), height=1.0 + 0.34 * len(table))
    places = np.arange(len(table))[::-1]
    for axis, quantity in zip(axes[0], quantities, strict=True):
        for place, (setting, row) in zip(places, table.items(), strict=True):
            values = np.asarray(row[quantity], float)
            mean, half = interval(values)
            axis.plot(values, np.full(len(values), place), '.', color=GREY, markersize=3, alpha=0.7)
            axis.errorbar(mean, place, xerr=None if np.isnan(half) else half, fmt='o', color=COLORS[0], markersize=4)
            if quantity in lines[setting]:
                axis.plot(lines[setting][quantity], place, '|', color='black', markersize=9)
        axis.set_xlim(-0.02, 1.02)
        axis.set_ylim(-0.6, len(places) - 0.4)
        axis.set_yticks(places, [''] * len(places))
        axis.set_title(QUANTITIES.get(quantity, quantity).replace(', ', ',\n'), fontsize=7)
        axis.set_xlabel('accuracy, last shot')
    axes[0, 0].set_yticks(places, [label.replace(', ', ',\n') for label in table])
    figure.suptitle(f'{name}: {replicas_note(min(len(v) for row in table.values() for v in row.values()))}; strokes: '
                    'ratio matching, kernel trick', fontsize=8)
    return figure


QUANTITIES = {
    'id_train/accuracy_last': 'training tasks',
    'ood_train/accuracy_last': 'unseen tasks',
    'ood_test/accuracy_last': 'unseen tasks and inputs',
    'ood_forced/accuracy_last_not_covered': 'unseen tasks, forced queries',
}


@styled
def difficulty(points) -> Figure:
    """Accuracy and loss at the end against the share of all tasks that was trained on, one colour a modulus p."""
    figure, axes = new_figure(1, 2, height=2.6)
    moduli = sorted({point.coordinates['task.p'] for point in points})
    for color, p in zip(COLORS, moduli, strict=False):
        own = [point for point in points if point.coordinates['task.p'] == p]
        counts = sorted({point.coordinates['task.num_tasks'] for point in own})
        for axis, quantity in zip(axes[0], ('accuracy_last', 'loss'), strict=True):
            for part, linestyle in (('id_train', '--'), ('ood_train', '-')):
                values = [[q.values[f'{part}/{quantity}'][-1] for q in own if q.coordinates['task.num_tasks'] == count]
                          for count in counts]
                mean, half = np.array([interval(np.array(x)) for x in values]).T
                share = np.array(counts) / p**2
                face = 'white' if part == 'id_train' else color
                axis.plot(share, mean, linestyle, color=color, marker='o', markersize=4, markerfacecolor=face,
                          label=f'p = {p}, {NAMES[part]}')
                if np.isfinite(half).any():
                    axis.fill_between(share, mean - half, mean + half, color=color, alpha=0.22, linewidth=0)
    axes[0, 0].set_ylabel('accuracy, last shot')
    axes[0, 0].set_ylim(0, 1.02)
    axes[0, 1].set_ylabel('loss (nats)')
    seeds = Counter((point.coordinates['task.p'], point.coordinates['task.num_tasks']) for point in points)
    finish(figure, axes, xlabel='training tasks / all tasks', note=replicas_note(min(seeds.values())), one_legend=True)
    return figure


@styled
def illustration(task, state, batch) -> Figure:
    """The data: the plane of tasks with its training tasks, the table of one task, and the rows of a batch.

    a: the p^2 tasks (a, b), training tasks coloured in fours where they were chosen as corners of rectangles. b: one
    training task, z at every input (x, y); what is dark is no training input. c: tokens of a batch, one row a sequence;
    rows of the same task lie together, and with shared inputs row r of every task has the same x and y.
    """
    p, count = task.p, int(state.num_tasks)
    figure = Figure(figsize=(TWO_COLUMNS, 2.8), layout='constrained')
    plane, table, rows = figure.subplots(1, 3, width_ratios=(1, 1, 1.5))
    tasks = np.asarray(state.tasks_T2)
    numbers = np.full((p, p), np.nan)
    for i, (a, b) in enumerate(tasks[:count]):
        numbers[a, b] = (i // 4) % 20
    plane.imshow(numbers.T, origin='lower', cmap='tab20', vmin=-0.5, vmax=19.5)
    plane.set(xlabel='a', ylabel='b', title=f'{count} of {p * p} tasks')
    a, b = tasks[0]
    x, y = np.meshgrid(np.arange(p), np.arange(p), indexing='ij')
    z = (a * x + b * y) % p
    hidden = np.ones((p, p), bool)
    inputs = np.asarray(state.inputs_T2)[: int(state.num_inputs)]
    hidden[inputs[:, 0], inputs[:, 1]] = False
    table.imshow(np.where(hidden, np.nan, z).T, origin='lower', cmap='viridis', vmin=0, vmax=p - 1)
    table.set_facecolor('black')
    for i in range(p):
        for j in range(p):
            if p <= 11 and not hidden[i, j]:
                table.text(i, j, z[i, j], ha='center', va='center', fontsize=6, color='w' if z[i, j] < p / 2 else 'k')
    table.set(xlabel='x', ylabel='y', title=f'z of the task ({a}, {b})')
    tokens = np.concatenate([batch.tokens_BL, batch.targets_BL[:, -1:]], 1)
    rows.imshow(tokens, cmap='viridis', aspect='auto', interpolation='nearest')
    for edge in range(3, tokens.shape[1], 3):
        rows.axvline(edge - 0.5, color='white', linewidth=1)
    rows.set(xlabel='token (x y z of each example)', ylabel='row of the batch', title=f'a batch, {task.batching}')
    for axis in (plane, table, rows):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        for spine in axis.spines.values():
            spine.set_visible(False)
    figure.suptitle(f'p = {p}, tasks: {task.geometry}; one seed', fontsize=8)
    return figure
