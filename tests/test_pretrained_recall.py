"""Models of the official recall code: the logits of torch, those of every variant, and a run directory of one."""

import jax
import jax.numpy as jnp
import make_official_checkpoint as maker
import numpy as np
import pytest
from conftest import ROOT
from test_cli import run_script

from lingrok import load_run, model, verify
from lingrok.config import ConfigError
from lingrok.pretrained import recall, torch_file
from lingrok.tasks import bigrams

F32 = np.float32
VOCAB, WIDTH, LENGTH = 7, 8, 10
SCRIPT = str(ROOT / 'experiments' / 'recall' / 'import_official.py')
SAVED_BY_TORCH = ROOT / 'tests' / 'official_recall.pth'  # with its logits in the .npz, by make_official_recall.py
TOKENS_BL = np.random.default_rng(1).integers(0, VOCAB, (3, LENGTH))


def state_dict(kinds=('mlp', 'mlp'), hidden=16, seed=0, tied=False) -> dict[str, np.ndarray]:
    """Random parameters under the official names."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(0, 0.5, shape).astype(F32)  # noqa: E731
    state = {'pe': draw(LENGTH, WIDTH), 'tok_embeddings.weight': draw(VOCAB, WIDTH)}
    for n, kind in enumerate(kinds):
        state |= {f'layers.{n}.attention.{name}.weight': draw(WIDTH, WIDTH) for name in ('wk', 'wv', 'wo')}
        shapes = {'mlp': {'ff.w1': (hidden, WIDTH), 'ff.w2': (WIDTH, hidden)}, 'linear': {'ff': (WIDTH, WIDTH)},
                  'linear_act': {'ff.w1': (WIDTH, WIDTH)}, 'none': {}}[kind]
        state |= {f'layers.{n}.{name}.weight': draw(*shape) for name, shape in shapes.items()}
    embed = state['tok_embeddings.weight']
    return state | {'output.weight': embed / np.sqrt(F32(WIDTH)) if tied else draw(VOCAB, WIDTH)}


def official_logits(state, tokens_BL, *, use_rope=False, no_sqrtd=False, relu=True, parallel=False, no_residual=False,
                    tied=False):
    """The forward pass of the official model in float64, from its state dict and the way it is run."""
    w = {name.removesuffix('.weight'): np.asarray(value, np.float64) for name, value in state.items()}
    act = (lambda x: np.maximum(x, 0)) if relu else (lambda x: x)

    def rotate(x):
        turn = np.exp(1j * np.arange(LENGTH)[:, None] * 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH))
        y = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([y.real, y.imag], -1).reshape(x.shape)

    h = w['tok_embeddings'][tokens_BL] + (0 if use_rope else w['pe'])
    for n in range(2):
        name = f'layers.{n}'
        q, k = h, h @ w[f'{name}.attention.wk'].T
        if use_rope and n == 0:
            q, k = rotate(q), rotate(k)
        scores = q @ k.swapaxes(1, 2) / (1 if no_sqrtd else np.sqrt(WIDTH))
        weights = np.exp(np.where(np.tri(LENGTH, dtype=bool), scores - scores.max(-1, keepdims=True), -np.inf))
        z = weights / weights.sum(-1, keepdims=True) @ (h @ w[f'{name}.attention.wv'].T)
        attn = z @ w[f'{name}.attention.wo'].T
        x = h if parallel and n == 1 else h + attn
        if f'{name}.ff' in w:
            h = h + attn + x @ w[f'{name}.ff'].T
        elif f'{name}.ff.w2' in w:
            h = h + attn + act(x @ w[f'{name}.ff.w1'].T) @ w[f'{name}.ff.w2'].T
        elif f'{name}.ff.w1' in w:
            h = h + attn + act(x @ w[f'{name}.ff.w1'].T)
        else:
            h = attn if no_residual and n == 1 else h + attn
    return h @ w['output'].T / (np.sqrt(WIDTH) if tied else 1)


def logits(path, tokens_BL, **given):
    cfg, params = recall.official(path, **given)
    run = jax.jit(lambda params: model.apply(params, tokens_BL, cfg=cfg)[0])
    return np.asarray(run(jax.tree.map(jnp.asarray, params))), cfg


def test_a_file_of_torch_gives_the_logits_of_torch():
    """Its rotary frequencies are complex numbers, which are read and left out."""
    stored = np.load(SAVED_BY_TORCH.with_suffix('.npz'))
    found, cfg = logits(SAVED_BY_TORCH, stored['tokens'])
    np.testing.assert_allclose(found, stored['logits'], atol=1e-4)
    assert cfg.mlp_kind == ('linear', 'mlp') and (cfg.d_mlp, cfg.max_len, cfg.vocab_size) == (16, LENGTH, VOCAB)
    state = torch_file.load(SAVED_BY_TORCH)
    angle = 3 * 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
    np.testing.assert_allclose(state['freqs_cis'][3], np.exp(1j * angle), rtol=1e-5)
    np.testing.assert_allclose(official_logits({n: x for n, x in state.items() if n != 'freqs_cis'}, stored['tokens']),
                               stored['logits'], atol=1e-4)


VARIANTS = {
    'as the script': (('mlp', 'mlp'), {}),
    'linear, one layer without': (('linear', 'none'), {'no_residual': True}),
    'one matrix and a ReLU': (('none', 'linear_act'), {'no_sqrtd': True}),
    'rotary, parallel': (('linear_act', 'mlp'), {'use_rope': True, 'parallel': True}),
    'no ReLU, tied': (('mlp', 'linear'), {'relu': False}),
}


@pytest.mark.parametrize('case', VARIANTS)
def test_every_variant_has_the_logits_of_the_official_model(case, tmp_path):
    kinds, given = VARIANTS[case]
    tied = 'tied' in case
    state = state_dict(kinds, tied=tied)
    found, cfg = logits(maker.save(tmp_path / 'a.pth', state), TOKENS_BL, **given)
    expected = official_logits(state, TOKENS_BL, tied=tied, **given)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert cfg.mlp_kind == kinds
    if given:
        plain = official_logits(state, TOKENS_BL, tied=tied)
        assert np.abs(plain - expected).max() > 0.01  # the settings matter


def test_every_parameter_has_the_shape_of_its_config(tmp_path):
    for kinds in (('mlp', 'none'), ('linear', 'linear_act')):
        cfg, params = recall.official(maker.save(tmp_path / 'a.pth', state_dict(kinds)), use_rope='mlp' in kinds)
        specs = model.parameter_specs(cfg)
        shapes = jax.tree.map(lambda spec: spec.shape, specs, is_leaf=lambda x: isinstance(x, model.Spec))
        assert shapes == jax.tree.map(np.shape, params)
        assert all(leaf.dtype == F32 for leaf in jax.tree.leaves(params))


def changed(name, value=None):
    """A state dict with one tensor changed, or without it."""
    state = state_dict()
    return {**state, name: value} if value is not None else {k: v for k, v in state.items() if k != name}


KEY = 'layers.1.attention.wk.weight'
BAD_STATES = {
    'another model': ({'fc.weight': np.ones((2, 2), F32)}, 'of another model'),
    'no blocks': ({'tok_embeddings.weight': np.ones((7, 8), F32)}, 'no layers layers.N'),
    'no keys': (changed(KEY), f'no tensor {KEY!r}'),
    'keys of another shape': (changed(KEY, np.ones((8, 4), F32)), r'shape \[8, 4\]; allowed: \[8, 8\]'),
    'whole numbers': (changed(KEY, np.ones((8, 8), np.int64)), 'int64; allowed: floating point'),
    'no positions': (changed('pe'), 'no position table pe'),
    'a query': (changed('layers.0.attention.wq.weight', np.ones((8, 8), F32)), 'unknown tensors.*wq'),
    'two widths': (changed('layers.1.ff.w1.weight', np.ones((24, 8), F32)) | {'layers.1.ff.w2.weight':
                   np.ones((8, 24), F32)}, r'widths \[16, 24\]'),
}


@pytest.mark.parametrize('case', BAD_STATES)
def test_a_state_dict_of_another_model_is_refused(case, tmp_path):
    state, message = BAD_STATES[case]
    with pytest.raises(ConfigError, match=message) as error:
        recall.official(maker.save(tmp_path / 'a.pth', state))
    assert '\n' not in str(error.value)


@pytest.mark.slow
def test_the_script_makes_a_run_that_can_be_read(tmp_path):
    """With a table of the symbols of the model; a table of another text is refused in one line."""
    table, state = tmp_path / 'table.json', state_dict()
    bigrams.save_table(bigrams.count('\n ! abcabdcab abcd! dcba adb cab'), table)
    path = maker.save(tmp_path / 'a.pth', state)
    common = (path, '--eval_batch_size=4')
    (code, out, err), (refused, _, why) = run_script(
        [(*common, f'--table={table}', f'--workdir={tmp_path / "run"}', '--noise_prob=0.3'),
         (*common, f'--workdir={tmp_path / "other"}')], SCRIPT)
    assert code == 0, err
    assert refused == 2 and why.count('\n') == 1 and 'the model has 7 tokens' in why and '--table=FILE.json' in why
    run = load_run(tmp_path / 'run')
    assert run.finished and run.steps == [5000] and 'noisy/loss' in out
    assert run.task.noise_token == '!' and run.task.noise_prob == 0.3 and run.task.num_triggers == 1
    np.testing.assert_allclose(run.apply(TOKENS_BL)[0], official_logits(state, TOKENS_BL), atol=1e-4)
    assert list(verify.problems(run.path)) == []
