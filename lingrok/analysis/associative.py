"""Noise in a linear associative memory, and which singular directions to remove (arXiv 2406.03068, theory).

n inputs with embeddings E (n, D); input j is followed by output j with probability 1 - noise_prob, else by the common
noise output n, so there are n + 1 outputs with unembeddings U (n + 1, D). The matrix W = U' C E is trained by full
gradients of the cross-entropy from zero; A = U W E' is the table (outputs, inputs) of logits that it stores.

With orthonormal embeddings A = a on the diagonal, b off it, c in the row of the noise, and its singular directions are
one that is common to all inputs, of value sqrt(n + 1) |c|, which carries the noise, and n - 1 contrasts of value
|a - b|, which carry the mapping and put nothing on the noise. Truncation removes the noise where it takes the common
direction: the bottom one while sqrt(n + 1) |c| < |a - b|, the top one afterwards. Derived here; see the tests.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lingrok.config import require, suggest

KINDS = ('full', 'bottom', 'top')  # nothing removed, the smallest direction removed, the largest removed


class Memory(NamedTuple):
    """Embeddings (n, D) of the inputs, unembeddings (n + 1, D) of the outputs, the noise last."""

    embed_ND: jax.Array
    unembed_OD: jax.Array


def orthonormal(num_inputs: int) -> Memory:
    """Unit vectors: D = n + 1."""
    return Memory(jnp.eye(num_inputs, num_inputs + 1), jnp.eye(num_inputs + 1))


def gaussian(num_inputs: int, width: int, key: jax.Array) -> Memory:
    """Independent Gaussian vectors of squared length about 1."""
    vectors = jax.random.normal(key, (2 * num_inputs + 1, width)) / width**0.5
    return Memory(vectors[:num_inputs], vectors[num_inputs:])


def target_law(num_inputs: int, noise_prob) -> jax.Array:
    """Law of the output (n + 1, n) for each input, in columns."""
    clean_OJ = jnp.eye(num_inputs + 1, num_inputs)
    return (1 - noise_prob) * clean_OJ + noise_prob * jax.nn.one_hot(num_inputs, num_inputs + 1)[:, None]


def flow(memory: Memory, noise_prob, *, steps: Sequence[int], step_size: float = 0.1) -> jax.Array:
    """Coefficients C (T, n + 1, n) of W = U' C E after the given numbers of steps of gradient descent from zero.

    The loss is summed over inputs; the time of the gradient flow is steps * step_size. noise_prob may be traced.
    """
    require(list(steps) == sorted(steps) and min(steps) >= 0, f'steps={tuple(steps)}; allowed: increasing numbers')
    law_OJ = target_law(len(memory.embed_ND), noise_prob)

    def step(_, c_OJ):
        return c_OJ + step_size * (law_OJ - jax.nn.softmax(table(memory, c_OJ), 0))

    def until(c_OJ, bounds):
        c_OJ = jax.lax.fori_loop(*bounds, step, c_OJ)
        return c_OJ, c_OJ

    ends = jnp.array(steps)
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    return jax.lax.scan(until, jnp.zeros_like(law_OJ), (starts, ends))[1]


def table(memory: Memory, c_OJ) -> jax.Array:
    """Logits (n + 1, n) that the coefficients stand for: A = U U' C E E'."""
    dot = lambda a, b: jnp.dot(a, b, precision='highest')  # noqa: E731
    return dot(dot(memory.unembed_OD, memory.unembed_OD.T), dot(c_OJ, dot(memory.embed_ND, memory.embed_ND.T)))


def rotated(memory: Memory) -> Memory:
    """The same overlaps in at most n + 1 dimensions: inputs and outputs each in an orthonormal basis of their span.

    W has the same singular values and the same table without any of its directions, at an SVD of a small matrix.
    """
    return Memory(*(jnp.linalg.qr(vectors.T, mode='r').T for vectors in memory))


def matrix(memory: Memory, c_OJ) -> jax.Array:
    """W (D, D), of rank n at most; logits are U W E'. After `rotated` (n + 1, n)."""
    return memory.unembed_OD.T @ c_OJ @ memory.embed_ND


def removed(w_DD: jax.Array, kind: str, rank: int) -> jax.Array:
    """The matrix without one of its `rank` singular directions: the smallest ('bottom') or the largest ('top').

    As lowrank.truncate keeps the top, or the bottom, rank - 1 of them.
    """
    require(kind in KINDS, f'kind={kind!r}; {suggest(kind, KINDS)}')
    if kind == 'full':
        return w_DD
    u, s, vt = jnp.linalg.svd(w_DD, full_matrices=False)
    kept = slice(0, rank - 1) if kind == 'bottom' else slice(1, rank)
    return (u[:, kept] * s[kept]) @ vt[kept]


def read(memory: Memory, w_DD: jax.Array) -> dict[str, jax.Array]:
    """p_correct, p_noise: mean over inputs; margin: least lead in logits of the correct output over the noise."""
    logits_OJ = memory.unembed_OD @ w_DD @ memory.embed_ND.T
    p_OJ = jax.nn.softmax(logits_OJ, 0)
    return {'p_correct': jnp.mean(jnp.diagonal(p_OJ)), 'p_noise': jnp.mean(p_OJ[-1]),
            'margin': jnp.min(jnp.diagonal(logits_OJ) - logits_OJ[-1])}


def structure(table_OJ: jax.Array) -> dict[str, jax.Array]:
    """a, b, c of a symmetric table, and the singular values of the two kinds of direction that follow from them."""
    n = table_OJ.shape[1]
    a, b, c = table_OJ[0, 0], table_OJ[1, 0], table_OJ[n, 0]
    return {'a': a, 'b': b, 'c': c, 'sigma_common': (n + 1) ** 0.5 * jnp.abs(c), 'sigma_contrast': jnp.abs(a - b)}


def trajectory(memory: Memory, noise_prob, *, steps: Sequence[int], step_size: float = 0.1) -> dict[str, jax.Array]:
    """`structure` of the table, its singular values, and `read` of every truncation, after each number of steps (T,).

    '<kind>/p_correct', '<kind>/p_noise', '<kind>/margin' for kind of KINDS; singular (T, n).
    """
    n, memory = len(memory.embed_ND), rotated(memory)

    def at(c_OJ):
        w_DD = matrix(memory, c_OJ)
        found = structure(table(memory, c_OJ)) | {'singular': jnp.linalg.svd(w_DD, compute_uv=False)[:n]}
        return found | {f'{kind}/{name}': value for kind in KINDS
                        for name, value in read(memory, removed(w_DD, kind, n)).items()}

    return jax.lax.map(at, flow(memory, noise_prob, steps=steps, step_size=step_size))


def threshold(num_inputs: int) -> float:
    """Noise probability below which the common direction is the bottom one after the first step: 1 / sqrt(n + 1)."""
    return (num_inputs + 1) ** -0.5


def crossing(steps, sigma_common_T, sigma_contrast_T) -> jax.Array:
    """The first of `steps` at which the common direction is the top one; NaN if it never is."""
    above_T = sigma_common_T > sigma_contrast_T
    return jnp.where(jnp.any(above_T), jnp.asarray(steps, float)[jnp.argmax(above_T)], jnp.nan)
