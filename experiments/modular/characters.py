"""Are tokens, heads and neurons simple in the basis of multiplicative characters? Power spectra over the discrete log.

    python experiments/modular/characters.py runs/modular_demo-ID --steps=all

A number for what the circles of Fig 1d, 1e and 6b show: a representation that places residues on a ring in the order
of their logarithms has all its power in one frequency. The paper has no such spectra.
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import characters
from lingrok.analysis.scan import parse_vector
from lingrok.cli import Expected
from lingrok.figures import features

SLOT = flags.DEFINE_integer('slot', 2, 'example of the row that runs over all inputs, from 0')
TASK = flags.DEFINE_string('task', '', 'task vector a,b; by default an unseen one of each replica')
ROOT = flags.DEFINE_integer('root', None, 'primitive root of the logarithm; by default 27 for p = 29, else the least')

SOURCE = 'by symmetry: independent normal numbers have 2 / (p - 2) in each frequency of two characters'
EXPECTED = [Expected('largest share of a frequency in the embedding', 'above that of random numbers', SOURCE,
                     'embedding/concentration'),
            Expected('the same, random numbers', 'drawn', SOURCE, 'embedding/concentration/random'),
            Expected('head with the most concentrated output', 'near 1 if it makes a ring (Fig 6b, p = 29, 2 blocks)',
                     'qualitative', 'heads/highest_concentration'),
            Expected('neurons of the most concentrated block', 'above that of random numbers', SOURCE,
                     'neurons/highest_concentration')]


def measure(run, **at):
    vector = parse_vector(TASK.value, run.task.p)
    return run.measure(functools.partial(characters.spectra, slot=SLOT.value, vector=vector, root=ROOT.value), **at)


if __name__ == '__main__':
    cli.experiment(measure, features.characters, task='modular', expected=EXPECTED, frame=features.characters_frame,
                   curves=('embedding/highest_concentration', 'heads/highest_concentration',
                           'neurons/highest_concentration'))
