import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lingrok import config, model
from lingrok.analysis import lowrank
from lingrok.config import ConfigError, ModelConfig

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})

BASE = {'num_layers': 2, 'd_model': 8, 'd_mlp': 12, 'num_heads': 2, 'vocab_size': 5, 'max_len': 4}
CONFIGS = {
    'plain': {},
    'one head': {'num_heads': 1},
    'wide heads': {'d_head': 10},
    'merged': {'value_output': 'merged', 'mlp_kind': ('linear', 'gated')},
    'biases': {'bias': True},
}
TOKENS = np.array([[1, 4, 0, 2], [3, 3, 1, 0]])


def make(case: str):
    """Config and parameters away from all zeros and ones."""
    cfg, rng = ModelConfig(**BASE | CONFIGS[case]), np.random.default_rng(0)
    params = jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32) * 0.5,
                          model.parameter_specs(cfg), is_leaf=lambda x: isinstance(x, model.Spec))
    return cfg, params


def products(params, cfg, layer) -> np.ndarray:
    """Value matrix times output matrix of every head, (H, D, D), without the library."""
    block = params[f'blocks_{layer}']
    D, K = cfg.d_model, cfg.d_head
    if cfg.value_output == 'merged':
        return np.stack([block['ov'][:, h * D : (h + 1) * D] for h in range(cfg.num_heads)])
    return np.stack([block['v'][:, h * K : (h + 1) * K] @ block['o'][h * K : (h + 1) * K]
                     for h in range(cfg.num_heads)])


def matrices(params, cfg, role, layer) -> np.ndarray:
    """What a truncation acts on, with a leading axis of heads (one for everything but 'ov')."""
    return products(params, cfg, layer) if role == 'ov' else np.asarray(params[f'blocks_{layer}'][role])[None]


CASES = [('plain', 'q', 0), ('plain', 'mlp_in', 1), ('plain', 'mlp_out', 0), ('plain', 'ov', 1), ('one head', 'ov', 0),
         ('wide heads', 'ov', 0), ('merged', 'ov', 1), ('merged', 'mlp_linear', 0), ('merged', 'mlp_gate', 1),
         ('biases', 'ov', 1)]


def full_rank(cfg, role, params, layer) -> int:
    if role == 'ov':
        return min(cfg.d_head, cfg.d_model) if cfg.value_output == 'factored' else cfg.d_model
    return min(params[f'blocks_{layer}'][role].shape)


