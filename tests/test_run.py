import copy
import errno
import fcntl
import functools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, get_config

import lingrok.tasks
from lingrok import config, load_run, run, train
from lingrok.checkpoint import Checkpoints
from lingrok.config import ConfigError
from lingrok.run import Interrupted, RunError
from lingrok.tasks import bigrams

SAVES = [0, 1, 4, 20]
EXPLODING = 0.4  # a learning rate at which replica 1 overflows in the middle of the run


def make_config(**changes) -> config.Config:
    """The smoke config of recall: 2 replicas, 20 steps, checkpoints at SAVES. changes: section.key as section_key."""
    cfg = get_config('recall.py:smoke')
    for name, value in changes.items():
        section, _, key = name.partition('_')
        cfg[section][key] = value
    return config.from_config_dict(cfg)


def nan_config() -> config.Config:
    cfg = get_config('recall.py:smoke')
    cfg.vary.optim.learning_rate = (cfg.optim.learning_rate, EXPLODING)
    return config.from_config_dict(cfg)


PROGRAMS, MADE, compiled = train.Programs, {}, []


@pytest.fixture(autouse=True, scope='module')
def _trace_once():
    """Runs of the same config share their programs: tracing them takes longer than training here."""
    compile_programs = PROGRAMS.compile

    def make(cfg, *, capacity, **options):
        tree = config.to_dict(cfg)
        for place in ('train.log_every', 'train.eval_every', 'train.save_optimizer', 'train.save_minutes',
                      'task.table'):
            section, _, name = place.partition('.')
            del tree[section][name]  # not compiled in; the tables of these tests have the same content
        tree['vary'] = cfg.num_replicas
        key = repr((tree, capacity))
        if key not in MADE:
            MADE[key] = PROGRAMS(cfg, capacity=capacity, **options)
        programs = copy.copy(MADE[key])
        dtypes = {name: values.dtype for name, values in programs.settings.items()}
        settings = {name: np.asarray(values, dtypes[name]) for name, values in cfg.coordinates().items()}
        programs.cfg, programs.settings = cfg, programs.put(settings)
        programs.compile = functools.partial(compile_once, MADE[key], programs)
        return programs

    def compile_once(made, programs, *args):
        if made not in compiled:
            compile_programs(made, *args)
            compiled.append(made)
        programs.train_chunk, programs.evaluate = made.train_chunk, made.evaluate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, 'Programs', make)
        yield


@pytest.fixture(scope='module', name='finished')
def _finished(tmp_path_factory):
    """An undisturbed run."""
    return run.execute(make_config(), tmp_path_factory.mktemp('undisturbed') / 'run')


def files_of(directory) -> dict[str, bytes]:
    directory = Path(directory)
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob('*') if path.is_file()}


def assert_same_tree(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(x, y)


def assert_same_run(a, b):
    """Same checkpoints and parameters bit for bit, same metrics byte for byte, nothing more and nothing less."""
    assert a.finished and b.finished and a.steps == b.steps == SAVES
    for step in SAVES:
        assert_same_tree(a.params(step, None), b.params(step, None))
    for name in ('metrics.jsonl', 'config.json'):
        assert Path(a.path / name).read_bytes() == Path(b.path / name).read_bytes()
    assert [path.name for path in sorted(Path(a.path / 'arrays').iterdir())] == ['0.npz', '10.npz', '20.npz']
    assert set(files_of(b.path / 'arrays')) == set(files_of(a.path / 'arrays'))
    for name, series in a.metrics().items():
        np.testing.assert_array_equal(series.values, b.metrics()[name].values)
    assert_same_tree(a.task_state(None), b.task_state(None))
    leftover = [name for name in os.listdir(b.path / 'checkpoints') if not name.isdigit()]
    assert not leftover and not list(Path(b.path).rglob('*.tmp'))


def one_line(error) -> str:
    message = str(error.value)
    assert '\n' not in message
    return message


def interrupted(cfg, directory, chunks: int, *signums: int) -> Interrupted:
    """Stops a run by signals to this process while it works on its n-th chunk; chunks are of one step."""
    agree, left = run._Trainer._agree, [chunks]

    def patched(self, length, late):
        left[0] -= 1
        if left[0] == 0:
            for signum in signums or (signal.SIGTERM,):
                os.kill(os.getpid(), signum)
        return agree(self, length, late)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run._Trainer, '_agree', patched)
        patch.setattr(run, 'CHUNK_SECONDS', -1.0)
        with pytest.raises((Interrupted, KeyboardInterrupt)) as caught:
            run.execute(cfg, directory)
    return caught.value


