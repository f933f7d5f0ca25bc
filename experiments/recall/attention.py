"""Where does the last layer look? The map of one noisy sequence, and statistics at the triggers of many.

    python experiments/recall/attention.py runs/recall_demo-ID
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import attention
from lingrok.cli import Expected
from lingrok.figures import editing as figures

ROWS = flags.DEFINE_integer('rows', 512, 'sequences behind the statistics', lower_bound=1)
HEAD = flags.DEFINE_integer('head', 0, 'head that is mapped', lower_bound=0)

EXPECTED = [
    Expected('mass of repeated triggers on their target', 'high', 'expected', 'mass/target'),
    Expected('mass on the noise token behind the same trigger', 'about 0, although it stands there half of the time',
             'expected', 'mass/noise'),
    Expected('target over target and noise', 'above that of a pattern that does not tell them apart', 'expected',
             'selective'),
    Expected('the same of a pattern that looks at whatever follows the trigger', 'about .5', 'derived: one minus the '
             'noise probability, where both are in sight', 'selective/blind'),
]
CURVES = ('mass/target', 'mass/noise', 'selective', 'previous')


def measure(run, **at):
    return run.measure(functools.partial(attention.attention, num_rows=ROWS.value, head=HEAD.value), **at)


if __name__ == '__main__':
    cli.experiment(measure, figures.attention, task='recall', expected=EXPECTED, frame=figures.pattern_map,
                   curves=CURVES)
