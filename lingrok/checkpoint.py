"""Checkpoints on disk, each with a hash of its content. The only file that imports orbax.

A checkpoint `checkpoints/<step>` has the items `params` (nested dict, replica axis first), `train` (the rest of the
state: optimiser, step, NaN steps) and `meta` (JSON: step, hashes, whether it was scheduled). Analysis restores params
alone, as host arrays, on any machine. A step directory appears only when it is complete.
"""

import errno
import gc
import hashlib
import json
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

ITEMS = ('params', 'train', 'meta')

SLACK = 2**20  # bytes of a checkpoint beyond its arrays, at most

for _name in ('absl', 'orbax'):  # a line for every save hides the run's own; errors are raised as well as logged
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, cut short or changed. The message is one line that names it."""


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, directory):
        self.directory = epath.Path(directory)
        self._handler = _handler()

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, in order. Whether its content is whole shows when it is read."""
        if not self.directory.exists():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdigit())

    def save(self, step: int, params, train, meta: Mapping) -> None:
        """Writes a checkpoint of host arrays; it exists in full or not at all. OSError if the disk does not take it.

        train=None: only what analysis needs.
        """
        path, items = self._path(step), {'params': _flat(params)} | ({} if train is None else {'train': _flat(train)})
        meta = {**meta, 'step': step, 'hash': {name: content_hash(item) for name, item in items.items()}}
        meta['hash']['meta'] = _meta_hash(meta)
        args = {name: ocp.args.StandardSave(item) for name, item in items.items()}
        self.directory.mkdir(parents=True, exist_ok=True)
        needed = SLACK + sum(value.nbytes for item in items.values() for value in item.values())
        free = shutil.disk_usage(self.directory).free  # asked first: tensorstore meets a full disk with many tracebacks
        if free < needed:
            raise OSError(errno.ENOSPC, f'disk full: a checkpoint needs {needed:,} bytes, {free:,} are free', str(path))
        _, reason = _quietly(self._handler.save, path, ocp.args.Composite(meta=ocp.args.JsonSave(meta), **args))
        if reason:
            raise OSError(errno.EIO, f'checkpoint not written: {reason}', str(path))

    def meta(self, step: int) -> dict:
        """What was saved as `meta`, checked against its hash."""
        return self._checked(step)['meta']

    def check(self, step: int) -> dict:
        """Reads everything that a checkpoint has against its hashes; returns `meta`."""
        meta = self.meta(step)
        self._item(step, 'params')
        if self.can_resume(step):
            self._item(step, 'train')
        return meta

    def params(self, step: int) -> dict:
        """Parameters of all replicas (S first) as numpy arrays, checked against their hash."""
        return _nested(self._item(step, 'params'))

    def train(self, step: int, like):
        """The rest of the training state, checked against its hash, in the tree form of `like`."""
        if self._path(step).exists() and not self.can_resume(step):
            raise CheckpointError(f'checkpoint {self._path(step)} has no optimiser state')
        flat = self._item(step, 'train')
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(like)]
        if sorted(paths) != sorted(flat):
            raise CheckpointError(f'checkpoint {self._path(step)} holds another optimiser state than this config makes')
        return jax.tree.unflatten(jax.tree.structure(like), [flat[path] for path in paths])

    def can_resume(self, step: int) -> bool:
        """Whether a checkpoint has the optimiser state, too."""
        return (self._path(step) / 'train').exists()

    def drop_train(self, step: int) -> None:
        """Leaves only what analysis needs."""
        if self.can_resume(step):
            (self._path(step) / 'train').rmtree()

    def remove(self, step: int) -> None:
        self._path(step).rmtree()

    def set_aside(self, step: int) -> epath.Path:
        """Moves a damaged checkpoint out of the way and returns its new place; nothing is deleted."""
        place = self.directory.parent / 'damaged'
        place.mkdir(exist_ok=True)
        number = 0
        while (place / f'{step}-{number}').exists():
            number += 1
        return self._path(step).rename(place / f'{step}-{number}')

    def clean(self) -> None:
        """Removes what an interrupted save left behind."""
        if self.directory.exists():
            for path in self.directory.iterdir():
                if not path.name.isdigit():
                    path.rmtree() if path.is_dir() else path.unlink()

    def _path(self, step: int):
        return self.directory / str(step)

    def _item(self, step: int, name: str) -> dict[str, np.ndarray]:
        # Restored as numpy: neither the sharding nor the accelerator of the writer is needed.
        restored = self._checked(step, **{name: ocp.args.StandardRestore()})
        item = {path: np.asarray(value) for path, value in restored[name].items()}
        if content_hash(item) != restored['meta']['hash'].get(name):
            raise CheckpointError(f'checkpoint {self._path(step)} is damaged: the content of {name!r} has changed')
        return item

    def _checked(self, step: int, **args):
        restored = self._restore(step, meta=ocp.args.JsonRestore(), **args)
        meta = restored['meta']
        found = meta.get('hash') if isinstance(meta, dict) else None
        sound = isinstance(found, dict) and meta.get('step') == step and found.get('meta') == _meta_hash(meta)
        if not sound:
            raise CheckpointError(f"checkpoint {self._path(step)} is damaged: the content of 'meta' has changed")
        return restored

    def _restore(self, step: int, **args):
        path = self._path(step)
        if not path.exists():
            raise CheckpointError(f'{self.directory} has no checkpoint of step {step}; it has {self.steps()}')
        restored, reason = _quietly(self._handler.restore, path, ocp.args.Composite(**args))
        if reason:
            raise CheckpointError(f'checkpoint {path} is damaged: {reason}')
        return restored


def _handler() -> ocp.Checkpointer:
    """Saves and restores host arrays without waiting for other processes: process 0 saves what all have gathered."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me}, barrier_sync_key_prefix=str(me))
    composite = ocp.CompositeOptions(multiprocessing_options=alone)
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(composite_options=composite), multiprocessing_options=alone)


def content_hash(flat: Mapping[str, np.ndarray]) -> str:
    """sha256 over names, dtypes, shapes and bytes of arrays."""
    digest = hashlib.sha256()
    for name in sorted(flat):
        value = np.asarray(flat[name])
        digest.update(f'{name} {value.dtype} {value.shape} '.encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _meta_hash(meta: Mapping) -> str:
    """sha256 over all of `meta` but this hash itself."""
    hashes = {name: value for name, value in meta['hash'].items() if name != 'meta'}
    return hashlib.sha256(json.dumps({**meta, 'hash': hashes}, sort_keys=True).encode()).hexdigest()


def _quietly(fn, *args):
    """(result, '') of fn, or (None, reason) where it fails: one line, without the tracebacks that its threads print."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    log = logging.getLogger('asyncio')
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', RuntimeWarning)
            try:
                return fn(*args), ''
            except Exception as error:  # orbax, tensorstore and json raise many kinds for damaged files and bad disks
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            time.sleep(0.1)  # reads and writes that are under way fail after the first one
            gc.collect()  # what was never awaited says so when it is collected
            return None, reason
    finally:
        sys.unraisablehook = hook
        log.setLevel(level)


def _flat(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(value) for path, value in jax.tree.leaves_with_path(tree)}


def _nested(flat: Mapping[str, np.ndarray]) -> dict:
    """The nested dict whose `_flat` form is `flat`: "['blocks_0']['q']" -> {'blocks_0': {'q': ...}}."""
    tree: dict = {}
    for path, value in flat.items():
        *parents, leaf = path.strip("[]'").split("']['")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree
