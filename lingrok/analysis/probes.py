"""Linear probes: what can be read off the residual stream, coefficients of the examples or the task vector.

Source: probes that the authors of arXiv 2406.02550 report to their reviewers: the factor c between two examples is read
at 15 to 20 % (p = 29, chance 3 %), the task (a, b) at chance. A probe here is a ridge regression to one-hot classes, in
closed form, tested on rows that it was not fitted to; another part of the rows chooses its penalty. Rows have random
tasks and inputs, of all p^2 each.

Axes: P blocks after which is probed, the embedding first; Q positions; F frequencies of `analysis.characters`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lingrok import model
from lingrok.analysis.characters import character_basis
from lingrok.config import Config

PENALTIES = (1e-4, 1e-2, 1.0, 100.0)  # over the mean squared deviation of a feature
FOLDS = 5
PIECE = 256  # rows of one forward pass
POSITIONS = ('x', 'y')  # tokens of the query


def ridge_probe(features_BD: jax.Array, labels_BT: jax.Array, valid_B: jax.Array, fold_B: jax.Array, p: int,
                root: int | None = None) -> dict[str, jax.Array]:
    """Cross-validated accuracy (T,) of probes for T targets with classes 0 to p - 1, and r2 (T, F).

    Rows of fold f test the probe that folds f + 2, ... fit and fold f + 1 chooses, so that every row tests once; only
    `valid` rows count. r2: of the real and imaginary part of each character of the class, as the probe predicts them;
    at most 0 on average where nothing is known.
    """
    num_targets = labels_BT.shape[1]
    target_BC = (labels_BT[..., None] == jnp.arange(p)).reshape(-1, num_targets * p).astype(jnp.float32)
    weight_B = valid_B.astype(jnp.float32)
    split = lambda values_BC: values_BC.reshape(-1, num_targets, p)  # noqa: E731

    def test(fold):
        fitted_B = weight_B * (fold_B != fold) * (fold_B != (fold + 1) % FOLDS)
        chooses_B, tests_B = weight_B * (fold_B == (fold + 1) % FOLDS), weight_B * (fold_B == fold)
        count = jnp.maximum(jnp.sum(fitted_B), 1)
        mean_D, mean_C = fitted_B @ features_BD / count, fitted_B @ target_BC / count
        x_BD = features_BD - mean_D
        eigenvalues, vectors_DR = jnp.linalg.eigh((x_BD * fitted_B[:, None]).T @ x_BD / count)
        cross_RC = vectors_DR.T @ ((x_BD * fitted_B[:, None]).T @ (target_BC - mean_C) / count)
        rotated_BR = x_BD @ vectors_DR

        def predict(penalty):
            shrunk_R = jnp.maximum(eigenvalues, 0) + penalty * jnp.maximum(jnp.mean(eigenvalues), 1e-12)
            return split(rotated_BR @ (cross_RC / shrunk_R[:, None]) + mean_C)

        predicted_RBTC = jax.lax.map(predict, jnp.array(PENALTIES))
        error_RT = jnp.einsum('b,rbtc->rt', chooses_B, (predicted_RBTC - split(target_BC)) ** 2)
        chosen_T = jnp.argmin(error_RT, 0)
        predicted_BTC = jnp.take_along_axis(predicted_RBTC, chosen_T[None, None, :, None], 0)[0]
        return predicted_BTC * tests_B[:, None, None]

    predicted_BTC = jnp.sum(jax.lax.map(test, jnp.arange(FOLDS)), 0)
    hit_BT = jnp.argmax(predicted_BTC, -1) == labels_BT
    basis = jnp.asarray(character_basis(p, root))[2 : (p - 1) // 2 + 2]
    true_BTF, found_BTF = (jnp.einsum('btc,fc->btf', values, basis) for values in (split(target_BC), predicted_BTC))
    total = jnp.maximum(jnp.sum(weight_B), 1)
    spread_BTF = jnp.abs(true_BTF - jnp.einsum('b,btf->tf', weight_B, true_BTF) / total) ** 2
    error_BTF = jnp.abs(true_BTF - found_BTF) ** 2
    r2_TF = 1 - jnp.einsum('b,btf->tf', weight_B, error_BTF) / jnp.einsum('b,btf->tf', weight_B, spread_BTF)
    return {'accuracy': weight_B @ hit_BT / total, 'r2': r2_TF}


def residuals(params, tokens_BL: jax.Array, positions: tuple[int, ...], cfg: Config) -> jax.Array:
    """Residual vectors (P, Q, B, D) at some positions, of the embedding and after every block."""
    names = ['embed', *(f'blocks.{n}.resid_post' for n in range(cfg.model.num_layers))]
    piece = PIECE if tokens_BL.shape[0] % PIECE == 0 else tokens_BL.shape[0]

    def run(tokens_BL):
        _, acts = model.apply(params, tokens_BL, cfg=cfg.model, capture=names)
        return jnp.stack([acts[name][:, np.array(positions)] for name in names]).astype(jnp.float32)

    found = jax.lax.map(run, tokens_BL.reshape(-1, piece, tokens_BL.shape[1]))  # (pieces, P, rows, Q, D)
    return found.transpose(1, 3, 0, 2, 4).reshape(len(names), len(positions), tokens_BL.shape[0], -1)


def coefficients(inputs_BS2: jax.Array, p: int) -> tuple[jax.Array, jax.Array]:
    """(c1, c2) (B, 2) with c1 e1 + c2 e2 = e3 modulo p for the three examples of each row, and which rows have them."""
    (x1, y1), (x2, y2), (x, y) = (inputs_BS2[:, s].T for s in range(3))
    scale = _inverse(p)[(x1 * y2 - y1 * x2) % p]
    return jnp.stack([(x * y2 - y * x2) * scale, (x1 * y - y1 * x) * scale], -1) % p, scale > 0


def probes(params, task_state, key, cfg: Config, *, num_rows: int = 0, root: int | None = None) -> dict[str, jax.Array]:
    """Probes of three kinds; accuracy, by chance 1 / p but for c, and r2 by frequency, by chance 0.

    c: the factor with c x1 = x, 1-shot rows without x1 = 0 and x = 0, which would tell c = 0 to a probe that knows x
    alone: chance 1 / (p - 1). c_control: the same for a random class of each pair (x1, x), which a probe can only learn
    by heart if at all. c1, c2: coefficients of two examples, 2-shot rows; at the x token nobody knows them. accuracy
    (P, Q), positions x and y of the query. a, b: the task, at the y token of the queries with `probed_shots` examples
    before them; accuracy (P, shots); fitted and tested on different tasks. best: the largest accuracy, ab/best that of
    the mean of a and b.
    num_rows: by default 2048, or 16 a residual dimension where that is more.
    """
    p, task = cfg.task.p, cfg.task
    num_rows = num_rows or max(2048, 16 * cfg.model.d_model // PIECE * PIECE)
    task_key, input_key, control_key, fold_key = jax.random.split(key, 4)
    number_B = jax.random.randint(task_key, (num_rows,), 0, p * p)
    vector_B2 = jnp.stack(jnp.divmod(number_B, p), -1)
    inputs_BS2 = jax.random.randint(input_key, (num_rows, task.num_examples, 2), 0, p)
    # Every fold of tasks has every a, and every b, equally often: a probe that knows nothing is then at chance.
    line_B = jnp.sum(vector_B2, -1) % p
    by_row_B, by_task_B = jnp.arange(num_rows) % FOLDS, (jax.random.permutation(fold_key, p) % FOLDS)[line_B]
    x1, x = inputs_BS2[:, 0, 0], inputs_BS2[:, 1, 0]
    control_B = control_classes(control_key, p)[x1, x]
    nonzero_B = (x1 > 0) & (x > 0)
    targets = [  # names, positions, labels, rows that count, folds
        (('c', 'c_control'), (3, 4), jnp.stack([x * _inverse(p)[x1] % p, control_B], -1), nonzero_B, by_row_B),
        (('a', 'b'), tuple(3 * k + 1 for k in probed_shots(task)), vector_B2, x1 >= 0, by_task_B),
    ]
    if task.num_examples > 2:
        targets.append((('c1', 'c2'), (6, 7), *coefficients(inputs_BS2, p), by_row_B))
    # One pass and one loop over all probes: what a query reads does not depend on what follows it.
    names, positions, labels, valid, folds = zip(*targets, strict=True)
    tokens_BL = task.rows(vector_B2, inputs_BS2).tokens_BL
    features_PQBD = residuals(params, tokens_BL, sum(positions, ()), cfg)
    labels_YBT, valid_YB, fold_YB = (jnp.stack(values) for values in (labels, valid, folds))
    which_Q = jnp.array([i for i, places in enumerate(positions) for _ in places])
    one = lambda x_BD, i: ridge_probe(x_BD, labels_YBT[i], valid_YB[i], fold_YB[i], p, root)  # noqa: E731
    measured = jax.lax.map(lambda x_QBD: jax.lax.map(lambda q: one(*q), (x_QBD, which_Q)), features_PQBD)
    found, start = {}, 0
    for pair, places in zip(names, positions, strict=True):
        for t, name in enumerate(pair):
            found |= {f'{name}/{quantity}': values[:, start : start + len(places), t]
                      for quantity, values in measured.items()}
            found[f'{name}/best'] = jnp.max(found[f'{name}/accuracy'])
        start += len(places)
    found['ab/best'] = jnp.max((found['a/accuracy'] + found['b/accuracy']) / 2)
    return found


def probed_shots(task) -> tuple[int, ...]:
    """Shots at which the task is probed: few, so that rows of 32 examples take seconds."""
    return tuple(k for k in (0, 1, 2, 3, 5, 8, 11, 16, 23, 31) if k < task.num_examples)


def control_classes(key: jax.Array, p: int) -> jax.Array:
    """A random Latin square (p, p) of the classes 1 to p - 1 in the places from 1 on, as x / x1 is one; 0 elsewhere."""
    rows, columns, classes = (jax.random.permutation(k, p - 1) for k in jax.random.split(key, 3))
    return jnp.pad(classes[(rows[:, None] + columns) % (p - 1)] + 1, ((1, 0), (1, 0)))


def _inverse(p: int) -> jax.Array:
    """1 / r modulo p (p,), 0 for r = 0."""
    return jnp.array([pow(r, -1, p) if r else 0 for r in range(p)])
