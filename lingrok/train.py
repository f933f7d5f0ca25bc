"""Training as pure functions of one replica, and the one place where the replica axis S is added.

A replica is a dict of scalars, its `settings`: seeds of the four random streams, optimiser and task values (see
`Config.coordinates`). `init`, `train_chunk` and `evaluate` are written for one replica; `Programs` compiles them for
all replicas of a config. Batch t comes from fold_in(key of the batch stream, t) inside the compiled program, so that a
resumed run sees what an undisturbed one would have seen.
"""

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lingrok import metrics, model, optim
from lingrok.config import SEED_STREAMS, VARIABLE_OPTIM, Config
from lingrok.loss import loss_and_grad
from lingrok.tasks.base import Batch

SKIP_FROM = 1024  # positions of a batch from which the unscored ones are left out of the tail of the model

# A probe measures a model beyond the metrics of its task: (params, batches by split, cfg) -> {metric: value}.
Probe = Callable[[Any, Mapping[str, Any], Config], dict[str, jax.Array]]
# Edited parameters by name, evaluated beside the model itself: (params, cfg) -> {name: params}.
Variants = Callable[[Any, Config], dict[str, Any]]
# Spreads a batch over devices, see `Programs`; the identity where a replica has one device.
Place = Callable[[Batch], Batch]


def _here(batch: Batch) -> Batch:
    return batch


class State(NamedTuple):
    """What training changes. nan_step is the step at which the replica was frozen, -1 while it is sound."""

    params: Any
    opt_state: Any
    step: jax.Array
    nan_step: jax.Array


def stream_key(settings: Mapping[str, jax.Array], stream: str) -> jax.Array:
    """Key of a random stream of a replica: init, task, batch or eval. Streams differ even for equal seeds."""
    return jax.random.fold_in(jax.random.key(settings[f'seed.{stream}']), SEED_STREAMS.index(stream))


def init_task(settings, *, cfg: Config):
    """The task state of a replica."""
    variable = {name: settings[f'task.{name}'] for name in cfg.task.VARIABLE}
    return cfg.task.init(stream_key(settings, 'task'), **variable)


def init(settings, *, cfg: Config) -> State:
    """Initial state of a replica."""
    params = model.init(stream_key(settings, 'init'), cfg.model)
    optim.check_patterns(params, cfg.optim)
    trainable, _ = optim.split(params, cfg.optim.frozen)
    return State(params, _optimizer(settings, cfg).init(trainable), jnp.int32(0), jnp.int32(-1))


def _optimizer(settings, cfg: Config):
    values = {name: settings[f'optim.{name}'] for name in VARIABLE_OPTIM}
    return optim.make_optimizer(cfg.optim, cfg.train.num_steps, values)


def train_step(
    state: State, task_state, settings, *, cfg: Config, skip: bool, place: Place = _here
) -> tuple[State, jax.Array]:
    """One update on the batch of this step; returns the loss before it. `skip`: see `loss.loss_and_grad`.

    A replica whose loss or update is not finite keeps the last sound parameters for good, and its loss reads NaN.
    """
    key = jax.random.fold_in(stream_key(settings, 'batch'), state.step)
    batch = cfg.task.sample(task_state, key, split='train', batch_size=cfg.train.batch_size, step=state.step)
    batch = place(batch)
    trainable, frozen = optim.split(state.params, cfg.optim.frozen)
    loss, grads = loss_and_grad(trainable, frozen, batch, cfg=cfg.model, skip=skip, scored=cfg.task.scored,
                                form=cfg.train.loss, mean=cfg.train.loss_mean)
    # With gated parameters, too: weight decay then adds nothing to the momentum of a frozen one.
    gate = functools.partial(optim.gate, cfg=cfg.optim, step=state.step)
    updates, opt_state = _optimizer(settings, cfg).update(gate(grads), state.opt_state, gate(trainable))
    updates = gate(updates)
    new_params = optim.merge(optax.apply_updates(trainable, updates), frozen)

    finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(updates))
    sound = finite & (state.nan_step < 0)
    keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(sound, new, old))
    nan_step = jnp.where(state.nan_step < 0, jnp.where(finite, -1, state.step), state.nan_step)
    new_state = State(keep(new_params, state.params), keep(opt_state, state.opt_state), state.step + 1, nan_step)
    return new_state, jnp.where(sound, loss, jnp.nan)


def train_chunk(
    state: State, task_state, settings, num_steps, *, cfg: Config, capacity: int, skip: bool, place: Place = _here
):
    """`num_steps` updates (traced, at most `capacity`): the new state and the loss of every step, NaN beyond.

    The number of steps is traced so that one program serves chunks of every length, with the same bits.
    """

    def body(i, carry):
        state, losses = carry
        state, loss = train_step(state, task_state, settings, cfg=cfg, skip=skip, place=place)
        return state, losses.at[i].set(loss)

    return jax.lax.fori_loop(0, num_steps, body, (state, jnp.full(capacity, jnp.nan)))


def evaluate(
    params,
    task_state,
    settings,
    *,
    cfg: Config,
    place: Place = _here,
    variants: Variants = lambda params, cfg: {},
    probes: tuple[Probe, ...] = (),
) -> dict[str, jax.Array]:
    """Metrics of a replica and of edited variants of it on every split, exact baselines, and what the probes measure.

    All splits are drawn from the same key, and every evaluation of a run uses the same sequences.
    """
    key = stream_key(settings, 'eval')
    batches = {split: place(cfg.task.sample(task_state, key, split=split, batch_size=cfg.eval.batch_size))
               for split in cfg.task.splits}
    measured = metrics.of_variants({'': params, **variants(params, cfg)}, batches, cfg)
    for split, batch in batches.items():
        measured |= {f'{split}/{name}': value for name, value in cfg.task.baselines(task_state, batch).items()}
    for probe in probes:
        measured |= probe(params, batches, cfg)
    return measured


