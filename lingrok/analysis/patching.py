"""Activations of one prompt put into another: whose answer follows, or which mixture of the two?

The algorithm that arXiv 2406.02550 claims finds coefficients with c1 (x1, y1) + c2 (x2, y2) = (x, y) and answers
c1 z1 + c2 z2. Its two ingredients can be told apart by causal means: put the residual stream of a source prompt into a
base prompt, at one depth and some tokens, and see whose coefficients meet whose labels. This goes beyond the paper.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lingrok import model
from lingrok.config import Config
from lingrok.tasks.base import Batch, masked_mean

# What differs between the prompts, and the answers to tell apart. In 'coordinates' the inputs of the source are also
# those of the base moved by an invertible matrix, which keeps all relations: its query has other numbers than a query
# of the base with the same coefficients.
CONDITIONS = {
    'labels': ('base', 'source'),
    'query': ('base', 'source'),
    'both': ('base', 'source', 'coefficients', 'labels'),
    'coordinates': ('base', 'source', 'coefficients', 'labels', 'tokens'),
}
MIN_PAIRS = 10  # fewer that count make no share
GROUPS = ('x', 'y', 'z', 'examples', 'query x', 'query y', 'query')


class Pair(NamedTuple):
    """A base and a source prompt in every row, full of examples but for the label of the last one.

    answers (B,), by name. base, source: of that prompt; coefficients: those of the source's query, on the base's
    labels; labels: the source's, with the coefficients of the base's query; tokens: what the tokens of the source's
    query ask among the examples of the base.
    """

    base: Batch
    source: Batch
    answers: dict[str, jax.Array]


def pair(task_state, key, cfg: Config, *, condition: str, split: str, num_rows: int) -> Pair:
    """Random prompts that differ in what the condition says."""
    task, p = cfg.task, cfg.task.p
    base_key, query_key, matrix_key = jax.random.split(key, 3)
    drawn, other = (task.sample(task_state, k, split=split, batch_size=num_rows) for k in (base_key, query_key))
    inputs_BS2, task_B2 = _inputs(drawn), drawn.groups['task_B2']
    query_B2 = inputs_BS2[:, -1] if condition == 'labels' else _inputs(other)[:, -1]
    other_task_B2 = task_B2 if condition == 'query' else jnp.roll(task_B2, 1, 0)
    identity = jnp.broadcast_to(jnp.eye(2, dtype=jnp.int32), (num_rows, 2, 2))
    matrix_B22 = invertible(matrix_key, num_rows, p) if condition == 'coordinates' else identity
    move = lambda x_BS2: jnp.einsum('bij,bsj->bsi', matrix_B22, x_BS2) % p  # noqa: E731
    answer = lambda task_B2, x_B2: jnp.sum(task_B2 * x_B2, -1) % p  # noqa: E731
    moved_B2, moved_query_B2 = (move(x[:, None])[:, 0] for x in (inputs_BS2[:, -1], query_B2))
    return Pair(task.rows(task_B2, inputs_BS2),
                task.rows(other_task_B2, move(inputs_BS2.at[:, -1].set(query_B2))),
                {'base': answer(task_B2, inputs_BS2[:, -1]), 'source': answer(other_task_B2, moved_query_B2),
                 'coefficients': answer(task_B2, query_B2), 'labels': answer(other_task_B2, moved_B2),
                 'tokens': answer(task_B2, moved_query_B2)})


def _inputs(batch: Batch) -> jax.Array:
    """The inputs (B, S, 2) of rows."""
    rows = batch.tokens_BL.shape[0]
    return jnp.pad(batch.tokens_BL, ((0, 0), (0, 1))).reshape(rows, -1, 3)[..., :2]


def invertible(key, num: int, p: int) -> jax.Array:
    """Random invertible matrices (num, 2, 2) modulo p: a lower times an upper triangular one."""
    diagonal_key, other_key = jax.random.split(key)
    a, d = jax.random.randint(diagonal_key, (2, num), 1, p)
    low, up = jax.random.randint(other_key, (2, num), 0, p)
    return jnp.stack([jnp.stack([a, up], -1), jnp.stack([low * a, low * up + d], -1)], -2) % p


def sites(cfg: Config) -> tuple[str, ...]:
    """Where activations are exchanged, by depth: the residual stream before every block and after the last.

    In between there is nothing to see: what a feed-forward makes of exchanged tokens is exchanged with them.
    """
    num = cfg.model.num_layers
    return (*(f'blocks.{layer}.resid_pre' for layer in range(num)), f'blocks.{num - 1}.resid_post')


def positions(length: int) -> jax.Array:
    """The tokens (G, L) of each of the GROUPS in a row whose last two tokens are the query."""
    position_L = jnp.arange(length)
    x, y, z = (position_L % 3 == slot for slot in range(3))
    query = position_L >= length - 2
    return jnp.stack([x & ~query, y & ~query, z, ~query, x & query, y & query, query])


def patched_answers(params, base_BL, source_BL, depth_I, tokens_IL, cfg: Config) -> jax.Array:
    """Answers (I, B) at the last token of the base when residuals of the source are put in.

    depth_I: index into `sites`; tokens_IL: which tokens are exchanged.
    """
    _, source = model.apply(params, source_BL, cfg=cfg.model, capture=sites(cfg))

    def run(patch):
        depth, tokens_L = patch
        hooks = {name: lambda value, i=i, name=name: jnp.where((depth == i) & tokens_L[:, None], source[name], value)
                 for i, name in enumerate(sites(cfg))}
        return jnp.argmax(model.apply(params, base_BL, cfg=cfg.model, hooks=hooks)[0][:, -1], -1)

    return jax.lax.map(run, (depth_I, tokens_IL))


def interchange(params, task_state, key, cfg: Config, *, split: str = 'ood_train', num_rows: int = 512) -> dict:
    """Whose answer a model gives after an exchange, by depth and token group, for all CONDITIONS.

    Only prompts count where the answers to tell apart differ and the model answers both the base and the source
    rightly, so that chance is 1 / p; of a model that solves too few of them there is nothing to tell, NaN.

    <condition>/<answer> (N + 1, G): share of prompts with that answer; <condition>/kept: share of prompts that count;
    <condition>/<answer>_most: the largest of the shares after an exchange of the whole query.
    """
    found, pairs = {}, {}
    for i, condition in enumerate(CONDITIONS):
        pairs[condition] = pair(task_state, jax.random.fold_in(key, i), cfg, condition=condition, split=split,
                                num_rows=num_rows)
    groups_GL = positions(cfg.task.seq_len)
    depths, G, L = len(sites(cfg)), *groups_GL.shape
    # The last two say what the model answers to the base and to the source alone.
    depth_I = jnp.concatenate([jnp.repeat(jnp.arange(depths), G), jnp.array([0, 0])])
    tokens_IL = jnp.concatenate([jnp.tile(groups_GL, (depths, 1)), jnp.zeros((1, L), bool), jnp.ones((1, L), bool)])
    prompts = [jnp.stack([getattr(x, name).tokens_BL for x in pairs.values()]) for name in ('base', 'source')]
    run = lambda both: patched_answers(params, *both, depth_I, tokens_IL, cfg)  # noqa: E731
    for (condition, told_apart), answer_IB in zip(CONDITIONS.items(), jax.lax.map(run, tuple(prompts)), strict=True):
        answers = pairs[condition].answers
        alone_base_B, alone_source_B = answer_IB[-2:]
        kept_B = (alone_base_B == answers['base']) & (alone_source_B == answers['source'])
        for i, one in enumerate(told_apart):
            for other in told_apart[:i]:
                kept_B &= answers[one] != answers[other]
        for name in told_apart:
            hit_IB = (answer_IB[:-2] == answers[name]).astype(jnp.float32)
            share_I = jax.vmap(masked_mean, (0, None))(hit_IB, kept_B)
            share_I = jnp.where(jnp.sum(kept_B) >= MIN_PAIRS, share_I, jnp.nan)
            found[f'{condition}/{name}'] = share_I.reshape(depths, G)
            found[f'{condition}/{name}_most'] = jnp.max(share_I.reshape(depths, G)[:, GROUPS.index('query')])
        found[f'{condition}/kept'] = jnp.mean(kept_B)
    return found
