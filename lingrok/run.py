"""One run: from a config to a finished run directory, through kills, full disks and NaNs; and reading it back.

    config.json        the resolved config
    versions.json      versions and device of every start of the run
    metrics.jsonl      one line a step, arrays/<step>.npz for what has an axis
    checkpoints/<step> params, train, meta
    task.npz           the task state of every replica
    files/             copies of the files that the task reads
    DONE               written last

Side effects start here. What is computed is in `train`, what is measured in `analysis`.
"""

import contextlib
import errno
import fcntl
import io
import json
import platform
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

import lingrok.tasks  # noqa: F401  registers the tasks
from lingrok import analysis, model, optim, train
from lingrok.checkpoint import CheckpointError, Checkpoints
from lingrok.config import NOT_HASHED, Config, TrainConfig, from_dict, require, run_id, to_dict
from lingrok.log import MetricsWriter, Progress, Series, read_metrics, write_json
from lingrok.metrics import interval, text

CHUNK_SECONDS = 5.0  # a signal is answered, and a loss shown, after about this long
MAX_CHUNK = 1000


class RunError(RuntimeError):
    """A run that cannot go on, or a directory that is not a sound run. The message is one line."""


class Interrupted(Exception):
    """A signal asked the run to stop; it has saved its state. `signum` is the signal."""

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.signum = signum


def save_steps(cfg: TrainConfig) -> list[int]:
    """Steps of the scheduled checkpoints, the last one among them, and step 0 unless that is the only one."""
    if cfg.save == 'final':
        return [cfg.num_steps]
    if cfg.save == 'log':
        inner = {round(step) for step in np.geomspace(1, cfg.num_steps, cfg.save_count)}
    elif cfg.save == 'regular':
        inner = set(range(0, cfg.num_steps, cfg.save_every))
    else:
        inner = set(cfg.save_steps)
    return sorted({0, cfg.num_steps, *inner})


def capacity(cfg: TrainConfig) -> int:
    """Most steps of a chunk."""
    return min(MAX_CHUNK, cfg.num_steps)


def default_directory(cfg: Config) -> Path:
    return Path('runs') / f'{cfg.name}-{run_id(cfg)}'


def execute(cfg: Config, directory) -> 'Run':
    """Trains to the end, from the start or from the last sound checkpoint, and returns the finished run.

    A finished run is returned as it is. Raises RunError for a directory that holds another config or is in use,
    Interrupted after a signal, OSError when the disk cannot be written.
    """
    directory = Path(directory).absolute()
    # Before the directory is claimed: a config that is refused leaves nothing behind.
    optim.check_patterns(jax.eval_shape(lambda: model.init(jax.random.key(0), cfg.model)), cfg.optim)
    with contextlib.ExitStack() as held:

        def claim() -> bool:
            directory.mkdir(parents=True, exist_ok=True)
            _refuse_foreign(directory)
            held.enter_context(_locked(directory))
            _claim(cfg, directory)
            return (directory / 'DONE').exists()

        try:
            if not on_first_process(claim):
                _Trainer(cfg, directory).train()
        except OSError as error:
            error.filename = error.filename or str(directory)  # a failed write does not say where
            raise
    return load_run(directory)


def write_imported(cfg: Config, saved: Mapping[int, dict], task_state, directory, *, origin: Mapping) -> 'Run':
    """The run directory of a model of one replica that was trained elsewhere, with its metrics, and reads it.

    saved: step -> parameters; without the last step of the config the run counts as unfinished. origin: JSON that
    says where the model comes from, kept in versions.json. Raises RunError for a directory that holds anything.
    """
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        found = sorted(path.name for path in directory.iterdir() if path.name != 'LOCK')
        if found:
            raise RunError(f'{directory} holds {", ".join(found[:3])}; choose another --workdir')
        saved, task_state = jax.tree.map(lambda x: np.array(x, order='C')[None], (dict(saved), task_state))
        _claim(cfg, directory)
        write_json(directory / 'versions.json', [{'step': max(saved), **versions(), 'origin': dict(origin)}])
        _write_npz(directory / 'task.npz', task_state)
        _copy_files(cfg.task, directory / 'files')
        programs = train.Programs(cfg, **analysis.evaluation(cfg.task.NAME))
        writer, checkpoints = MetricsWriter(directory, after=None), Checkpoints(directory / 'checkpoints')
        for step, params in sorted(saved.items()):
            measured = programs.evaluate(programs.put(params), programs.put(task_state), programs.settings)
            writer.write(step, programs.fetch(measured))
            checkpoints.save(step, params, None, {'run_id': run_id(cfg), 'nan_step': [-1]})
        writer.close()
        if cfg.train.num_steps in saved:
            (directory / 'DONE').touch()
    return load_run(directory)


