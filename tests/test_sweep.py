"""Sweeps: axes, planning, the sweep directory, and that a replica's result does not depend on its company."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from conftest import ROOT, get_config

from lingrok import launch, load_run, run, sweep
from lingrok.config import ConfigError, from_dict


@pytest.fixture(name='tree')
def _tree(smoke):
    return smoke.to_dict()


@pytest.fixture(name='cheap')
def _cheap(monkeypatch):
    """Programs of 100 bytes and 10 more a replica of a device, without compiling one."""

    def memory(config, devices):
        return 100 + 10 * -(-config.num_replicas // (1 if config.train.parallel == 'batch' else len(devices)))

    monkeypatch.setattr(sweep, 'program_memory', memory)
    monkeypatch.setattr(sweep, '_state_bytes', lambda config: 10)


def test_axes():
    grid = sweep.grid({'a': (1, 2), 'b': np.array([0.5, 0.25])})
    assert grid == [{'a': 1, 'b': 0.5}, {'a': 1, 'b': 0.25}, {'a': 2, 'b': 0.5}, {'a': 2, 'b': 0.25}]
    assert all(type(value) in (int, float) for point in grid for value in point.values())
    both = sweep.zipped({'a': (1, 2), 'b': (3, 4)})
    assert both == [{'a': 1, 'b': 3}, {'a': 2, 'b': 4}]
    assert sweep.chain(both, sweep.grid({'c': (5,)})) == [*both, {'c': 5}]
    assert sweep.product(both, sweep.zipped({'c': (5, 6)}))[:2] == [{'a': 1, 'b': 3, 'c': 5}, {'a': 1, 'b': 3, 'c': 6}]
    assert sweep.grid({}) == [{}]


@pytest.mark.parametrize('make, message', [
    (lambda: sweep.zipped({'a': (1, 2), 'b': (3,)}), "different lengths: {'a': 2, 'b': 1}"),
    (lambda: sweep.grid({'a': ()}), "axis 'a' has no values"),
    (lambda: sweep.product(sweep.grid({'a': (1,)}), sweep.grid({'a': (2,)})), "two axes set 'a'"),
    (lambda: sweep.product(sweep.grid({'seed': (1,)}), sweep.grid({'seed.init': (2,)})), "two axes set 'seed'"),
])
def test_impossible_axes(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_points_share_a_program_unless_a_key_is_compiled_in(tree):
    axes = sweep.grid({'task.noise_prob': (0.1, 0.2), 'model.d_mlp': (32, 64)})
    columns, table, groups = sweep.resolve(tree, axes)
    assert columns == ('task.noise_prob', 'model.d_mlp', 'seed') and len(table) == 8
    assert [group.config.model.d_mlp for group in groups] == [32, 64]
    assert groups[0].config.vary == {'task.noise_prob': (0.1, 0.1, 0.2, 0.2), 'seed': (0, 1, 0, 1)}
    assert [table[row] for row in groups[1].rows] == [(0.1, 64, 0), (0.1, 64, 1), (0.2, 64, 0), (0.2, 64, 1)]


def test_points_that_set_different_keys_take_the_rest_from_the_config(tree):
    tree['vary'] = {}
    tree['seed']['init'] = 7
    points = sweep.chain([{'seed': 1}], [{'optim.momentum': 0.5}], [{'seed.init': 2, 'seed': 3}])
    columns, table, (group,) = sweep.resolve(tree, points)
    assert columns == ('optim.momentum', 'seed.init', 'seed.task', 'seed.batch', 'seed.eval')
    assert table == ((0.9, 1, 1, 1, 1), (0.5, 7, 0, 0, 0), (0.9, 2, 3, 3, 3))
    assert group.config.coordinates()['seed.init'] == (1, 7, 2)
    assert points[0] == {'seed': 1}  # the argument is left alone


@pytest.mark.parametrize('points, message', [
    ([{'optim.learning_rat': 0.1}], "'optim.learning_rat', which is no key of the config; did you mean 'optim.learn"),
    ([{'task.name': 'recall'}], "'task.name', which is no key"),
    ([{'slurm.gpus': 1}], "'slurm.gpus', which is no key"),
    ([{'optim.learning_rate': 1}, {'optim.learning_rate': 1.0}], 'the points 0 and 2 of the sweep are the same'),
    ([{}, {'optim.momentum': 0.9}], 'the points 0 and 2 of the sweep are the same'),
    ([{'seed': 1}], "two axes set 'seed'"),
    ([{'task.noise_prob': 2.0}], 'noise_prob=2.0 is out of range'),
    ([{'model.num_heads': 3}], 'model.num_heads=3 does not divide'),
    ([], 'the sweep has no points'),
])
def test_impossible_points(tree, points, message):
    with pytest.raises(ConfigError, match=message) as caught:
        sweep.resolve(tree, points)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('budget, max_replicas, sizes', [
    (1000, 0, [12]),
    (120, 0, [6, 6]),  # 2 replicas a device on 4 devices are 8; split evenly
    (110, 0, [4, 4, 4]),
    (1000, 5, [4, 4, 4]),
    (1000, 7, [6, 6]),
])
def test_chunks_fit_the_memory(tree, cheap, budget, max_replicas, sizes):
    points = sweep.grid({'task.noise_prob': (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)})
    planned = sweep.plan(tree, points, budget=budget, max_replicas=max_replicas)
    assert [program.config.num_replicas for program in planned.programs] == sizes
    assert [row for program in planned.programs for row in program.rows] == list(range(12))
    assert all(program.memory <= budget for program in planned.programs)
    for program in planned.programs:
        assert [planned.points[row] for row in program.rows] == list(
            zip(program.config.vary['task.noise_prob'], program.config.vary['seed'], strict=True))
    assert len({program.name for program in planned.programs}) == len(planned.programs)


def test_batches_spread_over_the_devices_do_not_make_room_for_replicas(tree, cheap):
    tree['train']['parallel'] = 'batch'
    planned = sweep.plan(tree, sweep.grid({'task.noise_prob': (0.1, 0.2)}), budget=120)
    assert [program.config.num_replicas for program in planned.programs] == [2, 2]


def test_impossible_plans(tree, cheap):
    points = sweep.grid({'model.d_mlp': (32, 64)})
    with pytest.raises(ConfigError, match='one replica takes 110 bytes a device, the budget is 100'):
        sweep.plan(tree, points, budget=100)
    with pytest.raises(ConfigError, match='one program was asked for, but the sweep changes model.d_mlp'):
        sweep.plan(tree, points, budget=1000, one_program=True)
    with pytest.raises(ConfigError, match='one program was asked for, but 4 replicas take 2 to fit'):
        sweep.plan(tree, sweep.grid({'task.noise_prob': (0.1, 0.2)}), budget=1000, max_replicas=2, one_program=True)
    assert len(sweep.plan(tree, [{}], budget=1000, one_program=True).programs) == 1


def test_the_phase_diagram_is_one_program(cheap):
    tree = get_config('modular.py:smoke').to_dict()
    tree['vary'] = {'seed': {'all': (0, 1, 2)}}
    tree['train']['batch_size'] = 420  # as many sequences of every task, for each number of tasks
    axes = sweep.grid({'task.num_tasks': (1, 2, 3, 4, 5, 6, 7), 'task.alpha': np.linspace(0.2, 0.8, 7)})
    planned = sweep.plan(tree, axes, budget=10**6, one_program=True)
    assert planned.programs[0].config.num_replicas == 147


def test_the_plan_is_made_once_and_kept(tree, cheap, tmp_path):
    points = sweep.grid({'task.noise_prob': (0.1, 0.2, 0.3)})
    first = sweep.open_sweep(tmp_path, tree, points, budget=1000, max_replicas=2)
    again = sweep.open_sweep(tmp_path, tree, points, budget=1000)  # on a larger machine
    assert again == first and len(first.programs) == 3
    with pytest.raises(ConfigError, match='index 3 is out of range; this sweep has the programs 0 to 2'):
        first.program(3)
    with pytest.raises(ConfigError, match='index -1 is out of range'):
        first.program(-1)
    with pytest.raises(ConfigError, match='holds another sweep .recall_smoke, 6 points, .*choose another --workdir'):
        sweep.open_sweep(tmp_path, tree, points[:2], budget=1000)
    tree['train']['num_steps'] = 21
    with pytest.raises(ConfigError, match='holds another sweep'):
        sweep.open_sweep(tmp_path, tree, points, budget=1000)


def test_a_directory_that_is_no_sweep(tree, cheap, tmp_path):
    with pytest.raises(ConfigError, match='is not a sweep directory: it has no sweep.json'):
        sweep.collect(tmp_path)
    (tmp_path / 'thesis.tex').touch()
    with pytest.raises(ConfigError, match='thesis.tex.* and no sweep; choose another'):
        sweep.open_sweep(tmp_path, tree, [{}], budget=1000)
    (tmp_path / 'thesis.tex').unlink()
    sweep.open_sweep(tmp_path, tree, [{}], budget=1000)
    with pytest.raises(ConfigError, match='has no results yet'):
        sweep.collect(tmp_path)
    stored = json.loads((tmp_path / 'sweep.json').read_text())
    (tmp_path / 'sweep.json').write_text(json.dumps(stored | {'format_version': 0}))
    with pytest.raises(ConfigError, match='sweep.json has format version 0; this lingrok reads 1'):
        sweep.status(tmp_path)
    (tmp_path / 'sweep.json').write_text('{')
    with pytest.raises(ConfigError, match='sweep.json cannot be read'):
        sweep.status(tmp_path)


@pytest.mark.slow
def test_memory_is_that_of_the_compiled_program(tree):
    """The state of a replica counts once (it is donated), and what is in between comes on top."""
    tree['eval']['truncations'] = ()
    tree['train']['layout'] = 'vmap'  # replicas side by side: all of them have their intermediates at once
    config = from_dict(tree)
    one, two = (sweep.program_memory(sweep._repeat(config, count), jax.devices()[:1]) for count in (1, 2))
    state = sweep._state_bytes(config)
    assert one > state and two - one > state
    widest = config.train.batch_size * config.task.length * config.task.vocab_size * 4  # the logits
    assert two - one > widest


@pytest.mark.slow
def test_results_do_not_depend_on_the_grouping(tree, tmp_path):
    """The same bits whether four points share a program or two do, and in the table that collects them."""
    points = sweep.grid({'task.noise_prob': (0.3, 0.7)})
    runs = {}
    for name, most in (('together', 0), ('apart', 2)):
        planned = sweep.open_sweep(tmp_path / name, tree, points, max_replicas=most)
        for program in planned.programs:
            trained = run.execute(program.config, tmp_path / name / program.name)
            for replica, row in enumerate(program.rows):
                runs[name, row] = trained.params(replica=replica), trained.metrics(), replica
        assert [state for state, _, _ in sweep.status(tmp_path / name)] == ['finished'] * len(planned.programs)
    for row in range(4):
        (params, metrics, i), (other_params, other_metrics, j) = runs['together', row], runs['apart', row]
        jax.tree.map(np.testing.assert_array_equal, params, other_params)
        for name in metrics:
            np.testing.assert_array_equal(metrics[name].values[:, i], other_metrics[name].values[:, j])
    _check_table(tmp_path / 'apart', runs)


def _check_table(directory, runs):
    path = sweep.collect(directory)
    table = sweep.read_table(path)
    header = path.read_text().splitlines()[0].split(',')
    assert header[:5] == ['index', 'replica', 'task.noise_prob', 'seed', 'step']
    series = runs['together', 0][1]['noisy/loss']
    here = (table['task.noise_prob'] == 0.7) & (table['seed'] == 1) & np.isfinite(table['noisy/loss'])
    np.testing.assert_array_equal(table['step'][here], series.steps)
    np.testing.assert_allclose(table['noisy/loss'][here], series.values[:, 3], rtol=1e-6)
    assert set(table['index'][here]) == {1} and set(table['replica'][here]) == {1}
    last = runs['together', 3][1]['clean/accuracy_by_occurrence'].values[-1, 3, 0]
    np.testing.assert_array_equal(table['clean/accuracy_by_occurrence[0]'][here][-1], last)
    _, counts = np.unique(np.stack([table['index'], table['replica'], table['step']]), axis=1, return_counts=True)
    assert set(counts) == {1}  # one row a point and step


def sweep_command(*args, **options):
    """experiments/sweep.py in a process of its own."""
    command = [sys.executable, str(ROOT / 'experiments' / 'sweep.py'), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, **options)


@pytest.mark.parametrize('args, message', [
    (['--config=configs/recall.py:smoke', '--index=9'], 'index 9 is out of range'),
    (['--status'], 'no sweep; try --workdir'),
    (['--list'], 'no config; try --config='),
])
def test_bad_commands_end_in_one_line(args, message, tmp_path):
    extra = [f'--workdir={tmp_path}'] if '--index=9' in args else []
    ended = sweep_command(*args, *extra)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith('error: ') and message in line


@pytest.mark.slow
def test_local_launcher(tmp_path):
    """Programs in processes of their own; what fails is named at the end, what is finished is not run again."""
    common = ['--config=configs/recall.py:smoke', f'--workdir={tmp_path}', '--max_replicas=2']
    shown = sweep_command(*common, '--dry_run')
    assert shown.returncode == 0, shown.stderr
    assert 'index\treplica\ttask.noise_prob\tseed' in shown.stdout and '1\t1\t0.7\t1' in shown.stdout
    assert '5,824 parameters' in shown.stdout and 'MiB a device' in shown.stdout and 's a step' in shown.stdout
    assert not list(tmp_path.glob('0*'))
    first = json.loads((tmp_path / 'sweep.json').read_text())['programs'][0]['directory']
    (tmp_path / first).write_text('not a directory')
    failed = sweep_command(*common, '--launcher=local')
    assert failed.returncode == 1
    assert failed.stderr.strip().splitlines()[-1].startswith('error: program 0: exit code 2: error: ')
    (tmp_path / first).unlink()
    ended = sweep_command(*common, '--launcher=local')
    assert ended.returncode == 0, ended.stderr
    assert '1 of 2 program(s) to run' in ended.stdout
    states = sweep_command(f'--workdir={tmp_path}', '--status')
    assert states.stdout.count('finished') == 2
    assert 'on 1 cpu device' in sweep_command(f'--workdir={tmp_path}', '--status', '--index=1').stdout
    collected = sweep_command(f'--workdir={tmp_path}', '--collect')
    assert 'sweep.csv' in collected.stdout and (tmp_path / 'sweep.csv').exists()


def test_local_launcher_stops_its_processes(tmp_path):
    """A launcher that is told to stop asks its processes to, and leaves none behind."""
    command = [sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)']
    code = ('from pathlib import Path; from lingrok import launch\n'
            f'launch.local(lambda index: {command!r}, [0], Path({str(tmp_path)!r}), gpus=0)')
    launcher = subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stderr=subprocess.PIPE)
    log = tmp_path / 'logs' / '0000.log'
    wait_for(lambda: log.exists() and log.read_text().endswith('\n'))
    launcher.terminate()
    assert launcher.wait(30) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'nothing happened'
        time.sleep(0.05)


def test_every_launched_program_has_a_device_of_its_own(tmp_path):
    code = 'import os; print(sorted(os.sched_getaffinity(0)), os.environ.get("CUDA_VISIBLE_DEVICES"))'
    command = lambda index: [sys.executable, '-c', code]  # noqa: E731
    assert launch.local(command, [0, 1, 2], tmp_path, gpus=0) == {}
    cores = {(tmp_path / 'logs' / f'000{i}.log').read_text().split(']')[0] for i in range(3)}
    assert cores <= {f'[{core}' for core in os.sched_getaffinity(0)}
    assert launch.local(command, [3, 4], tmp_path, gpus=2, jobs=2) == {}
    assert {(tmp_path / 'logs' / f'000{i}.log').read_text().split()[-1] for i in (3, 4)} <= {'0', '1'}


def test_a_system_that_does_not_bind_processes_to_cores(tmp_path, monkeypatch):
    for name in ('sched_getaffinity', 'sched_setaffinity'):
        monkeypatch.delattr(os, name)
    assert launch.cores() == list(range(os.cpu_count()))
    assert launch.local(lambda index: [sys.executable, '-c', 'pass'], [0, 1], tmp_path, gpus=0) == {}


def test_configs_can_be_swept(cheap):
    for file in (ROOT / 'configs').glob('*.py'):
        config = sweep.load_config_file(file)
        for variant in config.VARIANTS if hasattr(config, 'get_sweep') else ():
            planned = sweep.plan(config.get_config(variant).to_dict(), config.get_sweep(variant), budget=10**9)
            assert len(planned.points) > 1 or config.get_sweep(variant) == [{}]  # a run that stands alone


def test_sweep_of_a_config_is_its_vary_when_it_says_no_more(tree, cheap):
    planned = sweep.plan(tree, [{}], budget=1000)
    assert planned.columns == ('seed',) and planned.points == ((0,), (1,))
    assert planned.programs[0].config == from_dict(tree)


def test_runs_of_a_sweep_are_runs(tree, cheap, tmp_path):
    planned = sweep.open_sweep(tmp_path, tree, [{}], budget=1000)
    run.execute(planned.programs[0].config, tmp_path / planned.programs[0].name)
    assert load_run(tmp_path / planned.programs[0].name).coordinates == {'seed': (0, 1)}


def test_a_preempted_task_lets_its_program_save(tmp_path):
    """The signal of submitit arrives while the task waits: the program is told, waited for, and can start again."""
    code = ('import pathlib, signal, sys, time; here = pathlib.Path(sys.argv[1])\n'
            'signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), (here / "saved").touch(), sys.exit(0)))\n'
            '(here / "up").touch(); time.sleep(60)')
    task, queued_again = launch.ArrayTask([sys.executable, '-c', code, str(tmp_path)]), []
    asked = signal.signal(signal.SIGUSR2, lambda *_: queued_again.append(task.checkpoint()))
    try:
        preempt = lambda: (wait_for((tmp_path / 'up').exists), os.kill(os.getpid(), signal.SIGUSR2))  # noqa: E731
        threading.Thread(target=preempt).start()
        began = time.monotonic()
        task()
    finally:
        signal.signal(signal.SIGUSR2, asked)
    assert (tmp_path / 'saved').exists() and time.monotonic() - began < 30
    assert queued_again[0].function.command == task.command
