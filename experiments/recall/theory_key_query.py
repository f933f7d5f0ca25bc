"""What does the key-query matrix learn in the second step, once the values have taken the first one?

    python experiments/recall/theory_key_query.py            about a minute on two cores
"""

import functools

import jax
import numpy as np

from lingrok import cli
from lingrok.analysis import one_layer
from lingrok.analysis.one_layer import Law
from lingrok.cli import Expected
from lingrok.figures import theory
from lingrok.log import Series

SEEDS, SIZE = 6, 20_000
SETTINGS = ((Law(20, 64, 0.5), False), (Law(20, 64, 0.5), True), (Law(40, 128, 0.5), False), (Law(40, 128, 0.5), True),
            (Law(20, 64, 0.2), True))
# Row q on E(q), E(τ), E~(q), E~(τ), in 1e-5.
PROTOTYPE = ((19, -12, -12, -11), (-0.6, 0.4, 1.0, 0.3), (5.7, -3.4, -3.3, -3.3), (-0.09, 0.05, 0.14, 0.05),
             (-0.3, -0.1, 3.8, -0.1))
NAMES = ('trigger', 'noise', 'after_trigger', 'after_noise')


def label(law: Law, trained_ff: bool) -> str:
    return (f'N = {law.num_tokens}, T = {law.length}, α = {law.noise_prob}, '
            + ('FF predicts noise' if trained_ff else 'FF untrained'))


EXPECTED = [
    Expected(f'{label(*setting)}: 1e5 times row q on {theory.KEY_ENTRIES[name]}', str(value),
             'prototype, one estimate of 20,000 sequences', f'{label(*setting)}/1e5/{name}')
    for setting, row in zip(SETTINGS, PROTOTYPE, strict=True) for name, value in zip(NAMES, row, strict=True)
] + [Expected('largest relative difference of gradient and formula', '0', 'derived', 'formula_error')]


def measure(seed: int) -> dict:
    found, errors = {}, []
    for i, (law, trained_ff) in enumerate(SETTINGS):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), i), SEEDS)
        row = one_layer.per_key(functools.partial(one_layer.key_query_row, law, size=SIZE, trained_ff=trained_ff), keys)
        errors.append(row.pop('formula_error'))
        found |= {f'{label(law, trained_ff)}/{name}': values for name, values in row.items()}
    found |= {'formula_error': np.max(errors, 0)}
    found |= {f'{name.rpartition("/")[0]}/1e5/{name.rpartition("/")[2]}': 1e5 * values
              for name, values in found.items() if '/' in name}
    return {name: Series(np.array([2]), values[None]) for name, values in found.items()}


if __name__ == '__main__':
    cli.calculation(measure, theory.key_query, expected=EXPECTED)
