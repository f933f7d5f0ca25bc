"""`python experiments/train.py` as a user starts it; bad input in forks of one process that has all imports."""

import csv
import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT, get_config

from lingrok import config, load_run, run

SCRIPT = str(ROOT / 'experiments' / 'train.py')
SMOKE = f'--config={ROOT}/configs/recall.py:smoke'
# A checkpoint every step makes a run long enough to be interrupted.
OFTEN = ('--config.train.save=regular', '--config.train.save_every=1')

# The devices of conftest, in a way that the script leaves alone: programs then come from the cache of the tests.
FLAGS = f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count=4'
ENV = {**os.environ, 'XLA_FLAGS': FLAGS, 'PYTHONPATH': str(ROOT),
       'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.3'}

FORKS = """
import json, os, runpy, sys, traceback
import lingrok.cli, lingrok.run, lingrok.figures, ml_collections.config_flags

for argv in json.load(sys.stdin):
    (out_read, out), (err_read, err) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(out, 1), os.dup2(err, 2)
        sys.argv = argv
        try:
            runpy.run_path(argv[0], run_name='__main__')
            code = 'did not exit'
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code if type(code) is int else 99)
    os.close(out), os.close(err)
    texts = [os.fdopen(end).read() for end in (out_read, err_read)]  # less than a pipe holds
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *texts]), flush=True)
"""


