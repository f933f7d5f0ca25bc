"""Attention heads: what each one adds to the residual stream, and where it looks.

Source: Fig 6a and 11 of arXiv 2406.02550. Heads have no order that seeds share: they are found by criterion, never by
index. Rows are flat examples x y z, so that a token has a slot, its position modulo 3.
"""

import jax
import jax.numpy as jnp

from lingrok.config import ModelConfig


def head_outputs(params, acts, cfg: ModelConfig, layer: int) -> jax.Array:
    """What each head adds to the residual stream (B, L, H, D), from the captured 'attn.z' of the layer.

    z after the rows of the output matrix that are the head's own. Their sum is 'attn_out' but for its bias.
    """
    z_BLHK = acts[f'blocks.{layer}.attn.z']
    if cfg.value_output == 'merged':
        return z_BLHK
    o_HKD = jnp.asarray(params[f'blocks_{layer}']['o']).reshape(cfg.num_heads, cfg.d_head, cfg.d_model)
    return jnp.einsum('blhk,hkd->blhd', z_BLHK, o_HKD.astype(z_BLHK.dtype))
