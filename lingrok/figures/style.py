"""One style for all figures: sizes for one and two columns of a paper, colour-blind safe colours, text as text."""

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from lingrok.metrics import interval

ONE_COLUMN, TWO_COLUMNS = 3.3, 6.9  # inches

# Okabe and Ito's palette, which stays distinct under the common colour deficiencies.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    '#0072B2', '#E69F00', '#009E73', '#D55E00', '#CC79A7', '#56B4E9', '#555555',
)

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
    'pdf.fonttype': 42,
    'svg.fonttype': 'none',
}


def new_figure(rows: int, columns: int, *, width: float = TWO_COLUMNS, height: float) -> tuple[Figure, np.ndarray]:
    """A figure outside pyplot's global state, and its axes as an array (rows, columns)."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height), layout='constrained')
        axes = figure.subplots(rows, columns, squeeze=False)
    return figure, axes


def band(axes, steps, values_TS, *, color: str, label: str, linestyle: str = '-') -> None:
    """Mean over replicas with its 95 % interval as a band."""
    mean, half = interval(values_TS)
    axes.plot(steps, mean, color=color, label=label, linestyle=linestyle)
    if np.isfinite(half).any():
        axes.fill_between(steps, mean - half, mean + half, color=color, alpha=0.22, linewidth=0)


def floor(axes, value: float, label: str, *, linestyle: str = ':') -> None:
    """A horizontal reference line, written on at its right end."""
    axes.axhline(value, color=GREY, linewidth=0.9, linestyle=linestyle)
    axes.annotate(label, (1, value), xycoords=('axes fraction', 'data'), xytext=(-2, 2), textcoords='offset points',
                  ha='right', va='bottom', fontsize=6.5, color=GREY)
