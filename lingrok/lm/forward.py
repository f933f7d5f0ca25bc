"""A model block by block: one compiled block serves all layers, and what an edit leaves alone is computed once.

An edit of layer n changes nothing before it. `residuals` keeps the stream before every block; `resume` goes on from
any of them, with other parameters or with activations replaced. A model of thirty layers then compiles one block.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from lingrok import model
from lingrok.config import ModelConfig, require

# Activation of a block (a name without 'blocks.N.') -> (where, value): value replaces it where `where` is true; both
# need only broadcast to it.
Replacement = Mapping[str, tuple[jax.Array, jax.Array]]


def block(params, h_BLD: jax.Array, *, cfg: ModelConfig, layer: int, replace: Replacement | None = None,
          capture: Sequence[str] = ()) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`model.block`, compiled once for all layers that are alike; what replaces an activation is traced."""
    require(0 <= layer < cfg.num_layers, f'layer {layer}; allowed: 0 to {cfg.num_layers - 1}')
    return _block(params[f'blocks_{layer}'], h_BLD, dict(replace or {}), cfg=cfg, layer=_alike(cfg, layer),
                  capture=tuple(capture))


@functools.partial(jax.jit, static_argnames=('cfg', 'layer', 'capture'))
def _block(block_params, h_BLD, replace, *, cfg, layer, capture):
    hooks = {name: lambda x, pair=pair: jnp.where(pair[0], pair[1].astype(x.dtype), x)
             for name, pair in replace.items()}
    return model.block(block_params, h_BLD, cfg=cfg, layer=layer, hooks=hooks, capture=capture)


@functools.cache
def _alike(cfg: ModelConfig, layer: int) -> int:
    """The first layer that differs from this one in its parameters only."""
    def kind(n):
        rotates = not cfg.rope_layers or n in cfg.rope_layers
        return rotates, *(field[n] for field in (cfg.mlp_kind, cfg.activation, cfg.parallel, cfg.attn_residual))

    return next(n for n in range(cfg.num_layers) if kind(n) == kind(layer))


@functools.partial(jax.jit, static_argnames='cfg')
def embed(params, tokens_BL: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """The residual stream before the first block (B, L, D)."""
    return model.embed(_outside(params), tokens_BL, cfg=cfg)


def residuals(params, tokens_BL: jax.Array, *, cfg: ModelConfig) -> list[jax.Array]:
    """The residual stream before every block and behind the last one, N + 1 arrays (B, L, D)."""
    stream = [embed(_outside(params), tokens_BL, cfg=cfg)]
    for layer in range(cfg.num_layers):
        stream.append(block(params, stream[-1], cfg=cfg, layer=layer)[0])
    return stream


def resume(params, h_BLD: jax.Array, *, cfg: ModelConfig, start: int,
           replace: Mapping[int, Replacement] | None = None) -> jax.Array:
    """The residual stream behind the last block (B, L, D), from that before the block `start`.

    replace: layer -> what replaces activations there.
    """
    replace = replace or {}
    require(all(start <= layer < cfg.num_layers for layer in replace), f'replacements in layers {sorted(replace)}; '
            f'allowed: {start}, where the stream starts, to {cfg.num_layers - 1}')
    for layer in range(start, cfg.num_layers):
        h_BLD, _ = block(params, h_BLD, cfg=cfg, layer=layer, replace=replace.get(layer))
    return h_BLD


def log_probs(params, h_BD: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """Log-probabilities (..., V) of the next token, from the residual stream behind the last block (..., D)."""
    return _log_probs(_outside(params), h_BD, cfg=cfg)


@functools.partial(jax.jit, static_argnames='cfg')
def _log_probs(params, h_BD, *, cfg):
    return jax.nn.log_softmax(model.head(params, h_BD, cfg=cfg))


def at(h_BLD: jax.Array, place_B: jax.Array) -> jax.Array:
    """The vectors (B, D) at one position of each row."""
    return h_BLD[jnp.arange(h_BLD.shape[0]), place_B]


def _outside(params) -> dict:
    """The parameters outside the blocks: the others would be arguments of the compiled program all the same."""
    return {name: value for name, value in params.items() if not name.startswith('blocks_')}
