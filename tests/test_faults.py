"""Faults that really happen to a run: each is done to it here, and it ends with the bits of an undisturbed one."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from conftest import ROOT

from lingrok import load_run, run, verify
from lingrok.checkpoint import Checkpoints
from lingrok.config import ConfigError, from_config_dict

STEPS = 20


def config(**train):
    tree = tiny.get_config(STEPS)
    for key, value in train.items():
        tree.train[key] = value
    return from_config_dict(tree)


@pytest.fixture(name='finished', scope='module')
def _finished(tmp_path_factory):
    """The directory of an undisturbed run. Tests copy it."""
    directory = tmp_path_factory.mktemp('undisturbed') / 'run'
    run.execute(config(), directory)
    return directory


@pytest.fixture(name='half')
def _half(finished, tmp_path):
    """A copy of the undisturbed run as if it had been killed between step 15 and 20."""
    directory = tmp_path / 'run'
    shutil.copytree(finished, directory)
    (directory / 'DONE').unlink()
    shutil.rmtree(directory / 'checkpoints' / '20')
    return directory


def same(one, other):
    """Both runs are sound and have the same bits: parameters at every step, metrics, arrays, task state."""
    for directory in (one, other):
        assert list(verify.problems(directory)) == []
    first, second = load_run(one), load_run(other)
    assert first.steps == second.steps and first.finished and second.finished
    for step in first.steps:
        jax.tree.map(np.testing.assert_array_equal, first.params(step, None), second.params(step, None))
    assert (one / 'metrics.jsonl').read_bytes() == (other / 'metrics.jsonl').read_bytes()
    for name, series in first.metrics().items():
        np.testing.assert_array_equal(series.values, second.metrics()[name].values)
    return True


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    """26 SIGKILLs, at least 10 of them inside a checkpoint write, in two runs side by side."""
    flags = '--xla_backend_optimization_level=0'  # compiles faster; the same in all processes that are compared
    env = os.environ | {'XLA_FLAGS': flags, 'PYTHONPATH': str(ROOT), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
    servers = []
    for seed in range(2):
        (tmp_path / str(seed)).mkdir()
        command = [sys.executable, str(Path(tiny.__file__)), str(tmp_path / str(seed)), '13', str(seed)]
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True))
    reports = []
    for server in servers:
        out, err = server.communicate(timeout=600)
        assert server.returncode == 0, err[-2000:]
        reports.append(json.loads(out))
    assert all(report['status'] == 0 for report in reports)
    assert sum(report['kills'] for report in reports) >= 25
    assert sum(report['inside'] for report in reports) >= 10
    for seed in range(2):
        assert same(tmp_path / str(seed) / 'undisturbed', tmp_path / str(seed) / 'killed')
        starts = json.loads((tmp_path / str(seed) / 'killed' / 'versions.json').read_text())
        assert max(start['step'] for start in starts) > 0  # some came far enough to go on from a checkpoint


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(half, finished, capfd):
    largest = max((half / 'checkpoints' / '15' / 'params').rglob('d/*'), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[: len(content) // 2])
    run.execute(config(), half)
    said = capfd.readouterr().err
    assert 'checkpoints/15 is damaged' in said and 'trying the one before it' in said and 'resumed at step 10' in said
    assert (half / 'damaged' / '15-0').exists()
    assert same(half, finished)


def test_damaged_versions_are_begun_anew(half, finished, capfd):
    (half / 'versions.json').write_text('x')
    run.execute(config(), half)
    assert 'versions.json cannot be read; it is begun anew' in capfd.readouterr().err
    assert same(half, finished)


def test_all_checkpoints_lost(half, finished):
    shutil.rmtree(half / 'checkpoints')
    run.execute(config(), half)
    assert same(half, finished)


def test_a_failed_save_is_not_offered_and_what_was_there_stays(half, finished, monkeypatch):
    """The write of step 20 fails half way: 15 and those before it stay whole, and the next start goes on from 15."""
    with monkeypatch.context() as patched:
        def fail(self, path, *args, **kwargs):
            (path.parent / f'{path.name}.orbax-checkpoint-tmp-7').mkdir()
            raise RuntimeError('the link is severed')

        patched.setattr('orbax.checkpoint.Checkpointer.save', fail)
        with pytest.raises(OSError, match='the link is severed'):
            run.execute(config(), half)
    left = load_run(half)
    assert left.steps == [0, 5, 10, 15] and not left.finished
    for step in left.steps:
        left.check(step)
    run.execute(config(), half)
    assert same(half, finished)


def test_an_unscheduled_checkpoint_goes_only_when_a_later_one_is_whole(tmp_path, monkeypatch):
    """After a signal at step 7 the state of step 7 is kept until another save has succeeded."""
    cfg, directory = config(save='listed', eval_every=5), tmp_path / 'run'
    steps, original = [], run._Trainer._agree

    def interrupt(self, length, late):
        steps.append(length)
        if len(steps) == 3:
            self.signum = 15
        return original(self, length, late)

    monkeypatch.setattr(run._Trainer, '_agree', interrupt)
    with pytest.raises(run.Interrupted):
        run.execute(cfg, directory)
    stopped = load_run(directory).steps[-1]
    assert 0 < stopped < STEPS and list(verify.problems(directory)) == []
    with monkeypatch.context() as patched:
        patched.setattr('orbax.checkpoint.Checkpointer.save', lambda *args, **kwargs: 1 / 0)
        with pytest.raises(OSError):
            run.execute(cfg, directory)
    assert load_run(directory).steps == [0, stopped]
    run.execute(cfg, directory)
    assert load_run(directory).steps == [0, STEPS]
    assert list(verify.problems(directory)) == []


def test_the_directory_vanishes(tmp_path, monkeypatch):
    """Nothing is written into a new directory: one error that names the one that has gone."""
    directory, original = tmp_path / 'run', run._Trainer._agree

    def remove(self, length, late):
        shutil.rmtree(directory, ignore_errors=True)
        return original(self, length, late)

    monkeypatch.setattr(run._Trainer, '_agree', remove)
    with pytest.raises(FileNotFoundError) as caught:
        run.execute(config(), directory)
    assert str(directory) in str(caught.value) and not directory.exists()


def test_the_clock_is_set_back(half, finished, monkeypatch):
    """Order comes from steps: files of next year and a clock of last year change nothing."""
    later = time.time() + 3.2e7
    for path in half.rglob('*'):
        os.utime(path, (later, later))
    real = time.time
    monkeypatch.setattr(time, 'time', lambda: real() - 3.2e7)
    monkeypatch.setattr(time, 'time_ns', lambda: int((real() - 3.2e7) * 1e9))
    run.execute(config(), half)
    monkeypatch.undo()
    assert same(half, finished)


def test_two_processes_on_one_run(half, finished):
    before = {path: path.read_bytes() for path in half.rglob('*') if path.is_file()}
    assert not run.in_use(half)
    with run._locked(half):
        assert run.in_use(half)
        with pytest.raises(run.RunError, match='is in use by another process; wait, or choose another --workdir'):
            run.execute(config(), half)
    assert before == {path: path.read_bytes() for path in half.rglob('*') if path.is_file()}
    run.execute(config(), half)
    assert same(half, finished)


@pytest.mark.parametrize('version', [0, 2, None, 'one'])
def test_a_directory_of_another_format_version(half, version):
    stored = json.loads((half / 'config.json').read_text())
    (half / 'config.json').write_text(json.dumps(stored | {'format_version': version}))
    for use in (load_run, lambda directory: run.execute(config(), directory)):
        with pytest.raises((run.RunError, ConfigError), match=f'format version {version!r}; this lingrok reads 1'):
            use(half)


@pytest.mark.parametrize('tail', ['{"step": 17, "train/lo', '{"step": 16, "train/loss": [0.1, 0.2]}\n', '\0\0\0'])
def test_metrics_beyond_the_checkpoint_are_written_again(half, finished, tail):
    """Half a line, and lines that were written after the last checkpoint, are gone after a resume."""
    lines = (half / 'metrics.jsonl').read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)['step'] <= 17]
    (half / 'metrics.jsonl').write_text(''.join(kept) + tail)
    run.execute(config(), half)
    assert same(half, finished)


def test_optimiser_state_in_the_two_newest_checkpoints_only(finished, tmp_path):
    """What is saved without it is the same; the older of the two is there for when the newest is damaged."""
    cfg, directory = config(save_optimizer='last'), tmp_path / 'run'
    run.execute(cfg, directory)
    checkpoints = Checkpoints(directory / 'checkpoints')
    assert [step for step in checkpoints.steps() if checkpoints.can_resume(step)] == [15, 20]
    assert same(directory, finished)
    (directory / 'DONE').unlink()
    shutil.rmtree(directory / 'checkpoints' / '20' / 'params')
    run.execute(cfg, directory)
    assert (directory / 'damaged' / '20-0').exists() and same(directory, finished)