def run_script(cases: list, script: str = SCRIPT) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of the script for every list of arguments."""
    return run_scripts([[script, *arguments] for arguments in cases])


def run_scripts(cases: list) -> list[tuple[int, str, str]]:
    """The same for scripts of several names, each case with its script first."""
    cases = [[str(x) for x in case] for case in cases]
    done = subprocess.run([sys.executable, '-c', FORKS], input=json.dumps(cases), env=ENV, cwd=ROOT,
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    results = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(results) == len(cases)
    return results


def start(*arguments) -> subprocess.Popen:
    command = [sys.executable, SCRIPT, SMOKE, *map(str, arguments)]
    return subprocess.Popen(command, env=ENV, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def interrupt(process: subprocess.Popen, signum: int) -> tuple[int, str, str]:
    """Sends a signal once the run has begun; (exit code, stdout, stderr)."""
    seen = ''
    for line in process.stderr:
        seen += line
        if '] step ' in line:
            process.send_signal(signum)
            break
    out, err = process.communicate(timeout=120)
    return process.returncode, out, seen + err


@pytest.fixture(scope='module', name='undisturbed')
def _undisturbed(tmp_path_factory):
    """The run of the smoke config with a checkpoint every step, in this process."""
    cfg = get_config('recall.py:smoke')
    cfg.train.save, cfg.train.save_every = 'regular', 1
    return run.execute(config.from_config_dict(cfg), tmp_path_factory.mktemp('undisturbed') / 'run')


@pytest.fixture(scope='module', name='place')
def _place(tmp_path_factory):
    return tmp_path_factory.mktemp('cli')


@pytest.fixture(scope='module', name='stopped')
def _stopped(undisturbed, place):
    """signal -> (exit code, stdout, stderr, checkpoints) of a run stopped by SIGTERM, and when resumed, by SIGINT."""
    results = {}
    for name in ('SIGTERM', 'SIGINT'):
        result = interrupt(start(f'--workdir={place}/run', *OFTEN), signal.Signals[name])
        results[name] = (*result, load_run(place / 'run').steps)
    return results


@pytest.mark.parametrize('name, code', [('SIGTERM', 143), ('SIGINT', 130)])
def test_a_signal_saves_and_ends_with_its_number(stopped, name, code):
    returned, out, err, steps = stopped[name]
    assert returned == code and out == ''
    assert f'{name}: saving after this chunk; once more stops at once' in err
    assert err.splitlines()[-1] == f'stopped by {name} at step {steps[-1]} of 20, state saved; the same command resumes'
    assert 'Traceback' not in err and steps == list(range(steps[-1] + 1))


def test_the_same_command_resumes_to_the_same_bits(stopped, results, undisturbed, place):
    code, _, err = results['resumed']
    assert code == 0 and f', resumed at step {stopped["SIGINT"][3][-1]}' in err
    resumed = load_run(place / 'run')
    assert resumed.finished and resumed.steps == list(range(21))
    for step in resumed.steps:
        jax.tree.map(np.testing.assert_array_equal, resumed.params(step, None), undisturbed.params(step, None))
    assert (resumed.path / 'metrics.jsonl').read_bytes() == (undisturbed.path / 'metrics.jsonl').read_bytes()


def test_stdout_names_the_figure_and_sums_up(results, undisturbed, place):
    _, out, err = results['resumed']
    assert out.splitlines() == [f'figure: {place}/run/figures/training.png (and .pdf, .csv)', undisturbed.summary()]
    assert all(line.startswith('[') for line in err.splitlines()), err


def test_figure_files(results, place):
    directory = place / 'run' / 'figures'
    assert sorted(os.listdir(directory)) == ['training.csv', 'training.pdf', 'training.png']
    assert (directory / 'training.png').read_bytes()[:4] == b'\x89PNG'
    assert (directory / 'training.pdf').read_bytes()[:4] == b'%PDF'
    assert all(os.path.getsize(directory / name) > 5000 for name in os.listdir(directory))


def test_the_numbers_behind_the_figure_are_the_metrics(results, place):
    directory = place / 'run'
    metrics = load_run(directory).metrics()
    with (directory / 'figures' / 'training.csv').open(newline='') as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ['quantity', 'step', 'replica', 'index', 'value']
    table = {(row['quantity'], int(row['step']), int(row['replica']), row['index']): float(row['value'])
             for row in rows}
    expected = {(name, int(steps[t]), replica, '/'.join(map(str, index))): value
                for name, (steps, values) in metrics.items()
                for (t, replica, *index), value in np.ndenumerate(values)}
    assert len(rows) == len(table) and table.keys() == expected.keys() and len(table) > 200
    for place, value in expected.items():
        np.testing.assert_allclose(table[place], value, rtol=1e-5, err_msg=str(place))  # six digits are written


@pytest.fixture(scope='module', name='mistakes')
def _mistakes(tmp_path_factory):
    """Files that a user can name by mistake."""
    place = tmp_path_factory.mktemp('mistakes')
    (place / 'file').touch()
    (place / 'foreign').mkdir()
    (place / 'foreign' / 'thesis.tex').touch()
    (place / 'broken_run').mkdir()
    (place / 'broken_run' / 'config.json').write_text('{')
    smoke = f'import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom configs import recall\n'
    for name, text in {
        'syntax.py': 'def get_config(:\n',
        'no_function.py': 'x = 1\n',
        'fails.py': 'def get_config():\n    return 1 / 0\n',
        'value.py': 'def get_config():\n    return int("seven")\n',
        'imports.py': 'import nothing_of_that_name\n',
        'typo.py': smoke + 'def get_config():\n    recall.get_config("smoke").train.num_step = 3\n',
        'nothing.py': 'def get_config():\n    pass\n',
        'number.py': 'def get_config():\n    return 3\n',
    }.items():
        (place / name).write_text(text)
    return place


BAD = {
    'no config': ([], 'no config; try --config=configs/recall.py:demo'),
    'missing file': (['--config=configs/nothing.py'], 'configs/nothing.py'),
    'a directory': (['--config=configs'], 'configs'),
    'unknown variant': (['--config=configs/recall.py:smok'],
                        "configs/recall.py has no variant 'smok'; did you mean 'smoke'?"),
    'unknown key': ([SMOKE, '--config.optim.learning_rat=0.1'],
                    "the config has no key 'optim.learning_rat'; did you mean 'optim.learning_rate'?"),
    'unknown section': ([SMOKE, '--config.optimm.learning_rate=0.1'], "did you mean 'optim.learning_rate'?"),
    'unknown top key': ([SMOKE, '--config.nam=x'], "did you mean 'name'?"),
    'a section for a key': ([SMOKE, '--config.optim=3'], 'optim'),
    'key below a key': ([SMOKE, '--config.train.num_steps.x=3'], "did you mean 'train.num_steps'?"),
    'not an int': ([SMOKE, '--config.train.num_steps=many'], 'many'),
    'a float for an int': ([SMOKE, '--config.train.num_steps=1.5'], '1.5'),
    'not a float': ([SMOKE, '--config.optim.learning_rate=fast'], 'fast'),
    'not a tuple': ([SMOKE, '--config.vary.seed.all=x'], 'type str; allowed: int'),
    'out of range': ([SMOKE, '--config.train.num_steps=0'],
                     'train.num_steps=0 is out of range; allowed: at least 1'),
    'impossible together': ([SMOKE, '--config.model.num_heads=3'], 'model.num_heads=3 does not divide'),
    'unknown choice': ([SMOKE, '--config.optim.optimizer=adam'], "did you mean 'adamw'?"),
    'unknown task': ([SMOKE, '--config.task.name=sorting'], "task.name='sorting' is unknown"),
    'missing table': ([SMOKE, '--config.task.table=nowhere.json'], 'nowhere.json'),
    'unknown pattern': ([SMOKE, "--config.optim.frozen=('embedding',)"], 'embedding'),
    'unknown flag': ([SMOKE, '--workdri=x'], 'workdri'),
    'positional': ([SMOKE, 'runs/x'], "unexpected argument 'runs/x'"),
    'flag without value': ([SMOKE, '--workdir'], 'workdir'),
    'syntax error': (['--config={place}/syntax.py'], 'syntax.py, line 1: SyntaxError'),
    'no get_config': (['--config={place}/no_function.py'], 'no_function.py has no function get_config'),
    'get_config fails': (['--config={place}/fails.py'], 'fails.py, line 2: ZeroDivisionError: division by zero'),
    'get_config fails with a ValueError': (['--config={place}/value.py'], 'value.py, line 2: ValueError: invalid'),
    'config imports nothing': (['--config={place}/imports.py'], 'imports.py, line 1: '),
    'get_config has a typo': (['--config={place}/typo.py'], 'typo.py, line 5: AttributeError'),
    'get_config returns nothing': (['--config={place}/nothing.py'], 'nothing.py returned None'),
    'get_config returns a number': (['--config={place}/number.py'], 'number.py returned 3'),
    'workdir is a file': ([SMOKE, '--workdir={place}/file'], '{place}/file: File exists; choose another place'),
    'workdir below a file': ([SMOKE, '--workdir={place}/file/run'], '{place}/file/run: Not a directory; choose'),
    'workdir of something else': ([SMOKE, '--workdir={place}/foreign'],
                                  '{place}/foreign holds thesis.tex and no run; choose another --workdir'),
    'workdir with a broken config': ([SMOKE, '--workdir={place}/broken_run'],
                                     '{place}/broken_run/config.json cannot be read'),
    'workdir of another run': ([SMOKE, '--workdir={other}'],
                               'holds another experiment (train.save: regular there, log here; train.save_every: '),
    'workdir that cannot be written': ([SMOKE, '--workdir=/sys/lingrok-test'], '/sys/lingrok-test'),
}


@pytest.fixture(scope='module', name='results')
def _results(mistakes, undisturbed, stopped, place):
    """name -> (exit code, stdout, stderr) of bad input, of a run that was stopped before, with a NaN, and of --help."""
    fill = lambda text: text.format(place=mistakes, other=undisturbed.path)  # noqa: E731
    cases = {name: [fill(argument) for argument in arguments] for name, (arguments, _) in BAD.items()} | {
        'resumed': [SMOKE, f'--workdir={place}/run', *OFTEN],
        'finished': ['--config', SMOKE.partition('=')[2], '--workdir', place / 'run', *OFTEN],
        'nan': [SMOKE, f'--workdir={place}/nan', '--config.vary.optim.learning_rate=(0.1, 0.4)'],
        'help': ['--help'],
    }
    assert stopped
    return dict(zip(cases, run_script(list(cases.values())), strict=True))


@pytest.mark.parametrize('name', BAD)
def test_bad_input_is_one_line_and_exit_code_2(results, mistakes, name):
    code, out, err = results[name]
    assert code == 2 and out == '', err
    assert err.startswith('error: ') and err.count('\n') == 1 and err.endswith('\n')
    assert BAD[name][1].format(place=mistakes) in err and 'Traceback' not in err
    assert len(err) < 1200


def test_bad_input_leaves_no_trace(results, mistakes):
    assert results and os.listdir(mistakes / 'foreign') == ['thesis.tex'] and not (mistakes / 'file').read_bytes()
    assert sorted(os.listdir(mistakes / 'broken_run')) == ['LOCK', 'config.json']


def test_a_finished_run_is_reported_again(results):
    assert results['finished'] == (0, results['resumed'][1], '')


def test_a_nan_replica_has_its_own_exit_code(results, place):
    code, out, err = results['nan']
    loaded = load_run(place / 'nan')
    assert code == 4 and loaded.nan_replicas() == [1] and loaded.finished
    assert 'warning: replica 1 (optim.learning_rate=0.4, seed=1) turned NaN at step ' in err
    assert out.splitlines()[-1] == loaded.summary()


def test_help(results):
    code, out, err = results['help']
    assert code == 0 and err == '' and '--workdir' in out and 'Exit codes' in out
