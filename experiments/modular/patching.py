"""Are coefficients and labels combined as claimed? Residuals of one prompt put into another, layer by layer.

Beyond the paper, which claims z = c1 z1 + c2 z2 with c1 (x1, y1) + c2 (x2, y2) = (x, y) from correlational evidence. If
the residual stream at the query holds the coefficients, that of a source prompt in a base prompt gives the answer with
the source's coefficients and the base's labels; once labels are read, it gives the source's answer.

    python experiments/modular/patching.py runs/modular_demo-ID
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import patching
from lingrok.figures import heads

ROWS = flags.DEFINE_integer('rows', 512, 'pairs of prompts of each kind', lower_bound=1)


def measure(run, **at):
    """On unseen tasks; on unseen inputs too where there are some."""
    split = 'ood_test' if run.task.alpha < 1 else 'ood_train'
    return run.measure(functools.partial(patching.interchange, split=split, num_rows=ROWS.value), **at)


if __name__ == '__main__':
    cli.experiment(measure, heads.patching, task='modular', frame=heads.mixed_map,
                   curves=('both/kept', 'both/coefficients_most', 'coordinates/coefficients_most'))
