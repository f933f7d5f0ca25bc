"""What the parts of a recall model know: noise stored in feed-forwards, attention that finds the target.

Quantities of arXiv 2406.03068 (its official code measures them along training), with attention taken at repeated
triggers only and matched trigger by trigger.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from lingrok import model
from lingrok.config import Config
from lingrok.tasks.base import Batch, masked_mean, previous_token


def noise_margin(params, tokens: jax.Array, noise_id: int, *, cfg, layers: tuple[int, ...]) -> jax.Array:
    """Noise logit minus the best other logit when a feed-forward sees the embedding of a token alone.

    tokens: ids of any shape (triggers, as a rule); the margins have the same shape. Neither position, nor attention,
    nor the residual stream takes part: this is what the feed-forward has stored about the token, whatever the context.
    layers: of several feed-forwards, each reads what the one before adds.
    """
    x_BLD = jnp.asarray(params['embed'])[tokens.reshape(1, -1)]
    for layer in layers:
        x_BLD = model.feed_forward(params, x_BLD, cfg=cfg, layer=layer)
    logits = model.unembed(params, x_BLD, cfg=cfg)[0]
    return lead(logits, noise_id).reshape(tokens.shape)


def lead(logits, token_id: int) -> jax.Array:
    """The logit of a token minus the best other one, over the last axis."""
    others = jnp.where(jnp.arange(logits.shape[-1]) == token_id, -jnp.inf, logits)
    return logits[..., token_id] - jnp.max(others, -1)


def followers(tokens_BL: jax.Array) -> jax.Array:
    """Boolean (B, L, M): keys, up to the query, that stand behind an earlier occurrence of the query's token."""
    length = tokens_BL.shape[1]
    same_BLM = previous_token(tokens_BL)[:, None] == tokens_BL[:, :, None]
    return same_BLM & jnp.tril(jnp.ones((length, length), bool))


def trigger_attention(pattern_BHLM: jax.Array, batch: Batch, noise_id: int) -> dict[str, jax.Array]:
    """Attention of repeated triggers, mean over heads, on tokens that followed the same trigger earlier.

    target: on its target; noise: on the noise token; uniform: what a uniform pattern would put on its target.
    """
    tokens_BL, answer_BL = batch.tokens_BL, batch.groups['answer_BL']
    repeated_BL = batch.groups['occurrence_BL'] >= 2
    length, follows_BLM = tokens_BL.shape[1], followers(tokens_BL)
    target_BLM = follows_BLM & (tokens_BL[:, None] == answer_BL[:, :, None])
    noise_BLM = follows_BLM & (tokens_BL[:, None] == noise_id)
    pattern_BLM = jnp.mean(pattern_BHLM, 1)
    uniform_BLM = jnp.broadcast_to(1 / jnp.arange(1, length + 1)[None, :, None], pattern_BLM.shape)

    def mass(pattern_BLM, keys_BLM):
        return masked_mean(jnp.sum(pattern_BLM * keys_BLM, -1), repeated_BL)

    return {
        'target': mass(pattern_BLM, target_BLM),
        'noise': mass(pattern_BLM, noise_BLM),
        'uniform': mass(uniform_BLM, target_BLM),
    }


def previous_token_attention(pattern_BHLM: jax.Array) -> jax.Array:
    """Mean attention on the token before, over positions from the second on, heads (the best head) and sequences."""
    return jnp.max(jnp.mean(jnp.diagonal(pattern_BHLM, -1, 2, 3), (0, 2)))


def recall_probe(params, batches: Mapping, cfg: Config) -> dict[str, jax.Array]:
    """Noise margin of every feed-forward and of all of them composed; what the first and the last layer look at."""
    batch, noise_id, last = batches['noisy'], cfg.task.noise_id, cfg.model.num_layers - 1
    ids_V = jnp.arange(cfg.task.vocab_size)
    is_trigger_V = jnp.any(batch.groups['triggers_Bk'][..., None] == ids_V, (0, 1))
    layers = [layer for layer, kind in enumerate(cfg.model.mlp_kind) if kind != 'none']
    chains = {f'blocks.{layer}': (layer,) for layer in layers}
    if len(layers) > 1:
        chains['composed'] = tuple(layers)
    measured = {}
    for name, chain in chains.items():
        margins_V = noise_margin(params, ids_V, noise_id, cfg=cfg.model, layers=chain)
        measured[f'noise_margin/{name}'] = masked_mean(margins_V, is_trigger_V)
    patterns = (f'blocks.{layer}.attn.pattern' for layer in {0, last})
    _, acts = model.apply(params, batch.tokens_BL, cfg=cfg.model, capture=tuple(patterns))
    attention = trigger_attention(acts[f'blocks.{last}.attn.pattern'], batch, noise_id)
    measured |= {f'noisy/attention_{name}/blocks.{last}': value for name, value in attention.items()}
    measured['noisy/attention_previous/blocks.0'] = previous_token_attention(acts['blocks.0.attn.pattern'])
    return measured
