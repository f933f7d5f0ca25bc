"""Pairs of embeddings stored in the matrices of a recall model, and which single position its heads look at.

Source: arXiv 2306.00802 and its official code. Each trained matrix of an induction head is read as a memory, a sum of
outer products of embeddings, and is tested by argmax over all answers it could give. Layers count from 0:

    wk0    key matrix of layer 0        position t + 1 asks for position t
    wk1    key matrix of layer 1        a trigger asks for what layer 0 writes about that trigger
    wo1    output matrix, last layer    what the head reads of a token raises the logit of that token
    ff1    last feed-forward            a token is followed by its row of bigrams

The first three are shares of right answers (chance: 1 / number of answers), ff1 is a divergence in nats. They read
single-head models without norms, biases, type embeddings and convolution, where these products are the whole path.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lingrok import model
from lingrok.config import Config, ConfigError, ModelConfig, require
from lingrok.tasks.base import Batch, divergence, masked_mean

EARLY = 64  # positions of the second number of wk0, as in the official code
LAWS = ('uniform', 'bigram')  # of targets
LEAST_CHANGE = 0.1  # between the first and the last value, for a half-way step to mean something


def wo1(params, cfg: ModelConfig) -> jax.Array:
    """Share of tokens v whose embedding, through value and output matrix of the last layer, has the top logit v."""
    _require_products(cfg)
    embed_VD = jnp.asarray(params['embed'])
    logits_VV = model.unembed(params, _value_output(embed_VD, params, cfg.num_layers - 1)[None], cfg=cfg)[0]
    return jnp.mean(jnp.argmax(logits_VV, -1) == jnp.arange(cfg.vocab_size))


def wk0(params, cfg: ModelConfig, *, positions: int | None = None) -> jax.Array:
    """Share of positions t for which position vector t + 1 scores highest with that of t in layer 0.

    Candidates are all positions but the last, whatever the causal mask; t runs over the first `positions` of them.
    """
    _require_products(cfg)
    require(cfg.position in ('learned', 'sinusoidal'), f'model.position={cfg.position!r} has no position vectors; '
            'allowed: learned or sinusoidal')
    require(cfg.max_len > 1, f'model.max_len={cfg.max_len} has no position before another; allowed: at least 2')
    at_LD = _positions(params, cfg)
    scores_LM = _scores(at_LD[1:], at_LD[:-1], params, cfg, 0)
    hit_L = jnp.argmax(scores_LM, -1) == jnp.arange(cfg.max_len - 1)
    return jnp.mean(hit_L[:positions])


def wk1(params, cfg: ModelConfig, triggers: tuple[int, ...] = (), *, candidates: tuple[int, ...] = ()) -> jax.Array:
    """Share of triggers q for which q scores highest, in layer 1, with what layer 0 writes about q.

    triggers: token ids, all by default. candidates: the answers, all tokens by default; the official code takes the
    triggers themselves, which makes a single trigger always right.
    """
    _require_products(cfg)
    require(cfg.num_layers == 2, f'wk1 reads models of two layers, found model.num_layers={cfg.num_layers}')
    everything = tuple(range(cfg.vocab_size))
    triggers, candidates = jnp.array(triggers or everything), jnp.array(candidates or everything)
    embed_VD = jnp.asarray(params['embed'])
    written_VD = _value_output(embed_VD[candidates], params, 0)
    found = candidates[jnp.argmax(_scores(embed_VD[triggers], written_VD, params, cfg, 1), -1)]
    return jnp.mean(found == triggers)


def ff1(params, cfg: ModelConfig, bigram_VV: jax.Array, mask_V: jax.Array) -> jax.Array:
    """KL divergence (nats) from the bigram row of a token to the softmax of the last feed-forward on its embedding.

    Mean over the tokens in `mask_V`. Neither the residual stream nor attention takes part, so the number means
    something only where all positions are trained on.
    """
    layer = cfg.num_layers - 1
    require(cfg.mlp_kind[layer] != 'none', f'layer {layer} has no feed-forward, whose bigrams ff1 reads')
    added_BLD = model.feed_forward(params, jnp.asarray(params['embed'])[None], cfg=cfg, layer=layer)
    return masked_mean(divergence(bigram_VV, model.unembed(params, added_BLD, cfg=cfg)[0]), mask_V)


def _require_products(cfg: ModelConfig) -> None:
    require(cfg.num_heads == 1, f'associations are read off models with one head, found model.num_heads='
            f'{cfg.num_heads}')
    plain = cfg.norm == 'none' and not cfg.bias and not cfg.num_types and not cfg.conv_width
    require(plain, f'associations are products of plain matrices; found model.norm={cfg.norm!r}, bias={cfg.bias}, '
            f'num_types={cfg.num_types}, conv_width={cfg.conv_width}; allowed: none, False, 0, 0')


def _value_output(x, params, layer: int):
    """What the head of a layer writes when it attends to x (..., D) alone."""
    w = params[f'blocks_{layer}']
    return x @ w['ov'] if 'ov' in w else x @ w['v'] @ w['o']


def _scores(queries, keys, params, cfg: ModelConfig, layer: int):
    """Attention scores (L, M) before any scaling."""
    w = params[f'blocks_{layer}']
    return (queries if cfg.query == 'identity' else queries @ w['q']) @ (keys @ w['k']).T


def _positions(params, cfg: ModelConfig):
    """Position vectors (max_len, D): the input of the blocks where all tokens embed to zero."""
    empty = {**params, 'embed': jnp.zeros_like(params['embed'])}
    return model.apply(empty, jnp.zeros((1, cfg.max_len), int), cfg=cfg, capture='embed')[1]['embed'][0]


def argmax_attention(first_BLM: jax.Array, last_BLM: jax.Array, logits_BLV: jax.Array, batch: Batch) -> dict:
    """Shares of positions at which a head looks most at the right one, from the patterns of one head a layer.

    First layer: previous: behind a trigger it looks at the trigger; previous_first: behind its first occurrence.
    Last layer, at repeated triggers: follows: it looks at a token that follows the same trigger; label, prediction: at
    a token equal to the label, to the most likely token. Both: chosen_previous: at the position that the last layer
    chose, the first looks at the token before; chosen_previous_own: the same where the label is the trigger itself.
    own_label: share of triggers whose label they are. NaN where no position counts.
    """
    tokens_BL, labels_BL, occurrence_BL = batch.tokens_BL, batch.targets_BL, batch.groups['occurrence_BL']
    repeated_BL, own_BL = occurrence_BL >= 2, tokens_BL == labels_BL
    places = jnp.arange(tokens_BL.shape[1])
    first_BL, chosen_BL = jnp.argmax(first_BLM, -1), jnp.argmax(last_BLM, -1)
    at_chosen = lambda x_BL: jnp.take_along_axis(x_BL, chosen_BL, 1)  # noqa: E731
    before_BL = jnp.take_along_axis(tokens_BL, jnp.maximum(chosen_BL - 1, 0), 1)
    read_BL = at_chosen(tokens_BL)
    looks_back_BL = (first_BL == places - 1) & (places > 0)
    behind_BL = jnp.pad(occurrence_BL, ((0, 0), (1, 0)))[:, :-1]  # occurrence of the trigger one position before
    return {
        'previous': masked_mean(looks_back_BL, behind_BL >= 1),
        'previous_first': masked_mean(looks_back_BL, behind_BL == 1),
        'follows': masked_mean((before_BL == tokens_BL) & (chosen_BL > 0), repeated_BL),
        'label': masked_mean(read_BL == labels_BL, repeated_BL),
        'prediction': masked_mean(read_BL == jnp.argmax(logits_BLV, -1), repeated_BL),
        'chosen_previous': masked_mean(at_chosen(looks_back_BL), repeated_BL),
        'chosen_previous_own': masked_mean(at_chosen(looks_back_BL), repeated_BL & own_BL),
        'own_label': masked_mean(own_BL, occurrence_BL >= 1),
    }


def association_probe(params, batches: Mapping[str, Batch], cfg: Config, *, bigram_VV=None) -> dict[str, jax.Array]:
    """All of the above on the noisy batch, every name a scalar, NaN for what the model or the task does not have.

    wk0_early is wk0 on the first EARLY positions, wk1_triggers the official wk1, with the triggers as candidates.
    Of several heads, attention is the mean pattern. bigram_VV: the law of the text; by default that of the table, NaN
    for a synthetic one, which is drawn.
    """
    task, cfg_model = cfg.task, cfg.model
    triggers = task.fixed_triggers if task.trigger_mode == 'fixed' else ()
    few = triggers if len(triggers) != 1 else None
    if bigram_VV is None and task.table != 'synthetic':
        bigram_VV = task.init(jax.random.key(0)).bigram_VV
    ids_V = jnp.arange(task.vocab_size)
    text_V = (ids_V < task.table_vocab) & ~jnp.isin(ids_V, jnp.array(triggers, int))
    measured = {
        'association/wo1': _or_nan(lambda: wo1(params, cfg_model)),
        'association/wk0': _or_nan(lambda: wk0(params, cfg_model)),
        'association/wk0_early': _or_nan(lambda: wk0(params, cfg_model, positions=EARLY)),
        'association/wk1': _or_nan(lambda: wk1(params, cfg_model, triggers)),
        'association/wk1_triggers': jnp.nan if few is None else _or_nan(
            lambda: wk1(params, cfg_model, few, candidates=few)),
        'association/ff1': jnp.nan if bigram_VV is None else _or_nan(lambda: ff1(params, cfg_model, bigram_VV, text_V)),
    }
    last = cfg_model.num_layers - 1
    logits_BLV, acts = model.apply(params, batches['noisy'].tokens_BL, cfg=cfg_model, capture='*.attn.pattern')
    first_BLM, last_BLM = (jnp.mean(acts[f'blocks.{layer}.attn.pattern'], 1) for layer in (0, last))
    shares = argmax_attention(first_BLM, last_BLM, logits_BLV, batches['noisy'])
    measured |= {f'noisy/argmax_{name}': value for name, value in shares.items()}
    return {name: jnp.asarray(value, jnp.float32) for name, value in measured.items()}


def _or_nan(probe: Callable[[], jax.Array]):
    try:
        return probe()
    except ConfigError:
        return jnp.nan


def associations(params, task_state, key, cfg: Config) -> dict[str, jax.Array]:
    """`association_probe` of one replica on fresh sequences of the training law."""
    batch = cfg.task.sample(task_state, key, split='noisy', batch_size=cfg.eval.batch_size)
    return association_probe(params, {'noisy': batch}, cfg, bigram_VV=task_state.bigram_VV)


def transfer(params, task_state, key, cfg: Config) -> dict[str, jax.Array]:
    """Accuracy at repeated triggers of clean sequences whose targets follow each of LAWS, whatever training had."""
    found = {}
    for law in LAWS:
        task = dataclasses.replace(cfg.task, target_law=law)
        batch = task.sample(task_state, key, split='clean', batch_size=cfg.eval.batch_size)
        logits_BLV, _ = model.apply(params, batch.tokens_BL, cfg=cfg.model)
        found[f'transfer/{law}'] = task.metrics(logits_BLV, batch)['accuracy']
    return found


def half_step(steps, values_TS) -> np.ndarray:
    """Step (S,) at which each replica first passes half way from its first to its last value, linear in between.

    NaN where a replica changes by less than LEAST_CHANGE or holds a NaN. steps (T,), values (T, S).
    """
    values_TS = np.asarray(values_TS, float)
    change_S = values_TS[-1] - values_TS[0]
    done_TS = (values_TS - values_TS[0]) / np.where(change_S == 0, 1, change_S) - 0.5
    after_S = np.argmax(done_TS >= 0, 0)
    before_S = np.maximum(after_S - 1, 0)
    low_S, high_S = (np.take_along_axis(done_TS, place_S[None], 0)[0] for place_S in (before_S, after_S))
    share_S = -low_S / np.where(high_S == low_S, 1, high_S - low_S)
    found_S = np.asarray(steps)[before_S] + share_S * (np.asarray(steps)[after_S] - np.asarray(steps)[before_S])
    return np.where(np.abs(change_S) >= LEAST_CHANGE, found_S, np.nan)
