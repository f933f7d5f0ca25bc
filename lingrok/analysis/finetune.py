"""Which part of a trained model has to learn before the noise goes? Fine-tuning of some parts on clean data.

Derived from the reviews of arXiv 2406.03068: if feed-forwards hold the noise, they alone should lose it as fast as the
whole model does, and attention alone should have to work around them.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lingrok import model, names, optim, train
from lingrok.config import VARIABLE_OPTIM, Config, require, suggest

FEED_FORWARD = tuple(sorted({role for roles, _ in names.MLP_KINDS.values() for role in roles}))
PARTS = {
    'everything': ('*',),
    'feed-forwards': tuple(f'blocks.*.{role}*' for role in FEED_FORWARD),
    'attention': tuple(f'blocks.*.{role}{tail}' for role in ('q', 'k', 'v', 'o', 'ov') for tail in ('', '_bias')),
}
QUANTITIES = ('p_noise', 'p_correct', 'accuracy', 'loss_bigram')
LOW = 0.05  # P(noise) on clean sequences below which the noise counts as gone


def masks(params, frozen: tuple[str, ...], parts: Sequence[str]):
    """Tree of bools (P,): whether a parameter is trained in each of `parts`, names of PARTS or patterns of parameters.

    What the run itself kept frozen stays so.
    """
    known = optim.parameter_names(params)
    chosen = []
    for part in parts:
        wanted = optim.match(params, PARTS.get(part, (part,)))
        require(part in PARTS or any(jax.tree.leaves(wanted)),
                f'no parameter is called {part!r}; {suggest(part, (*PARTS, *known))}')
        chosen.append(jax.tree.map(lambda w, f: w and not f, wanted, optim.match(params, frozen)))
        require(any(jax.tree.leaves(chosen[-1])), f'nothing of {part!r} is left to train in this model; it has '
                f'{", ".join(known)}, of which the run froze {", ".join(frozen) or "none"}')
    return jax.tree.map(lambda *x: jnp.array(x), *chosen)


def finetune(params, task_state, key, cfg: Config, *, parts: tuple[str, ...] = tuple(PARTS), num_steps: int = 100,
             every: int = 2, num_rows: int = 256, noise_prob: float = 0.0) -> dict[str, jax.Array]:
    """Fine-tunes each part of the model apart, on fresh sequences of another noise probability, and watches it.

    The optimiser is that of the run, from rest and at its peak learning rate. All parts see the same sequences.

    <part>/<quantity> (T,) on clean sequences after 0, every, 2 every, ... updates, `finetune/steps` (T,); <part>/steps:
    the first of them at which p_noise is below LOW, NaN if it never is; <part>/change/<quantity>: the value there minus
    that at the start, NaN likewise.
    """
    require(num_steps >= every > 0, f'{num_steps} steps, measured every {every}; allowed: every from 1 to the steps')
    require(0 <= noise_prob <= 1, f'noise_prob={noise_prob}; allowed: a number from 0 to 1')
    require(num_rows > 0, f'{num_rows} rows; allowed: at least 1')
    varied = [name for name in cfg.vary if name.startswith('optim.')]
    require(not varied, f'the replicas of this run differ in {", ".join(varied)}; allowed: seeds and task values, as '
            'one learning rate is used for all')
    mask_P = masks(params, cfg.optim.frozen, parts)
    constant = dataclasses.replace(cfg.optim, freeze_schedule=(), warmup_steps=0, schedule='constant')
    cfg = dataclasses.replace(cfg, optim=constant)
    test_key, seed_key = jax.random.split(key)
    clean = cfg.task.sample(task_state, test_key, split='clean', batch_size=num_rows)
    task_state = task_state._replace(noise_prob=jnp.full_like(task_state.noise_prob, noise_prob))
    values = {name: jnp.float32(getattr(cfg.optim, name)) for name in VARIABLE_OPTIM}
    settings = {f'optim.{name}': value for name, value in values.items()}
    settings['seed.batch'] = jax.random.randint(seed_key, (), 0, 2**31 - 1)
    trainable, _ = optim.split(params, cfg.optim.frozen)
    opt_state = optim.make_optimizer(cfg.optim, cfg.train.num_steps, values).init(trainable)
    start = train.State(params, opt_state, jnp.int32(0), jnp.int32(-1))
    times = jnp.arange(num_steps // every + 1) * every

    def measure(params):
        found = cfg.task.metrics(model.apply(params, clean.tokens_BL, cfg=cfg.model)[0], clean)
        return {name: found[name] for name in QUANTITIES}

    def curves(mask):
        def between(state, _):
            return tune(state, task_state, settings, mask, every, cfg=cfg), measure(state.params)

        return jax.lax.scan(between, start, length=len(times))[1]

    table = jax.lax.map(curves, mask_P)  # one program for all parts
    found = {'finetune/steps': times}
    for i, part in enumerate(parts):
        curves_T = {name: curve_PT[i] for name, curve_PT in table.items()}
        found |= {f'{part}/{name}': curve_T for name, curve_T in curves_T.items()} | {
            f'{part}/{name}': value for name, value in when_gone(times, curves_T).items()}
    return found


def tune(state: train.State, task_state, settings, mask, num_steps: int, *, cfg: Config) -> train.State:
    """The state after so many steps of training in which only the parameters of the mask change."""
    # Not under vmap: the positions without a loss can be left out.
    skip = cfg.train.batch_size * cfg.task.seq_len >= train.SKIP_FROM

    def update(_, old):
        # Every optimiser here works parameter by parameter: to undo an update is to freeze the parameter.
        new, _ = train.train_step(old, task_state, settings, cfg=cfg, skip=skip)
        return new._replace(params=jax.tree.map(jnp.where, mask, new.params, old.params))

    return jax.lax.fori_loop(0, num_steps, update, state)


def when_gone(times: jax.Array, curves_T: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """steps: the first time p_noise is below LOW; change/<quantity>: by how much it differs from the start then."""
    low_T = curves_T['p_noise'] < LOW
    first, reached = jnp.argmax(low_T), jnp.any(low_T)
    found = {'steps': jnp.where(reached, times[first], jnp.nan)}
    return found | {f'change/{name}': jnp.where(reached, x[first] - x[0], jnp.nan) for name, x in curves_T.items()}
