"""Multiplicative characters modulo p: the basis in which tokens, heads and neurons of the modular task are simple.

Multiplication of residues is addition of their discrete logarithms, so that features of a model that multiplies live
in the Fourier basis over the logarithm (arXiv 2406.02550 plots with labels that are logarithms base 27 modulo 29). 0
has no logarithm and gets a dimension of its own.

Axes: F frequencies 1 to (p - 1) / 2 of real functions, of which frequency k holds both characters k and p - 1 - k; the
last one is the quadratic character. x, y: a residue.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lingrok import names
from lingrok.analysis.heads import head_outputs
from lingrok.analysis.scan import scan
from lingrok.config import Config, require

VIEWS = ('x at x', 'x at y', 'y at y')  # function of which number, at the token of which


def primitive_roots(p: int) -> tuple[int, ...]:
    """The residues whose powers are all non-zero residues modulo the prime p."""
    return tuple(g for g in range(1, p) if len({pow(g, k, p) for k in range(p - 1)}) == p - 1)


def primitive_root(p: int, root: int | None = None) -> int:
    """`root`, checked; by default 27 modulo 29, as in the paper, and else the smallest."""
    require(p >= 5, f'multiplicative characters of p={p}; allowed: primes from 5 on')
    roots = primitive_roots(p)
    root = (27 if p == 29 else roots[0]) if root is None else root
    require(root in roots, f'{root} is no primitive root modulo {p}; allowed: {", ".join(map(str, roots))}')
    return root


def log_table(p: int, root: int | None = None) -> np.ndarray:
    """Discrete logarithms (p,): log 0 = 0 by convention, log 1 = p - 1, so that every residue has its own number."""
    root, table = primitive_root(p, root), np.zeros(p, int)
    for exponent in range(1, p):
        table[pow(root, exponent, p)] = exponent
    return table


def character_basis(p: int, root: int | None = None) -> np.ndarray:
    """A unitary matrix (p, p): row 0 is the indicator of 0, row 1 + k the character exp(2 pi i k log(r) / (p - 1))."""
    log = log_table(p, root)
    rows = np.exp(2j * np.pi * np.outer(np.arange(p - 1), log) / (p - 1)) / np.sqrt(p - 1)
    rows[:, 0] = 0
    return np.concatenate([np.eye(1, p), rows]).astype(np.complex64)


def power(values: jax.Array, root: int | None = None) -> jax.Array:
    """Power (F, ...) of each frequency in real functions (p, ...) of a residue; constant and value at 0 left out."""
    power_k = jnp.abs(jnp.tensordot(character_basis(values.shape[0], root).conj(), values, 1)) ** 2
    half = (values.shape[0] - 1) // 2
    # Row 1 + k holds frequency k; the half frequency is its own conjugate.
    return jnp.concatenate([power_k[2 : half + 1] + power_k[half + 2 :][::-1], power_k[half + 1 : half + 2]])


def joint_power(values: jax.Array, root: int | None = None) -> jax.Array:
    """|c|^2 (p, p, ...) of the characters in x and y of functions (p, p, ...) of both; rows as `character_basis`."""
    basis = jnp.asarray(character_basis(values.shape[0], root).conj())
    return jnp.abs(jnp.einsum('kx,ly,xy...->kl...', basis, basis, values)) ** 2


def shares(power_F: jax.Array) -> jax.Array:
    """Power as a share of the sum over frequencies; 0 where there is none."""
    total = jnp.sum(power_F, 0)
    return jnp.where(total > 0, power_F / jnp.where(total > 0, total, 1), 0)


def random_shares(p: int) -> np.ndarray:
    """Expected shares (F,) of functions with independent values: two characters a frequency, one for the last."""
    half = (p - 1) // 2
    return np.array([2.0] * (half - 1) + [1.0]) / (p - 2)


def concentration(power_F: jax.Array) -> jax.Array:
    """Share of the largest frequency."""
    return jnp.max(shares(power_F), 0)


def neuron_layers(model_cfg) -> list[int]:
    """Layers whose feed-forward has a hidden layer."""
    return [n for n, kind in enumerate(model_cfg.mlp_kind) if 'mlp.post' in names.MLP_KINDS[kind][1]]


def views(values_B3: jax.Array, p: int) -> jax.Array:
    """Scanned activations (p^2, 3, ...) as functions (p, 3, ...) of one number, mean over the other; see VIEWS."""
    at_x, at_y = (values_B3[:, token].reshape(p, p, *values_B3.shape[2:]) for token in (0, 1))
    return jnp.stack([jnp.mean(at_x, 1), jnp.mean(at_y, 1), jnp.mean(at_y, 0)], 1)


def spectra(params, task_state, key, cfg: Config, *, slot: int = 2, vector: tuple[int, int] | None = None,
            root: int | None = None) -> dict[str, jax.Array]:
    """Shares of the frequencies in the token embedding, the output of every head, and the MLP neurons of every block.

    embedding/power (F,), heads/power (F, views, N, H), neurons/power (F, views, layers that have neurons), where the
    power of all neurons of a layer is added up. concentration: share of the largest frequency, of the embedding, each
    head (views, N, H), and of neurons one by one, mean of a layer weighted by power. random: the same of independent
    normal numbers of the same shape, mean of 64 draws.
    """
    p, model_cfg = cfg.task.p, cfg.model
    layers = neuron_layers(model_cfg)
    capture = ['blocks.*.attn.z', *(f'blocks.{n}.mlp.post' for n in layers)]
    acts = scan(params, task_state, key, cfg, slot=slot, vector=vector, capture=capture)
    drawn = jax.random.normal(key, (p, 64, model_cfg.d_model))
    parts = {'embedding': (jnp.asarray(params['embed'])[:p], model_cfg.d_model)}
    heads = [head_outputs(params, acts, model_cfg, layer) for layer in range(model_cfg.num_layers)]
    parts['heads'] = views(jnp.stack(heads, 2), p), model_cfg.d_head
    if layers:
        parts['neurons'] = views(jnp.stack([acts[f'blocks.{n}.mlp.post'] for n in layers], 2), p), 1
    found = {}
    for name, (values, width) in parts.items():
        power_F = power(values, root)
        each_F = power_F if name == 'neurons' else jnp.sum(power_F, -1, keepdims=True)
        found[f'{name}/power'] = shares(jnp.sum(each_F, -1))
        total = jnp.sum(each_F, (0, -1))
        found[f'{name}/concentration'] = jnp.sum(jnp.max(each_F, 0), -1) / jnp.where(total > 0, total, 1)
        found[f'{name}/highest_concentration'] = jnp.max(found[f'{name}/concentration'])
        found[f'{name}/concentration/random'] = jnp.mean(concentration(jnp.sum(power(drawn[..., :width], root), -1)))
    return found
