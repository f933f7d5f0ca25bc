"""What a model can still do without some of its heads or feed-forwards.

Source: the head ablation in the authors' rebuttal to the reviews of arXiv 2406.02550 (mean over rows of the
pre-training tasks), extended to other replacements, to feed-forwards and to unseen tasks. A head is ablated where it
leaves its pattern, in 'attn.z', a feed-forward where it is added to the residual stream.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from lingrok import model
from lingrok.analysis import heads
from lingrok.config import Config

KINDS = ('mean', 'mean_all', 'zero', 'resample')
TOLERANCE = 0.05  # loss of accuracy up to which a head counts as removable


def ablate(params, task_state, key, cfg: Config, *, splits: tuple[str, ...], num_rows: int = 256) -> dict:
    """Accuracy at the last shot without every head, without every feed-forward, and without more and more heads.

    KINDS of replacement: the mean over rows of pre-training tasks, position by position; one mean over all positions
    too; zero; the value in another row, of a pre-training task.

    <split>/intact; <split>/<kind>/head (N, H), <split>/<kind>/mlp (N,), NaN for a block without; <split>/<kind>/heads
    and /mlps: without all of them; <split>/<kind>/previous_head: without ablation/previous_head, which looks at the
    token before; <split>/<kind>/worst_head: without the head that is missed most;
    <split>/cumulative (N H,): mean ablation of the first 1, 2, ... heads of ablation/order (N, H), which ranks them by
    the loss without one alone, on ood_train where that is one of `splits`; ablation/removable: how many of them can
    go for less than TOLERANCE there, NaN of a model that knows little more than chance;
    <split>/ratio: ratio matching on these rows.
    """
    reference_key, key = jax.random.split(key)
    rows = cfg.task.sample(task_state, reference_key, split='id_train', batch_size=num_rows)
    _, acts = model.apply(params, rows.tokens_BL, cfg=cfg.model, capture=(*_sites(cfg), '*.attn.pattern'))
    pattern_NBHLM = heads.stacked(acts, 'attn.pattern', cfg)[..., : heads.QUERIES[1], : heads.QUERIES[1]]
    previous = heads.statistics(pattern_NBHLM)['attention/previous_head']
    reference = {name: acts[name] for name in _sites(cfg)}
    batches = [cfg.task.sample(task_state, jax.random.fold_in(key, i), split=split, batch_size=num_rows)
               for i, split in enumerate(splits)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)

    def measure(setting):
        def on(batch):
            logits_BLV = ablated_logits(params, batch.tokens_BL, reference, *setting, cfg)
            found = cfg.task.metrics(logits_BLV, batch)
            return found['accuracy_last'], found['loss_last']

        return jax.lax.map(on, stacked)

    N, H = cfg.model.num_layers, cfg.model.num_heads
    singles = jnp.eye(N * H + N, dtype=bool)
    is_head = jnp.arange(N * H + N) < N * H
    parts = jnp.concatenate([singles, jnp.stack([is_head, ~is_head, jnp.zeros_like(is_head)])])
    kind_I, part_I = jnp.repeat(jnp.arange(len(KINDS)), len(parts)), jnp.tile(parts, (len(KINDS), 1))
    accuracy_IC, loss_IC = jax.lax.map(measure, (kind_I, part_I[:, : N * H].reshape(-1, N, H), part_I[:, N * H :]))
    judge = splits.index('ood_train') if 'ood_train' in splits else 0
    rank = jnp.argsort(jnp.argsort(loss_IC[: N * H, judge]))
    removed = rank <= jnp.arange(N * H)[:, None]
    no_mlp = jnp.zeros((N * H, N), bool)
    cumulative_IC, _ = jax.lax.map(measure, (jnp.zeros(N * H, int), removed.reshape(-1, N, H), no_mlp))

    has_mlp = jnp.array([kind != 'none' for kind in cfg.model.mlp_kind])
    found = {'ablation/order': rank.reshape(N, H), 'ablation/previous_head': previous}
    for i, (split, batch) in enumerate(zip(splits, batches, strict=True)):
        accuracy_KP = accuracy_IC[:, i].reshape(len(KINDS), -1)
        found[f'{split}/intact'] = accuracy_KP[0, -1]
        found[f'{split}/cumulative'] = cumulative_IC[:, i]
        found[f'{split}/ratio'] = cfg.task.baselines(task_state, batch)['accuracy_last/ratio']
        for kind, accuracy_P in zip(KINDS, accuracy_KP, strict=True):
            head_NH = accuracy_P[: N * H].reshape(N, H)
            found |= {f'{split}/{kind}/head': head_NH, f'{split}/{kind}/heads': accuracy_P[-3],
                      f'{split}/{kind}/mlp': jnp.where(has_mlp, accuracy_P[N * H : -3], jnp.nan),
                      f'{split}/{kind}/mlps': jnp.where(has_mlp.any(), accuracy_P[-2], jnp.nan),
                      f'{split}/{kind}/previous_head': head_NH[previous[0], previous[1]],
                      f'{split}/{kind}/worst_head': jnp.min(head_NH)}
    able = [found[f'{splits[judge]}/{name}'] for name in ('intact', 'cumulative')]
    return found | {'ablation/removable': removable(*able, cfg.task.p)}


def removable(intact, cumulative_C, p: int) -> jax.Array:
    """How many heads can go before the accuracy falls by TOLERANCE; NaN of a model that knows little beyond chance."""
    count = jnp.sum(jnp.cumprod(cumulative_C > intact - TOLERANCE))
    return jnp.where(intact - TOLERANCE > 2 / p, count, jnp.nan)


def _sites(cfg: Config) -> tuple[str, ...]:
    """Names of the activations that an ablation replaces."""
    mlps = [f'blocks.{layer}.mlp_out' for layer, kind in enumerate(cfg.model.mlp_kind) if kind != 'none']
    return (*(f'blocks.{layer}.attn.z' for layer in range(cfg.model.num_layers)), *mlps)


def ablated_logits(params, tokens_BL: jax.Array, reference: Mapping, kind, heads_NH, mlps_N, cfg: Config) -> jax.Array:
    """Logits (B, L, V) without the heads and feed-forwards that the masks name. All but `reference` may be traced.

    reference: activations by name, of as many rows as the batch has; kind: index into KINDS.
    """
    def hook(name, out):
        rows = reference[name]
        position = jnp.mean(rows, 0, keepdims=True)
        choices = (position, jnp.mean(position, 1, keepdims=True), jnp.zeros_like(position), rows)
        branches = [lambda choice=choice: jnp.broadcast_to(choice, rows.shape) for choice in choices]
        return lambda value: jnp.where(out, jax.lax.switch(kind, branches), value)

    hooks = {}
    for name in _sites(cfg):
        layer = int(name.split('.')[1])
        hooks[name] = hook(name, heads_NH[layer, :, None] if name.endswith('attn.z') else mlps_N[layer])
    return model.apply(params, tokens_BL, cfg=cfg.model, hooks=hooks)[0]
