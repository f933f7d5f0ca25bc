"""Fine-tuning of one part of a noisy model on clean sequences: how many steps until the noise is gone, at what cost.

    python experiments/recall/finetune.py runs/recall_demo-ID
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import finetune
from lingrok.cli import Expected
from lingrok.figures import editing as figures

UPDATES = flags.DEFINE_integer('updates', 60, 'updates of each part', lower_bound=1)
EVERY = flags.DEFINE_integer('every', 1, 'updates from one measurement to the next', lower_bound=1)
ROWS = flags.DEFINE_integer('rows', 128, 'clean sequences of each measurement', lower_bound=1)
PARTS = flags.DEFINE_list('parts', list(finetune.PARTS), 'everything, feed-forwards, attention, or patterns of '
                          'parameters such as blocks.1.mlp_*')

QUESTION = 'open question of the reviews of arXiv 2406.03068'
EXPECTED = [
    Expected('updates until P(noise) is below .05: feed-forwards alone', 'about as many as everything', f'{QUESTION}; '
             'expected, as they hold the noise', 'feed-forwards/steps'),
    Expected('updates, everything', 'the fewest', QUESTION, 'everything/steps'),
    Expected('updates, attention alone', 'more than feed-forwards', QUESTION, 'attention/steps'),
]
CURVES = tuple(f'{part}/steps' for part in finetune.PARTS)


def measure(run, **at):
    return run.measure(functools.partial(finetune.finetune, parts=tuple(PARTS.value), num_steps=UPDATES.value,
                                         every=EVERY.value, num_rows=ROWS.value), **at)


if __name__ == '__main__':
    cli.experiment(measure, figures.finetune, task='recall', expected=EXPECTED, curves=CURVES)
