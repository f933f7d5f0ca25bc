"""What does the first gradient step store where? The one-layer model against formulas, and their scaling.

    python experiments/recall/theory_first_step.py            about two minutes on two cores
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lingrok import cli
from lingrok.analysis import one_layer
from lingrok.analysis.one_layer import Law
from lingrok.cli import Expected
from lingrok.figures import theory
from lingrok.log import Series

BASE = Law(20, 64, 0.5)
REPLICAS = 8
SIZES = tuple(2**k for k in range(6, 14))
TOKENS, RATIOS = (10, 20, 40, 80, 160), (0.5, 1, 2, 4)
NOISE = (0.1, 0.2, 0.5, 0.8)
WIDTHS = (64, 128, 256, 512, 1024)

DERIVED = 'derived, N = 20, T = 64, α = .5, m = 256'
TESTED = 'prototype, same setting, one estimate'
EXPECTED = [
    Expected('feed-forward, F[τ, q]', '.452, sd .0313', DERIVED, 'by_size/mean/ff_noise[2]'),
    Expected('sd of F[τ, q]', '.0313', DERIVED, 'by_size/sd/ff_noise[2]'),
    Expected('1000 V[τ, j]', '21.8', TESTED, 'milli/value_other'),
    Expected('1000 V[τ, τ]', '10.5', TESTED, 'milli/value_noise'),
    Expected('1000 sd of V[τ, τ]', '1.05', TESTED, 'milli/sd/value_noise'),
    Expected('1000 sd of V[k, k]', '.71', TESTED, 'milli/sd/value_copy'),
    Expected('1000 (V[k, k] - V[k, j])', '.61', 'prototype, m = 20,000', 'milli/copy'),
    Expected('slope of the sd of F[τ, q] in m', '-.5', 'derived', 'slope/sd_ff_by_size'),
    Expected('slope of the sd of V[τ, j] in m', '-.5', 'derived', 'slope/sd_value_by_size'),
    Expected('slope of the attention margin in N', '-1', 'derived', 'slope/margin_attn_by_tokens'),
    Expected('slope of the feed-forward margin in N', '0', 'derived', 'slope/margin_ff_by_tokens'),
    Expected('slope of the sd of V[τ, j] in (1/N² + 1/(TN))^(1/2)', '1', 'derived', 'slope/sd_value_by_scale'),
    *(Expected(f'deviation of {name} from its exact mean, standard errors', 'below 4', 'derived', f'deviation/{name}')
      for name in ('ff_noise', 'value_other', 'value_noise', 'value_trigger', 'copy')),
    Expected('largest entry of the key-query gradient', '0', 'derived', 'key_query'),
]


def exact(law) -> dict:
    """Exact expectations of single entries; those of margins are not linear."""
    zero = jnp.zeros((1, 2), int)
    return {name: np.asarray(value) for name, value in one_layer.entries(one_layer.expected_first_step(law), zero
                                                                          ).items() if 'margin' not in name}


def slope(x, y_SX) -> np.ndarray:
    """Exponent of y in x for every replica (S,)."""
    return np.polyfit(np.log(x), np.log(y_SX).T, 1)[0]


def measure(seed: int) -> dict:
    key = jax.random.key(seed)
    moments = one_layer.first_step_moments
    keys = lambda i: jax.random.split(jax.random.fold_in(key, i), REPLICAS)  # noqa: E731
    found, total = {}, SIZES[-1] * 32
    by_size = one_layer.per_key(functools.partial(moments, BASE, sizes=SIZES, total=total), keys(0))
    predicted = one_layer.predicted_first_step(BASE, np.array(SIZES))
    found |= {f'by_size/{name}': x for name, x in by_size.items()}
    found |= {f'by_size/predicted/{name}': np.broadcast_to(x, (1, len(SIZES))) for name, x in predicted.items()}
    found['by_size/size'] = np.array([SIZES])

    grid = [(N, int(N * ratio)) for N in TOKENS for ratio in RATIOS]
    size = 128
    rows = [one_layer.per_key(functools.partial(moments, Law(N, T, BASE.noise_prob), sizes=(size,), total=32 * size),
                              keys(1 + i)) for i, (N, T) in enumerate(grid)]
    found |= {f'grid/{name}': np.concatenate([row[name] for row in rows], 1) for name in rows[0]}
    predicted = [one_layer.predicted_first_step(Law(N, T, BASE.noise_prob), size) for N, T in grid]
    found |= {f'grid/predicted/{name}': np.array([[row[name] for row in predicted]]) for name in predicted[0]}
    N, T = np.array(grid).T
    found |= {'grid/num_tokens': N[None], 'grid/length': T[None], 'grid/is_two': (T == 2 * N)[None],
              'grid/size': np.full((1, len(grid)), size)}

    size = 256
    by_noise = one_layer.per_key(lambda k: jax.lax.map(
        lambda alpha: moments(BASE._replace(noise_prob=alpha), k, sizes=(size,), total=32 * size),
        jnp.array(NOISE)), keys(40))
    found |= {f'by_noise/{name}': x[..., 0] for name, x in by_noise.items()}
    rows = [exact(BASE._replace(noise_prob=alpha)) for alpha in NOISE]
    found |= {f'by_noise/exact/{name}': np.array([[row[name] for row in rows]]) for name in rows[0]}
    found['by_noise/noise_prob'] = np.array([NOISE])

    rows = [one_layer.per_key(functools.partial(moments, BASE, sizes=(size,), total=8 * size, width=width),
                              keys(50 + i)) for i, width in enumerate(WIDTHS)]
    found |= {f'by_width/{name}': np.concatenate([row[name] for row in rows], 1) for name in rows[0]}
    found['by_width/width'] = np.array([WIDTHS])
    return {name: Series(np.array([1]), np.asarray(x)[None]) for name, x in (found | summary(found, total)).items()}


def summary(found: dict, total: int) -> dict:
    """Slopes of every replica, and deviations from the exact means in standard errors over all repetitions."""
    N, T, two = (found[f'grid/{name}'][0] for name in ('num_tokens', 'length', 'is_two'))
    scale = np.sqrt(1 / N**2 + 1 / (T * N))
    out = {
        'slope/sd_ff_by_size': slope(SIZES, found['by_size/sd/ff_noise']),
        'slope/sd_value_by_size': slope(SIZES, found['by_size/sd/value_other']),
        'slope/margin_attn_by_tokens': slope(N[two], found['grid/mean/margin_attn'][:, two]),
        'slope/margin_ff_by_tokens': slope(N[two], found['grid/mean/margin_ff'][:, two]),
        'slope/sd_value_by_scale': slope(scale, found['grid/sd/value_other']),
        'key_query': found['by_size/mean/key_query'].max(1),
    }
    means = exact(BASE)
    for name in ('ff_noise', 'value_other', 'value_noise', 'value_trigger', 'copy'):
        mean, sd = found[f'by_size/mean/{name}'][:, 0], found[f'by_size/sd/{name}'][:, 0]
        error = np.sqrt(np.mean(sd**2) / (REPLICAS * total / SIZES[0]))
        out |= {f'exact/{name}': means[name][None],
                f'deviation/{name}': (mean.mean(keepdims=True) - means[name]) / error}
    milli = {'value_other': 'mean/value_other', 'value_noise': 'mean/value_noise', 'copy': 'mean/copy',
             'sd/value_noise': 'sd/value_noise', 'sd/value_copy': 'sd/value_copy'}
    return out | {f'milli/{name}': 1000 * found[f'by_size/{source}'][:, 2] for name, source in milli.items()}


if __name__ == '__main__':
    cli.calculation(measure, theory.first_step, expected=EXPECTED)
