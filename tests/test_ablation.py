"""Ablation, against hooks written by hand and models whose parts do nothing."""

import functools

import jax
import numpy as np
import pytest
from test_heads import random_params, tiny_config

from lingrok import model
from lingrok.analysis import ablation

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
CFG = tiny_config(mlp_kind=('none', 'mlp'), num_heads=2)
PARAMS = random_params(CFG.model)
SPLITS = ('id_train', 'ood_train', 'ood_forced')


@quick_jit
def intact(params, tokens):
    return model.apply(params, tokens, cfg=CFG.model, capture='*')


@pytest.fixture(name='reference', scope='module')
def _reference():
    tokens = np.random.default_rng(1).integers(0, 5, (3, 11))
    return {name: np.asarray(value) for name, value in intact(PARAMS, tokens)[1].items()}


@pytest.mark.parametrize('kind', ablation.KINDS)
def test_each_kind_puts_in_what_it_says(reference, kind):
    """Head 1 of layer 0 and the feed-forward of layer 1 are replaced, nothing else."""
    tokens = np.random.default_rng(2).integers(0, 5, (3, 11))
    out_NH, out_N = np.array([[False, True], [False, False]]), np.array([False, True])
    z, mlp = reference['blocks.0.attn.z'][:, :, 1], reference['blocks.1.mlp_out']
    new = {
        'mean': lambda rows: sum(rows) / 3,
        'mean_all': lambda rows: np.tile(rows.reshape(-1, rows.shape[-1]).mean(0), (11, 1)),
        'zero': lambda rows: 0 * rows[0],
        'resample': lambda rows: rows,
    }[kind]

    @quick_jit
    def by_hand(params, z, mlp):
        hooks = {'blocks.0.attn.z': lambda value: value.at[:, :, 1].set(z),
                 'blocks.1.mlp_out': lambda value: 0 * value + mlp}
        return model.apply(params, tokens, cfg=CFG.model, hooks=hooks)[0]

    expected = by_hand(PARAMS, new(z), new(mlp))
    found = ablated(PARAMS, tokens, reference, ablation.KINDS.index(kind), out_NH, out_N)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(found - intact(PARAMS, tokens)[0]).max() > 0.1


@quick_jit
def ablated(params, tokens, reference, kind, heads_NH, mlps_N):
    return ablation.ablated_logits(params, tokens, reference, kind, heads_NH, mlps_N, CFG)


def test_empty_masks_change_nothing(reference):
    tokens = np.random.default_rng(2).integers(0, 5, (3, 11))
    found = ablated(PARAMS, tokens, reference, 2, np.zeros((2, 2), bool), np.zeros(2, bool))
    np.testing.assert_allclose(found, intact(PARAMS, tokens)[0], rtol=1e-5, atol=1e-5)


@functools.cache
def measured():
    """Of a model whose head 0 of layer 1 writes nothing: name -> array."""
    params = jax.tree.map(np.copy, PARAMS)
    params['blocks_1']['o'][: CFG.model.d_head] = 0
    state = quick_jit(CFG.task.init)(jax.random.key(3))
    fn = quick_jit(lambda *args: ablation.ablate(*args, CFG, splits=SPLITS, num_rows=200))
    return {name: np.asarray(value) for name, value in fn(params, state, jax.random.key(0)).items()}


def test_a_part_that_writes_nothing_is_not_missed():
    found = measured()
    for split in SPLITS:
        for kind in ablation.KINDS:
            assert found[f'{split}/{kind}/head'][1, 0] == found[f'{split}/intact']
            assert np.isnan(found[f'{split}/{kind}/mlp'][0])  # block 0 has none
            assert found[f'{split}/{kind}/mlp'][1] == found[f'{split}/{kind}/mlps']
            assert found[f'{split}/{kind}/worst_head'] == found[f'{split}/{kind}/head'].min()
    assert len({float(found[f'id_train/{kind}/head'][0, 0]) for kind in ablation.KINDS}) > 1


def test_heads_go_in_the_order_of_their_own_effect_until_none_is_left():
    found = measured()
    order = found['ablation/order']
    assert sorted(order.ravel()) == [0, 1, 2, 3]
    for split in SPLITS:
        head_NH, cumulative = found[f'{split}/mean/head'], found[f'{split}/cumulative']
        assert cumulative[0] == head_NH[order == 0][0]
        assert cumulative[-1] == found[f'{split}/mean/heads']
        previous = tuple(found['ablation/previous_head'])
        assert found[f'{split}/mean/previous_head'] == head_NH[previous]
