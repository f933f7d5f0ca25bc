import ast
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from conftest import ROOT

from lingrok import model, names
from lingrok.config import ModelConfig

# A file imports only what stands in an earlier row, or in its own package. A new file takes its place here.
ORDER = (
    ('names',), ('config',), ('tasks',), ('model',), ('optim',), ('loss',), ('metrics',), ('train',),
    ('checkpoint', 'log', 'pretrained'), ('analysis',), ('lm',), ('figures',), ('run',), ('launch', 'sweep', 'verify'),
    ('report',), ('cli',),
)
RANK = {name: rank for rank, row in enumerate(ORDER) for name in row}
FILES = sorted((ROOT / 'lingrok').rglob('*.py'))


def top_name(path: Path) -> str:
    """'tasks' for lingrok/tasks/recall.py, 'config' for lingrok/config.py, '' for lingrok/__init__.py."""
    first = path.relative_to(ROOT / 'lingrok').parts[0]
    return '' if first == '__init__.py' else first.removesuffix('.py')


def imports(source: str) -> list[str]:
    """Dotted names of all imports of a source text, at any depth; 'from a import b' counts as 'a.b'."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, 'relative imports would escape this test'
            found += [f'{node.module}.{alias.name}' for alias in node.names]
    return found


def broken_rules(name: str, source: str) -> list[str]:
    """Imports of the file `name` (a key of RANK) that go against the order of the layers."""
    broken = []
    for imported in imports(source):
        package, *rest = imported.split('.')
        if package == 'lingrok':
            other = rest[0] if rest and rest[0] in RANK else ''
            if other != name and (not other or RANK[other] >= RANK[name]):
                broken.append(imported)
        owner = {'flax': 'model', 'orbax': 'checkpoint'}.get(package, name)
        if package == 'experiments' or owner != name:
            broken.append(imported)
    pairs = {'analysis': ('run', 'log'), 'tasks': ('model',), 'model': ('tasks',)}
    return broken + [x for x in imports(source) for other in pairs.get(name, ())
                     if x.split('.')[:2] == ['lingrok', other]]


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_from_its_left(path):
    name, source = top_name(path), path.read_text()
    if name:
        assert name in RANK, f'{path.name} is new: give it a place in ORDER'
        assert broken_rules(name, source) == []
    else:
        assert not {'flax', 'orbax', 'experiments'} & {x.split('.')[0] for x in imports(source)}


@pytest.mark.parametrize('name, source', [
    ('tasks', 'from lingrok import model'),
    ('tasks', 'from lingrok.model import apply'),
    ('model', 'import lingrok.tasks.base'),
    ('analysis', 'from lingrok.log import Series'),
    ('analysis', 'def late():\n    from lingrok import run'),
    ('loss', 'from lingrok import metrics'),
    ('checkpoint', 'from lingrok import log'),
    ('config', 'import lingrok'),
    ('train', 'import flax.linen as nn'),
    ('run', 'import orbax.checkpoint as ocp'),
    ('cli', 'from experiments import train'),
])
def test_a_wrong_import_is_seen(name, source):
    assert broken_rules(name, source)


def test_import_is_light():
    code = "import sys, lingrok; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert 'jax' in loaded
    assert not loaded & {'matplotlib', 'torch', 'sklearn', 'wandb', 'tensorflow', 'ml_collections', 'experiments'}


def test_names_of_one_model():
    cfg = ModelConfig(mlp_kind=('gated', 'none'), d_model=4, vocab_size=3, max_len=2)
    attention = ('resid_pre', 'attn.q', 'attn.k', 'attn.v', 'attn.scores', 'attn.pattern', 'attn.z', 'attn_out',
                 'resid_mid')
    first = (*attention, 'mlp.gate', 'mlp.pre', 'mlp.post', 'mlp_out', 'resid_post')
    assert names.activation_names(cfg) == (
        'embed', *(f'blocks.0.{name}' for name in first), *(f'blocks.1.{name}' for name in (*attention, 'resid_post')),
        'final', 'logits',
    )


def test_param_name():
    assert names.param_name(('blocks_11', 'mlp_in')) == 'blocks.11.mlp_in'
    assert names.param_name(('embed',)) == 'embed'


@pytest.mark.parametrize('options', [
    {'num_types': 2, 'conv_width': 2, 'norm': 'layernorm', 'bias': True, 'mlp_kind': ('gated',)},
    {'value_output': 'merged', 'query': 'identity', 'mlp_kind': ('linear_act',)},
    {'norm': 'rmsnorm', 'norm_position': 'post', 'tied': True},
])
def test_every_parameter_has_a_documented_role(options):
    cfg = ModelConfig(**{'d_model': 4, 'vocab_size': 3, 'max_len': 2, **options})
    leaves = jax.tree.leaves_with_path(model.parameter_specs(cfg), is_leaf=lambda x: isinstance(x, model.Spec))
    roles = {path[-1].key.removesuffix('_bias').removesuffix('_scale') for path, _ in leaves}
    assert roles <= set(names.ROLES)
    assert {role for role in roles if role in names.MATRIX_ROLES} >= {'k'}


def test_roles_of_feed_forwards_are_matrices():
    for roles, activations in names.MLP_KINDS.values():
        assert set(roles) <= set(names.MATRIX_ROLES) <= set(names.ROLES)
        assert set(activations) <= set(names.BLOCK_ACTIVATIONS)
