"""Accuracy on seen and unseen tasks along training; unseen-task accuracy that rises and falls again (Fig 3b).

    python experiments/modular/learning_curves.py runs/modular_demo-ID       or one program of a sweep
"""

from lingrok import cli
from lingrok.cli import Expected
from lingrok.figures import modular

DIGITISED = 'derived from Fig 1b and the abstract: six blocks, p = 29'
EXPECTED = [
    Expected('unseen tasks and inputs at the end, 512 tasks', 'above .75', DIGITISED, 'ood_test/accuracy_last'),
    Expected('training tasks at the end', 'near 1 with few, lower with many', 'reviews', 'id_train/accuracy_last'),
    Expected('unseen tasks, p = 7, 36 and 8 tasks', '.87 to .91; .14', 'prototype, one seed',
             'ood_train/accuracy_last'),
]


def measure(run, **at):
    """What training has logged; every evaluation, whatever steps were saved."""
    return run.metrics()


if __name__ == '__main__':
    cli.experiment(measure, modular.learning_curves, task='modular', expected=EXPECTED)
