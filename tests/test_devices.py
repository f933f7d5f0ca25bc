"""Several devices and several processes compute what one computes."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny
from conftest import ROOT

from lingrok import load_run, run, train, verify
from lingrok.config import from_config_dict

STEPS = 4


def results(cfg, devices):
    """Parameters after a few steps, their losses and an evaluation, on the host."""
    programs = train.Programs(cfg, capacity=STEPS, devices=devices)
    state, task_state = programs.init(programs.settings), programs.init_task(programs.settings)
    state, losses = programs.train_chunk(state, task_state, programs.settings, np.int32(STEPS))
    return programs, programs.fetch((state.params, losses, programs.evaluate(state.params, task_state,
                                                                             programs.settings)))


def config(num_replicas, **train_keys):
    cfg = from_config_dict(tiny.get_config(20))
    return dataclasses.replace(cfg, vary={'seed': tuple(range(num_replicas))},
                               train=dataclasses.replace(cfg.train, **train_keys))


@pytest.mark.slow
def test_replicas_spread_over_devices():
    """The same bits however many replicas a device has, also where the devices do not divide their number."""
    _, seven = results(config(7), jax.devices()[:2])  # 4 and 3
    for replicas, used in ((7, 4), (5, 3)):
        programs, spread = results(config(replicas), None)
        assert programs.mesh.size == used and programs.layout == 'map' and spread[1].shape == (replicas, STEPS)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[: len(b)], b), seven, spread)
    # For one device XLA compiles another program, which rounds differently: a few float32 steps apart after 4 updates.
    _, alone = results(config(7), jax.devices()[:1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), alone, seven)


@pytest.mark.slow
def test_batches_spread_over_devices():
    """Every replica on all devices: the same numbers up to the order of sums over the batch."""
    _, alone = results(config(2), jax.devices()[:1])
    for layout in ('map', 'vmap'):
        programs, spread = results(config(2, parallel='batch', layout=layout), None)
        assert programs.mesh.size == 4
        # Sums of 32 float32 terms in another order, through 4 updates of AdamW, which divides by small gradients.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), alone, spread)


def test_batches_are_really_spread():
    programs = train.Programs(config(1, parallel='batch'), capacity=STEPS)
    shapes = jax.eval_shape(lambda s: (programs.init(s), programs.init_task(s)), programs.settings)
    text = programs.train_chunk.lower(*shapes, programs.settings, np.int32(1)).compile().as_text()
    assert 'all-reduce' in text  # of the gradients
    uneven = train.Programs(config(1, parallel='batch', batch_size=6), capacity=STEPS)
    assert uneven.mesh.size == 3  # equal parts


def test_how_a_run_is_spread_is_not_part_of_its_identity(tmp_path):
    """A run that was begun on the replicas goes on over the batch, and is the same run."""
    assert run.run_id(config(2)) == run.run_id(config(2, parallel='batch'))
    run.execute(config(2), tmp_path / 'run')
    (tmp_path / 'run' / 'DONE').unlink()
    run.execute(config(2, parallel='batch'), tmp_path / 'run')
    assert list(verify.problems(tmp_path / 'run')) == []


def processes(directory, count: int, *args):
    """`count` processes of experiments/train.py that train together, with two devices in all."""
    with socket.socket() as free:
        free.bind(('localhost', 0))
        port = free.getsockname()[1]
    started = []
    for index in range(count):
        devices = f'--xla_force_host_platform_device_count={2 // count} --xla_backend_optimization_level=0'
        env = os.environ | {'XLA_FLAGS': devices, 'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
                            'JAX_NUM_PROCESSES': str(count), 'JAX_PROCESS_ID': str(index),
                            'PYTHONPATH': f'{ROOT / "tests"}'}
        multihost = ['--multihost'] if count > 1 else []
        command = [sys.executable, str(ROOT / 'experiments' / 'train.py'), '--config=configs/recall.py:smoke',
                   f'--workdir={directory}', *multihost, *args]
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True))
    return started


def ends(started, code=0):
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [code] * len(started), outputs
    return outputs


@pytest.mark.slow
def test_two_processes_compute_what_one_computes(tmp_path):
    """Killed half way, resumed, one of the two asked to stop, resumed: bit for bit what one process computes."""
    args = ['--config.train.num_steps=4000', '--config.train.eval_every=1000', '--config.train.save_count=4',
            '--config.eval.truncations=()', '--config.train.log_every=50', '--config.optim.learning_rate=0.003']
    one, two = tmp_path / 'one', tmp_path / 'two'
    single = processes(one, 1, *args)
    ends(single)
    started = processes(two, 2, *args)
    while not (two / 'checkpoints' / '16').exists():  # log-spaced: 0, 1, 16, 252, 4000
        assert all(process.poll() is None for process in started), [process.communicate() for process in started]
        time.sleep(0.01)
    for process in started:
        process.kill()
        process.communicate()
    assert not (two / 'DONE').exists()

    started = processes(two, 2, *args)
    while not (two / 'checkpoints' / '252').exists():
        assert all(process.poll() is None for process in started), [process.communicate() for process in started]
        time.sleep(0.01)
    started[1].send_signal(signal.SIGTERM)  # one is told to stop: all save and stop
    (_, first), _ = ends(started, 128 + signal.SIGTERM)
    assert 'resumed at step' in first

    (_, first), (_, second) = ends(processes(two, 2, *args))
    assert 'resumed at step' in first and 'step ' not in second.replace('[Gloo]', '')  # process 0 logs
    assert list(verify.problems(two)) == []
    first, second = load_run(one), load_run(two)
    assert second.finished and first.steps == second.steps
    for step in first.steps:
        jax.tree.map(np.testing.assert_array_equal, first.params(step, None), second.params(step, None))
    assert (one / 'metrics.jsonl').read_text() == (two / 'metrics.jsonl').read_text()
    assert len(json.loads((two / 'versions.json').read_text())) == 3
    (line,) = [err for _, err in ends(processes(two, 2, *args, '--config.optim.momentum=0.5'), 2)][:1]
    assert 'holds another experiment' in line


def test_multihost_without_others_ends_in_one_line(tmp_path):
    script = str(ROOT / 'experiments' / 'train.py')
    command = [sys.executable, script, '--config=configs/recall.py:smoke', '--multihost', f'--workdir={tmp_path}/run']
    env = {key: value for key, value in os.environ.items() if not key.startswith('SLURM')}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and ended.stderr.strip().startswith('error: --multihost: '), ended.stderr
