"""Ablation, against hooks written by hand and models whose parts do nothing."""

import functools

import jax
import jax.numpy as jnp
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


def test_order_and_accuracy_are_those_of_the_rows_they_are_said_to_be_of():
    """The loss on unseen tasks without each head, and accuracy on forced queries, both by hand."""
    params = jax.tree.map(np.copy, PARAMS)
    params['blocks_1']['o'][: CFG.model.d_head] = 0

    @quick_jit
    def by_hand(params, state):
        first, rest = jax.random.split(jax.random.key(0))
        draw = lambda key, split: CFG.task.sample(state, key, split=split, batch_size=200)  # noqa: E731
        unseen, forced = draw(jax.random.fold_in(rest, 1), 'ood_train'), draw(jax.random.fold_in(rest, 2), 'ood_forced')
        z = model.apply(params, draw(first, 'id_train').tokens_BL, cfg=CFG.model, capture='*.attn.z')[1]

        def without(head, batch):
            hooks = {f'blocks.{layer}.attn.z': lambda value, layer=layer: jnp.where(
                (jnp.arange(2)[:, None] == head % 2) & (layer == head // 2), z[f'blocks.{layer}.attn.z'].mean(0), value)
                for layer in range(2)}
            logits = model.apply(params, batch.tokens_BL, cfg=CFG.model, hooks=hooks)[0][:, -1]
            loss_B = -jax.nn.log_softmax(logits)[jnp.arange(200), batch.targets_BL[:, -1]]
            return loss_B.mean(), logits.argmax(-1) == batch.targets_BL[:, -1]

        counts = forced.groups['valid_B'] & ~forced.groups['covered_BS'][:, -1]
        return jax.lax.map(lambda head: (without(head, unseen)[0], without(head, forced)[1]), jnp.arange(4)), counts

    (loss_H, hit_HB), counts_B = by_hand(params, quick_jit(CFG.task.init)(jax.random.key(3)))
    found = measured()
    np.testing.assert_array_equal(found['ablation/order'].ravel(), np.argsort(np.argsort(loss_H)))
    np.testing.assert_allclose(found['ood_forced/mean/head'].ravel(), hit_HB[:, counts_B].mean(1), rtol=1e-5)


def test_removable():
    """The first head that costs 5 points ends the count, and a model that guesses has nothing to count."""
    cumulative = np.array([0.91, 0.88, 0.84, 0.89])
    assert ablation.removable(0.9, cumulative, 5) == 2
    assert ablation.removable(0.95, cumulative, 5) == 1
    assert np.isnan(ablation.removable(0.4, 0 * cumulative + 0.4, 5))
