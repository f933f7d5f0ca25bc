"""Optimisers by optax, with traced hyper-parameters, and which parameters they touch.

The learning rate, momentum and weight decay come in as arrays, so that a sweep over them is one program over the
replica axis. Frozen parameters are taken out of the tree before the gradient: nothing is computed or kept for them.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from lingrok import names
from lingrok.config import OptimConfig, parse_freeze, require, suggest


def make_optimizer(cfg: OptimConfig, num_steps: int, values: Mapping[str, jax.Array]) -> optax.GradientTransformation:
    """The optimiser for `values`: the entries of `config.VARIABLE_OPTIM` as scalars, which may be traced."""

    def rate(name):
        return lambda step: values[name] * schedule(cfg, num_steps, step)

    def decayed(params):
        return match(params, cfg.decay)

    if cfg.optimizer == 'sgd':
        # As torch.optim.SGD: L2 in the gradient, buffer = momentum * buffer + gradient.
        return optax.chain(
            optax.add_decayed_weights(values['weight_decay'], mask=decayed),
            optax.trace(values['momentum']),
            optax.scale_by_learning_rate(rate('learning_rate')),
        )
    if cfg.optimizer == 'muon':
        return optax.contrib.muon(
            rate('learning_rate'),
            beta=values['momentum'],
            weight_decay=values['weight_decay'],
            weight_decay_mask=decayed,
            adam_learning_rate=rate('adam_learning_rate'),
            adam_weight_decay=values['adam_weight_decay'],
            adam_b1=cfg.b1,
            adam_b2=cfg.b2,
            eps=cfg.eps,
            muon_weight_dimension_numbers=_muon_matrices,
        )
    return optax.chain(
        optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps),
        optax.add_decayed_weights(values['weight_decay'], mask=decayed),
        optax.scale_by_learning_rate(rate('learning_rate')),
    )


def schedule(cfg: OptimConfig, num_steps: int, step) -> jax.Array:
    """Multiplier of the learning rate at `step` (updates done): linear warm-up, then what `cfg.schedule` says."""
    step = jnp.asarray(step, jnp.float32)
    rise = jnp.minimum(step / max(cfg.warmup_steps, 1), 1) if cfg.warmup_steps else jnp.ones_like(step)
    warm = cfg.warmup_from + (1 - cfg.warmup_from) * rise
    if cfg.schedule == 'constant':
        return warm
    if cfg.schedule == 'wsd':
        length = max(cfg.decay_share * num_steps, 1)
        fall = jnp.clip((step - (num_steps - length)) / length, 0, 1)
        return warm * (1 - (1 - cfg.floor) * fall)
    left = max(num_steps - cfg.warmup_steps, 1)
    progress = jnp.clip((step - cfg.warmup_steps) / left, 0, 1)
    return warm * (cfg.floor + (1 - cfg.floor) * (1 + jnp.cos(jnp.pi * progress)) / 2)


def _muon_matrices(params):
    """Muon's own description of which axes of a parameter form a matrix; None where AdamW serves."""
    matrix = optax.contrib.MuonDimensionNumbers(0, 1)
    return _map_names(lambda name, _: matrix if name.split('.')[-1] in names.MATRIX_ROLES else None, params)


def match(params, patterns: Sequence[str]):
    """Tree of bools: which parameters have a name that one of the patterns matches ('embed', 'blocks.1.mlp_*', '*')."""
    return _map_names(lambda name, _: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns), params)


def gate(tree, cfg: OptimConfig, step):
    """A tree of the form of the parameters, 0 where `cfg.freeze_schedule` freezes one at `step` (may be traced)."""
    for pattern, start, stop in map(parse_freeze, cfg.freeze_schedule):
        active = (step < start) | (step >= stop)
        tree = jax.tree.map(lambda x, found, active=active: jnp.where(active, x, 0) if found else x,
                            tree, match(tree, (pattern,)))
    return tree


def check_patterns(params, cfg: OptimConfig) -> None:
    """Raises if a pattern of the config names no parameter, or if nothing is left to train.

    A pattern for a role in all blocks ('blocks.*.mlp_in') may meet a model in which no block has the role.
    """
    known = parameter_names(params)
    anywhere = {f'blocks.*.{role}' for role in names.ROLES}
    patterns = {'decay': cfg.decay, 'frozen': cfg.frozen,
                'freeze_schedule': [parse_freeze(entry)[0] for entry in cfg.freeze_schedule]}
    for key, asked in patterns.items():
        for pattern in asked:
            found = pattern in anywhere or bool(fnmatch.filter(known, pattern))
            require(found, f'optim.{key}: {pattern!r} names no parameter of this model; {suggest(pattern, known)}')
    frozen = map(parse_freeze, cfg.freeze_schedule)
    always = [pattern for pattern, start, stop in frozen if (start, stop) == (0, math.inf)]
    left = jax.tree.leaves(match(params, (*cfg.frozen, *always)))
    where = f'optim.frozen={cfg.frozen!r}' + (f', optim.freeze_schedule={cfg.freeze_schedule!r}' if always else '')
    require(not all(left), f'{where} freezes every parameter; leave one to train')


def parameter_names(params) -> list[str]:
    """Names of all parameters, in the order of the leaves."""
    return jax.tree.leaves(_map_names(lambda name, _: name, params))


def split(params, patterns: Sequence[str]):
    """(trainable, frozen): two trees of the same form, each with None where the other has the parameter."""
    frozen = match(params, patterns)
    pick = lambda wanted: jax.tree.map(lambda x, f: x if f is wanted else None, params, frozen)  # noqa: E731
    return pick(False), pick(True)


def merge(trainable, frozen):
    """The inverse of `split`."""
    return jax.tree.map(lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda x: x is None)


def _map_names(fn, params):
    return jax.tree.map_with_path(lambda path, x: fn(names.param_name([p.key for p in path]), x), params)
