"""In which order is an induction head learned? Its memories read off the weights, along training.

    python experiments/train.py --config=configs/induction.py:simplified
    python experiments/recall/induction.py runs/induction_simplified-ID
"""

import numpy as np

from lingrok import cli
from lingrok.analysis import associations
from lingrok.cli import Expected
from lingrok.figures import induction
from lingrok.log import Series

HYPOTHESIS = 'expected of the simplified model, loss on repeated triggers'
EXPECTED = [
    Expected('copy memory at the end, wo1', 'near 1', HYPOTHESIS, 'association/wo1'),
    Expected('trigger memory at the end, wk1', 'near 1', HYPOTHESIS, 'association/wk1'),
    Expected('previous-token memory at the end, wk0', 'rises', HYPOTHESIS, 'association/wk0'),
    Expected('accuracy at repeated triggers', 'above .95', HYPOTHESIS, 'clean/accuracy'),
    *(Expected(f'step at which {name} is half-way', when, HYPOTHESIS, f'half/{quantity}') for name, when, quantity in (
        ('wo1', 'first', 'association/wo1'), ('wk1', 'second', 'association/wk1'),
        ('wk0', 'last', 'association/wk0'), ('accuracy', 'not before wk1', 'clean/accuracy'))),
    Expected('ff1, divergence of the feed-forward from the bigrams', 'falls quickly', 'expected with the loss on all '
             'tokens', 'association/ff1'),
    Expected('accuracy with targets from the bigrams', 'as with uniform ones, if trained on those', HYPOTHESIS,
             'transfer/bigram'),
]


def measure(run, *, steps, seed):
    """What training has logged; the probes at saved steps where it has not; accuracy under other laws of targets."""
    series = run.metrics()
    if 'association/wo1' not in series:
        series |= run.measure(associations.associations, steps=steps, seed=seed)
    series |= run.measure(associations.transfer, steps=steps, seed=seed)
    halves = {f'half/{name}': associations.half_step(*series[name]) for name in induction.EVENTS}
    return series | {name: Series(np.array(steps[-1:]), values[None]) for name, values in halves.items()}


if __name__ == '__main__':
    cli.experiment(measure, induction.training, task='recall', expected=EXPECTED, default_steps='all')
