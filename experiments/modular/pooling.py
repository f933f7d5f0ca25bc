"""Does a model combine two examples, or pool many? Unseen tasks, queries in a direction that no example has.

    python experiments/modular/pooling.py runs/modular_demo-ID

Beyond the paper, whose account (two examples combined linearly, Eq. 2) predicts full accuracy from 2 examples on.
"""

from lingrok import cli
from lingrok.analysis import skills
from lingrok.cli import Expected
from lingrok.figures import skills as figures

EQ_2 = 'Eq. 2, for a model that does what it says on every query; no number of a model is given'
EXPECTED = [
    Expected('accuracy on forced queries, all examples', '1', EQ_2, 'ood_forced/accuracy_all_examples'),
    Expected('the same, two distinct examples repeated', '1', EQ_2, 'ood_forced/accuracy_two_distinct'),
    Expected('labels that a solved answer rests on', '2', EQ_2, 'ood_forced/examples_relied_on'),
]


def measure(run, **at):
    return run.measure(skills.pooling, **at)


if __name__ == '__main__':
    curves = ('ood_forced/accuracy_two_distinct', 'ood_forced/accuracy_all_examples', 'ood_forced/examples_relied_on')
    cli.experiment(measure, figures.pooling, task='modular', expected=EXPECTED, curves=curves)
