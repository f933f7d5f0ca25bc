"""Docstrings, help texts and pages say what the code does: examples run, commands exist, named things are there."""

import ast
import doctest
import importlib
import importlib.util
import re

import pytest
import yaml
from conftest import ROOT, get_config
from test_cli import run_scripts

import lingrok
from lingrok import config, run
from lingrok.config import from_config_dict

SCRIPTS = sorted((ROOT / 'experiments').rglob('*.py'))
MODULES = {'.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__'): path.read_text()
           for path in sorted((ROOT / 'lingrok').rglob('*.py'))}
PAGES = sorted([*ROOT.glob('*.md'), *(ROOT / 'docs').glob('*.md')])
MAINS = ('experiment', 'calculation', 'language_model')  # main programs of `cli` that define flags


@pytest.mark.parametrize('name', [name for name, text in MODULES.items() if '>>> ' in text])
def test_examples_of_docstrings(name):
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.attempted and not found.failed


def defined_flags(tree: ast.AST) -> set[str]:
    """Names of the flags that a source text defines, and 'no...' of those that are on or off."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
             and node.func.attr.startswith('DEFINE_') and isinstance(node.args[0], ast.Constant)]
    return {prefix + call.args[0].value for call in calls
            for prefix in (('', 'no') if call.func.attr == 'DEFINE_bool' else ('',))}


CLI = ast.parse((ROOT / 'lingrok' / 'cli.py').read_text())
FLAGS_OF_MAINS = {node.name: defined_flags(node) for node in CLI.body if getattr(node, 'name', '') in MAINS}


def commands(text: str) -> list[list[str]]:
    """The words of every command `python experiments/...` of a text, up to a gap of two spaces."""
    joined = re.sub(r'\\\n\s*', '', text)
    return [command.split() for command in re.findall(r'python (experiments/\S+\.py(?: \S+)*)', joined)]


@pytest.mark.parametrize('path', SCRIPTS, ids=lambda path: str(path.relative_to(ROOT / 'experiments')))
def test_the_docstring_of_a_script_has_a_command_that_can_be_run(path):
    source = path.read_text()
    tree, own = ast.parse(source), str(path.relative_to(ROOT))
    text = ast.get_docstring(tree)
    assert f'\n    python {own}' in ast.get_docstring(tree, clean=False), 'an example, four spaces in'
    known = {'config', 'workdir'} | defined_flags(tree)
    dynamic = '_FLAGS = {' in source  # one flag for every option of a dataclass
    for main in MAINS:
        known |= FLAGS_OF_MAINS[main] if f'cli.{main}(' in source else set()
    for script, *words in commands(text):
        given = {word[2:].partition('=')[0] for word in words if word.startswith('--')}
        assert script != own or dynamic or {name for name in given if not name.startswith('config.')} <= known, words


@pytest.mark.parametrize('page', PAGES, ids=lambda path: path.name)
def test_commands_of_a_page_name_scripts_and_configs_that_exist(page):
    text = page.read_text()
    for script, *_ in commands(text):
        assert (ROOT / script).is_file() or 'NAME' in script, script
    for file, variant in {*re.findall(r'--config=configs/(\w+\.py):?(\w*)', text)}:
        from_config_dict(get_config(f'{file}:{variant}'))


@pytest.mark.parametrize('page', PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text()
    for name in re.findall(r'`((?:lingrok|experiments|configs|tests|docs|notebooks)/[\w/.]*)`', text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r'\]\((?!https?:|#)([^)#]+)', text):
        assert (page.parent / name).exists(), name


def test_help_is_the_docstring_and_the_flags():
    names = {'verify.py': 'Exit codes', 'train.py': '--[no]multihost', 'sweep.py': '--launcher',
             'report.py': '--[no]check', 'recall/truncation.py': '--steps', 'recall/theory_memory.py': '--out',
             'lm/ioi.py': '--truncate'}
    done = run_scripts([[ROOT / 'experiments' / name, '--help'] for name in names])
    for (name, flag), (code, out, err) in zip(names.items(), done, strict=True):
        docstring = ast.get_docstring(ast.parse((ROOT / 'experiments' / name).read_text()))
        assert code == 0 and err == '' and out.startswith(docstring.splitlines()[0]) and flag in out, (name, out, err)


def test_the_page_of_config_keys_is_that_of_the_code():
    path = ROOT / 'docs' / 'make_config.py'
    spec = importlib.util.spec_from_file_location('make_config', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / 'docs' / 'config.md').read_text() == module.page() + '\n'


def test_what_contributing_names_is_there():
    """`module.function` and `Class.method` of lingrok, in backticks."""
    text = (ROOT / 'CONTRIBUTING.md').read_text()
    assert len(text.splitlines()) < 120
    named = re.findall(r'`([a-z_]+)\.([A-Za-z_]+)[`(]', text)
    modules = {(file, name): [full for full in MODULES if full.endswith(f'.{file}')] for file, name in named}
    found = {pair: any(hasattr(importlib.import_module(full), pair[1]) for full in full_names)
             for pair, full_names in modules.items() if full_names}
    assert len(found) > 12 and all(found.values()), found


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    assert citation['version'] == lingrok.__version__ and f"version='{lingrok.__version__}'" in (
        ROOT / 'setup.py').read_text()
    assert citation['license'] == 'Apache-2.0' and citation['type'] == 'software' and citation['title'] == 'lingrok'
    for entry in (citation, *citation['references']):
        assert entry['title'] and all('name' in author or {'family-names', 'given-names'} <= author.keys()
                                      for author in entry['authors'])


def test_the_task_of_the_guide_trains(tmp_path, monkeypatch):
    section = (ROOT / 'CONTRIBUTING.md').read_text().split('## A task')[1].split('\n## ')[0]
    code = '\n'.join(line[4:] for line in section.splitlines() if line.startswith('    '))
    monkeypatch.setattr(config, 'TASKS', dict(config.TASKS))
    exec(code, {'__name__': 'parity'})
    tree = config.defaults('parity')
    tree.name, tree.model.d_model, tree.model.d_mlp, tree.task.length = 'parity', 8, 16, 4
    tree.train.num_steps, tree.train.batch_size, tree.eval.batch_size = 4, 8, 8
    finished = run.execute(config.from_config_dict(tree), tmp_path / 'run')
    series = finished.metrics()
    assert series['clean/loss'].values.shape == series['clean/loss/chance'].values.shape
    assert abs(series['clean/loss'].values[-1, 0] - series['clean/loss/chance'].values[-1, 0]) < 0.5
    with pytest.raises(config.ConfigError, match="the task 'half' has no SECTION, .*baselines; lingrok/tasks/base.py"):
        config.register_task('half')(type('Half', (), {}))