def flip_a_byte(directory: Path) -> None:
    """Damages the largest file, that of the array data."""
    path = max((p for p in directory.rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# Finished runs


def test_files_of_a_finished_run(finished):
    assert sorted(os.listdir(finished.path)) == [
        'DONE', 'LOCK', 'arrays', 'checkpoints', 'config.json', 'metrics.jsonl', 'task.npz', 'versions.json']
    assert sorted(map(int, os.listdir(finished.path / 'checkpoints'))) == SAVES
    stored = json.loads((finished.path / 'config.json').read_text())
    assert stored == config.to_dict(make_config()) and stored['format_version'] == config.FORMAT_VERSION
    (start,) = json.loads((finished.path / 'versions.json').read_text())
    assert start['step'] == 0 and start['jax'] == jax.__version__ and start['lingrok'] == lingrok.__version__
    assert start['python'] and start['numpy'] == np.__version__ and start['device'].startswith('cpu')


def test_lines_of_the_metrics(finished):
    rows = [json.loads(line) for line in (finished.path / 'metrics.jsonl').read_text().splitlines()]
    assert [row['step'] for row in rows] == list(range(21))
    assert all('train/loss' in row for row in rows[1:]) and 'train/loss' not in rows[0]
    assert [row['step'] for row in rows if 'noisy/loss' in row] == [0, 10, 20]
    assert all(len(values) == 2 for row in rows for name, values in row.items() if name != 'step')


def test_a_finished_run_is_returned_as_it_is(finished, monkeypatch):
    def paths():
        return {p: p.stat().st_mtime_ns for p in Path(finished.path).rglob('*')}

    before, times = files_of(finished.path), paths()
    monkeypatch.setattr(run, '_Trainer', None)
    again = run.execute(make_config(), finished.path)
    assert again.finished and files_of(finished.path) == before and paths() == times


def test_another_layout_and_name_are_the_same_experiment(finished):
    cfg = get_config('recall.py:smoke')
    cfg.name, cfg.train.layout = 'other', 'vmap'
    assert run.execute(config.from_config_dict(cfg), finished.path).finished


def test_steps_of_checkpoints():
    def steps(**values):
        return run.save_steps(config.TrainConfig(**values))

    assert steps(num_steps=20, save='log', save_count=3) == SAVES
    assert steps(num_steps=10, save='log', save_count=1) == [0, 1, 10]
    assert steps(num_steps=3, save='log', save_count=50) == [0, 1, 2, 3]
    assert steps(num_steps=10, save='regular', save_every=4) == [0, 4, 8, 10]
    assert steps(num_steps=10, save='regular', save_every=1000) == [0, 10]
    assert steps(num_steps=10, save='listed', save_steps=(7, 3)) == [0, 3, 7, 10]
    assert steps(num_steps=10, save='listed') == [0, 10]
    assert steps(num_steps=10, save='final') == [10]


def test_default_directory():
    cfg = make_config()
    assert run.default_directory(cfg) == Path('runs') / f'recall_smoke-{config.run_id(cfg)}'


# Interruptions


def test_the_clock_changes_no_result(finished, tmp_path, monkeypatch):
    """A machine so slow that every chunk is one step, and one so quick that they are as long as they may be."""
    monkeypatch.setattr(run, 'CHUNK_SECONDS', -1.0)
    assert_same_run(finished, run.execute(make_config(), tmp_path / 'slow'))


def test_interrupted_at_many_steps_equals_undisturbed(finished, tmp_path):
    stops = [1, 2, 3, 4, 5, 9, 10, 19]
    for start, step in zip([0, *stops], stops, strict=False):
        stop = interrupted(make_config(), tmp_path, step - start)
        assert stop.signum == signal.SIGTERM
        assert str(stop) == f'stopped by SIGTERM at step {step} of 20, state saved; the same command resumes'
        assert load_run(tmp_path).steps == sorted({step, *(s for s in SAVES if s <= step)})
        assert not load_run(tmp_path).finished
    assert_same_run(finished, run.execute(make_config(), tmp_path))
    starts = json.loads((tmp_path / 'versions.json').read_text())
    assert [start['step'] for start in starts] == [0, *stops]


@pytest.mark.parametrize('signum, chunks', [(signal.SIGINT, 3), (signal.SIGTERM, 13)])
def test_interrupted_once_equals_undisturbed(finished, tmp_path, signum, chunks, capsys):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert interrupted(make_config(), tmp_path, chunks, signum).signum == signum
    assert f'{signal.Signals(signum).name}: saving after this chunk' in capsys.readouterr().err
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert_same_run(finished, run.execute(make_config(), tmp_path))
    assert f'resumed at step {chunks}' in capsys.readouterr().err


def test_a_signal_in_the_last_chunk_comes_too_late(finished, tmp_path, monkeypatch):
    save = Checkpoints.save

    def patched(self, step, *args):
        if step == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        save(self, step, *args)

    monkeypatch.setattr(Checkpoints, 'save', patched)
    assert_same_run(finished, run.execute(make_config(), tmp_path))


def test_a_second_signal_stops_at_once(finished, tmp_path):
    assert isinstance(interrupted(make_config(), tmp_path, 9, signal.SIGINT, signal.SIGINT), KeyboardInterrupt)
    assert load_run(tmp_path).steps == [0, 1, 4]
    assert_same_run(finished, run.execute(make_config(), tmp_path))


def test_killed_between_saving_and_removing_an_interruption(finished, tmp_path):
    """The checkpoint of an interruption goes when the next one is there, and never stays behind."""
    interrupted(make_config(), tmp_path, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, 'remove', raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run.execute(make_config(), tmp_path)
    assert load_run(tmp_path).steps == [0, 1, 4, 7, 20] and not load_run(tmp_path).finished
    assert_same_run(finished, run.execute(make_config(), tmp_path))


def test_a_kill_between_far_checkpoints_costs_minutes(finished, tmp_path, monkeypatch):
    """With save_minutes=0 every chunk saves; of what was not scheduled only the newest stays, and resumes."""
    kept, save = [], Checkpoints.save

    def patched(self, step, *args):
        if step == 9:
            raise KeyboardInterrupt
        kept.append(self.steps())
        save(self, step, *args)

    monkeypatch.setattr(run, 'CHUNK_SECONDS', -1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, 'save', patched)
        with pytest.raises(KeyboardInterrupt):
            run.execute(make_config(train_save_minutes=0.0), tmp_path)
    assert kept == [[], [0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 4, 5], [0, 1, 4, 6], [0, 1, 4, 7]]
    assert load_run(tmp_path).steps == [0, 1, 4, 8]
    again = run.execute(make_config(), tmp_path)
    assert json.loads((tmp_path / 'versions.json').read_text())[-1]['step'] == 8
    (tmp_path / 'config.json').write_bytes(Path(finished.path / 'config.json').read_bytes())  # another save_minutes
    assert_same_run(finished, again)


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_in_a_thread_that_gets_no_signals(finished, tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(run.execute(make_config(), tmp_path)))
    thread.start()
    thread.join()
    assert_same_run(finished, results[0])


# Kills

KILLED = """
import os, sys, time, signal
from pathlib import Path
sys.path.insert(0, {tests!r})
import conftest  # the same devices and cache as in this process
from lingrok import config, run
cfg, directory = config.from_config_dict(conftest.get_config('recall.py:smoke')), Path({directory!r})
agree = run._Trainer._agree

def slow(self, length, late):
    time.sleep(0.03)
    return agree(self, length, late)

run._Trainer._agree, run.CHUNK_SECONDS = slow, -1.0
saving = lambda step: any((directory / 'checkpoints').glob(f'{{step}}.*'))

def killed_when(condition):
    child = os.fork()
    if child == 0:
        run.execute(cfg, directory)
        os._exit(0)
    while not condition():
        time.sleep(0.0005)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), 'ended before it was killed'
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL

killed_when(lambda: saving(4))
print(sorted(os.listdir(directory / 'checkpoints')), flush=True)
began = time.monotonic()
killed_when(lambda: time.monotonic() > began + {wait!r})
mark = (directory / 'metrics.jsonl').stat().st_ino
killed_when(lambda: (directory / 'metrics.jsonl').stat().st_ino != mark and saving(20))
"""


@pytest.mark.slow
def test_killed_three_times_equals_undisturbed(finished, tmp_path):
    """While it saves step 4; at any moment of starting or training; while it saves the last step."""
    wait = float(np.random.default_rng().uniform(0.3, 3))
    script = KILLED.format(tests=str(ROOT / 'tests'), directory=str(tmp_path / 'run'), wait=wait)
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run([sys.executable, '-c', script], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not load_run(tmp_path / 'run').finished
    print(f'killed after {wait} s; checkpoints at the first kill: {done.stdout}')
    assert_same_run(finished, run.execute(make_config(), tmp_path / 'run'))


# Damage


def unfinished_copy(finished, directory) -> Path:
    shutil.copytree(finished.path, directory)
    (directory / 'DONE').unlink()
    return directory


@pytest.mark.parametrize('item', ['params', 'train', 'meta'])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(finished, tmp_path, capfd, item):
    directory = unfinished_copy(finished, tmp_path / 'run')
    flip_a_byte(directory / 'checkpoints' / '20' / item)
    damaged = files_of(directory / 'checkpoints' / '20')
    again = run.execute(make_config(), directory)
    out, err = capfd.readouterr()
    warnings = [line for line in err.splitlines() if not line.startswith('[')]
    assert len(warnings) == 1 and out == '', err
    assert warnings[0].startswith(f'warning: checkpoint {directory}/checkpoints/20 is damaged: ')
    assert warnings[0].endswith(f'; moved to {directory}/damaged/20-0; trying the one before it')
    assert 'resumed at step 4' in err
    assert files_of(directory / 'damaged' / '20-0') == damaged
    assert_same_run(finished, again)


def test_all_checkpoints_damaged(finished, tmp_path, capfd):
    directory = unfinished_copy(finished, tmp_path / 'run')
    for step in SAVES:
        flip_a_byte(directory / 'checkpoints' / str(step) / 'params')
    again = run.execute(make_config(), directory)
    err = capfd.readouterr().err
    assert err.count('warning: ') == 4 and 'resumed' not in err
    assert sorted(os.listdir(directory / 'damaged')) == ['0-0', '1-0', '20-0', '4-0']
    assert_same_run(finished, again)


def test_a_checkpoint_that_lost_its_optimiser_state(finished, tmp_path, capfd):
    directory = unfinished_copy(finished, tmp_path / 'run')
    shutil.rmtree(directory / 'checkpoints' / '20' / 'train')
    again = run.execute(make_config(), directory)
    err = capfd.readouterr().err
    assert f'warning: checkpoint {directory}/checkpoints/20 has no optimiser state; moved to ' in err
    assert 'resumed at step 4' in err
    assert_same_run(finished, again)
    assert (directory / 'checkpoints' / '20' / 'train').exists()


@pytest.mark.parametrize('damaged, resumed', [((), 20), ((20,), 4), ((20, 4), None)])
def test_optimiser_state_in_the_two_newest_checkpoints_only(finished, tmp_path, capfd, damaged, resumed):
    cfg = make_config(train_save_optimizer='last')
    done = run.execute(cfg, tmp_path)

    def with_state():
        return [step for step in SAVES if (tmp_path / 'checkpoints' / str(step) / 'train').exists()]

    assert with_state() == [4, 20]
    for step in SAVES:
        assert_same_tree(done.params(step, None), finished.params(step, None))
    (tmp_path / 'DONE').unlink()
    for step in damaged:
        flip_a_byte(tmp_path / 'checkpoints' / str(step) / 'train')
    capfd.readouterr()
    again = run.execute(cfg, tmp_path)
    err = capfd.readouterr().err
    assert f'resumed at step {resumed}' in err if resumed else 'resumed' not in err
    assert again.steps == SAVES and with_state() == [4, 20]
    for step in SAVES:
        assert_same_tree(again.params(step, None), finished.params(step, None))
    assert (tmp_path / 'metrics.jsonl').read_bytes() == (finished.path / 'metrics.jsonl').read_bytes()


def test_a_damaged_checkpoint_is_an_error_when_asked_for(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / 'run')
    flip_a_byte(tmp_path / 'run' / 'checkpoints' / '4' / 'params')
    loaded = load_run(tmp_path / 'run')
    assert loaded.params(20) and loaded.steps == SAVES
    with pytest.raises(lingrok.checkpoint.CheckpointError, match='checkpoints/4 is damaged') as caught:
        loaded.params(4)
    one_line(caught)


def test_a_half_written_start(finished, tmp_path):
    """Killed before the first checkpoint: whatever is there is made anew."""
    interrupted(make_config(), tmp_path, 1)
    shutil.rmtree(tmp_path / 'checkpoints')
    (tmp_path / 'task.npz').write_bytes(b'PK')
    (tmp_path / 'config.json.tmp').write_text('{')
    again = run.execute(make_config(), tmp_path)
    (tmp_path / 'config.json.tmp').unlink()
    assert_same_run(finished, again)


# Directories that will not do


def test_another_config(finished):
    before = files_of(finished.path)
    with pytest.raises(RunError) as caught:
        run.execute(make_config(train_num_steps=30, optim_momentum=0.5), finished.path)
    assert one_line(caught) == (
        f'{finished.path} holds another experiment (optim.momentum: 0.9 there, 0.5 here; train.num_steps: 20 there, '
        '30 here); choose another --workdir')
    assert files_of(finished.path) == before


def test_another_number_of_replicas(finished):
    cfg = get_config('recall.py:smoke')
    cfg.vary.seed.all = (0, 1, 2)
    with pytest.raises(RunError, match=r'vary.seed.all: \[0, 1\] there, \[0, 1, 2\] here'):
        run.execute(config.from_config_dict(cfg), finished.path)


def test_in_use(finished):
    with open(finished.path / 'LOCK', 'a') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunError) as caught:
            run.execute(make_config(), finished.path)
    assert one_line(caught) == f'{finished.path} is in use by another process; wait, or choose another --workdir'
    assert run.execute(make_config(), finished.path).finished


def test_a_directory_of_something_else(tmp_path):
    (tmp_path / 'thesis.tex').write_text('x')
    with pytest.raises(RunError) as caught:
        run.execute(make_config(), tmp_path)
    assert one_line(caught) == f'{tmp_path} holds thesis.tex and no run; choose another --workdir'
    assert os.listdir(tmp_path) == ['thesis.tex']


def test_an_empty_directory_will_do(finished, tmp_path):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'LOCK').touch()
    assert_same_run(finished, run.execute(make_config(), tmp_path / 'run'))


def test_below_a_file(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(OSError) as caught:
        run.execute(make_config(), tmp_path / 'file' / 'run')
    assert caught.value.errno == errno.ENOTDIR and str(tmp_path / 'file') in str(caught.value.filename)


def test_a_read_only_place():
    place = Path('/sys/lingrok-test')
    try:
        with pytest.raises(OSError) as caught:
            run.execute(make_config(), place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    assert str(place) in str(caught.value.filename)


# A full disk


@pytest.fixture(name='disk')
def _disk(tmp_path):
    """A small file system and a function that changes its size in kilobytes."""
    place = tmp_path / 'disk'
    place.mkdir()

    def resize(size: int, how='remount') -> None:
        command = ['mount', '-t', 'tmpfs', '-o', f'{how},size={size}k', 'lingrok-test', str(place)]
        subprocess.run(command, check=True, capture_output=True)

    try:
        resize(64, how='rw')
    except (OSError, subprocess.CalledProcessError):
        pytest.skip('no permission to mount a file system')
    yield place, resize
    subprocess.run(['umount', '-l', str(place)], check=True)


def kilobytes(directory) -> int:
    """Of whole pages, as a tmpfs counts."""
    return sum(4 * (len(content) // 4096 + 2) for content in files_of(directory).values())


def test_a_full_disk(finished, disk, capfd):
    """Found by the first file, by the first checkpoint and by a later one; with room, the run goes on."""
    place, resize = disk
    checkpoint, rest = kilobytes(finished.path / 'checkpoints' / '0'), kilobytes(finished.path / 'arrays') + 60
    for size in (8, 64, 1100 + rest + checkpoint * 3 // 2):
        resize(size)
        with pytest.raises(OSError) as caught:
            run.execute(make_config(), place / 'run')
        assert caught.value.errno == errno.ENOSPC and str(place) in str(caught.value.filename)
        one_line(caught)
    assert 0 < len(load_run(place / 'run').steps) < len(SAVES) and not load_run(place / 'run').finished
    err = capfd.readouterr().err
    assert all(line.startswith('[') for line in err.splitlines()), err  # progress, and no traceback
    resize(20_000)
    assert_same_run(finished, run.execute(make_config(), place / 'run'))


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(finished, disk, capfd, monkeypatch):
    place, resize = disk
    resize(256)
    monkeypatch.setattr(lingrok.checkpoint, 'SLACK', -(2**30))  # it looks as if there were room
    with pytest.raises(OSError, match='checkpoint not written') as caught:
        run.execute(make_config(), place / 'run')
    assert str(place / 'run' / 'checkpoints') in caught.value.filename
    one_line(caught)
    err = capfd.readouterr().err
    assert all(line.startswith('[') for line in err.splitlines()), err
    resize(20_000)
    assert_same_run(finished, run.execute(make_config(), place / 'run'))


def test_metrics_that_cannot_be_written(finished, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(run.MetricsWriter, 'flush', raising(OSError(errno.ENOSPC, 'No space left on device')))
        with pytest.raises(OSError) as caught:
            run.execute(make_config(), tmp_path)
    assert caught.value.filename == str(tmp_path)
    assert_same_run(finished, run.execute(make_config(), tmp_path))


# Replicas that turn NaN


@pytest.fixture(scope='module', name='exploded')
def _exploded(tmp_path_factory):
    return run.execute(nan_config(), tmp_path_factory.mktemp('exploded') / 'run')


def test_a_nan_replica_is_frozen_and_the_others_go_on(finished, exploded):
    losses = exploded.metrics()['train/loss'].values
    when = int(np.argmax(np.isnan(losses[:, 1])))
    assert 4 < when < 18, 'choose another EXPLODING'
    assert np.isnan(losses[when:, 1]).all() and np.isfinite(losses[:when, 1]).all()
    np.testing.assert_array_equal(losses[:, 0], finished.metrics()['train/loss'].values[:, 0])
    assert exploded.nan_replicas() == [1] and finished.nan_replicas() == []
    for step in SAVES:
        assert_same_tree(exploded.params(step, 0), finished.params(step, 0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(exploded.params(20, 1)))
    lines = (exploded.path / 'metrics.jsonl').read_text().splitlines()
    assert json.loads(lines[20])['train/loss'][1] is None and 'NaN' not in ''.join(lines)
    measured = exploded.metrics()['clean/p_noise'].values  # of a frozen replica it is no result
    counted = exploded.measure(lambda *_: {'one': np.float32(1), 'two': np.int32(2)})
    assert np.isnan(counted['one'].values[-1, 1]) and np.isnan(counted['two'].values[-1, 1])
    assert counted['one'].values[-1, 0] == 1 and counted['two'].values[-1, 0] == 2
    assert np.isnan(measured[-1, 1]) and np.isfinite(measured[:, 0]).all() and '(n=1)' in exploded.summary()


@pytest.mark.parametrize('chunks', [3, 18])
def test_a_nan_is_told_with_its_step_whenever_the_run_was_interrupted(exploded, tmp_path, capsys, chunks):
    when = int(np.argmax(np.isnan(exploded.metrics()['train/loss'].values[:, 1])))
    interrupted(nan_config(), tmp_path, chunks)
    told = capsys.readouterr().err
    assert load_run(tmp_path).nan_replicas() == ([1] if chunks > when else [])
    again = run.execute(nan_config(), tmp_path)
    told += capsys.readouterr().err
    warning = (f'warning: replica 1 (optim.learning_rate={EXPLODING}, seed=1) turned NaN at step {when} and is frozen; '
               'the others go on')
    assert told.count('warning') == 1 and warning in told
    assert_same_run(exploded, again)


# Reading a run


def test_parameters(finished):
    everything = finished.params(replica=None)
    one = finished.params()
    assert jax.tree.structure(one) == jax.tree.structure(everything)
    assert_same_tree(one, finished.params(20, 0))
    assert_same_tree(one, jax.tree.map(lambda x: x[0], everything))
    assert_same_tree(finished.params(4, 1), jax.tree.map(lambda x: x[1], finished.params(4, None)))
    assert all(type(x) is np.ndarray and x.shape[0] == 2 for x in jax.tree.leaves(everything))
    assert (one['blocks_0']['k'] != finished.params(0)['blocks_0']['k']).any()
    assert (one['embed'] != finished.params(replica=1)['embed']).any()


def test_what_a_run_tells(finished):
    assert finished.steps == SAVES and finished.finished
    assert finished.coordinates == {'seed': (0, 1)}
    assert finished.config == make_config() and finished.task == make_config().task
    assert repr(finished) == f"Run('{finished.path}', finished, 2 replicas, checkpoints at [0, 1, 4, 20])"
    values = finished.metrics()['noisy/loss'].values[-1]
    assert finished.summary().startswith(f'step 20: noisy/loss {values.mean():.3f} ± ')
    assert all(name in finished.summary() for name in finished.task.headline)


def test_metrics(finished):
    metrics = finished.metrics()
    assert metrics['train/loss'].values.shape == (20, 2) and metrics['train/loss'].steps.tolist() == list(range(1, 21))
    assert metrics['noisy/loss'].values.shape == (3, 2) and metrics['noisy/loss'].steps.tolist() == [0, 10, 20]
    assert metrics['noisy/accuracy_by_occurrence'].values.shape == (3, 2, 8)
    assert all(series.values.shape[1] == 2 for series in metrics.values())


def test_metrics_are_those_of_the_stored_parameters(finished):
    """The evaluation of step 20, made again from what is on the disk."""
    cfg = finished.config
    p = train.Programs(cfg, capacity=20, **lingrok.analysis.evaluation(cfg.task.NAME))
    measured = p.evaluate(p.put(finished.params(20, None)), p.put(finished.task_state(None)), p.settings)
    for name, values in p.fetch(measured).items():
        # Seven digits are stored.
        np.testing.assert_allclose(finished.metrics()[name].values[-1], values, rtol=1e-6, atol=1e-9)


def test_task_state_and_samples(finished):
    state, both = finished.task_state(1), finished.task_state(None)
    assert_same_tree(state, jax.tree.map(lambda x: x[1], both))
    expected = finished.task.init(jax.random.key(0))
    np.testing.assert_array_equal(state.bigram_VV, expected.bigram_VV)
    batch = jax.jit(lambda key: finished.sample(key, split='clean', batch_size=3, replica=1))(jax.random.key(0))
    assert batch.tokens_BL.shape == (3, finished.task.length) and not batch.groups['is_noise_BL'].any()


def test_measure_is_the_function_on_every_replica_and_step(finished):
    def norms(params, task_state, key, cfg):
        table = jnp.sum(jax.tree.leaves(task_state)[0])
        return {'norm': jnp.linalg.norm(params['embed']), 'draw': jax.random.uniform(key, (3,)), 'table': table}

    series = finished.measure(norms, steps=[0, 20], seed=1)
    assert series['norm'].steps.tolist() == [0, 20] and series['draw'].values.shape == (2, 2, 3)
    for replica in (0, 1):
        expected = [np.linalg.norm(finished.params(step, replica)['embed']) for step in (0, 20)]
        np.testing.assert_allclose(series['norm'].values[:, replica], expected, rtol=1e-6)
        table = np.sum(jax.tree.leaves(finished.task_state(replica))[0])
        np.testing.assert_allclose(series['table'].values[:, replica], table, rtol=1e-5)
    draws = series['draw'].values
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (finished.measure(norms)['draw'].values[0] != draws[0]).all()
    assert finished.measure(norms)['norm'].steps.tolist() == [20]


def test_apply(finished):
    tokens = np.arange(32).reshape(2, 16)
    at = functools.partial(finished.apply, step=4, replica=1)
    logits, acts = jax.jit(functools.partial(at, capture='blocks.*.attn.pattern'))(tokens)
    assert logits.shape == (2, 16, finished.task.vocab_size)
    assert sorted(acts) == ['blocks.0.attn.pattern', 'blocks.1.attn.pattern']
    np.testing.assert_allclose(acts['blocks.0.attn.pattern'].sum(-1), 1, rtol=1e-5)
    direct = jax.jit(lambda params: lingrok.apply(params, tokens, cfg=finished.config.model)[0])(finished.params(4, 1))
    np.testing.assert_allclose(logits, direct, rtol=1e-5, atol=1e-6)
    hooked, _ = jax.jit(functools.partial(at, hooks={'blocks.1.mlp.post': lambda x: 0 * x}))(tokens)
    assert (np.asarray(hooked) != np.asarray(logits)).any()


@pytest.mark.parametrize('call, message', [
    (lambda r: r.params(replica=2), 'replica 2; allowed: 0 to 1, or None for all'),
    (lambda r: r.params(replica=-1), 'replica -1; allowed: 0 to 1, or None for all'),
    (lambda r: r.task_state(5), 'replica 5; allowed: 0 to 1, or None for all'),
    (lambda r: r.params(3), 'has no checkpoint of step 3; it has [0, 1, 4, 20]'),
    (lambda r: r.apply(np.zeros((1, 3), int), step=-1), 'has no checkpoint of step -1; it has [0, 1, 4, 20]'),
    (lambda r: r.sample(jax.random.key(0), split='dirty', batch_size=1), "split 'dirty'; allowed: train, noisy, clean"),
    (lambda r: r.apply(np.full((1, 3), r.config.model.vocab_size)), 'tokens from '),
    (lambda r: r.apply(np.full((1, 3), -1)), 'tokens from -1 to '),
    (lambda r: r.apply(np.zeros((1, 99), int)), 'tokens of length 99; allowed: 1 to max_len=16'),
])
def test_bad_requests(finished, call, message):
    with pytest.raises(ConfigError) as caught:
        call(finished)
    assert message in one_line(caught)


def test_an_unfinished_run_is_readable(tmp_path):
    interrupted(make_config(), tmp_path, 6)
    loaded = load_run(tmp_path)
    assert not loaded.finished and loaded.steps == [0, 1, 4, 6] and 'unfinished' in repr(loaded)
    assert loaded.metrics()['train/loss'].steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert loaded.summary().startswith('step 0: noisy/loss') and loaded.nan_replicas() == []


def test_a_run_that_has_nothing_yet(tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps(config.to_dict(make_config())))
    loaded = load_run(tmp_path)
    assert loaded.steps == [] and loaded.metrics() == {} and loaded.nan_replicas() == []
    for call in (loaded.params, loaded.summary):
        with pytest.raises(ConfigError, match='yet'):
            call()


def test_from_another_directory(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(finished.path.parent)
    loaded = load_run('run')
    monkeypatch.chdir(tmp_path)
    assert_same_tree(loaded.params(), finished.params())
    assert loaded.path == finished.path and loaded.metrics() and loaded.task_state() is not None
    monkeypatch.setenv('HOME', str(finished.path.parent))
    assert_same_tree(load_run('~/run').params(1), finished.params(1))


def test_nothing_is_unpickled(finished, tmp_path, monkeypatch):
    directory = unfinished_copy(finished, tmp_path / 'run')
    for name in ('load', 'loads', 'Unpickler'):
        monkeypatch.setattr(pickle, name, raising(AssertionError('unpickled')))
    loaded = load_run(directory)
    assert loaded.params() and loaded.metrics() and loaded.task_state() is not None and loaded.summary()
    np.savez(directory / 'task.npz', **{'0': np.array([{}], object)})
    with pytest.raises(RunError, match='task.npz cannot be read') as caught:
        loaded.task_state()
    one_line(caught)


@pytest.mark.parametrize('content', [b'', b'PK', b'\x00' * 100])
def test_a_damaged_task_state(finished, tmp_path, content):
    directory = unfinished_copy(finished, tmp_path / 'run')
    (directory / 'task.npz').write_bytes(content)
    with pytest.raises(RunError, match='task.npz cannot be read') as caught:
        load_run(directory).task_state()
    one_line(caught)


def broken(**changes) -> str:
    return json.dumps({**config.to_dict(make_config()), **changes})


@pytest.mark.parametrize('content, message', [
    (broken(format_version=2), 'config of format version 2; this lingrok reads 1'),
    (broken(colour='red'), "config has no key 'colour'"),
    (broken(model={'num_layer': 1}), "config.model has no key 'num_layer'; did you mean 'num_layers'?"),
    (broken(task={'name': 'sorting'}), "task.name='sorting' is unknown"),
    (broken(train={'num_steps': '20'}), "train.num_steps='20' has type str; allowed: int"),
    (broken(vary=3), 'vary=3 is not a group of keys'),
    ('', 'Expecting value'), ('{"name": ', 'Expecting value'), ('[]', ''), ('3', ''), ('null', ''), ('\x00', ''),
])
def test_a_config_that_cannot_be_read(tmp_path, content, message):
    (tmp_path / 'config.json').write_text(content)
    for call in (lambda: load_run(tmp_path), lambda: run.execute(make_config(), tmp_path)):
        with pytest.raises(RunError) as caught:
            call()
        assert one_line(caught).startswith(f'{tmp_path}/config.json cannot be read: ') and message in one_line(caught)


def test_not_a_run(tmp_path):
    for place in (tmp_path, tmp_path / 'nowhere'):
        with pytest.raises(RunError) as caught:
            load_run(place)
        assert one_line(caught) == f'{place} is not a run directory: it has no config.json'
    for name in ('0001-b', '0000-a'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'config.json').touch()
    with pytest.raises(RunError, match=f'has no config.json; it holds runs, try {tmp_path}/0000-a$'):
        load_run(tmp_path)


# A table of the user's


@pytest.fixture(name='table')
def _table(tmp_path):
    """A copy of the shipped table, so that the programs are those of the other tests."""
    place = tmp_path / 'my-table.json'
    shutil.copyfile(Path(bigrams.__file__).parent / 'shakespeare.json', place)
    return place


def test_a_run_outlives_its_table(finished, table, tmp_path, monkeypatch):
    cfg = make_config(task_table=str(table))
    done = run.execute(cfg, tmp_path / 'run')
    assert os.listdir(tmp_path / 'run' / 'files') == ['table-my-table.json']
    assert_same_tree(done.params(20, None), finished.params(20, None))
    table.unlink()
    monkeypatch.chdir('/')
    loaded = load_run(tmp_path / 'run')
    assert loaded.task.symbols == finished.task.symbols and config.run_id(loaded.config) == config.run_id(done.config)
    assert_same_tree(loaded.task_state(), finished.task_state())
    assert run.execute(loaded.config, tmp_path / 'run').finished


def test_a_moved_table_is_the_same_experiment(table, tmp_path):
    interrupted(make_config(task_table=str(table)), tmp_path / 'run', 2)
    moved = table.rename(tmp_path / 'moved.json')
    with pytest.raises(RunError) as caught:
        run.execute(make_config(task_table=str(moved), optim_momentum=0.5), tmp_path / 'run')
    assert 'holds another experiment (optim.momentum: 0.9 there, 0.5 here)' in one_line(caught)
    assert run.execute(make_config(task_table=str(moved)), tmp_path / 'run').finished


def test_a_table_that_has_changed_is_another_experiment(table, tmp_path):
    cfg = make_config(task_table=str(table))
    interrupted(cfg, tmp_path / 'run', 2)
    before = config.run_id(cfg)
    content = json.loads(table.read_text())
    content['unigram'][0] += 1
    content['bigram'][0][0] += 1
    table.write_text(json.dumps(content))
    changed = make_config(task_table=str(table))
    assert config.run_id(changed) != before and config.run_id(load_run(tmp_path / 'run').config) == before
    with pytest.raises(RunError, match='holds another experiment .*task.table') as caught:
        run.execute(changed, tmp_path / 'run')
    one_line(caught)


def test_killed_while_copying_the_table(table, tmp_path, monkeypatch):
    cfg = make_config(task_table=str(table))
    with monkeypatch.context() as patch:
        def half(source, target):
            Path(target).write_text('{')
            raise KeyboardInterrupt

        patch.setattr(shutil, 'copyfile', half)
        with pytest.raises(KeyboardInterrupt):
            run.execute(cfg, tmp_path / 'run')
    assert run.execute(cfg, tmp_path / 'run').finished


def test_a_run_that_logs_less_often_than_it_lasts(tmp_path):
    done = run.execute(make_config(train_log_every=100, train_eval_every=100), tmp_path)
    assert done.nan_replicas() == [] and 'train/loss' not in done.metrics()
    assert done.metrics()['noisy/loss'].steps.tolist() == [0, 20]


def test_a_refused_config_leaves_nothing_behind(tmp_path):
    wrong = get_config('recall.py:smoke')
    wrong.optim.frozen = ('embedd',)
    with pytest.raises(ConfigError, match='embedd'):
        run.execute(config.from_config_dict(wrong), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()
