"""Induction in three gradient steps: one step on each memory of a simplified model, from zero.

Source: the theorem of arXiv 2306.00802 on the order output matrix, key matrix of layer 1, key matrix of layer 0, here
checked on the real model and its gradient. Vectors are orthonormal, or random ones of variance 1 / d_model. Sequences
hold one trigger, different ones in different sequences, twice:

    u u q y u u q u     the label of the second q is y; q at random positions, the rest u uniform on other tokens

A query that always stood at the end would make its position a common trigger, which drowns the tokens' own. Pairs of
trigger and label are balanced, which takes out the noise of their frequencies: the theorem has no noise.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from lingrok import model, optim
from lingrok.analysis import associations
from lingrok.config import ModelConfig
from lingrok.loss import loss_and_grad
from lingrok.tasks.base import Batch, label_log_probs, masked_mean

TOP_DOWN = ('blocks.1.o', 'blocks.1.k', 'blocks.0.k')
ORDERS = {'top_down': TOP_DOWN, 'bottom_up': TOP_DOWN[::-1]}
SHIFTS = 8  # sequences of every trigger in a piece


def model_config(vocab_size: int, length: int, width: int = 0) -> ModelConfig:
    """The simplified model: two layers of one head with identity queries, no feed-forward.

    width: of random vectors; by default just what orthonormal ones need, see `init`.
    """
    return ModelConfig(num_layers=2, d_model=width or 3 * vocab_size + 2 * length, vocab_size=vocab_size,
                       max_len=length, query='identity', scale_scores=False, mlp_kind=('none',), init='fan_in',
                       embed_std=(width or 1) ** -0.5, pos_std=(width or 1) ** -0.5)


def init(key: jax.Array, cfg: ModelConfig, *, orthonormal: bool = True) -> dict:
    """Parameters, the three memories zero. The rest is random, or has orthonormal vectors, which are coordinates:

    tokens and positions take V + L of them, what layer 0 writes about each the next V + L, the unembedding V more.
    """
    params = model.init(key, cfg)
    zero = optim.match(params, TOP_DOWN)
    params = jax.tree.map(lambda x, is_memory: jnp.zeros_like(x) if is_memory else x, params, zero)
    if not orthonormal:
        return params
    vocab, inputs, axes = cfg.vocab_size, cfg.vocab_size + cfg.max_len, jnp.eye(cfg.d_model)
    moved = jnp.zeros_like(axes).at[:inputs].set(axes[inputs : 2 * inputs])
    return params | {'embed': axes[:vocab], 'pos': axes[vocab:inputs], 'unembed': axes[2 * inputs :][:vocab].T,
                     'blocks_0': params['blocks_0'] | {'v': moved, 'o': axes},
                     'blocks_1': params['blocks_1'] | {'v': axes}}


def piece_size(cfg: ModelConfig) -> int:
    """Sequences that are drawn and differentiated at once."""
    return SHIFTS * cfg.vocab_size


def sample(key: jax.Array, cfg: ModelConfig, index) -> Batch:
    """Piece `index` of a batch, scored at the second trigger; groups: trigger_B, first_B (its first position).

    Every token is SHIFTS times the trigger and as often the label; the pieces go round through all ordered pairs.
    """
    length, vocab = cfg.max_len, cfg.vocab_size
    keys, num = jax.random.split(key, 3), piece_size(cfg)
    trigger_B1 = jnp.arange(num)[:, None] % vocab
    shift_B1 = 1 + (index * SHIFTS + jnp.arange(num)[:, None] // vocab) % (vocab - 1)
    label_B1 = (trigger_B1 + shift_B1) % vocab
    first_B1 = jax.random.randint(keys[0], (num, 1), 0, length - 2)
    second_B1 = jax.random.randint(keys[2], (num, 1), first_B1 + 2, length)
    other_BL = jax.random.randint(keys[1], (num, length), 0, vocab - 1)
    other_BL = other_BL + (other_BL >= trigger_B1)  # uniform on all tokens but the trigger
    places = jnp.arange(length)
    is_trigger_BL = (places == first_B1) | (places == second_B1)
    tokens_BL = jnp.where(is_trigger_BL, trigger_B1, jnp.where(places == first_B1 + 1, label_B1, other_BL))
    targets_BL = jnp.where(places == second_B1, label_B1, jnp.roll(tokens_BL, -1, 1))
    mask_BL = jnp.broadcast_to((places == second_B1).astype(jnp.float32), tokens_BL.shape)
    return Batch(tokens_BL, targets_BL, mask_BL, {'trigger_B': trigger_B1[:, 0], 'first_B': first_B1[:, 0]})


def step(params, key: jax.Array, rate, *, cfg: ModelConfig, role: str, pieces: int) -> tuple[dict, jax.Array]:
    """Parameters after one gradient step on the matrix `role`, on so many pieces; and the norm of the gradient."""
    trainable, frozen = optim.split(params, [name for name in optim.parameter_names(params) if name != role])

    def add(total, index):
        batch = sample(jax.random.fold_in(key, index), cfg, index)
        _, grads = loss_and_grad(trainable, frozen, batch, cfg=cfg, skip=False)
        return jax.tree.map(jnp.add, total, grads), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, trainable), jnp.arange(pieces))
    moved = jax.tree.map(lambda x, g: x - rate * g / pieces, trainable, total)
    return optim.merge(moved, frozen), jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(total))) / pieces


def state(params, key: jax.Array, *, cfg: ModelConfig, pieces: int) -> dict[str, jax.Array]:
    """Probes of the three memories, accuracy and loss on so many pieces."""

    def score(index):
        batch = sample(jax.random.fold_in(key, index), cfg, index)
        logits_BLV, _ = model.apply(params, batch.tokens_BL, cfg=cfg)
        hit_BL = jnp.argmax(logits_BLV, -1) == batch.targets_BL
        loss_BL = -label_log_probs(logits_BLV, batch.targets_BL)
        return masked_mean(hit_BL, batch.mask_BL), masked_mean(loss_BL, batch.mask_BL)

    hits, losses = jax.lax.map(score, jnp.arange(pieces))
    return {'wo1': associations.wo1(params, cfg), 'wk1': associations.wk1(params, cfg),
            'wk0': associations.wk0(params, cfg), 'accuracy': jnp.mean(hits), 'loss': jnp.mean(losses)}


def trajectory(key: jax.Array, cfg: ModelConfig, order: Sequence[str], rates: Mapping[str, float], *, pieces: int,
               test_pieces: int = 4, orthonormal: bool = True) -> dict[str, jax.Array]:
    """`state` of one seed before and after each step of `order`, arrays (4,), and the norms of the gradients (3,)."""
    init_key, test_key, *keys = jax.random.split(key, 2 + len(order))
    params = init(init_key, cfg, orthonormal=orthonormal)
    table, norms = [measure(params, test_key, cfg=cfg, pieces=test_pieces)], []
    for role, step_key in zip(order, keys, strict=True):
        params, norm = update(params, step_key, rates[role], cfg=cfg, role=role, pieces=pieces)
        table.append(measure(params, test_key, cfg=cfg, pieces=test_pieces))
        norms.append(norm)
    return {name: jnp.stack([row[name] for row in table]) for name in table[0]} | {'gradient_norm': jnp.stack(norms)}


update = functools.partial(jax.jit, static_argnames=('cfg', 'role', 'pieces'))(step)
measure = functools.partial(jax.jit, static_argnames=('cfg', 'pieces'))(state)
