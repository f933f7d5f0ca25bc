"""Does a head put inputs on a circle of circles? Principal components of head, attention or MLP outputs (Fig 1d, 6b).

    python experiments/modular/pca.py runs/modular_demo-ID
    python experiments/modular/pca.py runs/modular_demo-ID --steps=all         the same along training
    python experiments/modular/pca.py runs/modular_demo-ID --part=mlp_out      or attn_out: whole sublayers
    python experiments/modular/pca.py runs/modular_demo-ID --nozero            directions of inputs without a zero

One example of a context runs over all inputs (x, y), and a previous-token head reads x at the token of y. If its value
and output matrices put residues on a circle by their logarithm, x makes a large circle and the head's small attention
to y itself small ones on it.
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import pca
from lingrok.analysis.scan import parse_vector
from lingrok.cli import Expected
from lingrok.figures import features

PART = flags.DEFINE_enum('part', 'heads', pca.PARTS, 'what is taken apart')
TOKENS = flags.DEFINE_enum('tokens', 'xy', pca.TOKENS, 'the two tokens whose vectors are joined')
SLOT = flags.DEFINE_integer('slot', 2, 'example of the row that runs over all inputs, from 0')
TASK = flags.DEFINE_string('task', '', 'task vector a,b; by default an unseen one of each replica')
ROOT = flags.DEFINE_integer('root', None, 'primitive root of the logarithm; by default 27 for p = 29, else the least')
UNCENTRED = flags.DEFINE_bool('uncentred', False, 'add the mean to the directions and project uncentred data, as the '
                              'official code does')
ZERO = flags.DEFINE_bool('zero', True, 'inputs with a zero count for the directions')

FIG_1D = 'Fig 1d, p = 29, 2 blocks: measured on a picture of the official repository'
DERIVED = 'derived for p = 29 from the attention of the released model with 2 blocks: .08 to .87'
EXPECTED = [Expected('radius of the small circles to that of the large one', '.11', FIG_1D, 'best/radius_ratio'),
            Expected('the same, predicted from attention to y and x', '.09', DERIVED, 'best/predicted_ratio'),
            Expected('distance of x = 0 from the centre', 'near 0', FIG_1D, 'best/centre'),
            Expected('ring score of the best head', '.99 with these radii', 'derived: 1 / (1 + .11^2)', 'best/ring'),
            Expected('the same, x in random order', 'below the ring score', 'baseline', 'best/shuffled'),
            Expected('share of variance of components 1 and 2', 'unknown', 'not readable for us', 'best/variance')]


def measure(run, **at):
    options = {'part': PART.value, 'tokens': TOKENS.value, 'slot': SLOT.value,
               'vector': parse_vector(TASK.value, run.task.p), 'root': ROOT.value, 'uncentred': UNCENTRED.value,
               'zero': ZERO.value}
    return run.measure(functools.partial(pca.scanned_components, **options), **at)


if __name__ == '__main__':
    cli.experiment(measure, features.pca, task='modular', expected=EXPECTED, frame=features.pca_frame,
                   curves=('best/ring', 'best/radius_ratio', 'best/variance'))
