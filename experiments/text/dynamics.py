"""Which layers of a model of text hold the bigram law, and which copy from the context, along training?

    python experiments/text/dynamics.py runs/text_demo-ID --steps=all
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import copying
from lingrok.cli import Expected
from lingrok.figures import text

ROWS = flags.DEFINE_integer('rows', 128, 'windows of each set', lower_bound=1)

DIRECTION = 'expected, after the abstract of arXiv 2406.03068'
EXPECTED = [
    Expected('divergence from the bigram law, feed-forward 0 alone (nats)', 'below the unigram law', DIRECTION,
             'memory/feed_forward[0]'),
    Expected('divergence from the bigram law, feed-forward 1 alone (nats)', 'below the unigram law', DIRECTION,
             'memory/feed_forward[1]'),
    Expected('the same of the unigram law (nats)', 'the reference', 'exact, of the text', 'memory/unigram'),
    Expected('accuracy on the second copy of random sequences', 'far above chance', DIRECTION,
             'random_repeated/accuracy/intact'),
    Expected('the same without feed-forward 1', 'still above chance', DIRECTION,
             'random_repeated/accuracy/mean/feed_forward[1]'),
    Expected('the same without attention 1', 'chance', DIRECTION, 'random_repeated/accuracy/mean/attention[1]'),
]


def measure(run, **at):
    return run.measure(functools.partial(copying.dynamics, num_rows=ROWS.value), **at)


if __name__ == '__main__':
    cli.experiment(measure, text.dynamics, task='text', expected=EXPECTED)
