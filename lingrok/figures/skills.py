"""Figures of what a model of the modular task can do: grids of queries, label noise, mixtures, pooling of examples."""

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lingrok.config import Config
from lingrok.figures.modular import NAMES
from lingrok.figures.style import (
    BLUE,
    COLORS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    TWO_COLUMNS,
    band,
    finish,
    first_replica,
    floor,
    new_figure,
    picture,
    replicas_note,
    styled,
)
from lingrok.metrics import interval

TASKS = {'ood': 'unseen tasks', 'id': 'training tasks'}
LIKE = {'regression': ('regression: Bayes, all tasks', BLUE), 'pretraining': ('memorising: Bayes, training tasks', RED),
        'ratio': ('ratio matching', GREEN), 'guess': ('uniform guess', GREY)}
UNEXPLAINED = {'kl_by_shot': ('left by the mixture', PURPLE), 'kl_by_shot/guess': ('left by a uniform guess', ORANGE)}
SIGNS = ListedColormap([BLUE, 'white', RED])
BINARY = ListedColormap(['white', GREY])
ROWS = 4  # most settings shown one below the other


def _shots(values: Mapping) -> list[int]:
    return sorted(int(name.split('/')[2].partition('_')[0]) for name in values if name.startswith('grid/model/'))


def _note(cfg: Config, pictures: str = '') -> str:
    return f'{cfg.name}: {pictures}{replicas_note(min(map(len, cfg.groups().values())))}'


