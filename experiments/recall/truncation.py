"""What goes with the singular directions of every matrix: noise, recall, bigrams; top against bottom directions.

    python experiments/recall/truncation.py runs/recall_demo-ID
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import truncation
from lingrok.cli import Expected
from lingrok.figures import editing as figures

ROWS = flags.DEFINE_integer('rows', 128, 'sequences of each split', lower_bound=1)

EXPECTED = [
    Expected('P(noise) on clean sequences', 'the noise probability, .5 in the demo', 'derived: what the Bayes '
             'predictor of the noisy law says', 'clean/p_noise/whole'),
    Expected('P(noise) without the last feed-forward', 'lower by .3 or more', 'expected: a goal of this project',
             'clean/p_noise/removed/blocks.1.mlp_in'),
    Expected('P(target) without the last feed-forward', 'higher than with it', 'expected, as that writes the noise',
             'clean/p_correct/removed/blocks.1.mlp_in'),
    Expected('P(target) of the whole model', 'one minus the noise probability, .5 in the demo', 'derived, as P(noise)',
             'clean/p_correct/whole'),
    Expected('P(target) without the values of the last attention', 'chance, .016', 'expected: recall is in attention',
             'clean/p_correct/removed/blocks.1.ov'),
]
CURVES = ('clean/p_noise/whole', 'clean/p_noise/removed/blocks.1.mlp_in', 'clean/p_correct/removed/blocks.1.mlp_in',
          'soft_rank/blocks.1.mlp_in')


def measure(run, **at):
    return run.measure(functools.partial(truncation.grid, num_rows=ROWS.value), **at)


if __name__ == '__main__':
    cli.experiment(measure, figures.truncation, task='recall', expected=EXPECTED, frame=figures.noise_map,
                   curves=CURVES)
