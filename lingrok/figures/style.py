"""One style for all figures: sizes for one and two columns of a paper, colour-blind safe colours, text as text."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from lingrok.metrics import interval

ONE_COLUMN, TWO_COLUMNS = 3.3, 6.9  # inches

# Okabe and Ito's palette, which stays distinct under the common colour deficiencies.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    '#0072B2', '#E69F00', '#009E73', '#D55E00', '#CC79A7', '#56B4E9', '#555555',
)
COLORS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, GREY)
FRAMES = 8  # most frames of a film strip

RC = {
    'font.size': 8,
    'axes.titlesize': 8,
    'axes.labelsize': 8,
    'legend.fontsize': 7,
    'xtick.labelsize': 7,
    'ytick.labelsize': 7,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.linewidth': 0.6,
    'lines.linewidth': 1.3,
    'legend.frameon': False,
    'legend.handlelength': 1.6,
    'legend.columnspacing': 1.2,
    'legend.borderaxespad': 0.2,
    'pdf.fonttype': 42,
    'svg.fonttype': 'none',
}


def styled(plot):
    """Decorator of every figure function: draws it in the style of the project, whatever the user's own settings.

    The figure carries its caption as its label.
    """

    @functools.wraps(plot)
    def draw(*args, **kwargs):
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **RC}):
            figure = plot(*args, **kwargs)
        figure.set_label(caption(plot))
        return figure

    return draw


def caption(plot) -> str:
    """The docstring of a figure function in one line, without the sentences that explain its arguments.

    >>> def plot(series):
    ...     'Loss along training. series: the metrics of a run. Lines are means.'
    >>> caption(plot)
    'Loss along training. Lines are means.'
    """
    text = ' '.join((plot.__doc__ or '').split())
    arguments = '|'.join(inspect.signature(plot).parameters)
    return re.sub(rf'(^|(?<=\. ))({arguments}): [^.]*\.( |$)', '', text).strip() if arguments else text


def new_figure(rows: int, columns: int, *, width: float = TWO_COLUMNS, height: float) -> tuple[Figure, np.ndarray]:
    """A figure outside pyplot's global state, and its axes as an array (rows, columns)."""
    figure = Figure(figsize=(width, height), layout='constrained')
    return figure, figure.subplots(rows, columns, squeeze=False)


def band(axes, steps, values_TS, *, color: str, label: str, linestyle: str = '-') -> None:
    """Mean over replicas with its 95 % interval as a band; of two replicas, whose interval says little, both curves."""
    mean, half = interval(values_TS)
    axes.plot(steps, mean, color=color, label=label, linestyle=linestyle)
    if np.shape(values_TS)[-1] == 2:
        axes.plot(steps, values_TS, color=color, linestyle=linestyle, linewidth=0.5)
    elif np.isfinite(half).any():
        axes.fill_between(steps, mean - half, mean + half, color=color, alpha=0.22, linewidth=0)


def floor(axes, value: float, label: str, *, below: bool = False) -> None:
    """A horizontal reference line with its name at the right end, above or below it."""
    axes.axhline(value, color=GREY, linewidth=0.9, linestyle=':')
    axes.annotate(label, (1, value), xycoords=('axes fraction', 'data'), xytext=(-2, -2 if below else 2),
                  textcoords='offset points', ha='right', va='top' if below else 'bottom', fontsize=6.5, color=GREY)


def picture(axes, image, *, title: str = '', cmap: str = 'viridis', vmin: float | None = None,
            vmax: float | None = None):
    """A matrix as an image, first axis downwards, without ticks; returns the image for a colour bar."""
    shown = axes.imshow(image, cmap=cmap, vmin=vmin, vmax=vmax, interpolation='nearest', aspect='auto')
    axes.set_title(title, fontsize=7, pad=2)
    axes.set_xticks([])
    axes.set_yticks([])
    return shown


