"""Truncation of every matrix, against matrices cut by numpy and metrics taken one model at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import get_config

from lingrok import config, model
from lingrok.analysis import lowrank, truncation
from lingrok.config import ConfigError, ModelConfig
from lingrok.figures import editing as figures
from lingrok.log import Series

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
FRACTIONS, ROWS, KEY = (0.0, 0.3, 1.0), 24, 7


def random_params(cfg: ModelConfig, seed: int = 0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32) * 0.5, model.parameter_specs(cfg),
                        is_leaf=lambda x: isinstance(x, model.Spec))


def tiny():
    cfg = get_config('recall.py:smoke')
    cfg.model.d_model, cfg.model.d_mlp, cfg.model.num_heads = 8, 12, 2
    cfg.model.query = 'full'
    cfg.model.mlp_kind = ('mlp', 'linear')
    cfg.task.table, cfg.task.table_size, cfg.task.noise_token, cfg.task.length = 'uniform', 6, '5', 12
    cfg.eval.truncations = ()
    return config.from_config_dict(cfg)


CFG = tiny()
PARAMS = random_params(CFG.model)
ENTRIES = truncation.entries(CFG.model)


@functools.cache
def measured():
    state = quick_jit(CFG.task.init)(jax.random.key(1))
    fn = quick_jit(lambda *args: truncation.grid(*args, CFG, fractions=FRACTIONS, num_rows=ROWS))
    return {name: np.asarray(value) for name, value in fn(PARAMS, state, jax.random.key(KEY)).items()}


@functools.cache
def sequences():
    """The batches of `measured`, stacked, and their baselines."""

    @quick_jit
    def draw(key):
        state = CFG.task.init(jax.random.key(1))
        batches = [CFG.task.sample(state, key, split=split, batch_size=ROWS) for split in ('noisy', 'clean')]
        return jax.tree.map(lambda *x: jnp.stack(x), *batches), CFG.task.baselines(state, batches[0])

    return draw(jax.random.key(KEY))


@functools.cache
def alone(model_cfg=CFG.model):
    """params -> metrics of both splits, on the sequences of `measured`."""
    stacked, _ = sequences()

    @quick_jit
    def fn(params):
        return jax.lax.map(lambda batch: CFG.task.metrics(model.apply(params, batch.tokens_BL, cfg=model_cfg)[0],
                                                          batch), stacked)

    return fn


def as_series(found: dict) -> dict[str, Series]:
    """Two equal replicas at one step."""
    return {name: Series(np.array([5]), np.stack([value, value])[None]) for name, value in found.items()}


def check(found: dict, name: str, place, expected: dict) -> None:
    for quantity in truncation.QUANTITIES:
        for k, split in enumerate(('noisy', 'clean')):
            np.testing.assert_allclose(found[f'{split}/{quantity}/{name}'][place], expected[quantity][k], rtol=2e-4,
                                       atol=2e-5, err_msg=f'{split}/{quantity}/{name}')


def cut(matrix, rank: int, keep: str):
    """The matrix with `rank` of its singular directions, by numpy."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    kept = np.arange(len(s)) < rank if keep == 'top' else np.arange(len(s)) >= len(s) - rank
    return (u * np.where(kept, s, 0) @ vt).astype(np.float32)


def edited(layer: int, role: str, rank: int, keep: str):
    """Parameters with one matrix cut by numpy; the product of a head is cut in its own width."""
    block, K = dict(PARAMS[f'blocks_{layer}']), CFG.model.d_head
    if role != 'ov':
        block[role] = cut(block[role], rank, keep)
    else:
        v, o = block['v'].copy(), block['o'].copy()
        for head in range(CFG.model.num_heads):
            at = slice(head * K, head * K + K)
            u, s, vt = (x[..., :K, :] if i == 2 else x[..., :K]
                        for i, x in enumerate(np.linalg.svd(v[:, at] @ o[at], full_matrices=False)))
            kept = np.arange(K) < rank if keep == 'top' else np.arange(K) >= K - rank
            v[:, at], o[at] = u * np.where(kept, s, 0), vt
        block |= {'v': v, 'o': o}
    return {**PARAMS, f'blocks_{layer}': block}


def test_every_matrix_of_the_model_is_there():
    assert ENTRIES == ((0, 'q'), (0, 'k'), (0, 'v'), (0, 'o'), (0, 'ov'), (0, 'mlp_in'), (0, 'mlp_out'),
                       (1, 'q'), (1, 'k'), (1, 'v'), (1, 'o'), (1, 'ov'), (1, 'mlp_linear'))
    other = dataclasses.replace(CFG.model, value_output='merged', query='identity', mlp_kind=('none', 'linear_act'))
    assert truncation.entries(other) == ((0, 'k'), (0, 'ov'), (1, 'k'), (1, 'ov'), (1, 'mlp_linear'))


def test_the_whole_fraction_is_the_model_and_no_fraction_is_its_removal():
    found, whole = measured(), alone()(PARAMS)
    check(found, 'whole', (), whole)
    different = 0
    for layer, role in ENTRIES:
        name = f'blocks.{layer}.{role}'
        removed = alone()(edited(layer, role, 0, 'top'))
        check(found, f'removed/{name}', (), removed)
        for keep in truncation.KEPT:
            check(found, f'{name}/{keep}', 2, whole)
            check(found, f'{name}/{keep}', 0, removed)
        different += abs(removed['loss_bigram'][1] - whole['loss_bigram'][1]) > 1e-3
    assert different == len(ENTRIES)


