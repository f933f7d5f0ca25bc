"""Does the theory of the first step hold in the whole network? Gradients at initialisation, by part of the last block.

    python experiments/recall/theory_network.py runs/recall_demo-ID            a minute a replica on two cores

Reads the checkpoint of step 0; with --steps=all the same along training.
"""

import jax.numpy as jnp
from absl import flags

from lingrok import cli
from lingrok.analysis import one_layer
from lingrok.cli import Expected
from lingrok.figures import theory

SIZES = flags.DEFINE_list('sizes', ['8', '32', '128', '512'], 'numbers m of sequences of a gradient')
REPETITIONS = flags.DEFINE_integer('repetitions', 32, 'minibatches of each size', lower_bound=2)

DERIVED = 'derived for the one-layer model; a whole network is expected to behave alike'
EXPECTED = [
    Expected('answer to the trigger alone: change by the feed-forward over that by attention', 'above 1; about half '
             'the number of tokens in the one-layer model', DERIVED, 'gain/alone'),
    Expected('logits in context: change by the feed-forward over that by attention', 'above 1', DERIVED,
             'gain/context'),
    Expected('signal to noise of the feed-forward over that of attention, trigger alone, smallest m', 'above 1',
             DERIVED, 'advantage/alone[0]'),
    Expected('signal to noise of the feed-forward over that of attention, in context, smallest m', 'above 1', DERIVED,
             'advantage/context[0]'),
]


def measure(run, **at):
    from lingrok.config import require

    for size in SIZES.value:
        require(size.strip().isdecimal() and int(size) > 0, f'--sizes holds {size!r}; allowed: positive whole numbers')
    sizes = tuple(int(size) for size in SIZES.value)

    def fn(params, task_state, key, cfg):
        found = one_layer.network_first_step(params, task_state, key, cfg, sizes=sizes, repetitions=REPETITIONS.value)
        for reading in ('alone', 'context'):
            found[f'gain/{reading}'] = found[f'mean/ff/{reading}'][-1] / found[f'mean/attn/{reading}'][-1]
            found[f'advantage/{reading}'] = found[f'ratio/ff/{reading}'] / found[f'ratio/attn/{reading}']
        return found | {'size': jnp.array(sizes)}

    return run.measure(fn, **at)


if __name__ == '__main__':
    cli.experiment(measure, theory.network, task='recall', expected=EXPECTED, default_steps='0',
                   curves=('mean/ff/alone', 'mean/attn/alone'))