@styled
def dynamics(series: Mapping, cfg, *, frame: Callable | None, curves: Sequence[str]) -> Figure:
    """A measurement along training: a film strip of replica 0, and curves of quantities, one colour a setting."""
    steps = next(iter(series.values())).steps
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(FRAMES, len(steps))).round().astype(int))
    curves = [name for name in curves if name in series]
    columns = max(len(chosen) if frame else 1, 1)
    figure = Figure(figsize=(TWO_COLUMNS, (1.3 if frame else 0) + (2.2 if curves else 0)), layout='constrained')
    top, bottom = (figure.subfigures(2, 1, height_ratios=(1.3, 2.2)) if frame and curves else (figure, figure))
    if frame:
        for axis, t in zip(top.subplots(1, columns, squeeze=False)[0], chosen, strict=True):
            frame(axis, {name: x.values[t, 0] for name, x in series.items()}, cfg)
            axis.set_title(f'step {steps[t]}', fontsize=7, pad=2)
    if curves:
        panels = bottom.subplots(1, len(curves), squeeze=False)[0]
        for axis, name in zip(panels, curves, strict=True):
            for color, (setting, replicas) in zip(COLORS, cfg.groups().items(), strict=False):
                band(axis, steps, series[name].values[:, replicas], color=color, label=setting or 'model')
            log_steps(axis, steps)
            axis.set_xlabel('step')
            axis.set_ylabel(name.replace('_', ' '))
        panels[0].legend(loc='best')
    smallest = min(map(len, cfg.groups().values()))
    figure.suptitle(f'{cfg.name}: ' + (f'frames of {first_replica(cfg)}; ' if frame else '')
                    + (f'curves: {replicas_note(smallest)}' if curves else ''), fontsize=8)
    return figure


def log_steps(axis, steps) -> None:
    """A logarithmic axis of steps with a place for step 0, and labels that leave each other room."""
    first, last = max(1, steps[1] if len(steps) > 1 else 1), max(1, steps[-1])
    axis.set_xscale('symlog', linthresh=first)
    decades = 10.0 ** np.arange(np.ceil(np.log10(first)), np.floor(np.log10(last)) + 1)
    axis.set_xticks([0, *decades[:: 1 + len(decades) // 5]])
    axis.minorticks_off()


def letters(axes) -> None:
    """a, b, c, ... above the panels."""
    for letter, axis in zip('abcdefghijklmnop', np.ravel(axes), strict=False):
        axis.annotate(letter, (0, 1), xycoords='axes fraction', xytext=(-28, 6), textcoords='offset points',
                      fontweight='bold', fontsize=9)


def finish(figure: Figure, axes, *, xlabel: str, note: str, one_legend: bool = False) -> None:
    """Letters, a legend above each panel or one above all, the label of the x axes, and what the error bars are."""
    entries, labels_of = {}, [axis.get_legend_handles_labels()[1] for axis in np.ravel(axes)]
    # Long legends of panels would run into each other.
    one_legend = one_legend or any(len(labels) > 6 or max(map(len, labels), default=0) > 26 for labels in labels_of)
    letters(axes)
    for axis in np.ravel(axes):
        axis.set_xlabel(xlabel)
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
        if handles and not one_legend:
            axis.legend(handles, labels, loc='lower left', bbox_to_anchor=(0, 1.0), ncols=2 + (len(labels) > 4))
    if one_legend:
        columns = max(1, min(5, 120 // (6 + max(map(len, entries), default=0))))
        figure.legend(entries.values(), entries.keys(), loc='outside lower center', ncols=columns)
    figure.suptitle(note, fontsize=8)


def first_replica(cfg) -> str:
    """'replica 0' and its setting, for pictures of one model."""
    setting = next(iter(cfg.groups()))
    return f'replica 0 ({setting})' if setting else 'replica 0'


def replicas_note(count: int) -> str:
    few = {1: 'one seed, no error bars', 2: 'mean of 2 seeds, both drawn thin'}
    return few.get(count, f'mean of {count} seeds, 95 % intervals')
