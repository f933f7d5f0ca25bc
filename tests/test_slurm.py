"""A sweep as a job array of a real SLURM, with one task requeued by the cluster and one preempted, half way.

    tests/slurm_up.sh && pytest -m slurm
"""

import json
import os
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import ROOT

from lingrok import load_run, sweep, verify

pytestmark = pytest.mark.slurm
SECONDS = 600  # SLURM starts a requeued job two minutes later


@pytest.fixture(name='cluster', autouse=True)
def _cluster():
    if shutil.which('sinfo') is None or subprocess.run(['sinfo', '-h'], capture_output=True).returncode:
        pytest.skip('no SLURM is running here; see tests/slurm_up.sh')


def command(*args):
    # One device everywhere: XLA rounds differently for several. The other flag compiles faster.
    flags = '--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0'
    env = os.environ | {'XLA_FLAGS': flags}
    run = [sys.executable, str(ROOT / 'experiments' / 'sweep.py'), *map(str, args)]
    ended = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, env=env, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def wait(directory, condition, what):
    end = time.monotonic() + SECONDS
    while not condition():
        logs = {path.name: path.read_text()[-500:] for path in (directory / 'slurm').glob('*.out')}
        assert time.monotonic() < end, f'{what} did not happen: {logs}'
        time.sleep(0.05)


def test_array_with_a_requeued_and_a_preempted_task(tmp_path):
    options = ['--config=configs/recall.py:smoke', '--max_replicas=2', '--config.train.num_steps=4000',
               '--config.train.eval_every=1000', '--config.train.save_count=4', '--config.train.log_every=50',
               '--config.optim.learning_rate=0.003', '--config.eval.truncations=()']
    undisturbed, directory = tmp_path / 'undisturbed', tmp_path / 'array'
    command(*options, f'--workdir={undisturbed}', '--launcher=local')
    slurm = ['--launcher=slurm', '--config.slurm.minutes=30', '--config.slurm.partition=main',
             '--config.slurm.parallel=2', "--config.slurm.sbatch=('--nice=1',)"]
    said = command(*options, f'--workdir={directory}', *slurm)
    assert '2 of 2 program(s) to run' in said
    job = said.split('array job ')[1].split(';')[0]
    programs = [entry['directory'] for entry in sweep.read_json(directory)['programs']]
    disturb = (['scontrol', 'requeue', f'{job}_0'], ['scancel', '--signal=USR2', f'{job}_1'])
    for name, signal in zip(programs, disturb, strict=True):
        wait(directory, (directory / name / 'checkpoints' / '16').exists, f'a checkpoint of {name}')
        subprocess.run(signal, check=True)
    for name in programs:
        assert not (directory / name / 'DONE').exists(), 'too quick to be disturbed'
    assert 'SLURM: ' in command(f'--workdir={directory}', '--status')
    for name in programs:
        wait(directory, (directory / name / 'DONE').exists, f'the end of {name}')
        assert list(verify.problems(directory / name)) == []
        starts = json.loads((directory / name / 'versions.json').read_text())
        assert len(starts) == 2 and starts[1]['step'] >= 16
        one, two = load_run(undisturbed / name), load_run(directory / name)
        jax.tree.map(np.testing.assert_array_equal, one.params(replica=None), two.params(replica=None))
        assert (one.path / 'metrics.jsonl').read_text() == (two.path / 'metrics.jsonl').read_text()
    assert command(f'--workdir={directory}', '--status').count('finished') == 2
    assert 'resumed at step' in command(f'--workdir={directory}', '--status', '--index=0')
    assert '0 of 2 program(s) to run' in command(*options, f'--workdir={directory}', *slurm)


def test_a_refused_array_ends_in_one_line(tmp_path):
    script = [sys.executable, str(ROOT / 'experiments' / 'sweep.py'), '--config=configs/recall.py:smoke',
              '--max_replicas=2', f'--workdir={tmp_path}', '--launcher=slurm', '--config.slurm.partition=nowhere']
    ended = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.strip().splitlines()[-1].startswith('error: sbatch refused the array: ')
