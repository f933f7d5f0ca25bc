"""Where the last layer looks in noisy sequences: the map of one, and statistics at the triggers of many.

Quantities of arXiv 2406.03068; its official code counts every post-trigger position as correct and includes first
occurrences. Here keys are matched trigger by trigger, and only repeated triggers are queries. Derived: baselines.
"""

import jax
import jax.numpy as jnp

from lingrok import model
from lingrok.analysis import memory
from lingrok.config import Config, require
from lingrok.tasks.base import masked_mean

KINDS = ('target', 'noise', 'trigger', 'rest')


def key_kinds(batch, noise_id: int) -> dict[str, jax.Array]:
    """Boolean (B, L, M): which earlier keys are what for a query. Every key up to the query has one of KINDS.

    target, noise: the target or the noise token behind an earlier occurrence of the same trigger; trigger: an earlier
    or the present occurrence of the same trigger; rest: all others.
    """
    tokens_BL, answer_BL = batch.tokens_BL, batch.groups['answer_BL']
    length = tokens_BL.shape[1]
    causal_LM, follows_BLM = jnp.tril(jnp.ones((length, length), bool)), memory.followers(tokens_BL)
    target_BLM = follows_BLM & (tokens_BL[:, None] == answer_BL[:, :, None])
    noise_BLM = follows_BLM & (tokens_BL[:, None] == noise_id) & ~target_BLM
    trigger_BLM = (tokens_BL[:, None] == tokens_BL[:, :, None]) & causal_LM & ~target_BLM & ~noise_BLM
    rest_BLM = causal_LM & ~target_BLM & ~noise_BLM & ~trigger_BLM
    return dict(zip(KINDS, (target_BLM, noise_BLM, trigger_BLM, rest_BLM), strict=True))


def attention(params, task_state, key, cfg: Config, *, num_rows: int = 512, head: int = 0) -> dict[str, jax.Array]:
    """Mass of repeated triggers by kind of key in the last layer, mean over heads, and the map of one sequence.

    Queries are the repeated triggers of noisy sequences that have both a target and a noise token to look at.
    mass/<kind> and uniform/<kind>: of the model and of a uniform pattern; argmax/<kind>: share of queries whose largest
    weight is on that kind; selective: target over target and noise; selective/blind: the same of a pattern that looks
    at what follows the trigger whatever it is. previous: mass of layer 0 on the token before.
    map/pattern (L, M) of one head, map/tokens, map/occurrence (L,), map/answer (): the first sequence drawn.
    """
    last = cfg.model.num_layers - 1
    require(num_rows > 0, f'{num_rows} rows; allowed: at least 1')
    require(0 <= head < cfg.model.num_heads, f'head {head}; allowed: 0 to {cfg.model.num_heads - 1}')
    batch = cfg.task.sample(task_state, key, split='noisy', batch_size=num_rows)
    names = tuple(f'blocks.{layer}.attn.pattern' for layer in sorted({0, last}))
    acts = model.apply(params, batch.tokens_BL, cfg=cfg.model, capture=names)[1]
    pattern_BHLM = acts[names[-1]].astype(jnp.float32)
    kinds = key_kinds(batch, cfg.task.noise_id)
    counts = {kind: jnp.sum(keys_BLM, -1) for kind, keys_BLM in kinds.items()}
    scored_BL = (batch.groups['occurrence_BL'] >= 2) & (counts['target'] > 0) & (counts['noise'] > 0)
    pattern_BLM = jnp.mean(pattern_BHLM, 1)
    top_BL1 = jnp.argmax(pattern_BLM, -1)[..., None]
    mean = lambda x_BL: masked_mean(x_BL, scored_BL)  # noqa: E731
    masses = {kind: jnp.sum(pattern_BLM * keys_BLM, -1) for kind, keys_BLM in kinds.items()}
    found = {'previous': memory.previous_token_attention(acts[names[0]].astype(jnp.float32))}
    for kind, keys_BLM in kinds.items():
        found[f'mass/{kind}'] = mean(masses[kind])
        found[f'uniform/{kind}'] = mean(counts[kind] / jnp.arange(1, pattern_BLM.shape[1] + 1))
        found[f'argmax/{kind}'] = mean(jnp.take_along_axis(keys_BLM, top_BL1, -1)[..., 0])
    found['selective'] = mean(masses['target'] / jnp.maximum(masses['target'] + masses['noise'], 1e-9))
    found['selective/blind'] = mean(counts['target'] / jnp.maximum(counts['target'] + counts['noise'], 1))
    return found | {
        'map/pattern': pattern_BHLM[0, head],
        'map/tokens': batch.tokens_BL[0],
        'map/occurrence': batch.groups['occurrence_BL'][0],
        'map/answer': jnp.max(batch.groups['answer_BL'][0]),
    }
