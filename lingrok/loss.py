"""The one loss: mean cross-entropy over the positions that the task scores, and its gradient."""

import math

import jax
import jax.numpy as jnp

from lingrok import model, optim
from lingrok.config import ModelConfig
from lingrok.tasks.base import Batch, label_log_probs

SHARES = (0.17, 0.37, 1)  # of the positions: for one of these the tail of the model is computed


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Weighted mean of -log p(target) in nats; logits (..., V), targets and weights (...). 0 if nothing has weight."""
    total = jnp.sum(weights)
    return -jnp.sum(label_log_probs(logits, targets) * weights) / jnp.where(total > 0, total, 1)


def loss_and_grad(trainable, frozen, batch: Batch, *, cfg: ModelConfig, skip: bool):
    """Loss of the model `optim.merge(trainable, frozen)` on a batch, and its gradient for `trainable`.

    With `skip`, what follows the attention of the last block is computed only at scored positions: for the smallest of
    a few fixed numbers of positions that holds all of them. The result is the same up to rounding. Under vmap all
    numbers would be computed, so `skip` is for replicas that run one after the other.
    """

    def run_trunk(trainable):
        return model.trunk(optim.merge(trainable, frozen), batch.tokens_BL, cfg=cfg)

    (h_BLD, z_BLHK), pull_back = jax.vjp(run_trunk, trainable)
    targets, weights = batch.targets_BL.reshape(-1), batch.mask_BL.reshape(-1)
    positions = jnp.nonzero(weights, size=weights.size, fill_value=0)[0]
    count = jnp.sum(weights > 0)

    def tail_loss(size):
        def run_tail(trainable, h, z):
            if size == weights.size:
                return cross_entropy(model.tail(optim.merge(trainable, frozen), h, z, cfg=cfg), targets, weights)
            at = positions[:size]
            logits = model.tail(optim.merge(trainable, frozen), h[at], z[at], cfg=cfg)
            return cross_entropy(logits, targets[at], jnp.where(jnp.arange(size) < count, weights[at], 0))

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