@pytest.mark.parametrize('case, role, layer', CASES)
def test_truncation(case, role, layer):
    """All fractions of one matrix: squared errors are tails of the squared singular values, halves add up."""
    cfg, params = make(case)
    full = full_rank(cfg, role, params, layer)
    original = matrices(params, cfg, role, layer)
    s = np.linalg.svd(original, compute_uv=False)[:, :full]
    scale = np.square(s).sum()
    ranks = sorted({0, 1, full // 2, full - 1})

    @quick_jit
    def edit(params):
        """The matrix after truncation to every rank, and with all other directions; with one decomposition for all."""
        svd = lowrank.spectrum(params, cfg, role, layer)
        cut = functools.partial(lowrank.truncate, params, cfg, role, layer)
        edited = {(rank, keep): cut(rank / full, keep=keep, svd=svd) for rank in ranks for keep in ('top', 'bottom')}
        edited |= {(rank, 'rest'): cut((full - rank) / full, keep='bottom', svd=svd) for rank in ranks}
        edited[1, 'alone'] = cut(1 / full)
        return {key: params[f'blocks_{layer}'] for key, params in edited.items()}

    kept = {key: matrices({f'blocks_{layer}': jax.tree.map(np.asarray, block)}, cfg, role, layer)
            for key, block in edit(params).items()}
    for rank in ranks:
        for keep, lost in (('top', s[:, rank:]), ('bottom', s[:, : full - rank])):
            found = kept[rank, keep]
            # Rounding of float32, relative to the whole matrix.
            np.testing.assert_allclose(np.square(found - original).sum((1, 2)), np.square(lost).sum(1),
                                       atol=2e-6 * scale)
            assert np.linalg.matrix_rank(found[0], tol=1e-4) == rank
        np.testing.assert_allclose(kept[rank, 'top'] + kept[rank, 'rest'], original, atol=1e-5)
    np.testing.assert_allclose(kept[1, 'alone'], kept[1, 'top'], atol=1e-6)
    np.testing.assert_array_equal(kept[0, 'top'], np.zeros_like(original))
    for keep in ('top', 'bottom'):
        assert lowrank.truncate(params, cfg, role, layer, 1, keep=keep) is params


def test_everything_else_stays():
    cfg, params = make('plain')
    before = jax.tree.map(np.copy, params)
    edited = lowrank.truncate(params, cfg, 'mlp_in', 1, 0.5)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    assert edited['blocks_0'] is params['blocks_0']
    for role, value in edited['blocks_1'].items():
        assert (value is params['blocks_1'][role]) == (role != 'mlp_in')
        assert value.shape == params['blocks_1'][role].shape and value.dtype == np.float32
    edited = lowrank.truncate(params, cfg, 'ov', 0, 0.5)
    changed = {role for role in params['blocks_0'] if edited['blocks_0'][role] is not params['blocks_0'][role]}
    assert changed == {'v', 'o'}


# 0.29 * 100 is 28.999... in binary.
@pytest.mark.parametrize('fraction, rank', [(0.29, 29), (0.299, 29), (0.57, 57), (0.999, 99), (0.009, 0)])
def test_the_rank_is_rounded_down(fraction, rank):
    cfg = ModelConfig(**BASE | {'d_model': 100, 'num_layers': 1})
    values = np.arange(100.0, 0, -1)
    params = {'blocks_0': {'mlp_in': np.diag(values)}}
    svd = lowrank.Spectrum(np.eye(100), values, np.eye(100))
    kept = np.asarray(lowrank.truncate(params, cfg, 'mlp_in', 0, fraction, svd=svd)['blocks_0']['mlp_in'])
    np.testing.assert_array_equal(np.diag(kept), np.where(np.arange(100) < rank, values, 0))


@pytest.mark.parametrize('case', ['plain', 'merged', 'biases'])
def test_truncated_models(case):
    """Removed parts add nothing but their biases; without its smallest direction a product is nearly the same."""
    cfg, params = make(case)
    layer, role = 1, 'mlp_in'
    bias = cfg.bias

    @quick_jit
    def measure(params):
        removed = lowrank.truncate(params, cfg, role, layer, 0)
        no_ov = lowrank.truncate(params, cfg, 'ov', layer, 0)
        # Rank K - 1 of K and then what is missing: the sum of both attention outputs is the whole.
        most = lowrank.truncate(params, cfg, 'ov', layer, 1 - 1 / min(cfg.d_head, cfg.d_model)
                                if cfg.value_output == 'factored' else 1 - 1 / cfg.d_model)
        # A constant that each head adds, because its pattern sums to one: its value bias through its output matrix.
        block = params[f'blocks_{layer}']
        constant = block['v_bias'] @ block['o'] + block['o_bias'] if bias else jnp.zeros(cfg.d_model)

        def attention(params):
            name = f'blocks.{layer}.attn_out'
            return model.apply(params, TOKENS, cfg=cfg, capture=name)[1][name]

        hooks = {f'blocks.{layer}.mlp_out': jnp.zeros_like}
        return {
            'removed': model.apply(removed, TOKENS, cfg=cfg)[0],
            'hooked': model.apply(params, TOKENS, cfg=cfg, hooks=hooks)[0],
            'no_ov': attention(no_ov), 'constant': constant, 'most': attention(most), 'whole': attention(params),
        }

    found = measure(params)
    if not bias:
        np.testing.assert_allclose(found['removed'], found['hooked'], atol=1e-6)
    np.testing.assert_allclose(found['no_ov'], np.broadcast_to(found['constant'], found['no_ov'].shape), atol=1e-5)
    # The smallest direction is small: almost everything is left, the biases in full.
    smallest = np.linalg.svd(products(params, cfg, layer), compute_uv=False)
    smallest = smallest[:, min(cfg.d_head, cfg.d_model) - 1 if cfg.value_output == 'factored' else -1].sum()
    assert 1e-4 < np.abs(found['most'] - found['whole']).max() < 12 * smallest


def counted(monkeypatch) -> list:
    calls, svd = [], jnp.linalg.svd

    def count(matrix, *args, **kwargs):
        calls.append(matrix.shape)
        return svd(matrix, *args, **kwargs)

    monkeypatch.setattr(jnp.linalg, 'svd', count)
    return calls


@pytest.mark.parametrize('entries, decompositions', [
    (('blocks.1.mlp_in@0.0', 'blocks.1.mlp_in@0.1', 'blocks.1.mlp_in@0.25', 'blocks.1.mlp_in@0.5'), 1),
    (('blocks.1.mlp_in@0.5', 'blocks.0.mlp_in@0.5', 'blocks.1.mlp_in@0.25@bottom', 'blocks.1.k@0.5'), 3),
    (('blocks.1.mlp_in@0', 'blocks.0.ov@0'), 0),
    ((), 0),
])
def test_truncations_decompose_each_matrix_once(monkeypatch, smoke, entries, decompositions):
    smoke.eval.truncations = entries
    cfg = config.from_config_dict(smoke)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32),
                          model.parameter_specs(cfg.model), is_leaf=lambda x: isinstance(x, model.Spec))
    calls = counted(monkeypatch)
    edited = lowrank.truncations(params, cfg)
    assert len(calls) == decompositions
    assert list(edited) == list(entries)
    for entry in entries:
        layer, role, fraction, keep = config.parse_truncation(entry)
        assert keep == ('bottom' if 'bottom' in entry else 'top')
        alone = lowrank.truncate(params, cfg.model, role, layer, fraction, keep=keep)
        jax.tree.map(np.testing.assert_array_equal, edited[entry], alone)


