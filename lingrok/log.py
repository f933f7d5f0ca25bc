"""What a run writes besides checkpoints: metrics on disk and progress on the screen.

`metrics.jsonl` has one line a step, {"step": 50, "train/loss": [one value a replica], ...}; NaN is null. Quantities
with an axis (accuracy by occurrence) are in `arrays/<step>.npz`, replica axis first.
"""

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from etils import epath


class Series(NamedTuple):
    """A quantity along training: steps (T,), values (T, S, ...)."""

    steps: np.ndarray
    values: np.ndarray


class MetricsWriter:
    """Appends whole lines to a run's metrics; what was written before a kill stays."""

    def __init__(self, directory: Path, *, after: int | None):
        """Opens the metrics of a run for appending. Lines beyond step `after`, and unreadable ones, are dropped."""
        self.path, self.arrays = directory / 'metrics.jsonl', directory / 'arrays'
        kept = [] if after is None else [row for row in _rows(self.path) if row['step'] <= after]
        lines = self.path.read_bytes().splitlines() if kept else []
        if any(_row(line + b'\n') is None for line in lines[: len(kept)]):
            place = self.path.with_name(self.path.name + '.damaged')
            write_atomically(place, b'\n'.join(lines) + b'\n')
            print(f'warning: lines of {self.path} cannot be read and are left out; the file as it was is {place}',
                  file=sys.stderr, flush=True)
        write_atomically(self.path, ''.join(json.dumps(row) + '\n' for row in kept).encode())
        for path in self.arrays.glob('*'):
            if after is None or not path.stem.isdigit() or int(path.stem) > after:
                path.unlink()
        self._file = self.path.open('a', encoding='utf8')

    def write(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """One step: arrays (S,) become lists of the line, arrays (S, ...) an npz file."""
        scalars = {name: value for name, value in values.items() if np.ndim(value) == 1}
        arrays = {name: value for name, value in values.items() if np.ndim(value) > 1}
        if arrays:
            self.arrays.mkdir(exist_ok=True)
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **arrays)
            write_atomically(self.arrays / f'{step}.npz', buffer.getvalue())
        row = {'step': step} | {name: [_number(x) for x in value] for name, value in sorted(scalars.items())}
        self._file.write(json.dumps(row, allow_nan=False) + '\n')

    def flush(self) -> None:
        """Returns when everything written is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        self._file.close()

    def abandon(self) -> None:
        """Closes after an error. On a full disk this fails as the write before it did, which is the one to report."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_metrics(directory, *, arrays: bool = True) -> dict[str, Series]:
    """Every quantity of a run directory by name. Lines that cannot be read, as a kill leaves one, are ignored.

    arrays: also those with an axis, which are in files of their own.
    """
    directory = epath.Path(directory)
    columns: dict[str, tuple[list, list]] = {}

    def add(name, step, value):
        steps, values = columns.setdefault(name, ([], []))
        steps.append(step)
        values.append(value)

    for row in _rows(directory / 'metrics.jsonl'):
        for name, value in row.items():
            if name != 'step':
                add(name, row['step'], [np.nan if x is None else x for x in value])
    folder = directory / 'arrays'
    files = [path for path in folder.iterdir() if path.stem.isdigit()] if arrays and folder.exists() else []
    for path in sorted(files, key=lambda path: int(path.stem)):
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            for name in stored.files:
                add(name, int(path.stem), stored[name])
    return {name: Series(np.array(steps), np.array(values)) for name, (steps, values) in sorted(columns.items())}


def _rows(path) -> list[dict]:
    """The lines of metrics.jsonl that can be read: a kill leaves half a line, a crash of the machine any bytes."""
    found = [_row(line) for line in path.read_bytes().splitlines(keepends=True)] if path.exists() else []
    return [row for row in found if row is not None]


def _row(line: bytes) -> dict | None:
    try:
        row = json.loads(line) if line.endswith(b'\n') else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get('step'), int) else None


def _number(x) -> float | None:
    x = float(x)
    return float(f'{x:.7g}') if np.isfinite(x) else None


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that it is the old or the new one, never half of it."""
    temporary = path.with_name(path.name + '.tmp')
    with temporary.open('wb') as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, tree) -> None:
    """Writes JSON so that the file is the old or the new one, never half of it."""
    write_atomically(path, (json.dumps(tree, indent=1) + '\n').encode())


class Progress:
    """A bar on a terminal, plain lines elsewhere. Everything goes to stderr; stdout is for results."""

    def __init__(self, total: int, initial: int = 0, *, quiet: bool = False):
        self._start, self._bar, self._quiet = time.monotonic(), None, quiet
        if sys.stderr.isatty() and not quiet:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, initial=initial, unit='step', dynamic_ncols=True)

    def advance(self, steps: int) -> None:
        if self._bar is not None:
            self._bar.update(steps)

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif not self._quiet:
            print(f'[{time.monotonic() - self._start:6.1f} s] {line}', file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