def on_first_process(fn: Callable[[], int | None]) -> int:
    """Calls `fn` in process 0 while the others wait. All have its result, and where it fails, all fail."""
    if jax.process_count() == 1:
        return int(fn() or 0)
    result, error = 0, None
    if jax.process_index() == 0:
        try:
            result = int(fn() or 0)
        except Exception as caught:
            error = caught
    result, failed = multihost_utils.broadcast_one_to_all(np.array([result, error is not None], np.int32))
    if error is not None:
        raise error
    if failed:
        raise RunError('process 0 has failed; its output says why')
    return int(result)


@contextlib.contextmanager
def _locked(directory: Path):
    """Holds the run directory against a second process; a killed process lets go of it."""
    with (directory / 'LOCK').open('a') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f'{directory} is in use by another process; wait, or choose another --workdir') from None
        yield


def _refuse_foreign(directory: Path) -> None:
    """Raises for a directory that holds something, but no run; nothing is written into it."""
    found = sorted(path.name for path in directory.iterdir() if path.name != 'LOCK' and path.suffix != '.tmp')
    if found and 'config.json' not in found:
        raise RunError(f'{directory} holds {", ".join(found[:3])} and no run; choose another --workdir')


def in_use(directory: Path) -> bool:
    """Whether a process on this machine, or on one that shares its locks, works on the run."""
    try:
        with _locked(Path(directory)):
            return False
    except RunError:
        return True


def _claim(cfg: Config, directory: Path) -> None:
    """Makes the directory this config's, or raises if it is another's."""
    path = directory / 'config.json'
    if not path.exists():
        write_json(path, to_dict(cfg))
        return
    stored = _read_config(epath.Path(directory))
    if run_id(stored) != run_id(cfg):
        old, new = (dict(_leaves(to_dict(c))) for c in (stored, cfg))
        same = {f'train.{name}' for name in NOT_HASHED} | {'name', *_same_files(stored.task, cfg.task)}
        keys = [key for key in sorted({*old, *new} - same) if old.get(key) != new.get(key)]
        changed = [f'{key}: {old.get(key)} there, {new.get(key)} here' for key in keys]
        raise RunError(f'{directory} holds another experiment ({"; ".join(changed[:3])}); choose another --workdir')


def _same_files(task, other) -> set[str]:
    """Config keys of two tasks that name files of the same content."""
    pairs = {f'task.{field}': [Path(getattr(t, field, '')) for t in (task, other)] for field in task.FILES}
    return {key for key, (a, b) in pairs.items() if a.is_file() and b.is_file() and a.read_bytes() == b.read_bytes()}


def _leaves(tree, prefix=''):
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f'{prefix}{name}.')
        else:
            yield prefix + name, value