@pytest.mark.parametrize('arguments, options, found, allowed', [
    (('mlp_in', 0, 1.5), {}, 'rank_fraction=1.5', 'from 0'),
    (('mlp_in', 0, -0.1), {}, 'rank_fraction=-0.1', 'from 0'),
    (('mlp_in', 0, float('nan')), {}, 'rank_fraction=nan', 'from 0'),
    (('mlp_in', 0, '0.5'), {}, "rank_fraction='0.5'", 'from 0'),
    (('mlp_in', 0, 0.5), {'keep': 'tpo'}, "keep='tpo'", "did you mean 'top'? Allowed: top, bottom"),
    (('mlp_inn', 0, 0.5), {}, "'mlp_inn'", "did you mean 'mlp_in'? Allowed: q, k, v, o, ov, mlp_in, mlp_out"),
    (('mlp_gate', 0, 0.5), {}, "'mlp_gate'", 'Allowed: q'),
    (('embed', 0, 0.5), {}, "'embed'", 'Allowed: q'),
    (('mlp_in', 2, 0.5), {}, 'layer 2', '0 to 1'),
    (('mlp_in', -1, 0), {}, 'layer -1', '0 to 1'),
])
def test_errors(arguments, options, found, allowed):
    cfg, params = make('plain')
    with pytest.raises(ConfigError) as error:
        lowrank.truncate(params, cfg, *arguments, **options)
    message = str(error.value)
    assert message.isprintable() and found in message and allowed in message and 'llowed' in message


def test_shared_value_heads_have_no_product():
    cfg = ModelConfig(**BASE | {'num_kv_heads': 1})
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))
    with pytest.raises(ConfigError, match="layer 0 has no role 'ov'; .*Allowed: q, k, v, o, mlp_in, mlp_out"):
        lowrank.truncate(params, cfg, 'ov', 0, 0.5)
    assert lowrank.matrix(params, cfg, 'v', 0).shape == (8, 4)
