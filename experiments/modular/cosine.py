"""Which inputs look alike inside the model? Correlations of the residual stream between all inputs (Fig 8).

    python experiments/modular/cosine.py runs/modular_demo-ID
    python experiments/modular/cosine.py runs/modular_demo-ID --steps=all      mean by ratio, along training
    python experiments/modular/cosine.py runs/modular_demo-ID --part=heads     outputs of single heads (appendix)

A model that prepares the ratio y / x of an example has a block after which inputs of equal ratio are similar.
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import similarity
from lingrok.analysis.scan import parse_vector
from lingrok.cli import Expected
from lingrok.figures import features

SLOT = flags.DEFINE_integer('slot', 2, 'example of the row that runs over all inputs, from 0')
TASK = flags.DEFINE_string('task', '', 'task vector a,b; by default an unseen one of each replica')
PART = flags.DEFINE_string('part', 'resid_post', 'vectors: resid_post, or heads (what each head adds)')
CENTRED = flags.DEFINE_bool('centred', False, 'take the mean over inputs from all vectors first')

FIG_8 = 'Fig 8, p = 29, in words only: block 3 of 4, block 1 of 2 blocks'
EXPECTED = [Expected('ratio contrast at the y token, best block', 'clearly positive', FIG_8, 'y/highest_contrast'),
            Expected('ratio contrast at the z token, best block', 'clearly positive', FIG_8, 'z/highest_contrast'),
            Expected('y token, first block: 97.5 % quantile of random ratios', 'near 0', 'baseline', 'y/shuffled[0]')]


def measure(run, **at):
    options = {'part': PART.value, 'slot': SLOT.value, 'vector': parse_vector(TASK.value, run.task.p),
               'centred': CENTRED.value, 'pictures': len(at['steps']) == 1}
    return run.measure(functools.partial(similarity.similarities, **options), **at)


if __name__ == '__main__':
    cli.experiment(measure, features.cosine, task='modular', expected=EXPECTED, frame=features.cosine_frame,
                   curves=('y/highest_contrast', 'z/highest_contrast'))
