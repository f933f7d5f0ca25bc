"""The figure of experiments/benchmark.py."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from lingrok.figures.style import BLUE, GREY, new_figure, styled


@styled
def scaling(found: Mapping[str, Mapping], machine: str) -> Figure:
    """Seconds of a training step against batch, replicas and length, at the size of the recall demo; grey: linear.

    found: axis -> {'values', 'step_s'}. The line goes through the last point: what lies above it costs more than its
    share, as the fixed cost of a step does on its left end.
    """
    figure, axes = new_figure(1, len(found), height=2.4)
    for axis, (name, row) in zip(axes[0], found.items(), strict=True):
        values, times = (np.asarray(row[key], float) for key in ('values', 'step_s'))
        axis.loglog(values, times[-1] * values / values[-1], ':', color=GREY, label='linear')
        axis.loglog(values, times, 'o-', color=BLUE, markersize=4, label='measured')
        slope = np.polyfit(np.log(values[-3:]), np.log(times[-3:]), 1)[0]
        axis.set_title(f'slope of the last three: {slope:.2f}', fontsize=7)
        axis.set_xlabel({'batch': 'batch (sequences)', 'length': 'length (tokens)'}.get(name, name))
        axis.set_xticks(values, [f'{value:g}' for value in values])
        axis.minorticks_off()
    axes[0, 0].set_ylabel('step (s)')
    axes[0, 0].legend(loc='upper left')
    figure.suptitle(f'{machine}; shortest of 3 timings', fontsize=8)
    return figure
