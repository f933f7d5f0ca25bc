"""What do wrong labels in the context do? At random places, and at one place (appendix of the paper)

    python experiments/modular/label_noise.py runs/modular_demo-ID

All tasks of a pool take part (the official notebook draws 32 and 32), and only labels of the context are wrong (its
noise can pick the answer of the query itself).
"""

import functools

from lingrok import cli
from lingrok.analysis import skills
from lingrok.cli import Expected
from lingrok.figures import skills as figures

APPENDIX = 'appendix on label noise, p = 29; qualitative, the numbers are not known'
EXPECTED = [
    Expected('accuracy on training tasks, last shot, no wrong label', 'high', APPENDIX, 'id_train/accuracy_clean'),
    Expected('the same, one wrong label', 'mostly right', APPENDIX, 'id_train/accuracy_one_wrong'),
    Expected('accuracy on unseen tasks, no wrong label', 'high', APPENDIX, 'ood_train/accuracy_clean'),
    Expected('the same, one wrong label', 'more sensitive', APPENDIX, 'ood_train/accuracy_one_wrong'),
    Expected('the same, a quarter wrong', 'falls with the number', APPENDIX, 'ood_train/accuracy_quarter_wrong'),
]


def measure(run, **at):
    """All four sets; only those of training inputs where every input trains."""
    splits = ('id_train', 'ood_train') + (('id_test', 'ood_test') if run.task.alpha < 1 else ())
    return run.measure(functools.partial(skills.label_noise, splits=splits), **at)


if __name__ == '__main__':
    curves = ('ood_train/accuracy_clean', 'ood_train/accuracy_one_wrong', 'ood_train/accuracy_quarter_wrong')
    cli.experiment(measure, figures.label_noise, task='modular', expected=EXPECTED, frame=figures.noise_frame,
                   curves=curves)
