"""Who learns the noise and who the recall when the one-layer model is trained from zero? SGD, Adam, sign descent.

    python experiments/recall/theory_trajectories.py            about two minutes on two cores
"""

import jax
import numpy as np
import optax

from lingrok import cli
from lingrok.analysis import one_layer
from lingrok.analysis.one_layer import Law
from lingrok.cli import Expected
from lingrok.figures import theory
from lingrok.log import Series

LAW, STEPS, BATCH, SEEDS = Law(20, 64, 0.5), 400, 512, 6
OPTIMIZERS = {'SGD, rate 1': optax.sgd(1.0), 'Adam, rate .03': optax.adam(0.03, b1=0.9, b2=0.99),
              'sign descent, rate .01': optax.sign_sgd(0.01)}
# Step, then loss, p(noise), p(target), the same two without the feed-forward, attention on targets, on noise, margin.
PROTOTYPE = {
    'SGD, rate 1': ((1, 2.81, 0.08, 0.05, 0.05, 0.05, 0.024, 0.023, 0.44),
                    (10, 2.15, 0.45, 0.03, 0.06, 0.05, 0.024, 0.023, 2.41),
                    (400, 2.12, 0.49, 0.03, 0.06, 0.05, 0.048, 0.045, 2.48)),
    'Adam, rate .03': ((20, 2.15, 0.63, 0.02, 0.24, 0.04, 0.07, 0.09, 0.90),
                       (50, 1.67, 0.49, 0.09, 0.19, 0.15, 0.60, 0.13, 0.70),
                       (100, 1.07, 0.51, 0.41, 0.21, 0.65, 0.78, 0.09, 0.60),
                       (400, 0.99, 0.50, 0.50, 0.31, 0.68, 0.785, 0.13, 0.21)),
}
QUANTITIES = ('loss/model', 'p_noise', 'p_target', 'p_noise/no_ff', 'p_target/no_ff', 'attention_target',
              'attention_noise', 'margin/ff')
EXPECTED = [
    Expected(f'{name}, step {step}: {quantity}', str(value), 'prototype, one seed', f'at {step}/{name}/{quantity}')
    for name, rows in PROTOTYPE.items() for step, *row in rows
    for quantity, value in zip(QUANTITIES, row, strict=True)
]


def measure(seed: int) -> dict:
    keys = jax.random.split(jax.random.key(seed), SEEDS)
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        curves = one_layer.per_key(lambda k, optimizer=optimizer: one_layer.train(
            LAW, k, optimizer, num_steps=STEPS, batch_size=BATCH), keys)
        found |= {f'{name}/{quantity}': Series(np.arange(STEPS + 1), values.T) for quantity, values in curves.items()}
    by_hand = one_layer.per_key(lambda k: one_layer.best_reference(LAW, k), keys)
    found |= {f'by hand/{quantity}': Series(np.array([STEPS]), values[None]) for quantity, values in by_hand.items()}
    return found | {f'at {step}/{name}/{quantity}': Series(np.array([step]), found[f'{name}/{quantity}'].values[[step]])
                    for name, rows in PROTOTYPE.items() for step, *_ in rows for quantity in QUANTITIES}


if __name__ == '__main__':
    cli.calculation(measure, theory.trajectories, expected=EXPECTED)
