"""What a task is: pure functions from keys to batches, with its own mask, chance level and exact baselines.

A task is a frozen dataclass registered with `config.register_task`. Its fields are the keys of `config.task`; those
named in `VARIABLE` may differ between the replicas of one program, so they live in the state as arrays. Everything is
written for one replica.
"""

from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Batch(NamedTuple):
    """Sequences and what a loss and the metrics need of them.

    tokens_BL  int32, inputs; targets_BL int32, the token to predict at each position;
    mask_BL    float32, weight of each position in the loss (0 or 1 in most tasks);
    groups     arrays by which metrics are split, named by the task.
    """

    tokens_BL: jax.Array
    targets_BL: jax.Array
    mask_BL: jax.Array
    groups: dict[str, jax.Array]


class Task(Protocol):
    """The contract. Training samples the split 'train'; the model is evaluated on every one of `splits`."""

    NAME: ClassVar[str]
    VARIABLE: ClassVar[tuple[str, ...]]
    FILES: ClassVar[tuple[str, ...]]  # fields that may hold the path of a file
    scored: slice  # positions of a sequence outside which no batch has weight
    splits: tuple[str, ...]
    headline: tuple[str, ...]  # names of the metrics that sum up a run

    @property
    def vocab_size(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    def init(self, key: jax.Array, **variable) -> Any:
        """The pools of the task as arrays; `variable` replaces the fields named in VARIABLE by traced values."""

    def sample(self, state: Any, key: jax.Array, *, split: str, batch_size: int, step=0) -> Batch:
        """A batch of a split. `step` is the training step, for what changes along training (weights, curricula)."""

    def check_batch(self, batch_size: int) -> None:
        """Raises ConfigError if the training law cannot fill a batch of this size."""

    def metrics(self, logits_BLV: jax.Array, batch: Batch) -> dict[str, jax.Array]: ...

    def baselines(self, state: Any, batch: Batch) -> dict[str, jax.Array]:
        """Losses of exact reference predictors on this very batch, as metrics ('loss/bayes')."""


def masked_mean(values, mask):
    """Mean of `values` where `mask` is positive, weighted by it; NaN where nothing is."""
    total = jnp.sum(mask)
    return jnp.where(total > 0, jnp.sum(jnp.where(mask > 0, values * mask, 0)) / jnp.maximum(total, 1e-9), jnp.nan)


def label_log_probs(logits_BLV, labels_BL):
    """Log-probability of each label (B, L), in float32."""
    logits_BLV = logits_BLV.astype(jnp.float32)
    picked_BL = jnp.take_along_axis(logits_BLV, labels_BL[..., None], -1)[..., 0]
    return picked_BL - jax.nn.logsumexp(logits_BLV, -1)


def divergence(law, logits):
    """Kullback-Leibler divergence in nats of softmax(logits) from a law, over the last axis of both (..., V)."""
    return jnp.sum(jax.scipy.special.xlogy(law, law) - law * jax.nn.log_softmax(logits.astype(jnp.float32)), -1)


def previous_token(tokens_BL):
    """The token before each position (B, L), -1 at the first one."""
    return jnp.pad(tokens_BL, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
