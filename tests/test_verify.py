"""verify finds what is wrong with a run directory, and nothing wrong with a sound one."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import tiny
from conftest import ROOT

from lingrok import run, verify
from lingrok.config import from_config_dict


@pytest.fixture(name='finished', scope='module')
def _finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp('verify') / 'run'
    run.execute(from_config_dict(tiny.get_config(20)), directory)
    return directory


@pytest.fixture(name='copy')
def _copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'run')
    return tmp_path / 'run'


def edit(path, change):
    path.write_text(change(path.read_text()))


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest(checkpoint):
    """The file with most of the parameters."""
    return max((checkpoint / 'params').rglob('d/*'), key=lambda path: path.stat().st_size)


DAMAGE = {
    'no config.json': lambda d: (d / 'config.json').unlink(),
    'config.json cannot be read': lambda d: (d / 'config.json').write_text('{'),
    'format version 3': lambda d: rewrite(d / 'config.json', format_version=3),
    'the config of': lambda d: rewrite(d / 'config.json', seed={'init': 5, 'task': 0, 'batch': 0, 'eval': 0}),
    'versions.json cannot be read': lambda d: (d / 'versions.json').unlink(),
    'versions.json does not list': lambda d: (d / 'versions.json').write_text('[]'),
    'checkpoints/15 is damaged': lambda d: flip(largest(d / 'checkpoints' / '15')),
    'left behind by an interrupted save': lambda d: (d / 'checkpoints' / '20.orbax-checkpoint-tmp-1').mkdir(),
    'without whole checkpoints of the steps .10.': lambda d: shutil.rmtree(d / 'checkpoints' / '10'),
    'has no checkpoint that is whole': lambda d: shutil.rmtree(d / 'checkpoints'),
    'metrics.jsonl is missing': lambda d: (d / 'metrics.jsonl').unlink(),
    'is half a line': lambda d: edit(d / 'metrics.jsonl', lambda text: text[:-5]),
    'line 3 cannot be read': lambda d: edit(d / 'metrics.jsonl', lambda text: text.replace('"step": 2,', '"step" 2,')),
    'has step 2 after step 2': lambda d: edit(d / 'metrics.jsonl', lambda text: text.replace('p": 3,', 'p": 2,')),
    'one number for each of the 2': lambda d: edit(d / 'metrics.jsonl', lambda text: text.replace('[', '[0.5, ', 1)),
    'metrics end at step 19 of 20': lambda d: edit(
        d / 'metrics.jsonl', lambda text: ''.join(text.splitlines(keepends=True)[:-1])),
    '10.npz cannot be read': lambda d: flip(d / 'arrays' / '10.npz'),
    'is no array of a step': lambda d: (d / 'arrays' / 'x.npz.tmp').touch(),
    'is of a step that metrics.jsonl does not have': lambda d: shutil.copy(d / 'arrays/10.npz', d / 'arrays/30.npz'),
    'task.npz cannot be read': lambda d: (d / 'task.npz').unlink(),
    'not the task state': lambda d: shutil.copy(d / 'arrays' / '10.npz', d / 'task.npz'),
}


@pytest.mark.parametrize('message', DAMAGE)
def test_damage_is_found(copy, message):
    DAMAGE[message](copy)
    found = list(verify.problems(copy))
    assert any(re.search(message, line) for line in found), found
    assert all('\n' not in line for line in found)


def test_sound_runs(finished, copy):
    assert list(verify.problems(finished)) == []
    (copy / 'DONE').unlink()
    shutil.rmtree(copy / 'checkpoints' / '20')
    assert list(verify.problems(copy)) == []  # unfinished, and sound


def test_command(finished, copy, tmp_path):
    def command(*paths):
        script = [sys.executable, str(ROOT / 'experiments' / 'verify.py'), *map(str, paths)]
        code = f'import runpy, sys, tiny; sys.argv = {script[1:]!r}; runpy.run_path(sys.argv[0], run_name="__main__")'
        return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT / 'tests')

    ended = command(finished)
    assert ended.returncode == 0 and ended.stdout.startswith('sound: '), ended.stderr
    flip(largest(copy / 'checkpoints' / '15'))
    ended = command(finished, copy, tmp_path / 'nothing')
    assert ended.returncode == 2 and 'is damaged' in ended.stderr and 'not a run directory' in ended.stderr
    assert command(copy).returncode == 1
    (tmp_path / 'sweep.json').write_text('{}')
    ended = command(tmp_path)
    assert ended.returncode == 2 and ended.stderr.count('\n') == 1 and "has no 'format_version'" in ended.stderr
