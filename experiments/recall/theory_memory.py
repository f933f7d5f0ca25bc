"""When does removing a singular direction of an associative memory remove the noise, and which direction is it?

    python experiments/recall/theory_memory.py            about half a minute on two cores
"""

import jax
import jax.numpy as jnp
import numpy as np

from lingrok import cli
from lingrok.analysis import associative
from lingrok.cli import Expected
from lingrok.figures import theory
from lingrok.log import Series

STEPS = tuple(int(x) for x in np.unique(np.geomspace(1, 10_000, 60).round()))
MAP_STEPS = (1, 100, 10_000)
INPUTS = tuple(range(2, 17))
NOISE = tuple(np.linspace(0.02, 0.9, 45))
WIDTHS, DRAWS = (8, 16, 32, 64, 128, 256), 8

# Inputs, noise probability, width of random embeddings or 0, step, which direction goes, p(correct), p(noise). Steps
# with random embeddings are guesses: the prototype's are not known.
PROTOTYPE = (
    (2, 0.3, 0, 20_000, 'bottom', 0.978, 0.021), (2, 0.5, 0, 20_000, 'bottom', 0.974, 0.025),
    (2, 0.6, 0, 20_000, 'bottom', 0.971, 0.028), (3, 0.3, 0, 20_000, 'bottom', 0.994, 0.005),
    (5, 0.3, 0, 100, 'bottom', 0.753, 0.076), (5, 0.3, 0, 100, 'full', 0.635, 0.221),
    (2, 0.3, 64, 8000, 'bottom', 0.965, 0.033), (5, 0.1, 128, 2000, 'bottom', 0.987, 0.007),
    (5, 0.1, 128, 2000, 'full', 0.897, 0.098), (3, 0.03, 8, 2000, 'bottom', 0.967, 0.019),
    (3, 0.03, 8, 2000, 'full', 0.959, 0.026),
)


def label(n, alpha, width, step, kind, *_) -> str:
    return f'n={n} noise={alpha} ' + (f'width={width} ' if width else '') + f'step={step} {kind}'


EXPECTED = [
    Expected(f'{label(*row)}: {name}', str(value), 'prototype' + ', one draw, step unknown' * (row[2] > 0),
             f'{label(*row)}/{name}')
    for row in PROTOTYPE for name, value in zip(('p_correct', 'p_noise'), row[-2:], strict=True)
] + [Expected('5 inputs, noise .3: step at which the common direction becomes the top one', 'between 100 and 1000',
              'prototype', 'time/crossing')]


def draws(n, width, alpha, steps, key) -> dict:
    """`associative.trajectory` of several draws of embeddings, (S, T, ...)."""
    run = lambda k: associative.trajectory(associative.gaussian(n, width, k), alpha, steps=steps)  # noqa: E731
    return jax.device_get(jax.jit(lambda keys: jax.lax.map(run, keys))(jax.random.split(key, DRAWS)))


def exact(n, alpha, steps) -> dict:
    """`associative.trajectory` of orthonormal embeddings with a replica axis, (1, T, ...)."""
    run = jax.jit(lambda alpha: associative.trajectory(associative.orthonormal(n), alpha, steps=steps))
    return {name: np.asarray(x)[None] for name, x in run(alpha).items()}


def measure(seed: int) -> dict:
    with jax.enable_x64(True):
        return _measure(jax.random.key(seed))


def _measure(key) -> dict:
    found = {}
    for i, row in enumerate(PROTOTYPE):
        n, alpha, width, step, kind, *_ = row
        values = draws(n, width, alpha, (step,), jax.random.fold_in(key, i)) if width else exact(n, alpha, (step,))
        found |= {f'{label(*row)}/{name}': Series(np.array([step]), values[f'{kind}/{name}'].T)
                  for name in ('p_correct', 'p_noise')}
    time = exact(5, 0.3, STEPS)
    found |= {f'time/{name}': Series(np.array(STEPS), np.moveaxis(x, 1, 0)) for name, x in time.items()}
    crossing = associative.crossing(STEPS, time['sigma_common'][0], time['sigma_contrast'][0])
    found['time/crossing'] = Series(np.array(STEPS[-1:]), np.array([[crossing]]))

    last = MAP_STEPS[-1:]
    rows = [draws(5, width, 0.3, last, jax.random.fold_in(key, 100 + width)) for width in WIDTHS]
    found |= {f'width/{name}': Series(np.array(last), np.stack([row[name][:, 0] for row in rows], 1)[None])
              for name in rows[0] if name != 'singular'}
    found['width/width'] = Series(np.array(last), np.array([[WIDTHS]]))

    def ratios(n):
        memory = associative.orthonormal(n)

        def of(alpha):
            parts = jax.vmap(lambda c: associative.structure(associative.table(memory, c)))(
                associative.flow(memory, alpha, steps=MAP_STEPS))
            return jnp.log2(parts['sigma_common'] / parts['sigma_contrast'])

        return jax.jit(jax.vmap(of))(jnp.array(NOISE))

    ratio_NAT = np.stack([ratios(n) for n in INPUTS])
    found['map/log_ratio'] = Series(np.array(MAP_STEPS), np.moveaxis(ratio_NAT, 2, 0)[:, None])
    found['map/num_inputs'] = Series(np.array(last), np.array([[INPUTS]]))
    found['map/noise_prob'] = Series(np.array(last), np.array([[NOISE]]))
    return found


if __name__ == '__main__':
    cli.calculation(measure, theory.memory, expected=EXPECTED)