def _legend(figure: Figure, colors: Mapping[str, str], styles: Mapping[str, str]) -> None:
    """One legend for all panels, below them: what the colours and what the line styles mean."""
    handles = [Line2D([], [], color=color, label=label or 'model') for label, color in colors.items()]
    named = {handle.get_label() for handle in handles}
    handles += [Line2D([], [], color='black', linestyle=style, linewidth=1, label=label)
                for label, style in styles.items() if label not in named]
    rows = 1 + (sum(len(handle.get_label()) + 6 for handle in handles) > 110)
    figure.legend(handles=handles, loc='outside lower center', ncols=-(-len(handles) // rows))


def _grid(axis, image_pp, cmap, title: str) -> None:
    """A (p, p) picture indexed [x, y]: x to the right, y upwards."""
    picture(axis, np.asarray(image_pp, float).T[::-1], title=title, cmap=cmap, vmin=2 - cmap.N, vmax=1)
    axis.set_box_aspect(1)
    axis.spines[:].set(visible=True, linewidth=0.4)


def grid_frame(axis, values: Mapping, cfg: Config) -> None:
    """Model minus ratio matching after the last context but one."""
    suffix = f'{_shots(values)[-2:][0]}_shots'
    model, ratio = (values[f'grid/{name}/{suffix}'].astype(int) for name in ('model', 'ratio'))
    _grid(axis, model - ratio, SIGNS, '')


@styled
def kshot_grid(series: Mapping, cfg: Config) -> Figure:
    """Which queries are right after k examples of a fixed context, and which of them ratio matching explains.

    Above: all p^2 queries of one task, x to the right and y upwards. First row: right answers of the model; second row:
    multiples of an example of the context, which ratio matching answers; third row: the difference, right beyond ratio
    matching in red, wrong although covered in blue. Numbers count queries. Below: accuracy over unseen and over
    training tasks on covered queries (dashed) and on the others (solid), where dotted is the guess that z = 0 (the
    kernel trick), the best that needs no combining of examples.
    """
    groups, shots = cfg.groups(), _shots(series)
    shown = list(groups.items())[:2]
    side = min(1.3, 5.8 / (len(shots) * len(shown)))
    heights = (3 * side + 1.5, 2.6)
    figure = Figure(figsize=(TWO_COLUMNS, sum(heights)), layout='constrained')
    top, bottom = figure.subfigures(2, 1, height_ratios=heights)
    for part, (setting, replicas) in zip(top.subfigures(1, len(shown), squeeze=False)[0], shown, strict=True):
        now = {name: values[-1, replicas[0]] for name, (_, values) in series.items()}
        axes = part.subplots(3, len(shots), squeeze=False)
        for column, k in zip(axes.T, shots, strict=True):
            model, ratio = (now[f'grid/{name}/{k}_shots'].astype(int) for name in ('model', 'ratio'))
            count = {name: int(now[f'grid/{name}_of_{model.size}/{k}_shots'])
                     for name in ('model', 'ratio', 'gained', 'lost')}
            _grid(column[0], model, BINARY, f'{k} shot{"s" * (k > 1)}\n{count["model"]} of {model.size}')
            _grid(column[1], ratio, BINARY, f'{count["ratio"]}')
            _grid(column[2], model - ratio, SIGNS, f'+{count["gained"]}  −{count["lost"]}')
            column[2].set_xlabel('x')
        for axis, label in zip(axes[:, 0], ('model', 'ratio matching', 'difference'), strict=True):
            axis.set_ylabel(f'{label}\ny')
        kind = 'a training task' if now['grid/is_training_task'] else 'an unseen task'
        task = ', '.join(f'{int(c)}' for c in now['grid/task'])
        part.suptitle(f'{setting + ": " if setting else ""}({task}), {kind}', fontsize=8)
    panels = bottom.subplots(1, 2, squeeze=False)
    for axis, (which, label) in zip(panels[0], TASKS.items(), strict=True):
        along_KS = {name: np.stack([series[f'{which}/{name}/{k}_shots'].values[-1] for k in shots])
                    for name in ('accuracy_covered', 'accuracy_uncovered', 'accuracy_uncovered/kernel')}
        for color, replicas in zip(COLORS, groups.values(), strict=False):
            band(axis, shots, along_KS['accuracy_uncovered'][:, replicas], color=color, label='')
            band(axis, shots, along_KS['accuracy_covered'][:, replicas], color=color, label='', linestyle='--')
        axis.plot(shots, interval(along_KS['accuracy_uncovered/kernel'])[0], color=GREY, linestyle=':')
        floor(axis, 1 / cfg.task.p, 'chance', below=True)
        axis.set_xscale('log', base=2)
        axis.set_xticks(shots, [str(k) for k in shots])
        axis.minorticks_off()
        axis.set_ylim(0, 1.03)
        axis.set_ylabel(f'accuracy, {label}')
    pictures = 'replica 0' if len(groups) == 1 else 'the first replica of ' + (
        'each setting' if len(groups) == 2 else 'the first two settings')
    finish(bottom, panels, xlabel='shots', note='')
    _legend(bottom, dict(zip(groups, COLORS, strict=False)), {'not covered': '-', 'covered': '--', 'kernel trick': ':'})
    figure.suptitle(_note(cfg, f'grids of {pictures}; curves: '), fontsize=8)
    return figure


def _map(axis, image, *, title: str, vmin: float, vmax: float, ylabel: str, cmap: str = 'viridis'):
    """An (S, S) table [shot, other]: the shot to the right, the other number upwards; NaN is white."""
    shown = axis.imshow(image.T, origin='lower', cmap=cmap, vmin=vmin, vmax=vmax, interpolation='nearest')
    axis.set_title(title.replace(', ', ',\n'), fontsize=7, pad=3)
    axis.set_xlabel('shots')
    axis.set_ylabel(ylabel)
    return shown


def noise_frame(axis, values: Mapping, cfg: Config) -> None:
    """Accuracy on unseen tasks by shot and number of wrong labels."""
    _map(axis, values['ood_train/noise_accuracy'], title='', vmin=0, vmax=1, ylabel='wrong labels')


@styled
def label_noise(series: Mapping, cfg: Config) -> Figure:
    """What wrong labels in the context do to the answer.

    First row: accuracy and loss against the number of examples and how many of them, at random places, have a wrong
    label. Second row: accuracy when one given example is wrong. Third row: at the longest context, accuracy against the
    number of wrong labels, unseen (solid) and training tasks (dashed), with (dotted) the tasks that misfit fewest
    examples of unseen tasks as the reference; and against the place of the one wrong example, where a dip shows an
    example that the answer rests on.
    """
    part = 'test' if 'ood_test/noise_accuracy' in series else 'train'
    splits = [split for split in NAMES if f'{split}/one_wrong_accuracy' in series]
    now = {name: values[-1] for name, (_, values) in series.items()}
    figure = Figure(figsize=(TWO_COLUMNS, 7.2), layout='constrained')
    top, middle, bottom = figure.subfigures(3, 1, height_ratios=(2.2, 2.4, 2.6))
    losses = [f'{which}_{part}/noise_loss' for which in ('id', 'ood')]
    high = max(np.nanmax(now[name][0]) for name in losses)
    axes = top.subplots(1, 4)
    for pair, quantity, vmax, cmap, label in ((axes[:2], 'accuracy', 1, 'viridis', 'accuracy'),
                                              (axes[2:], 'loss', high, 'magma_r', 'loss (nats)')):
        for axis, which in zip(pair, ('id', 'ood'), strict=True):
            shown = _map(axis, now[f'{which}_{part}/noise_{quantity}'][0], title=NAMES[f'{which}_{part}'],
                         vmin=0, vmax=vmax, ylabel='wrong labels' if axis is axes[0] else '', cmap=cmap)
        top.colorbar(shown, ax=pair, shrink=0.7, label=label)
    axes = middle.subplots(1, len(splits), squeeze=False)[0]
    for axis, split in zip(axes, splits, strict=True):
        shown = _map(axis, now[f'{split}/one_wrong_accuracy'][0], title=NAMES[split], vmin=0, vmax=1,
                     ylabel='wrong example' if axis is axes[0] else '')
    middle.colorbar(shown, ax=axes, shrink=0.95, label='accuracy')
    panels = bottom.subplots(1, 2, squeeze=False)
    number, places = panels[0]
    for color, replicas in zip(COLORS, cfg.groups().values(), strict=False):
        for which, linestyle in (('ood', '-'), ('id', '--')):
            for axis, quantity in ((number, 'noise_accuracy'), (places, 'one_wrong_accuracy')):
                values_SJ = now[f'{which}_{part}/{quantity}'][replicas, -1]
                band(axis, np.arange(values_SJ.shape[1]), values_SJ.T, color=color, label='', linestyle=linestyle)
    best_J = np.nanmean(now[f'ood_{part}/noise_accuracy/plurality'][:, -1], 0)
    number.plot(np.arange(best_J.size), best_J, color=GREY, linestyle=':')
    for axis in (number, places):
        axis.set_ylim(0, 1.03)
        axis.set_ylabel(f'accuracy, {cfg.task.num_examples - 1} shots' + (', unseen inputs' if part == 'test' else ''))
        axis.xaxis.get_major_locator().set_params(integer=True)
        floor(axis, 1 / cfg.task.p, 'chance', below=True)
    finish(bottom, panels, xlabel='', note='')
    number.set_xlabel('wrong labels')
    places.set_xlabel('wrong example')
    _legend(bottom, dict(zip(cfg.groups(), COLORS, strict=False)),
            {'unseen': '-', 'training': '--', 'best-fitting of all tasks': ':'})
    figure.suptitle(_note(cfg, f'maps of {first_replica(cfg)}; curves: '), fontsize=8)
    return figure


def mixture_frame(axis, values: Mapping, cfg: Config) -> None:
    """Weights by shot on unseen tasks; those that matter are named."""
    for name, (_, color) in LIKE.items():
        weight_K = values[f'ood_train/weight_by_shot/{name}']
        axis.plot(weight_K, color=color, linestyle=_dashed(name))
        if weight_K.mean() > 0.3:
            axis.text(len(weight_K) / 2, weight_K.mean() - 0.08, name, color=color, fontsize=6, ha='center', va='top')
    axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel('shots')


@styled
def bayes_mixture(series: Mapping, cfg: Config) -> Figure:
    """The mixture of reference predictors nearest to the model, by shot; one row a setting.

    Left and middle: weights on training and unseen tasks; they sum to 1. Where predictors agree (0 shots; ratio
    matching and regression at 1 shot) they share their weight. Right: what the mixture leaves unexplained, KL(model ||
    mixture), and what there was to explain, KL(model || uniform), on training (dashed) and unseen tasks (solid).
    """
    groups = list(cfg.groups().items())[:ROWS]
    figure, axes = new_figure(len(groups), 3, height=0.6 + 2.1 * len(groups))
    for row, (setting, replicas) in zip(axes, groups, strict=True):
        for axis, split in zip(row, ('id_train', 'ood_train'), strict=False):
            for name, (_, color) in LIKE.items():
                weight_KS = series[f'{split}/weight_by_shot/{name}'].values[-1, replicas].T
                band(axis, np.arange(len(weight_KS)), weight_KS, color=color, label='', linestyle=_dashed(name))
            axis.set_ylim(-0.03, 1.03)
            axis.set_ylabel(f'weight, {NAMES[split]}')
        for split, linestyle in (('id_train', '--'), ('ood_train', '-')):
            for name, (_, color) in UNEXPLAINED.items():
                kl_KS = series[f'{split}/{name}'].values[-1, replicas].T
                band(row[2], np.arange(len(kl_KS)), kl_KS, color=color, label='', linestyle=linestyle)
        _fit_to_means(row[2], low=0)
        row[2].set_ylabel('KL from the model (nats)')
        row[1].set_title(setting)
    finish(figure, axes, xlabel='shots', note=_note(cfg))
    _legend(figure, dict([*LIKE.values(), *UNEXPLAINED.values()]), {'right: unseen tasks': '-', 'training tasks': '--'})
    return figure


def _fit_to_means(axis, low: float | None = None) -> None:
    """Limits of y from the curves and not from the bands: those of two seeds are beyond any scale."""
    curves = [line.get_ydata() for line in axis.lines if line.get_transform() == axis.transData]
    values = np.concatenate([[np.nan], *curves])
    if np.isnan(values).all():
        return
    bottom, top = np.nanmin(values), np.nanmax(values)
    margin = 0.4 * (top - bottom) + 1e-3
    axis.set_ylim(bottom - margin if low is None else low, top + margin)


def _dashed(name: str) -> str:
    # On training tasks it often coincides with regression, which then shows between the dashes.
    return (0, (3, 2)) if name == 'pretraining' else '-'


@styled
def pooling(series: Mapping, cfg: Config) -> Figure:
    """Does the model combine two examples or pool many? Queries in a direction that no example of the context has.

    a: accuracy against the number of examples. b: against the number of distinct examples, repeated in turn up to the
    full context. One who can combine any two examples is at his full accuracy from 2 on in both; one who needs more
    rises with the number; one whom copies help does better in b than in a. c: what one wrong label at a random place
    costs. If answers rest on two examples, whichever they are, it is the share 2/k of what is solved (dashed); less, if
    they rest on a vote of many; more, if on all. A curve that rises in a and is as the dashed one in c: two examples
    are combined, and more examples offer more pairs that the model can use. Dotted: chance, and the guess that z = 0
    (the kernel trick) on the same rows.
    """
    figure, axes = new_figure(1, 3, height=2.5)
    number = np.arange(cfg.task.num_examples)
    last = {name: values[-1].T for name, (_, values) in series.items()}
    for axis, quantity, label in zip(axes[0], ('accuracy_by_examples', 'accuracy_by_distinct', 'drop_by_examples'),
                                     ('accuracy', 'accuracy, full context', 'lost to a wrong label'), strict=True):
        for color, replicas in zip(COLORS, cfg.groups().values(), strict=False):
            band(axis, number, last[f'ood_forced/{quantity}'][:, replicas], color=color, label='')
            if axis is axes[0, 2]:
                two_KS = last[f'ood_forced/{quantity}/two_examples'][:, replicas]
                axis.plot(number, interval(two_KS)[0], color=color, linestyle='--')
        if axis is not axes[0, 2]:
            axis.plot(number, interval(last[f'ood_forced/{quantity}/kernel'])[0], color=GREY, linestyle=':')
            floor(axis, 1 / cfg.task.p, 'chance', below=True)
            axis.set_ylim(0, 1.03)
        axis.set_ylabel(label)
    _fit_to_means(axes[0, 2])
    finish(figure, axes, xlabel='examples', note=_note(cfg, 'unseen tasks, forced queries; '))
    axes[0, 1].set_xlabel('distinct examples')
    _legend(figure, dict(zip(cfg.groups(), COLORS, strict=False)),
            {'model': '-', 'two examples combined': '--', 'kernel trick': ':'})
    return figure