class Programs:
    """The compiled programs of a config, over all its replicas. The replica axis is added here and only here.

    train.parallel=replicas: replicas are spread over the devices of all processes; those of one device run side by
    side (vmap) or one after the other (map). On a CPU batched small matrices are slower than a loop over plain ones.
    Where the devices do not divide their number, the last replica is computed more than once.
    train.parallel=batch: every replica is on all devices, and each batch is spread over them.

    Arguments and results stay on the devices, with the padded replica axis; `put` and `fetch` lead there and back.
    """

    def __init__(self, cfg: Config, *, capacity: int = 1, devices=None, **evaluation):
        """capacity: most steps of a chunk; devices: all by default; evaluation: `variants`, `probes` of `evaluate`."""
        self.cfg, self.capacity = cfg, capacity
        devices = jax.devices() if devices is None else devices
        self._by_batch = cfg.train.parallel == 'batch'
        used = _num_devices(cfg, len(devices))
        axis = 'batch' if self._by_batch else 'replica'
        self.mesh = jax.make_mesh((used,), (axis,), axis_types=(AxisType.Auto,), devices=devices[:used])
        self.spec = P() if self._by_batch else P('replica')
        self._padding = 0 if self._by_batch else -cfg.num_replicas % used
        layout = cfg.train.layout
        self.layout = ('map' if jax.default_backend() == 'cpu' else 'vmap') if layout == 'auto' else layout
        self.settings = self.put({name: _column(name, values) for name, values in cfg.coordinates().items()})
        place = self._spread if self._by_batch else _here
        # Choosing positions takes longer to compile than it saves in small batches, and would gather a batch that is
        # spread over devices on one of them.
        large = cfg.train.batch_size * cfg.task.seq_len >= SKIP_FROM and cfg.task.scored == slice(None)
        skip = self.layout == 'map' and large and not self._by_batch
        self.init_task = self._compile(functools.partial(init_task, cfg=cfg))
        self.init = self._compile(functools.partial(init, cfg=cfg))
        self.train_chunk = self._compile(
            functools.partial(train_chunk, cfg=cfg, capacity=capacity, skip=skip, place=place),
            shared=1,
            donate_argnums=0,
        )
        self.evaluate = self._compile(functools.partial(evaluate, cfg=cfg, place=place, **evaluation))

    def compile(self, state: State, task_state) -> None:
        """Compiles training and evaluation ahead of time, both at once; without it each compiles when first called.

        The arguments are arrays, or only their shapes and dtypes.
        """
        lowered = {
            'train_chunk': self.train_chunk.lower(state, task_state, self.settings, np.int32(1)),
            'evaluate': self.evaluate.lower(state.params, task_state, self.settings),
        }
        with ThreadPoolExecutor() as pool:
            for name, program in zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True):
                setattr(self, name, program)

    def put(self, tree):
        """Host arrays with a leading replica axis, the same in every process, placed on the devices."""
        sharding = NamedSharding(self.mesh, self.spec)

        def place(x):
            x = np.asarray(x)
            x = np.concatenate([x, np.repeat(x[-1:], self._padding, 0)])
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(place, tree)

    def fetch(self, tree):
        """Results of all replicas as host arrays, in every process. Waits for the devices."""

        def gather(x):
            if not (x.is_fully_addressable or x.is_fully_replicated):
                x = multihost_utils.process_allgather(x, tiled=True)
            return np.asarray(x)[: self.cfg.num_replicas]

        return jax.tree.map(gather, tree)

    def _spread(self, batch: Batch) -> Batch:
        arrays = (batch.tokens_BL, batch.targets_BL, batch.mask_BL)
        arrays = jax.lax.with_sharding_constraint(arrays, NamedSharding(self.mesh, P('batch')))
        return Batch(*arrays, batch.groups)

    def _compile(self, fn, *, shared: int = 0, **jit_options):
        """`fn` over the replica axis of its arguments, but for the last `shared` ones."""

        def run(*args):
            split = len(args) - shared
            one = lambda per_replica: fn(*per_replica, *args[split:])  # noqa: E731
            return jax.vmap(one)(args[:split]) if self.layout == 'vmap' else jax.lax.map(one, args[:split])

        def sharded(*args):
            specs = (P('replica'),) * (len(args) - shared) + (P(),) * shared
            # check_vma asks for hand-written casts in loops whose carry starts from a constant; nothing is shared here.
            return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=P('replica'), check_vma=False)(*args)

        if self._by_batch:
            return jax.jit(run, out_shardings=NamedSharding(self.mesh, P()), **jit_options)
        return jax.jit(sharded, **jit_options)


def _num_devices(cfg: Config, available: int) -> int:
    """How many devices the replicas, or the equal parts of a batch, are spread over."""
    if jax.process_count() > 1:
        return available  # every process takes part
    if cfg.train.parallel == 'batch':
        return max(n for n in range(1, available + 1) if cfg.train.batch_size % n == 0)
    each = -(-cfg.num_replicas // available)
    return -(-cfg.num_replicas // each)


def _column(name: str, values) -> np.ndarray:
    return np.asarray(values, np.int32 if name.startswith('seed.') else np.float32)