class _Trainer:
    """The loop of one process: chunks of steps, evaluations, checkpoints, and the reading of what they measured.

    The metrics of a chunk are read while the next one runs, so the device never waits for the host between saves.
    Of several processes, each trains its replicas; process 0 alone writes, what all have gathered.
    """

    def __init__(self, cfg: Config, directory: Path):
        self.cfg, self.directory = cfg, directory
        self.checkpoints = Checkpoints(directory / 'checkpoints')
        self.capacity = capacity(cfg.train)
        self.programs = train.Programs(cfg, capacity=self.capacity, **analysis.evaluation(cfg.task.NAME))
        self.saves = save_steps(cfg.train)
        self.nan_steps = np.full(cfg.num_replicas, -1)
        self.signum = 0
        self.saved_at = time.monotonic()
        self.is_first = jax.process_index() == 0

    def train(self) -> None:
        cfg, programs = self.cfg, self.programs
        on_first_process(self.checkpoints.clean)
        self.task_state = programs.init_task(programs.settings)
        state, step = self._initial_state()
        self.writer = MetricsWriter(self.directory, after=step) if self.is_first else None
        self.progress = Progress(cfg.train.num_steps, max(step or 0, 0), quiet=not self.is_first)
        self._announce(step)
        try:
            with self._signals():
                self._loop(state, step)
            on_first_process(self._finish)
        except BaseException:
            if self.is_first:
                self.writer.abandon()
            raise
        finally:
            self.progress.close()

    def _finish(self) -> None:
        self._drop_interruptions(before=self.cfg.train.num_steps)
        self.writer.close()
        (self.directory / 'DONE').touch()

    def _initial_state(self):
        """The last sound checkpoint as (state, step), or (initial state, None)."""
        programs = self.programs
        state = programs.init(programs.settings)
        programs.compile(state, self.task_state)
        step = on_first_process(lambda: self._last_sound(state))
        if step < 0:
            task_state = programs.fetch(self.task_state)
            if self.is_first:
                _write_npz(self.directory / 'task.npz', task_state)
                _copy_files(self.cfg.task, self.directory / 'files')
            return state, None
        host = self.restored if self.is_first else self._restore(step, state)
        self.restored = None
        self.nan_steps = np.array(host.nan_step)
        return programs.put(host), step

    def _last_sound(self, like) -> int:
        """Step of the last checkpoint that can be read, kept in `restored`; -1 if there is none."""
        for step in reversed(self.checkpoints.steps()):
            try:
                self.restored = self._restore(step, like)
                return step
            except CheckpointError as error:
                place = self.checkpoints.set_aside(step)
                print(f'warning: {error}; moved to {place}; trying the one before it', file=sys.stderr, flush=True)
        return -1

    def _restore(self, step: int, like):
        params = self.checkpoints.params(step)
        rest = self.checkpoints.train(step, like._replace(params=()))
        return rest._replace(params=params)

    def _announce(self, step: int | None) -> None:
        cfg, mesh = self.cfg, self.programs.mesh
        if self.is_first:
            path = self.directory / 'versions.json'
            try:
                starts = json.loads(path.read_text()) if path.exists() else []
                require(isinstance(starts, list), 'not a list')
            except ValueError:  # such as ConfigError
                print(f'warning: {path} cannot be read; it is begun anew', file=sys.stderr, flush=True)
                starts = []
            write_json(path, [*starts, {'step': step or 0, **versions()}])
        self.progress.say(
            f'{self.directory.name}: {cfg.num_replicas} replica(s) of {model.num_parameters(cfg.model):,} parameters, '
            f'{cfg.train.num_steps} steps, on {mesh.size} {jax.default_backend()} device(s) ({self.programs.layout})'
            + ('' if step is None else f', resumed at step {step}')
        )

    def _loop(self, state, step: int | None) -> None:
        cfg = self.cfg.train
        if step is None:
            step = 0
            self._finish_step(0, self._evaluation(state))
            self._save(0, state)
        pending, length, began, signum = None, 1, time.monotonic(), 0
        while step < cfg.num_steps and not signum:
            stops = [s for s in self.saves if s > step] + [step + cfg.eval_every - step % cfg.eval_every]
            length = min(length, min(stops) - step, self.capacity)
            state, losses = self.programs.train_chunk(state, self.task_state, self.programs.settings, np.int32(length))
            chunk, step = (step, length, losses), step + length
            due = step % cfg.eval_every == 0 or step == cfg.num_steps
            measured = self._evaluation(state) if due else {}
            if pending:
                self._consume(*pending)
            pending = (chunk, measured)
            # Doubling finds the length of a chunk within a few of them, whatever the speed of the machine.
            quick = time.monotonic() - began < CHUNK_SECONDS
            late = time.monotonic() - self.saved_at > 60 * cfg.save_minutes
            length, signum, late = self._agree(max(1, length * 2 if quick else length // 2), late)
            began = time.monotonic()
            if step in self.saves or signum or late:
                self._consume(*pending)
                pending = None
                self._save(step, state)
        if pending:
            self._consume(*pending)
        if signum and step < cfg.num_steps:
            raise Interrupted(signum, f'stopped by {signal.Signals(signum).name} at step {step} of '
                              f'{cfg.num_steps}, state saved; the same command resumes')

    def _agree(self, length: int, late: bool) -> tuple[int, int, bool]:
        """Length of the next chunk, signal received, whether a checkpoint is late: the same in every process."""
        if jax.process_count() == 1:
            return length, self.signum, late
        table = multihost_utils.process_allgather(np.array([length, self.signum, late], np.int32))
        return int(table[0, 0]), int(table[:, 1].max()), bool(table[0, 2])

    def _evaluation(self, state) -> dict:
        return self.programs.evaluate(state.params, self.task_state, self.programs.settings)

    def _consume(self, chunk, measured) -> None:
        """Writes the losses of a chunk and the evaluation at its end."""
        start, length, losses = chunk
        losses_ST, measured = self.programs.fetch((losses, measured))
        losses_ST = losses_ST[:, :length]
        self._report_nans(start, losses_ST)
        measured = _without_frozen(measured, self.nan_steps >= 0)
        every = self.cfg.train.log_every
        for step in range(start + 1, start + length + 1):
            row = {'train/loss': losses_ST[:, step - start - 1]} if step % every == 0 else {}
            if step == start + length:
                row |= measured
            if row and self.is_first:
                self.writer.write(step, row)
        self.progress.advance(length)
        if measured:
            self._say(start + length, measured)

    def _finish_step(self, step: int, measured) -> None:
        measured = self.programs.fetch(measured)
        if self.is_first:
            self.writer.write(step, measured)
        self._say(step, measured)

    def _say(self, step: int, measured) -> None:
        # Seeds of one setting are averaged; settings stand side by side, while there are few.
        groups = self.cfg.groups().values()
        groups = groups if len(groups) <= 3 else [range(self.cfg.num_replicas)]
        parts = [f'{name} ' + ' / '.join(f'{interval(measured[name][list(group)])[0]:.3f}' for group in groups)
                 for name in self.cfg.task.headline]
        self.progress.say(f'step {step:>6}  ' + '  '.join(parts))

    def _report_nans(self, start: int, losses_ST) -> None:
        for replica, losses in enumerate(losses_ST):
            if self.nan_steps[replica] < 0 and np.isnan(losses).any():
                step = start + int(np.argmax(np.isnan(losses)))
                self.nan_steps[replica] = step
                where = ', '.join(f'{name}={values[replica]}' for name, values in self.cfg.vary.items())
                self.progress.say(f'warning: replica {replica} ({where or "the only one"}) turned NaN at step {step} '
                                  'and is frozen; the others go on')

    def _save(self, step: int, state) -> None:
        host = self.programs.fetch(state)
        on_first_process(lambda: self._write(step, host))
        self.saved_at = time.monotonic()

    def _write(self, step: int, host) -> None:
        if not self.directory.exists():  # nothing is written into a new directory that nobody knows
            raise FileNotFoundError(errno.ENOENT, 'the run directory has vanished', str(self.directory))
        self.writer.flush()  # metrics up to a checkpoint are on disk before it is
        if step not in self.checkpoints.steps():
            meta = {'run_id': run_id(self.cfg), 'nan_step': host.nan_step.tolist()}
            self.checkpoints.save(step, host.params, host._replace(params=()), meta)
        self._drop_interruptions(before=step)
        if self.cfg.train.save_optimizer == 'last':
            for old in self.checkpoints.steps()[:-2]:
                self.checkpoints.drop_train(old)

    def _drop_interruptions(self, before: int) -> None:
        """Removes unscheduled checkpoints (after a signal, or by the clock) that training has overtaken."""
        for step in self.checkpoints.steps():
            if step not in self.saves and step < before:
                self.checkpoints.remove(step)

    @contextlib.contextmanager
    def _signals(self):
        """SIGINT and SIGTERM are noted and answered after the current chunk; a second one stops at once."""

        def note(signum, frame):
            if self.signum:
                raise KeyboardInterrupt
            self.signum = signum
            self.progress.say(f'{signal.Signals(signum).name}: saving after this chunk; once more stops at once')

        try:
            old = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread (a notebook's worker): signals stay with their owner
            old = {}
        try:
            yield
        finally:
            for signum, handler in old.items():
                signal.signal(signum, handler)


def versions() -> dict:
    """Versions of what computes a run, the device, and the commit of the source where git knows it."""
    source = Path(__file__).parent
    try:
        git = ('git', '-C', str(source), 'describe', '--always', '--dirty', '--abbrev=12')
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ''
    packages = ('lingrok', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
    device = jax.local_devices()[0]
    return {
        'python': platform.python_version(),
        **{name: _version(name) for name in packages},
        'commit': commit,
        'device': f'{device.platform} {device.device_kind}',
        'machine': platform.machine(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return 'not installed'


def _without_frozen(measured: dict, frozen: np.ndarray) -> dict:
    """What was measured of a frozen replica is no result: NaN."""
    if not frozen.any():
        return measured
    return {name: np.where(frozen.reshape(-1, *[1] * (x.ndim - 1)), np.nan, x) for name, x in measured.items()}


def _write_npz(path: Path, tree) -> None:
    arrays = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    path.write_bytes(buffer.getvalue())


def _copy_files(task, directory: Path) -> None:
    """Copies the files that the task reads, so that the run can be loaded where they are not."""
    for field in task.FILES:
        path = Path(getattr(task, field))
        if path.is_file():
            directory.mkdir(exist_ok=True)
            copy = directory / f'{field}-{path.name}'
            shutil.copyfile(path, copy.with_name(f'{copy.name}.tmp'))
            copy.with_name(f'{copy.name}.tmp').replace(copy)


def _read_config(directory) -> Config:
    path = directory / 'config.json'
    if not path.exists():
        runs = sorted(found.parent.name for found in directory.glob('*/config.json'))
        raise RunError(f'{directory} is not a run directory: it has no config.json' + (
            f'; it holds runs, try {directory / runs[0]}' if runs else ''))
    try:
        tree = json.loads(path.read_text())
        for copy in (directory / 'files').iterdir() if (directory / 'files').exists() else ():
            # The copy and not the original, which may be gone or have changed since.
            if copy.suffix != '.tmp':
                tree['task'][copy.name.partition('-')[0]] = str(copy)
        return from_dict(tree)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f'{path} cannot be read: {error}') from error


class Run:
    """A run directory, read from anywhere: its config, checkpoints and metrics, and its model.

    `replica` is 0 unless said otherwise; replica=None returns all of them with a leading axis S. Without `step` the
    last checkpoint is meant.
    """

    def __init__(self, path):
        path = epath.Path(path)
        self.path = path if '://' in str(path) else path.expanduser().absolute()
        self.config = _read_config(self.path)
        self.task = self.config.task
        self._checkpoints = Checkpoints(self.path / 'checkpoints')

    def __repr__(self) -> str:
        done = 'finished' if self.finished else 'unfinished'
        return f'Run({str(self.path)!r}, {done}, {self.config.num_replicas} replicas, checkpoints at {self.steps})'

    @property
    def finished(self) -> bool:
        return (self.path / 'DONE').exists()

    @property
    def steps(self) -> list[int]:
        """Steps that have a checkpoint."""
        return self._checkpoints.steps()

    @property
    def coordinates(self) -> dict[str, tuple]:
        """What differs between the replicas: name -> one value a replica."""
        return dict(self.config.vary)

    def check(self, step: int) -> None:
        """Raises CheckpointError unless a checkpoint has the content it was saved with and is of this config."""
        meta = self._checkpoints.check(step)
        if meta.get('run_id') != run_id(self.config):
            raise CheckpointError(f'checkpoint {self.path / "checkpoints" / str(step)} is of run {meta.get("run_id")}, '
                                  f'the config of {run_id(self.config)}')

    def params(self, step: int | None = None, replica: int | None = 0) -> dict:
        """Parameters at a saved step as numpy arrays, checked against the hash they were saved with."""
        steps = self.steps
        require(bool(steps), f'{self.path} has no checkpoint yet')
        step = steps[-1] if step is None else step
        require(step in steps, f'{self.path} has no checkpoint of step {step}; it has {steps}')
        return self._pick(self._checkpoints.params(step), replica)

    def task_state(self, replica: int | None = 0):
        """The task state the run was trained with."""
        like = jax.eval_shape(lambda: self.task.init(jax.random.key(0)))
        path = self.path / 'task.npz'
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
                leaves = [stored[str(i)] for i in range(len(stored.files))]
            state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise RunError(f'{path} cannot be read: {error}') from error
        return self._pick(state, replica)

    def metrics(self) -> dict[str, Series]:
        """Every logged quantity: name -> (steps (T,), values (T, S, ...))."""
        return read_metrics(self.path)

    def sample(self, key, *, split: str, batch_size: int, replica: int = 0):
        """A batch of this run's task."""
        allowed = ('train', *self.task.splits)
        require(split in allowed, f'split {split!r}; allowed: {", ".join(allowed)}')
        return self.task.sample(self.task_state(replica), key, split=split, batch_size=batch_size)

    def apply(self, tokens_BL, *, step: int | None = None, replica: int = 0, params=None, hooks=None, capture=()):
        """Logits and captured activations of the model at a saved step, or of `params`; see `model.apply`."""
        params = self.params(step, replica) if params is None else params
        if not isinstance(tokens_BL, jax.core.Tracer):
            found, size = np.asarray(tokens_BL), self.config.model.vocab_size
            require(found.size == 0 or 0 <= found.min() <= found.max() < size, f'tokens from {found.min(initial=0)} to '
                    f'{found.max(initial=0)}; allowed: 0 to {size - 1}')
        params, tokens_BL = jax.tree.map(jax.numpy.asarray, (params, tokens_BL))
        return model.apply(params, tokens_BL, cfg=self.config.model, hooks=hooks, capture=capture)

    def measure(self, fn, *, steps=None, seed: int = 0) -> dict[str, Series]:
        """A measurement of every replica at saved steps: name -> (steps (T,), values (T, S, ...)).

        fn(params, task_state, key, cfg) -> {name: array} is a pure function of one replica, compiled once; see
        `lingrok.analysis`. steps: the last one by default. A replica's key comes from its evaluation seed and `seed`,
        so what is measured of it does not depend on what it was grouped with. Of a replica that had turned NaN by a
        step the values there are NaN: its parameters are those of an earlier step.
        """
        steps = self.steps[-1:] if steps is None else list(steps)
        require(bool(steps), f'{self.path} has no checkpoint yet')
        one = jax.jit(lambda params, state, key: fn(params, state, key, self.config))
        state_S = self.task_state(replica=None)
        seeds = self.config.coordinates()['seed.eval']
        keys = [jax.random.fold_in(train.stream_key({'seed.eval': s}, 'eval'), 1 + seed) for s in seeds]

        def at(step) -> dict:
            params_S = self.params(step, replica=None)
            found = [jax.device_get(one(self._pick(params_S, r), self._pick(state_S, r), keys[r]))
                     for r in range(self.config.num_replicas)]
            nan_steps = np.array(self._checkpoints.meta(step)['nan_step'])
            stacked = {name: np.stack([values[name] for values in found]) for name in found[0]}
            return _without_frozen(stacked, nan_steps >= 0)

        table = [at(step) for step in steps]
        return {name: Series(np.array(steps), np.stack([row[name] for row in table])) for name in table[0]}

    def summary(self) -> str:
        """The headline metrics at the last evaluation, with their spread over replicas."""
        metrics = self.metrics()
        require(self.task.headline[0] in metrics, f'{self.path} has no evaluation yet')
        steps = metrics[self.task.headline[0]].steps
        last = {name: metrics[name].values[-1] for name in self.task.headline if name in metrics}
        parts = [(f'{setting}: ' if setting else '') + f'{name} {text(values[replicas])}'
                 for setting, replicas in self.config.groups().items() for name, values in last.items()]
        return f'step {steps[-1]}: ' + '; '.join(parts) + '; mean ± half of the 95 % interval'

    def nan_replicas(self) -> list[int]:
        """Replicas that were frozen because they turned NaN before the last checkpoint."""
        steps = self._checkpoints.meta(self.steps[-1])['nan_step'] if self.steps else []
        return [replica for replica, step in enumerate(steps) if step >= 0]

    def _pick(self, tree, replica: int | None):
        if replica is None:
            return tree
        num = self.config.num_replicas
        require(0 <= replica < num, f'replica {replica}; allowed: 0 to {num - 1}, or None for all')
        return jax.tree.map(lambda x: x[replica], tree)


def load_run(path) -> Run:
    """A run directory, local or gs://, for reading. Nothing in it is executed."""
    return Run(path)


