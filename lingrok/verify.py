"""Checks a run directory from end to end: what a run that trained here, or was copied here, must hold."""

import io
import json
from collections.abc import Iterator

import jax
import numpy as np
from etils import epath

from lingrok import run
from lingrok.checkpoint import CheckpointError


def problems(path) -> Iterator[str]:
    """What is wrong with a run directory, one line each; nothing if it is sound. An unfinished run can be sound.

    Checked: config and versions can be read; every checkpoint has the content it was saved with and belongs to this
    config; metrics.jsonl holds whole lines of increasing steps with a number for every replica; arrays and the task
    state have a row for every replica; DONE stands only beside the last step and every scheduled checkpoint.
    """
    path = epath.Path(path)
    try:
        loaded = run.load_run(path)
    except run.RunError as error:
        yield str(error)
        return
    yield from _versions(path / 'versions.json')
    saved = yield from _checkpoints(loaded)
    last = yield from _metrics(path / 'metrics.jsonl', loaded.config)
    yield from _arrays(path / 'arrays', loaded.config, last)
    yield from _task_state(loaded)
    if loaded.finished:
        yield from _done(loaded, saved, last)


def _versions(path) -> Iterator[str]:
    try:
        starts = json.loads(path.read_text())
        if not (isinstance(starts, list) and starts and all('jax' in start and 'step' in start for start in starts)):
            yield f'{path} does not list the versions of every start'
    except (OSError, ValueError, TypeError) as error:
        yield f'{path} cannot be read: {_reason(error)}'


def _checkpoints(loaded) -> Iterator[str]:
    """Yields problems; returns the steps whose checkpoints are whole."""
    directory, sound = loaded.path / 'checkpoints', []
    if directory.exists():
        for entry in directory.iterdir():
            if not entry.name.isdigit():
                yield f'{entry} was left behind by an interrupted save; the next start of the run removes it'
    for step in loaded.steps:
        try:
            loaded.check(step)
            sound.append(step)
        except CheckpointError as error:
            yield str(error)
    if not sound:
        yield f'{loaded.path} has no checkpoint that is whole'
    return sound


def _metrics(path, config) -> Iterator[str]:
    """Yields problems; returns the last step."""
    last, where = -1, ''
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if not lines:
        yield f'{path} is missing or empty'
    for number, line in enumerate(lines, 1):
        where = f'{path}, line {number}'
        if not line.endswith('\n'):
            yield f'{where} is half a line; the next start of the run drops it'
            break
        try:
            row = json.loads(line)
            step = row.pop('step')
        except (ValueError, KeyError, AttributeError) as error:
            yield f'{where} cannot be read: {_reason(error)}'
            continue
        if step <= last:
            yield f'{where} has step {step} after step {last}'
        last = max(step, last)
        for name, values in row.items():
            if not isinstance(values, list) or len(values) != config.num_replicas:
                yield f'{where}: {name} does not have one number for each of the {config.num_replicas} replicas'
    return last


def _arrays(directory, config, last: int) -> Iterator[str]:
    for path in directory.iterdir() if directory.exists() else ():
        if path.suffix != '.npz' or not path.stem.isdigit():
            yield f'{path} is no array of a step'
            continue
        if int(path.stem) > last:
            yield f'{path} is of a step that metrics.jsonl does not have'
        yield from _npz(path, config.num_replicas)


def _npz(path, num_replicas: int) -> Iterator[str]:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            short = [name for name in stored.files if len(stored[name]) != num_replicas]
    except Exception as error:  # zipfile, zlib and numpy raise many kinds for a damaged file
        yield f'{path} cannot be read: {_reason(error)}'
        return
    if short:
        yield f'{path}: {short[0]} does not have a row for each of the {num_replicas} replicas'


def _task_state(loaded) -> Iterator[str]:
    path = loaded.path / 'task.npz'
    yield from _npz(path, loaded.config.num_replicas)
    try:
        jax.tree.map(np.shape, loaded.task_state())
    except Exception as error:
        yield f'{path} is not the task state of this config: {_reason(error)}'


def _done(loaded, saved, last: int) -> Iterator[str]:
    steps = loaded.config.train.num_steps
    missing = sorted(set(run.save_steps(loaded.config.train)) - set(saved))
    if missing:
        yield f'{loaded.path} is marked DONE without whole checkpoints of the steps {missing}'
    if last != steps:
        yield f'{loaded.path} is marked DONE, but its metrics end at step {last} of {steps}'


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
