"""Scripts of experiments/modular as a user starts them, on a run of the smoke config and on its sweep."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, get_config
from test_cli import ENV

from lingrok import cli, config, load_run, run, sweep
from lingrok.cli import Expected
from lingrok.log import Series

SCRIPTS = sorted(path.name for path in (ROOT / 'experiments' / 'modular').glob('*.py'))
OF_A_SWEEP = ('phase_diagram.py',)
OF_A_FILE = ('import_official.py',)


@pytest.fixture(scope='module', name='trained')
def _trained(tmp_path_factory):
    """A run of the modular task on all sets: 2 settings, 10 steps."""
    cfg = get_config('modular.py:smoke')
    cfg.task.alpha = 0.7
    cfg.task.splits = ('id_train', 'id_test', 'ood_train', 'ood_test', 'ood_forced', 'select_test')
    cfg.train.num_steps = 10
    return run.execute(config.from_config_dict(cfg), tmp_path_factory.mktemp('modular') / 'run')


def start(script: str, *arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / 'experiments' / 'modular' / script), *map(str, arguments)]
    return subprocess.run(command, env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize('script', [name for name in SCRIPTS if name not in OF_A_FILE])
def test_every_script_writes_its_figure_and_the_numbers_behind_it(script, trained, tmp_path):
    done = start(script, trained.path, f'--out={tmp_path}')
    assert done.returncode == 0, done.stderr
    assert 'Warning' not in done.stderr and 'Traceback' not in done.stderr
    assert 'figure: ' in done.stdout and 'expected' in done.stdout
    pictures = list(tmp_path.glob('*.png'))
    assert pictures and all(path.with_suffix('.pdf').exists() for path in pictures)
    for path in tmp_path.glob('*.csv'):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        assert rows
    reports = [json.loads(path.read_text()) for path in tmp_path.glob('*.json')]
    assert reports and all(row['source'] for report in reports for row in report['expected'])


def test_several_steps_are_curves_and_frames(trained, tmp_path):
    done = start('attention.py', trained.path, '--steps=all', f'--out={tmp_path}')
    assert done.returncode == 0, done.stderr
    with (tmp_path / 'attention_steps.csv').open() as file:
        steps = {int(row['step']) for row in csv.DictReader(file)}
    assert steps == set(trained.steps) and (tmp_path / 'attention_steps.png').exists()


def test_bad_input_is_one_line(trained, tmp_path):
    (tmp_path / 'empty').mkdir()
    cases = {
        (): 'try: python',
        (tmp_path / 'empty',): 'is not a run directory',
        (trained.path, '--steps=7'): 'no checkpoint of step 7',
        (trained.path, '--steps=x'): 'allowed: last, all',
        (trained.path, '--stepz=7'): 'stepz',
        (trained.path, trained.path): '2 run directories given',
    }
    for arguments, message in cases.items():
        done = start('shots.py', *arguments)
        assert done.returncode == 2 and message in done.stderr, (arguments, done.stderr)
        assert done.stderr.count('\n') == 1 and done.stderr.startswith('error: ')


def test_help_shows_the_command_and_the_flags():
    done = start('shots.py', '--help')
    assert done.returncode == 0 and 'experiments/modular/shots.py runs/' in done.stdout and '--steps' in done.stdout


def test_a_single_run_is_a_sweep_of_one_program(trained):
    rows = list(sweep.rows(trained.path))
    assert {(row['index'], row['replica'], row['task.num_tasks']) for row in rows} == {(0, 0, 36), (0, 1, 8)}
    last = {row['replica']: row['id_train/loss'] for row in rows if row['step'] == 10}
    np.testing.assert_allclose([last[0], last[1]], trained.metrics()['id_train/loss'].values[-1])


def test_expected_numbers_stand_beside_the_measured_ones_of_every_setting(trained):
    cfg = load_run(trained.path).config
    values = np.arange(2 * 3 * 4).reshape(3, 2, 4) / 10
    series = {'a/by_shot': Series(np.arange(3), values), 'a': Series(np.arange(3), values[..., 0])}
    asked = [Expected('x', '1', 'here', 'a/by_shot[2]'), Expected('x', '1', 'here', 'a'),
             Expected('x', '1', 'here', 'a/by_shot[9]'), Expected('x', '1', 'here', 'b')]
    found = [row['measured'] for row in cli.compare(series, cfg, asked)]
    assert found == ['num_tasks=36: 1.800 (n=1); num_tasks=8: 2.200 (n=1)',
                     'num_tasks=36: 1.600 (n=1); num_tasks=8: 2.000 (n=1)', 'not in this run', 'not in this run']
