"""One association taken out by a rank-one edit, beside truncation at the same cost; noise margins in context.

    python experiments/recall/editing.py runs/recall_demo-ID
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import editing
from lingrok.cli import Expected
from lingrok.figures import editing as figures

ROWS = flags.DEFINE_integer('rows', 128, 'sequences on which amounts are chosen, and as many on which they are judged',
                            lower_bound=1)
LAYER = flags.DEFINE_integer('layer', None, 'feed-forward that is edited; by default the last one', lower_bound=0)

QUESTION = 'open question of the reviews of arXiv 2406.03068; expected: an edit of one association costs less'
EXPECTED = [
    Expected('nats off triggers until P(noise) is half: whitened edit', 'less than any truncation', QUESTION,
             'least/kl_text/half/edit/whitened'),
    Expected('the same, top directions of the first matrix kept', 'more than the edit', QUESTION,
             'least/kl_text/half/mlp_in/top'),
    Expected('the same, bottom directions kept', 'more than the edit', QUESTION, 'least/kl_text/half/mlp_in/bottom'),
    Expected('P(noise) without the feed-forward', 'near 0', 'expected: the last feed-forward holds the noise',
             'removed/p_noise'),
    Expected('noise margin of the last feed-forward in context', 'positive', 'expected, as that of the trigger alone',
             'margin/context/blocks.1'),
]
CURVES = ('whole/p_noise', 'least/kl_text/half/edit/whitened', 'least/kl_text/half/mlp_in/top',
          'margin/context/blocks.1')


def measure(run, **at):
    return run.measure(functools.partial(editing.compare, layer=LAYER.value, num_rows=ROWS.value), **at)


if __name__ == '__main__':
    cli.experiment(measure, figures.editing, task='recall', expected=EXPECTED, curves=CURVES)
