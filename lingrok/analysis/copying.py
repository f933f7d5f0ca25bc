"""What a model of text has stored and what it copies from the context, with and without each of its layers.

The questions of arXiv 2406.03068 where nobody designed the data: which layers hold the bigram law, which copy. A layer
is taken out by ablation (see `ablation`); what a feed-forward has stored is read by giving it one embedding alone, as
the probe ff1 of the official code does, but behind the final norm, where the model has one.
"""

import jax
import jax.numpy as jnp

from lingrok import model
from lingrok.analysis import ablation, heads
from lingrok.config import Config
from lingrok.tasks.base import divergence

KINDS = ('mean', 'zero')
PARTS = ('attention', 'feed_forward')


def layers(params, task_state, key, cfg: Config, *, num_rows: int = 128) -> dict:
    """The metrics of the text task on every split: of the model, and without each attention and feed-forward layer.

    KINDS of replacement: the mean over windows of the training text, position by position; zero. In the names that
    follow, <metric> is that of the task on a split, 'test/loss'.

    <metric>/intact; <metric>/<kind>/attention and /feed_forward (N,): without that of one layer; <metric>/<kind>/
    all_attention and all_feed_forward: without those of all layers; NaN where there is no feed-forward; and the
    baselines of the task, 'test/loss/bigram'.
    """
    key, reference_key = jax.random.split(key)
    draw = lambda key, split: cfg.task.sample(task_state, key, split=split, batch_size=num_rows)  # noqa: E731
    batches = {split: draw(jax.random.fold_in(key, i), split) for i, split in enumerate(cfg.task.splits)}
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches.values())
    N, H = cfg.model.num_layers, cfg.model.num_heads
    has_mlp_N = jnp.array([kind != 'none' for kind in cfg.model.mlp_kind])
    sites = ('*.attn.z', *(('*.mlp_out',) if any(kind != 'none' for kind in cfg.model.mlp_kind) else ()))
    _, reference = model.apply(params, draw(reference_key, 'train_text').tokens_BL, cfg=cfg.model, capture=sites)

    def measure(setting):
        kind, attention_N, mlp_N = setting
        heads_NH = jnp.broadcast_to(attention_N[:, None], (N, H))

        def on(batch):
            logits_BLV = ablation.ablated_logits(params, batch.tokens_BL, reference, kind, heads_NH, mlp_N, cfg)
            return cfg.task.metrics(logits_BLV, batch)

        return jax.lax.map(on, stacked)

    is_attention = jnp.arange(2 * N) < N
    parts = jnp.concatenate([jnp.eye(2 * N, dtype=bool), jnp.stack([is_attention, ~is_attention])])
    parts = jnp.concatenate([jnp.zeros((1, 2 * N), bool), *[parts] * len(KINDS)])
    kind_I = jnp.array([0] + [ablation.KINDS.index(kind) for kind in KINDS for _ in range(2 * N + 2)])
    table = jax.lax.map(measure, (kind_I, parts[:, :N], parts[:, N:]))
    found = {}
    for s, (split, batch) in enumerate(batches.items()):
        for quantity, values_IC in table.items():
            name, value_I = f'{split}/{quantity}', values_IC[:, s]
            found[f'{name}/intact'] = value_I[0]
            for kind, value_P in zip(KINDS, value_I[1:].reshape(len(KINDS), -1), strict=True):
                found |= {f'{name}/{kind}/attention': value_P[:N],
                          f'{name}/{kind}/feed_forward': jnp.where(has_mlp_N, value_P[N : 2 * N], jnp.nan),
                          f'{name}/{kind}/all_attention': value_P[-2],
                          f'{name}/{kind}/all_feed_forward': jnp.where(has_mlp_N.any(), value_P[-1], jnp.nan)}
        found |= {f'{split}/{name}': value for name, value in cfg.task.baselines(task_state, batch).items()}
    return found


def bigram_memory(params, task_state, cfg: Config) -> dict:
    """Kullback-Leibler divergence (nats) from the bigram row of a token to what a part says of its embedding alone.

    Means over tokens by their frequency, of logits behind the final norm. memory/feed_forward (N,): of what each
    feed-forward adds, NaN for a layer without; memory/embedding: of the embedding itself; memory/unigram: of the
    unigram law; memory/uniform: of the uniform law.
    """
    last = cfg.model.num_layers - 1
    ids_V1 = jnp.arange(cfg.task.vocab_size)[:, None]
    embed_V1D = jnp.asarray(params['embed'])[ids_V1]
    law_VV, unigram_V = jnp.asarray(task_state.bigram_VV), jnp.asarray(task_state.unigram_V)

    def mean_divergence(logits_VV):
        return jnp.sum(unigram_V * divergence(law_VV, logits_VV))

    def of(value_V1D):
        """Of a residual stream that ends as `value`."""
        hooks = {f'blocks.{last}.resid_post': lambda x: value_V1D.astype(x.dtype)}
        logits_V1V = model.apply(params, ids_V1, cfg=cfg.model, hooks=hooks)[0]
        return mean_divergence(logits_V1V[:, 0, : cfg.task.vocab_size])

    stored = [of(model.feed_forward(params, embed_V1D, cfg=cfg.model, layer=layer)) if kind != 'none' else jnp.nan
              for layer, kind in enumerate(cfg.model.mlp_kind)]
    return {
        'memory/feed_forward': jnp.stack([jnp.asarray(x) for x in stored]),
        'memory/embedding': of(embed_V1D),
        'memory/unigram': mean_divergence(jnp.log(unigram_V)),
        'memory/uniform': mean_divergence(jnp.zeros_like(unigram_V)),
    }


def induction(params, tokens_BL: jax.Array, cfg: Config) -> dict:
    """Where heads look in sequences (B, L) whose second half repeats the first, means over the second half.

    induction/head (N, H): mass on the token that followed the previous occurrence of the query's token, L / 2 - 1 back;
    induction/previous (N, H): mass on the token before; induction/best_head, induction/best_previous: the largest;
    induction/uniform: what a uniform pattern puts on one token.
    """
    half = tokens_BL.shape[1] // 2
    pattern_NBHLM = heads.patterns(params, tokens_BL, cfg)
    query = jnp.arange(half, tokens_BL.shape[1])

    def mass(back):
        return jnp.mean(pattern_NBHLM[..., query, query - back], (1, 3))

    head_NH, previous_NH = mass(half - 1), mass(1)
    return {
        'induction/head': head_NH, 'induction/previous': previous_NH,
        'induction/best_head': jnp.max(head_NH), 'induction/best_previous': jnp.max(previous_NH),
        'induction/uniform': jnp.mean(1 / (query + 1)),
    }


def dynamics(params, task_state, key, cfg: Config, *, num_rows: int = 128) -> dict:
    """All of the above of one replica: `layers`, `bigram_memory`, and `induction` on random repeated sequences."""
    layer_key, key = jax.random.split(key)
    random = cfg.task.sample(task_state, key, split='random_repeated', batch_size=num_rows)
    return (layers(params, task_state, layer_key, cfg, num_rows=num_rows) | bigram_memory(params, task_state, cfg)
            | induction(params, random.tokens_BL, cfg))
