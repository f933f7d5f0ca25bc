"""Does a model memorise its tasks, match ratios, or regress? The mixture of exact predictors nearest to its output.

    python experiments/modular/bayes_mixture.py runs/modular_demo-ID
    python experiments/modular/bayes_mixture.py runs/modular_demo-ID --steps=all      the shares along training

Beyond the paper, which has no such measurement: nothing to compare with.
"""

import functools

from lingrok import cli
from lingrok.analysis import skills
from lingrok.figures import skills as figures


def measure(run, **at):
    return run.measure(functools.partial(skills.bayes_mixture, splits=('id_train', 'ood_train')), **at)


if __name__ == '__main__':
    curves = ('ood_train/weight/pretraining', 'ood_train/weight/ratio', 'ood_train/weight/regression', 'ood_train/kl')
    cli.experiment(measure, figures.bayes_mixture, task='modular', frame=figures.mixture_frame, curves=curves)