@pytest.mark.parametrize('layer, role', [(0, 'k'), (1, 'v'), (0, 'ov'), (0, 'mlp_out'), (1, 'mlp_linear')])
def test_a_fraction_is_the_model_with_the_matrix_cut_by_numpy(layer, role):
    full = {'v': 8, 'ov': 4}.get(role, 8)
    rank = int(0.3 * full)
    for keep in truncation.KEPT:
        check(measured(), f'blocks.{layer}.{role}/{keep}', 1, alone()(edited(layer, role, rank, keep)))
    name = f'clean/loss_bigram/blocks.{layer}.{role}'
    assert measured()[f'{name}/top'][1] != pytest.approx(measured()[f'{name}/bottom'][1], abs=1e-4)


def test_switched_off_parts_are_other_models():
    off = truncation.switched_off(CFG.model)
    assert list(off) == ['no_relu/blocks.0', 'no_residual/blocks.1']
    assert off['no_relu/blocks.0'].activation == ('identity', 'relu')
    assert off['no_residual/blocks.1'].attn_residual == (True, False)
    for name, model_cfg in off.items():
        check(measured(), name, (), alone(model_cfg)(PARAMS))
    assert not truncation.switched_off(dataclasses.replace(CFG.model, mlp_kind=('none',), attn_residual=(False,)))


def test_norms_and_soft_ranks():
    for layer, role in ENTRIES:
        block, K = PARAMS[f'blocks_{layer}'], CFG.model.d_head
        matrices = ([block['v'][:, i : i + K] @ block['o'][i : i + K] for i in range(0, 8, K)] if role == 'ov'
                    else [block[role]])
        frobenius = [np.linalg.norm(x) for x in matrices]
        spectral = [np.linalg.norm(x, 2) for x in matrices]
        for name, values in (('frobenius_norm', frobenius), ('spectral_norm', spectral),
                             ('soft_rank', np.divide(frobenius, spectral))):
            assert measured()[f'{name}/blocks.{layer}.{role}'] == pytest.approx(np.mean(values), rel=1e-4)


def test_baselines_are_those_of_the_same_sequences():
    for name, value in sequences()[1].items():
        assert measured()[f'noisy/{name}'] == pytest.approx(float(value), rel=1e-4)


@pytest.mark.parametrize('options', [{}, {'bias': True}, {'value_output': 'merged'}, {'d_head': 10}], ids=str)
def test_directions_add_up_and_may_be_kept_in_part(options):
    """Of the matrix of every role: two complementary masks give the whole, and a share of all gives that share."""
    cfg = ModelConfig(num_layers=1, d_model=8, d_mlp=12, num_heads=2, vocab_size=5, max_len=4, **options)
    params = random_params(cfg, seed=1)
    for _, role in truncation.entries(cfg):
        svd = lowrank.spectrum(params, cfg, role, 0)
        kept = (np.arange(lowrank.full_rank(cfg, role, svd)) % 2).astype(np.float32)
        matrix = lambda kept, role=role, svd=svd: np.asarray(lowrank.matrix(  # noqa: E731
            lowrank.select(params, cfg, role, 0, kept, svd=svd), cfg, role, 0))
        whole = np.asarray(lowrank.matrix(params, cfg, role, 0))
        np.testing.assert_allclose(matrix(kept) + matrix(1 - kept), whole, atol=1e-5)
        np.testing.assert_allclose(matrix(np.full_like(kept, 0.25)), whole / 4, atol=1e-5)
        assert np.abs(matrix(kept) - whole).max() > 0.01
    if cfg.bias:
        svd, old = lowrank.spectrum(params, cfg, 'ov', 0), params['blocks_0']
        block = lowrank.select(params, cfg, 'ov', 0, np.zeros(4), svd=svd)['blocks_0']
        np.testing.assert_allclose(block['o_bias'], old['v_bias'] @ old['o'] + old['o_bias'], rtol=1e-5)
        assert not np.any(block['v_bias'])


def test_select_is_truncate_for_a_traced_mask():
    keep_two = quick_jit(lambda params, kept: lowrank.select(params, CFG.model, 'mlp_in', 0, kept,
                                                             svd=lowrank.spectrum(params, CFG.model, 'mlp_in', 0)))
    expected = lowrank.truncate(PARAMS, CFG.model, 'mlp_in', 0, 0.25)
    found = keep_two(PARAMS, np.arange(8) < 2)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), found, expected)


@pytest.mark.parametrize('options, message', [
    ({'fractions': (0.0, 1.5)}, 'rank_fraction=1.5; allowed: a number from 0'),
    ({'num_rows': 0}, '0 rows; allowed: at least 1'),
])
def test_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        truncation.grid(PARAMS, None, jax.random.key(0), CFG, **options)


def test_figure_draws_curves_and_maps_of_every_matrix():
    axes = figures.truncation(as_series(measured()), CFG).axes[:9]
    labels = axes[0].get_legend_handles_labels()[1]
    assert labels == ['1 FF, top', '1 FF, bottom', '0 FF in, top', '0 FF in, bottom', '1 ov, top', '1 ov, bottom']
    curve = next(line for line in axes[0].lines if line.get_label() == '1 FF, bottom')
    np.testing.assert_allclose(curve.get_ydata(), measured()['clean/p_noise/blocks.1.mlp_linear/bottom'], rtol=1e-6)
    shown = axes[7].images[0].get_array()  # recall, bottom directions kept
    assert [label.get_text() for label in axes[6].get_yticklabels()][-1] == '1 FF' and len(shown) == len(ENTRIES)
    np.testing.assert_allclose(shown[-1], measured()['clean/p_correct/blocks.1.mlp_linear/bottom'], rtol=1e-6)
