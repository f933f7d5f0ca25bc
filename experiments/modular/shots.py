"""How many examples does a model need? Accuracy and loss by shot on seen and unseen tasks (Fig 1c and 3c).

    python experiments/modular/shots.py runs/modular_demo-ID
"""

import functools

from lingrok import cli
from lingrok.analysis import skills
from lingrok.cli import Expected
from lingrok.figures import modular

FIG_1C = 'Fig 1c, p = 29, digitised from a picture of the official repository; depth and number of tasks unknown'
EXPECTED = [Expected(f'accuracy on unseen tasks and inputs, {shot} shots', value, FIG_1C,
                     f'ood_test/accuracy_by_shot[{shot}]')
            for shot, value in ((0, '.028'), (1, '.071'), (2, '.095'), (3, '.225'), (5, '.532'), (8, '.805'),
                                (11, '.927'), (16, '.936'), (31, '.959'))]


def measure(run, **at):
    """All four sets; only those of training inputs where every input trains."""
    splits = ('id_train', 'ood_train') + (('id_test', 'ood_test') if run.task.alpha < 1 else ())
    return run.measure(functools.partial(skills.by_shot, splits=splits), **at)


if __name__ == '__main__':
    cli.experiment(measure, modular.shots, task='modular', expected=EXPECTED)
