"""Low-rank truncation of weight matrices, as pure functions of params (LASER, arXiv 2312.13558; here by exact SVD).

Keeping the top fraction of singular directions of a matrix, or the bottom one, shows where an association is stored:
arXiv 2406.03068 removes the noise association by truncating a feed-forward. A fraction is relative to the largest
possible rank, min(shape); fraction 1 returns the parameters as they are and 0 removes the matrix.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lingrok.config import Config, ModelConfig, parse_truncation, require, suggest, truncatable_roles


class Spectrum(NamedTuple):
    """Singular value decomposition u diag(s) vt of one matrix, or of one a head with a leading axis H."""

    u: jax.Array
    s: jax.Array
    vt: jax.Array


def matrix(params, cfg: ModelConfig, role: str, layer: int) -> jax.Array:
    """The matrix of a role, (in, out); for 'ov' the product of value and output matrix of each head, (H, D, D)."""
    require(0 <= layer < cfg.num_layers, f'layer {layer}; allowed: 0 to {cfg.num_layers - 1}')
    allowed = truncatable_roles(cfg, layer)
    require(role in allowed, f'layer {layer} has no role {role!r}; {suggest(role, allowed)}')
    block = params[f'blocks_{layer}']
    if role != 'ov':
        return block[role]
    heads, width = cfg.num_heads, cfg.d_model
    if cfg.value_output == 'merged':
        return block['ov'].reshape(width, heads, width).transpose(1, 0, 2)
    v_HDK = block['v'].reshape(width, heads, cfg.d_head).transpose(1, 0, 2)
    return v_HDK @ block['o'].reshape(heads, cfg.d_head, width)


def spectrum(params, cfg: ModelConfig, role: str, layer: int) -> Spectrum:
    """Exact SVD of a matrix; pass it to `truncate` to pay for it once."""
    return Spectrum(*jnp.linalg.svd(matrix(params, cfg, role, layer), full_matrices=False))


def truncate(params, cfg: ModelConfig, role: str, layer: int, rank_fraction: float, *, keep: str = 'top',
             svd: Spectrum | None = None):
    """New params in which one matrix keeps its `keep` ('top' or 'bottom') singular directions.

    floor(rank_fraction * full rank) directions are kept; the full rank is min(shape), for 'ov' of factored heads the
    head width. Biases keep their effect. With svd=spectrum(params, cfg, role, layer) any number of fractions costs one
    decomposition, and fraction 0 none.

    >>> cfg = ModelConfig(num_layers=1, d_model=4, d_mlp=4)
    >>> params = {'blocks_0': {'mlp_in': jnp.diag(jnp.array([1.0, 5.0, 2.0, 3.0]))}}
    >>> edited = truncate(params, cfg, 'mlp_in', layer=0, rank_fraction=0.5)
    >>> [round(float(s), 3) for s in spectrum(edited, cfg, 'mlp_in', layer=0).s]
    [5.0, 3.0, 0.0, 0.0]
    """
    require_fraction(rank_fraction)
    require(keep in ('top', 'bottom'), f'keep={keep!r}; {suggest(keep, ("top", "bottom"))}')
    shape = jax.eval_shape(lambda p: matrix(p, cfg, role, layer), params).shape
    full = _full_rank(cfg, role, shape)
    rank = rank_of(rank_fraction, full)
    if rank == full:
        return params
    if rank == 0:
        block = params[f'blocks_{layer}']
        edited = {name: jnp.zeros_like(block[name]) for name in (('v', 'o') if _is_factored(cfg, role) else (role,))}
        return _with_roles(params, cfg, role, layer, edited)
    u, s, vt = spectrum(params, cfg, role, layer) if svd is None else svd
    kept = slice(0, rank) if keep == 'top' else slice(full - rank, full)
    edited = _with_product(cfg, role, u[..., kept] * s[..., None, kept], vt[..., kept, :])
    return _with_roles(params, cfg, role, layer, edited)


def select(params, cfg: ModelConfig, role: str, layer: int, kept_R: jax.Array, *, svd: Spectrum):
    """New params in which one matrix keeps the singular directions where kept_R (`full_rank`,) is 1; it may be traced.

    Values between 0 and 1 keep a part of a direction. svd: the `spectrum` of the matrix.
    """
    u, s, vt = (x[..., :full_rank(cfg, role, svd)] for x in (svd.u, svd.s, jnp.swapaxes(svd.vt, -1, -2)))
    edited = _with_product(cfg, role, u * (s * kept_R)[..., None, :], jnp.swapaxes(vt, -1, -2))
    return _with_roles(params, cfg, role, layer, edited)


def full_rank(cfg: ModelConfig, role: str, svd: Spectrum) -> int:
    """The largest rank that the matrix of a role can have; for 'ov' of factored heads the head width."""
    return _full_rank(cfg, role, (svd.u.shape[-2], svd.vt.shape[-1]))


def rank_of(rank_fraction: float, full: int) -> int:
    """Number of directions that a fraction of the full rank keeps, rounded down.

    >>> rank_of(0.29, 100), rank_of(0.1, 64)
    (29, 6)
    """
    return int(rank_fraction * full + 1e-6)  # .29 * 100 is 28.999... in binary


def require_fraction(rank_fraction) -> None:
    require(isinstance(rank_fraction, (int, float)) and 0 <= rank_fraction <= 1,
            f'rank_fraction={rank_fraction!r}; allowed: a number from 0 (removes the matrix) to 1 (keeps it)')


def _full_rank(cfg: ModelConfig, role: str, shape) -> int:
    return min(*shape[-2:], cfg.d_head) if _is_factored(cfg, role) else min(shape[-2:])


def _is_factored(cfg: ModelConfig, role: str) -> bool:
    return role == 'ov' and cfg.value_output == 'factored'


def _with_roles(params, cfg: ModelConfig, role: str, layer: int, edited: dict):
    """New params with the edited parameters of a block; biases keep their effect."""
    block = params[f'blocks_{layer}']
    if _is_factored(cfg, role) and cfg.bias:
        # The weights of a pattern sum to one, so the value bias adds a constant, which the new factors would change.
        edited['v_bias'] = jnp.zeros_like(block['v_bias'])
        edited['o_bias'] = block['o_bias'] + block['v_bias'] @ block['o']
    return {**params, f'blocks_{layer}': {**block, **edited}}


def _with_product(cfg: ModelConfig, role: str, left: jax.Array, right: jax.Array) -> dict[str, jax.Array]:
    """The parameters that make left @ right the matrix of a role."""
    if role != 'ov':
        return {role: left @ right}
    if cfg.value_output == 'merged':
        return {'ov': (left @ right).transpose(1, 0, 2).reshape(cfg.d_model, -1)}
    # The product of rank r goes into the first r columns and rows of the two factors of each head.
    pad = cfg.d_head - left.shape[-1]
    left, right = jnp.pad(left, ((0, 0), (0, 0), (0, pad))), jnp.pad(right, ((0, 0), (0, pad), (0, 0)))
    return {'v': left.transpose(1, 0, 2).reshape(cfg.d_model, -1), 'o': right.reshape(-1, cfg.d_model)}


def truncations(params, cfg: Config) -> dict[str, dict]:
    """The models of `eval.truncations` by name ('blocks.1.mlp_in@0.1'), at one decomposition a matrix."""
    spectra, edited = {}, {}
    for entry in cfg.eval.truncations:
        layer, role, fraction, keep = parse_truncation(entry)
        if 0 < fraction < 1 and (layer, role) not in spectra:
            spectra[layer, role] = spectrum(params, cfg.model, role, layer)
        svd = spectra.get((layer, role))
        edited[entry] = truncate(params, cfg.model, role, layer, fraction, keep=keep, svd=svd)
    return edited
