"""What do single MLP neurons compute? Their activations as functions of (x, y), all of them by kind (G.1, Fig 7).

    python experiments/modular/neurons.py runs/modular_demo-ID
    python experiments/modular/neurons.py runs/modular_demo-ID --steps=all     one neuron and shares along training

The authors show pictures of chosen neurons: of specific x in the first block, periodic ones, and neurons that fire on
lines through 0. Here every neuron is scored, and the shares of the kinds have error bars over seeds.
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import neurons
from lingrok.analysis.scan import parse_vector
from lingrok.cli import Expected
from lingrok.figures import features

SLOT = flags.DEFINE_integer('slot', 2, 'example of the row that runs over all inputs, from 0')
TASK = flags.DEFINE_string('task', '', 'task vector a,b; by default an unseen one of each replica')

G_1 = 'authors to the reviewers, p = 29, in words only'
EXPECTED = [Expected('most neurons of x in a block', 'first of 4 blocks: many', G_1, 'y/most_x'),
            Expected('most neurons of the ratio in a block, y token', 'third of 4 blocks: all ratios present', G_1,
                     'y/most_ratio'),
            Expected('the same, z token', 'not reported', G_1, 'z/most_ratio'),
            Expected('share of the ratios that some ratio neuron prefers, y token', '1 (4 blocks)', G_1,
                     'y/ratios_present'),
            Expected('the same, z token', 'not reported', G_1, 'z/ratios_present'),
            Expected('most waves of two characters in a block', 'second of 4 blocks: periodic in (x, y)', G_1,
                     'y/most_character')]


def measure(run, **at):
    vector = parse_vector(TASK.value, run.task.p)
    return run.measure(functools.partial(neurons.neuron_kinds, slot=SLOT.value, vector=vector), **at)


if __name__ == '__main__':
    cli.experiment(measure, features.neurons, task='modular', expected=EXPECTED, frame=features.neurons_frame,
                   curves=('y/most_x', 'y/most_ratio', 'z/most_ratio', 'z/most_answer'))
