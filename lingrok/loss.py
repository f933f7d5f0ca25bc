"""The one loss: mean cross-entropy over the positions that the task scores, and its gradient."""

import functools
import math

import jax
import jax.numpy as jnp

from lingrok import model, optim
from lingrok.config import ModelConfig
from lingrok.tasks.base import Batch, label_log_probs

SHARES = (0.17, 0.37, 1)  # of the positions: for one of these the tail of the model is computed


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array, *, form: str = 'softmax',
                  mean: str = 'scored') -> jax.Array:
    """Weighted mean of -log p(target) in nats; logits (..., V), targets and weights (...). 0 if nothing has weight.

    form, mean: `train.loss` and `train.loss_mean`.
    """
    losses = LOSSES[form](logits.astype(jnp.float32), targets)
    if mean == 'positive':
        weights = jnp.where(losses > 0, weights, 0)
    total = jnp.sum(weights)
    return jnp.sum(losses * weights) / jnp.where(total > 0, total, 1)


def exact_cross_entropy(logits, targets):
    """-log softmax(logits)[target] as log(1 + sum of the other classes), which keeps its digits near 0."""
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    lead = jnp.where(is_target, -jnp.inf, logits - jnp.take_along_axis(logits, targets[..., None], -1))
    shift = jax.lax.stop_gradient(jnp.maximum(jnp.max(lead, -1), 0))
    others = jnp.sum(jnp.exp(lead - shift[..., None]), -1)
    return shift + jnp.log1p(others + jnp.expm1(-shift))


def stablemax_cross_entropy(logits, targets):
    """-log of s(target) over the sum of s, where s(x) = x + 1 from 0 on and 1 / (1 - x) below (arXiv 2501.04697)."""
    magnitude = jnp.log1p(jnp.abs(logits))
    return -label_log_probs(jnp.where(logits >= 0, magnitude, -magnitude), targets)


LOSSES = {
    'softmax': lambda logits, targets: -label_log_probs(logits, targets),
    'exact': exact_cross_entropy,
    'stablemax': stablemax_cross_entropy,
}


def loss_and_grad(trainable, frozen, batch: Batch, *, cfg: ModelConfig, skip: bool, scored: slice = slice(None),
                  form: str = 'softmax', mean: str = 'scored'):
    """Loss of the model `optim.merge(trainable, frozen)` on a batch, and its gradient for `trainable`.

    With `skip`, what follows the attention of the last block is computed only at scored positions: for the smallest of
    a few fixed numbers of positions that holds all of them. The result is the same up to rounding. Under vmap all
    numbers would be computed, so `skip` is for replicas that run one after the other.

    scored: positions of a sequence outside which the batch has no weight, as a task promises; the last block computes
    no others. form, mean: `train.loss` and `train.loss_mean`.
    """

    def run_trunk(trainable):
        return model.trunk(optim.merge(trainable, frozen), batch.tokens_BL, cfg=cfg, queries=scored)

    (h_BLD, z_BLHK), pull_back = jax.vjp(run_trunk, trainable)
    targets, weights = batch.targets_BL[:, scored].reshape(-1), batch.mask_BL[:, scored].reshape(-1)
    positions = jnp.nonzero(weights, size=weights.size, fill_value=0)[0]
    count = jnp.sum(weights > 0)

    entropy = functools.partial(cross_entropy, form=form, mean=mean)

    def tail_loss(size):
        def run_tail(trainable, h, z):
            if size == weights.size:
                return entropy(model.tail(optim.merge(trainable, frozen), h, z, cfg=cfg), targets, weights)
            at = positions[:size]
            logits = model.tail(optim.merge(trainable, frozen), h[at], z[at], cfg=cfg)
            return entropy(logits, targets[at], jnp.where(jnp.arange(size) < count, weights[at], 0))

        return jax.value_and_grad(run_tail, (0, 1, 2))

    inputs = (trainable, h_BLD.reshape(-1, h_BLD.shape[-1]), z_BLHK.reshape(-1, *z_BLHK.shape[2:]))
    if skip:
        sizes = sorted({math.ceil(weights.size * share) for share in SHARES})
        smallest = jnp.searchsorted(jnp.array(sizes), count)
        loss, grads = jax.lax.switch(smallest, [tail_loss(size) for size in sizes], *inputs)
    else:
        loss, grads = tail_loss(weights.size)(*inputs)
    (through_trunk,) = pull_back((grads[1].reshape(h_BLD.shape), grads[2].reshape(z_BLHK.shape)))
    return loss, jax.tree.map(jnp.add, grads[0], through_trunk)
