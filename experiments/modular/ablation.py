"""Which heads and feed-forwards does a model need? One part taken out, and more and more heads.

    python experiments/modular/ablation.py runs/modular_demo-ID
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import ablation
from lingrok.cli import Expected
from lingrok.figures import heads

ROWS = flags.DEFINE_integer('rows', 256, 'rows of each set', lower_bound=1)

REBUTTAL = "authors' rebuttal, text, p = 29, {}; the set of rows is not named"
EXPECTED = [
    Expected('accuracy without the head of the token before (which makes the circle of circles)', 'chance, .03',
             REBUTTAL.format('d = 2 and 4'), 'ood_train/mean/previous_head'),
    Expected('accuracy without the head that is missed most', 'chance, .03', REBUTTAL.format('d = 2 and 4'),
             'ood_train/mean/worst_head'),
    Expected('heads that can go one after the other for less than 5 points', 'none', REBUTTAL.format(
             'd = 2: every head costs something'), 'ablation/removable'),
    Expected('heads that can go one after the other for less than 5 points', '9 of 16', REBUTTAL.format(
             'd = 4: all but three and those of the last block'), 'ablation/removable'),
]
CURVES = ('ood_train/intact', 'ood_train/mean/previous_head', 'ood_train/mean/heads', 'ood_train/mean/mlps')


def measure(run, **at):
    """The sets of training inputs, those of test inputs where there are some, and queries that need two examples."""
    splits = ('id_train', 'ood_train', *(('id_test', 'ood_test') if run.task.alpha < 1 else ()), 'ood_forced')
    return run.measure(functools.partial(ablation.ablate, splits=splits, num_rows=ROWS.value), **at)


if __name__ == '__main__':
    cli.experiment(measure, heads.ablation, task='modular', expected=EXPECTED, frame=heads.without_heads,
                   curves=CURVES)
