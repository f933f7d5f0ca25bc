"""Attention heads: what each one adds to the residual stream, and where it looks.

Source: Fig 6a and 11 of arXiv 2406.02550. Heads have no order that seeds share: they are found by criterion, never by
index. Rows are flat examples x y z, so that a token has a slot, its position modulo 3.
"""

import jax
import jax.numpy as jnp

from lingrok import model
from lingrok.config import Config, ModelConfig

QUERIES = (12, 48)  # first query position and the one after the last, as in the numbers of the released models
MAX_OFFSET = 36


def head_outputs(params, acts, cfg: ModelConfig, layer: int) -> jax.Array:
    """What each head adds to the residual stream (B, L, H, D), from the captured 'attn.z' of the layer.

    z after the rows of the output matrix that are the head's own. Their sum is 'attn_out' but for its bias.
    """
    z_BLHK = acts[f'blocks.{layer}.attn.z']
    if cfg.value_output == 'merged':
        return z_BLHK
    o_HKD = jnp.asarray(params[f'blocks_{layer}']['o']).reshape(cfg.num_heads, cfg.d_head, cfg.d_model)
    return jnp.einsum('blhk,hkd->blhd', z_BLHK, o_HKD.astype(z_BLHK.dtype))


def attention(params, task_state, key, cfg: Config, *, task: tuple[int, int] | None = None, tokens: int = 24,
              num_rows: int = 256) -> dict:
    """Where every head looks: maps of one row, and statistics over rows of unseen tasks.

    task: (a, b) of the row that is mapped; by default the first unseen task. tokens: length of the maps T.

    map/pattern (N, H, T, T), of the row map/tokens (T,) of the task map/task (2,), which is map/unseen or not.
    attention/by_offset (N, H, 3, O): mass on the token `offset` back, by slot of the query;
    attention/by_slot (N, H, 3, 3): mass on all tokens of a slot, by slot of the query;
    attention/first_token, attention/entropy (N, H): mass on token 0, entropy in nats; means over queries and slots;
    attention/best_by_slot (N, 3, 4), attention/best (N, 6): the most that a head of the layer puts on offsets 0 to 3,
    and over all slots on these, token 0, and tokens of its own slot; attention/uniform (6,): a uniform pattern does so;
    attention/previous_head (2,): layer and head with the largest mass on offset 1, attention/previous_mass; and
    attention/self_over_previous: what its y queries put on y over what they put on x.
    """
    row_key, key = jax.random.split(key)
    row = cfg.task.sample(task_state, row_key, split='ood_train', batch_size=1)
    if task is not None:
        inputs_BS2 = jnp.pad(row.tokens_BL, ((0, 0), (0, 1))).reshape(1, -1, 3)[..., :2]
        row = cfg.task.rows(jnp.array([task]), inputs_BS2)
    shown_BL, task_2 = row.tokens_BL[:, :tokens], row.groups['task_B2'][0]
    trains_T = jnp.all(task_state.tasks_T2 == task_2, -1) & (jnp.arange(cfg.task.p**2) < task_state.num_tasks)
    batch = cfg.task.sample(task_state, key, split='ood_train', batch_size=num_rows)
    found = {'map/pattern': patterns(params, shown_BL, cfg)[:, 0], 'map/tokens': shown_BL[0], 'map/task': task_2,
             'map/unseen': 1 - jnp.any(trains_T)}
    return found | statistics(patterns(params, batch.tokens_BL[:, : QUERIES[1]], cfg))


def patterns(params, tokens_BL, cfg: Config) -> jax.Array:
    """Attention patterns of all layers (N, B, H, L, M)."""
    return stacked(model.apply(params, tokens_BL, cfg=cfg.model, capture='*.attn.pattern')[1], 'attn.pattern', cfg)


def stacked(acts, name: str, cfg: Config) -> jax.Array:
    """An activation of every block, captured under its name, with the layer as first axis (N, ...)."""
    return jnp.stack([acts[f'blocks.{layer}.{name}'] for layer in range(cfg.model.num_layers)])


def statistics(pattern_NBHLM: jax.Array) -> dict[str, jax.Array]:
    """The quantities 'attention/...' of `attention`, over the queries that QUERIES names or the later half of a row."""
    length = pattern_NBHLM.shape[-1]
    position_L = jnp.arange(length)
    used_L = position_L >= min(QUERIES[0], length // 2)
    entropy_NHL = jnp.mean(-jnp.sum(jax.scipy.special.xlogy(pattern_NBHLM, pattern_NBHLM), -1), 1)
    pattern_NHLM = jnp.mean(pattern_NBHLM, 1)
    causal_LM = jnp.tril(jnp.ones((length, length)))
    found = _by_query(pattern_NHLM, used_L)
    uniform = _by_query((causal_LM / jnp.sum(causal_LM, -1, keepdims=True))[None, None], used_L)
    by_offset, best = found['by_offset'], jnp.max(_criteria(found), 1)
    previous = find_head(jnp.mean(by_offset, 2)[..., 1])
    y_offsets = by_offset[previous[0], previous[1], 1]
    found |= {
        'entropy': jnp.sum(entropy_NHL * used_L, -1) / jnp.sum(used_L),
        'best_by_slot': jnp.max(by_offset[..., :4], 1),
        'best': best,
        'uniform': _criteria(uniform)[0, 0],
        'previous_head': previous,
        'previous_mass': jnp.max(best[:, 1]),
        'self_over_previous': y_offsets[0] / y_offsets[1],
    }
    return {f'attention/{name}': value for name, value in found.items()}


def _by_query(pattern_NHLM, used_L) -> dict:
    """Mass by offset, by slot and on the first token, means over the used queries."""
    length = pattern_NHLM.shape[-1]
    query_L, offset_O = jnp.arange(length), jnp.arange(min(MAX_OFFSET, length))
    key_LO = query_L[:, None] - offset_O
    mass_NHLO = jnp.take_along_axis(pattern_NHLM, jnp.maximum(key_LO, 0)[None, None], -1)
    slot_LC = (query_L[:, None] % 3 == jnp.arange(3)) & used_L[:, None]
    weight_LCO = (slot_LC[..., None] & (key_LO >= 0)[:, None]).astype(jnp.float32)
    to_slot_NHLC = pattern_NHLM @ jax.nn.one_hot(query_L % 3, 3)
    mean_LC = slot_LC / jnp.sum(slot_LC, 0)
    return {
        'by_offset': jnp.einsum('nhlo,lco->nhco', mass_NHLO, weight_LCO) / jnp.maximum(jnp.sum(weight_LCO, 0), 1),
        'by_slot': jnp.einsum('nhlk,lc->nhck', to_slot_NHLC, mean_LC),
        'first_token': jnp.sum(pattern_NHLM[..., 0] * used_L, -1) / jnp.sum(used_L),
    }


def _criteria(found) -> jax.Array:
    """(N, H, 6): mass on offsets 0 to 3, on token 0 and on tokens of the own slot, mean over slots."""
    own = jnp.mean(jnp.diagonal(found['by_slot'], axis1=-2, axis2=-1), -1)
    others = jnp.stack([found['first_token'], own], -1)
    return jnp.concatenate([jnp.mean(found['by_offset'][..., :4], 2), others], -1)


def find_head(score_NH: jax.Array) -> jax.Array:
    """Layer and head (2,) with the largest score."""
    return jnp.stack(jnp.unravel_index(jnp.argmax(score_NH), score_NH.shape))
