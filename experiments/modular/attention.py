"""Where does every head look? Maps of one row, and statistics over many (Fig 6a and 11).

    python experiments/modular/attention.py runs/modular_demo-ID --task=6,6 --tokens=48
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import heads
from lingrok.analysis.scan import parse_vector
from lingrok.cli import Expected
from lingrok.config import require
from lingrok.figures import heads as figures

TASK = flags.DEFINE_string('task', '', 'task vector a,b of the row that is mapped; by default the first unseen one of '
                           'each replica')
TOKENS = flags.DEFINE_integer('tokens', 24, 'length of the maps')
ROWS = flags.DEFINE_integer('rows', 256, 'rows behind the statistics', lower_bound=1)

MAPS = 'measured from the maps published for the released {} model, p = 29, task (6, 6), queries 12 to 47'
D2, D4 = MAPS.format('d = 2'), MAPS.format('d = 4')
EXPECTED = [
    Expected('first block, best head, mass on the token before', '.87', D2, 'attention/best[0,1]'),
    Expected('first block, best head, mass two tokens back', '.95', D2, 'attention/best[0,2]'),
    Expected('second block, best head, mass on the first token', '.49', D2, 'attention/best[1,4]'),
    Expected('head of the token before, y queries: mass on y over mass on x', '.09', D2,
             'attention/self_over_previous'),
    Expected('second block, best head, mass on the token before', '.79', D4, 'attention/best[1,1]'),
    Expected('third block, best head, from x to the z before', '.87', D4, 'attention/best_by_slot[2,0,1]'),
    Expected('third block, best head, from x to the y before', '.89', D4, 'attention/best_by_slot[2,0,2]'),
    Expected('third block, best head, from z to itself', '.71', D4, 'attention/best_by_slot[2,2,0]'),
    Expected('third block, best head, from z to its own y', '.82', D4, 'attention/best_by_slot[2,2,1]'),
]
CURVES = ('attention/previous_mass', 'attention/self_over_previous')


def measure(run, **at):
    """Every replica on its own unseen tasks."""
    require(TOKENS.value > 0, f'--tokens={TOKENS.value}; allowed: 1 to {run.task.seq_len}')
    fn = functools.partial(heads.attention, task=parse_vector(TASK.value, run.task.p),
                           tokens=min(TOKENS.value, run.task.seq_len), num_rows=ROWS.value)
    return run.measure(fn, **at)


if __name__ == '__main__':
    cli.experiment(measure, figures.attention, task='modular', expected=EXPECTED, frame=figures.previous_map,
                   curves=CURVES)
