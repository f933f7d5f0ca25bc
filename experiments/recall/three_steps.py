"""Does one gradient step on each memory, from the last to the first, make an induction head? And in reverse order?

    python experiments/recall/three_steps.py                          orthonormal vectors, 32 tokens, 32 positions
    python experiments/recall/three_steps.py --tokens=64 --length=64 --width=512      random vectors; for a GPU
"""

import jax
import numpy as np
from absl import flags

from lingrok import cli
from lingrok.cli import Expected
from lingrok.figures import induction
from lingrok.log import Series

TOKENS = flags.DEFINE_integer('tokens', 32, 'vocabulary', lower_bound=3)
LENGTH = flags.DEFINE_integer('length', 32, 'tokens of a sequence', lower_bound=4)
WIDTH = flags.DEFINE_integer('width', 0, 'of random vectors; 0: orthonormal ones', lower_bound=0)
PIECES = flags.DEFINE_integer('pieces', 40, 'pieces of the batch, each of 8 sequences a token', lower_bound=1)
SEEDS = flags.DEFINE_integer('seeds', 5, 'replicas', lower_bound=1)
RATES = flags.DEFINE_list('rates', ['1000', '40000', '2000000'], 'learning rates of the steps on o of layer 1, k of '
                          'layer 1, k of layer 0')

THEOREM = 'expected by the theorem of three steps'
EXPECTED = [
    Expected('copy memory after the step on it, wo1', 'above .95', THEOREM, 'top_down/wo1[1]'),
    Expected('trigger memory after the step on it, wk1', 'near 1', THEOREM, 'top_down/wk1[2]'),
    Expected('previous-token memory after the step on it, wk0', 'high', THEOREM, 'top_down/wk0[3]'),
    Expected('accuracy after the three', 'near 1', THEOREM, 'top_down/accuracy[3]'),
    Expected('bottom-up: previous-token memory', 'chance', 'expected: no gradient that helps', 'bottom_up/wk0[3]'),
    Expected('bottom-up: gradient of k of layer 1', '0', 'derived: exact', 'bottom_up/gradient_norm[1]'),
    Expected('bottom-up: accuracy after the three', 'near chance', 'expected', 'bottom_up/accuracy[3]'),
]


def is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def measure(seed: int) -> dict:
    from lingrok.analysis import three_steps
    from lingrok.config import require

    cfg = three_steps.model_config(TOKENS.value, LENGTH.value, WIDTH.value)
    require(len(RATES.value) == 3 and all(map(is_number, RATES.value)), f'--rates={",".join(RATES.value)}; allowed: '
            'three numbers, such as 1000,40000,2000000')
    rates = dict(zip(three_steps.TOP_DOWN, map(float, RATES.value), strict=True))
    keys = jax.random.split(jax.random.key(seed), SEEDS.value)
    series = {'chance': Series(np.array([0]), np.array([[1 / TOKENS.value]]))}
    for name, order in three_steps.ORDERS.items():
        found = [three_steps.trajectory(key, cfg, order, rates, pieces=PIECES.value, orthonormal=not WIDTH.value)
                 for key in keys]
        series |= {f'{name}/{quantity}': Series(np.array([0]), np.stack([row[quantity] for row in found])[None])
                   for quantity in found[0]}
    return series


if __name__ == '__main__':
    cli.calculation(measure, induction.three_steps, expected=EXPECTED)
