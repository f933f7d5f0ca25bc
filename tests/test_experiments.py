"""Scripts of experiments/<task> as a user starts them, on runs of the smoke config (one run serves as a sweep, too)."""

import csv
import functools
import json
import re

import numpy as np
import pytest
from conftest import ROOT, get_config
from test_cli import run_script, run_scripts

from lingrok import cli, config, load_run, run, sweep
from lingrok.cli import Expected
from lingrok.log import Series

# Scripts that take something else than a run; their own tests run them.
OTHERS = {'modular/import_official.py', 'recall/import_official.py', 'recall/budget.py', 'recall/three_steps.py',
          *(f'recall/theory_{name}.py' for name in ('first_step', 'key_query', 'memory', 'trajectories'))}
TASKS = ('modular', 'recall', 'text')
SCRIPTS = sorted(f'{task}/{path.name}' for task in TASKS for path in (ROOT / 'experiments' / task).glob('*.py'))
SCRIPTS = [name for name in SCRIPTS if name not in OTHERS]
SEVERAL = {'modular': 'modular/attention.py', 'recall': 'recall/attention.py', 'text': 'text/dynamics.py'}


@pytest.fixture(scope='module', name='trained_of')
def _trained_of(tmp_path_factory):
    """Task -> a run of 10 steps; that of the modular task is on all sets and in two settings."""

    @functools.cache
    def train(task):
        cfg = get_config(f'{task}.py:smoke')
        if task == 'modular':
            cfg.task.alpha = 0.7
            cfg.task.splits = ('id_train', 'id_test', 'ood_train', 'ood_test', 'ood_forced', 'select_test')
        cfg.train.num_steps = 10
        return run.execute(config.from_config_dict(cfg), tmp_path_factory.mktemp(task) / 'run')

    return train


@pytest.fixture(scope='module', name='trained')
def _trained(trained_of):
    return trained_of('modular')


def path_of(name: str) -> str:
    return str(ROOT / 'experiments' / name)


@pytest.fixture(scope='module', name='results_of')
def _results_of(trained_of, tmp_path_factory):
    """Task -> every script of it once, and one for several steps: name -> (exit code, stdout, stderr), folder."""

    @functools.cache
    def start(task):
        names = [name for name in SCRIPTS if name.startswith(task)]
        folders = [tmp_path_factory.mktemp('results') for _ in (*names, 'steps')]
        path = trained_of(task).path
        cases = [[path_of(name), path, f'--out={folder}'] for name, folder in zip(names, folders, strict=False)]
        cases.append([path_of(SEVERAL[task]), path, f'--out={folders[-1]}', '--steps=0,10'])
        return dict(zip((*names, 'steps'), zip(run_scripts(cases), folders, strict=True), strict=True))

    return start


@pytest.mark.slow
@pytest.mark.parametrize('script', SCRIPTS)
def test_every_script_writes_its_figure_and_the_numbers_behind_it(script, results_of):
    (code, out, err), folder = results_of(script.partition('/')[0])[script]
    assert code == 0, err
    assert 'Warning' not in err and 'Traceback' not in err, err
    assert 'figure: ' in out
    pictures = list(folder.glob('*.png'))
    assert pictures and all(path.with_suffix('.pdf').exists() for path in pictures)
    tables = list(folder.glob('*.csv'))
    for path in tables:
        with path.open() as file:
            assert list(csv.DictReader(file))
    reports = [json.loads(path.read_text()) for path in folder.glob('*.json')]
    assert tables and reports and all(row['source'] for report in reports for row in report['expected'])
    captions = [text for report in reports for text in report.get('captions', {'': report.get('caption')}).values()]
    assert all(text.endswith('.') and ' series: ' not in text for text in captions), captions


@pytest.mark.slow
@pytest.mark.parametrize('task', TASKS)
def test_several_steps_are_curves_and_frames(task, results_of):
    (code, _, err), folder = results_of(task)['steps']
    assert code == 0, err
    name = {'modular': 'attention_steps', 'recall': 'attention_steps', 'text': 'dynamics'}[task]
    with (folder / f'{name}.csv').open() as file:
        assert {int(row['step']) for row in csv.DictReader(file)} == {0, 10}
    assert (folder / f'{name}.png').exists()
    caption = json.loads((folder / f'{name}.json').read_text())['caption']
    assert task == 'text' or 'film strip of replica 0' in caption.partition('The whole figure: ')[0]


def test_bad_input_is_one_line(trained, tmp_path):
    (tmp_path / 'empty').mkdir()
    cases = {
        (): 'try: python',
        (tmp_path / 'empty',): 'is not a run directory',
        (trained.path, '--steps=7'): 'no checkpoint of step 7',
        (trained.path, '--steps=x'): 'allowed: last, all',
        (trained.path, '--stepz=7'): 'stepz',
        (trained.path, trained.path): '2 directories given',
    }
    done = run_script(list(cases), path_of('modular/shots.py'))
    for message, (code, _, err) in zip(cases.values(), done, strict=True):
        assert code == 2 and message in err, err
        assert err.count('\n') == 1 and err.startswith('error: ')


def test_a_task_vector_that_is_none_is_one_line(trained):
    asked = {'attention': '6', 'characters': '1,2,3', 'cosine': '1,x', 'kshot_grid': '0,99', 'neurons': '-1,0',
             'pca': '1;2'}
    cases = [[path_of(f'modular/{name}.py'), trained.path, f'--task={text}'] for name, text in asked.items()]
    for code, _, err in run_scripts(cases):
        assert code == 2
        assert re.fullmatch(r'error: --task=\S+; allowed: two numbers from 0 to \d+; try --task=1,2\n', err), err


def test_help_shows_the_command_and_the_flags():
    ((code, out, _),) = run_script([('--help',)], path_of('modular/shots.py'))
    assert code == 0 and 'experiments/modular/shots.py runs/' in out and '--steps' in out


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
