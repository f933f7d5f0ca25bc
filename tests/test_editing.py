"""Rank-one edits: what they remove and leave, a model whose memory is known, and the comparison by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_truncation import CFG as TINY
from test_truncation import PARAMS, as_series, cut, quick_jit, random_params

from lingrok import config, model
from lingrok.analysis import editing, memory
from lingrok.config import ConfigError, ModelConfig
from lingrok.figures import editing as figures

RNG = np.random.default_rng(0)
ROWS, KEY = 16, 3


@pytest.mark.parametrize('own_reads', [True, False])
def test_an_edit_removes_what_is_written_for_its_keys_and_nothing_else(own_reads):
    w, keys, write = RNG.normal(size=(9, 5)), RNG.normal(size=(2, 9)), RNG.normal(size=5)
    reads = keys if own_reads else RNG.normal(size=(2, 9))
    edited = np.asarray(editing.erase(*map(jnp.asarray, (w, keys, write)), reads_KI=jnp.asarray(reads)))
    np.testing.assert_allclose(keys @ edited @ write, 0, atol=1e-4)
    assert np.linalg.matrix_rank(edited - w, tol=1e-4) == 1
    across = np.linalg.svd(write[None])[2][1:].T  # outputs orthogonal to the write
    np.testing.assert_allclose(edited @ across, w @ across, atol=1e-5)
    deaf = np.linalg.svd(reads)[2][2:]  # inputs orthogonal to the reads
    np.testing.assert_allclose(deaf @ edited, deaf @ w, atol=1e-5)
    assert np.abs(w - edited).max() > 0.1


def test_one_key_is_the_formula_and_strength_scales_it():
    w, key, write = RNG.normal(size=(9, 5)), RNG.normal(size=9), RNG.normal(size=5)
    q, tau = key / np.linalg.norm(key), write / np.linalg.norm(write)
    expected = w - np.outer(q, tau) * (q @ w @ tau)
    erase = functools.partial(editing.erase, *map(jnp.asarray, (w, key[None], write)))
    np.testing.assert_allclose(erase(), expected, atol=1e-5)
    np.testing.assert_allclose(erase(strength=0.0), w, atol=1e-6)
    np.testing.assert_allclose(key @ np.asarray(erase(strength=2.0)) @ write, -key @ w @ write, rtol=1e-4)


def test_a_key_without_input_has_nothing_to_erase():
    w, keys = RNG.normal(size=(9, 5)), np.stack([np.zeros(9), RNG.normal(size=9)])
    edited = editing.erase(*map(jnp.asarray, (w, keys, np.ones(5))))
    np.testing.assert_allclose(edited, editing.erase(*map(jnp.asarray, (w, keys[1:], np.ones(5)))), atol=1e-5)


def with_model(**options):
    return dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, **options))


def test_what_arrives_at_the_matrix():
    """Of a ReLU feed-forward its hidden units, of a linear one its normed input; alone: of the embedding."""
    cfg = with_model(norm='rmsnorm', bias=True, mlp_kind=('linear', 'mlp')).model
    params = random_params(cfg, seed=2)
    tokens = np.array([[0, 3, 1, 1]])

    @quick_jit
    def run(params):
        acts = model.apply(params, tokens, cfg=cfg, capture=('*.resid_mid', '*.mlp.post'))[1]
        found = {(layer, alone): editing.matrix_inputs(params, tokens, cfg=cfg, layer=layer, alone=alone)
                 for layer in (0, 1) for alone in (False, True)}
        return acts, found

    acts, found = run(params)

    def normed(x, layer):
        scale = params[f'blocks_{layer}']['mlp_norm_scale']
        return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + cfg.norm_eps) * scale

    streams = {False: lambda layer: np.asarray(acts[f'blocks.{layer}.resid_mid']),
               True: lambda layer: params['embed'][tokens]}
    for alone, stream in streams.items():
        block = params['blocks_1']
        hidden = np.maximum(normed(stream(1), 1) @ block['mlp_in'] + block['mlp_in_bias'], 0)
        np.testing.assert_allclose(found[0, alone], normed(stream(0), 0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[1, alone], hidden, rtol=1e-4, atol=1e-4)


def test_directions_are_means_over_triggers_and_the_whitened_read_disturbs_text_least():
    cfg = with_model(mlp_kind=('none', 'linear'))
    params = random_params(cfg.model, seed=3)
    trigger = cfg.task.fixed_triggers[0]

    @quick_jit
    def run(params, state):
        batch = cfg.task.sample(state, jax.random.key(0), split='noisy', batch_size=ROWS)
        inputs = editing.matrix_inputs(params, batch.tokens_BL, cfg=cfg.model, layer=1)
        return editing.directions(params, batch, cfg, 1), batch, inputs

    found, batch, inputs = jax.tree.map(np.asarray, run(params, quick_jit(cfg.task.init)(jax.random.key(1))))
    at_trigger, text = inputs[batch.tokens_BL == trigger], inputs[batch.tokens_BL != trigger]
    for name in ('context', 'whitened'):
        np.testing.assert_allclose(found[name][0][0], at_trigger.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found['embedding'][0][0], params['embed'][trigger], rtol=1e-4)
    (key,), w, write = found['whitened'][0], params['blocks_1']['mlp_linear'], np.ones(8)

    def disturbance(read):
        edited = editing.erase(*map(jnp.asarray, (w, key[None], write)), reads_KI=jnp.asarray(read[None]))
        return np.square(text @ (np.asarray(edited) - w)).mean()

    least = disturbance(found['whitened'][1][0])
    others = [key, *(key + 0.3 * np.linalg.norm(key) * RNG.normal(size=8) for _ in range(20))]
    assert least < 0.9 * disturbance(key) and all(least < disturbance(read) for read in others)


def test_both_ends():
    for full in (1, 2, 7, 64, 1000):
        ranks = editing.both_ends(full)
        assert ranks == sorted(set(ranks)) and {0, 1, full - 1, full} <= set(ranks)
        assert [full - rank for rank in ranks[::-1]] == ranks
        assert len(ranks) < 50


def test_divergence():
    p, q = RNG.dirichlet(np.ones(6), size=(2, 3))
    expected = (p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(editing.divergence(np.log(p) + 5, np.log(q) - 2), expected, rtol=1e-4)
    np.testing.assert_allclose(editing.divergence(np.log(p), np.log(p)), 0, atol=1e-6)


@functools.cache
def measured():
    state = quick_jit(TINY.task.init)(jax.random.key(1))
    fn = quick_jit(lambda *args: editing.compare(*args, TINY, layer=0, num_rows=ROWS))
    return {name: np.asarray(value) for name, value in fn(PARAMS, state, jax.random.key(KEY)).items()}


@functools.cache
def by_hand():
    """Logits and metrics of some edited models on the rows that are reported, these rows, parts of the margins."""
    state = quick_jit(TINY.task.init)(jax.random.key(1))

    @quick_jit
    def run(params, state, mlp_outs):
        clean_key, noisy_key = jax.random.split(jax.random.key(KEY))
        clean = TINY.task.sample(state, clean_key, split='clean', batch_size=2 * ROWS)
        noisy = TINY.task.sample(state, noisy_key, split='noisy', batch_size=ROWS)
        half = jax.tree.map(lambda x: x[ROWS:], clean)
        edits = editing.directions(params, noisy, TINY, 0)
        block = params['blocks_0']
        write = params['unembed'][:, TINY.task.noise_id]
        erased = [editing.erase(block['mlp_out'], *edits[name][:1], write, reads_KI=edits[name][1])
                  for name in editing.METHODS]
        matrices = jnp.stack([block['mlp_out'], *mlp_outs, *erased])

        def logits(matrix):
            edited = {**params, 'blocks_0': {**block, 'mlp_out': matrix}}
            return model.apply(edited, half.tokens_BL, cfg=TINY.model)[0]

        def cut_off(scale):
            hooks = {'blocks.1.mlp_out': lambda x: x * scale}
            return model.apply(params, clean.tokens_BL, cfg=TINY.model, hooks=hooks)[0]

        table, (whole, without) = jax.lax.map(logits, matrices), jax.lax.map(cut_off, jnp.array([1.0, 0.0]))
        alone = memory.noise_margin(params, jnp.array(TINY.task.fixed_triggers), TINY.task.noise_id, cfg=TINY.model,
                                    layers=(1,))
        margins = whole, whole - without, alone, clean.groups['occurrence_BL'] >= 2
        return table, jax.lax.map(lambda x: TINY.task.metrics(x, half), table), half, margins

    w = PARAMS['blocks_0']['mlp_out']
    table, metrics, half, margins = run(PARAMS, state, [0 * w, cut(w, 2, 'top'), cut(w, 2, 'bottom')])
    names = ['whole', 'removed', 'top', 'bottom', *editing.METHODS]
    metrics = {name: {quantity: x[i] for quantity, x in metrics.items()} for i, name in enumerate(names)}
    return dict(zip(names, np.asarray(table), strict=True)), metrics, half, jax.tree.map(np.asarray, margins)


def test_quantities_are_those_of_models_edited_by_hand():
    found, (logits, metrics, half, _) = measured(), by_hand()
    place = found['mlp_out/top/amount'].tolist().index(2)
    strength = editing.STRENGTHS.index(1.0)
    cases = {'whole': ('whole', ()), 'removed': ('removed', ()), 'top': ('mlp_out/top', place),
             'bottom': ('mlp_out/bottom', place), **{name: (f'edit/{name}', strength) for name in editing.METHODS}}
    noise, text = TINY.task.noise_id, half.groups['occurrence_BL'] == 0
    repeated = half.groups['occurrence_BL'] >= 2
    softmax = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)  # noqa: E731
    p = softmax(logits['whole'])
    for name, (method, at) in cases.items():
        q = softmax(logits[name])
        expected = {x: metrics[name][x] for x in ('p_noise', 'p_correct', 'accuracy', 'loss_bigram')}
        expected['kl_text'] = (p * np.log(p / q)).sum(-1)[text].mean()
        others = [np.delete(x, noise, -1) for x in (p, q)]
        a, b = (x / x.sum(-1, keepdims=True) for x in others)
        expected['kl_others'] = (a * np.log(a / b)).sum(-1)[repeated].mean()
        for quantity, value in expected.items():
            np.testing.assert_allclose(found[f'{method}/{quantity}'][at], value, rtol=2e-3, atol=2e-5,
                                       err_msg=f'{name} {quantity}')
    for method, last in (('edit/context', 0), ('mlp_in/top', -1), ('mlp_out/bottom', -1)):
        assert found[f'{method}/kl_text'][last] == pytest.approx(0, abs=1e-5)
    assert found['removed/kl_text'] > 0.01


def test_margins_of_every_feed_forward():
    """Logits with minus without, and the memory of the trigger alone."""
    found, (whole, added, alone, repeated) = measured(), by_hand()[-1]
    noise = TINY.task.noise_id
    for name, logits in (('model', whole), ('context/blocks.1', added)):
        lead = logits[..., noise] - np.delete(logits, noise, -1).max(-1)
        assert found[f'margin/{name}'] == pytest.approx(lead[repeated].mean(), rel=1e-3)
    assert found['margin/alone/blocks.1'] == pytest.approx(alone.mean(), rel=1e-3)


def test_equal_cost_takes_the_best_amount_within_the_budget_and_reports_the_other_half():
    part = {'p_noise': [[0.5, 0.6], [0.3, 0.4], [0.04, 0.06], [0.2, 0.1]],
            'kl_text': [[0.0, 0.0], [0.02, 0.03], [0.5, 0.7], [0.2, 0.25]],
            'loss_bigram': [[2.0, 2.1], [1.9, 2.0], [9.0, 9.0], [2.02, 2.2]]}
    found = editing._equal_cost({name: jnp.array(x) for name, x in part.items()}, 'm', whole=0)
    budgets = dict(zip(editing.BUDGETS, found['budget/kl_text/p_noise/m'].tolist(), strict=True))
    assert {b: round(x, 3) for b, x in budgets.items()} == {0.001: 0.6, 0.003: 0.6, 0.01: 0.6, 0.03: 0.4, 0.1: 0.4,
                                                            0.3: 0.1, 1.0: 0.06, 3.0: 0.06}
    np.testing.assert_allclose(found['budget/loss_bigram/kl_text/m'][:4], [0.03, 0.03, 0.03, 0.25])
    assert found['least/kl_text/half/m'] == pytest.approx(0.25)
    assert found['least/kl_text/low/m'] == pytest.approx(0.7)
    assert found['least/loss_bigram/half/m'] == pytest.approx(0.1, rel=1e-4)
    never = editing._equal_cost({name: jnp.array(x[:2]) for name, x in part.items()}, 'm', whole=0)
    assert np.isnan(never['least/kl_text/low/m']) and np.isnan(never['least/kl_text/half/m'])


def planted():
    """One linear feed-forward with two memories: the trigger's noise (strength 6) and 'b' behind 'a' (strength 4)."""
    cfg = with_model(num_layers=1, d_model=12, num_heads=1, num_kv_heads=1, d_head=12, mlp_kind=('linear',),
                     activation=('relu',), parallel=(False,), attn_residual=(True,), position='none')
    params = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), model.parameter_specs(cfg.model),
                          is_leaf=lambda x: isinstance(x, model.Spec))
    params['embed'] = np.eye(6, 12, dtype=np.float32)
    params['unembed'] = np.eye(12, dtype=np.float32)[:, 6:]  # the stream itself writes no logits
    trigger, noise = cfg.task.fixed_triggers[0], cfg.task.noise_id
    params['blocks_0']['mlp_linear'][trigger, 6 + noise] = 6
    params['blocks_0']['mlp_linear'][3, 6 + 2] = 4
    return cfg, params


def test_an_association_goes_alone():
    """The edit takes the noise at no cost; truncation can take the largest direction, or the other memory with it."""
    cfg, params = planted()
    fn = quick_jit(lambda *args: editing.compare(*args, cfg, num_rows=ROWS))
    state = quick_jit(cfg.task.init)(jax.random.key(1))
    found = {name: np.asarray(x) for name, x in fn(params, state, jax.random.key(0)).items()}
    assert found['whole/p_noise'] == pytest.approx(np.exp(6) / (np.exp(6) + 5), rel=1e-4)
    one = editing.STRENGTHS.index(1.0)
    for method in editing.METHODS:
        assert found[f'edit/{method}/p_noise'][one] == pytest.approx(1 / 6, rel=1e-3)
        assert found[f'edit/{method}/kl_text'][one] == pytest.approx(0, abs=1e-5)
        assert found[f'budget/kl_text/p_noise/edit/{method}'] == pytest.approx(
            float(found[f'edit/{method}/p_noise'].min()), rel=1e-3)
    amounts = found['mlp_linear/top/amount'].tolist()
    assert found['mlp_linear/top/p_noise'][amounts.index(1)] == pytest.approx(float(found['whole/p_noise']), rel=1e-3)
    assert found['mlp_linear/top/kl_text'][amounts.index(1)] > 0.1
    assert found['mlp_linear/bottom/p_noise'][amounts.index(11)] == pytest.approx(1 / 6, rel=1e-3)
    assert found['mlp_linear/bottom/kl_text'][amounts.index(11)] == pytest.approx(0, abs=1e-5)
    assert found['least/kl_text/half/mlp_linear/top'] > 0.1
    assert found['margin/context/blocks.0'] == pytest.approx(6, rel=1e-4)


@pytest.mark.parametrize('changed, options, message', [
    ({}, {'layer': 2}, 'layer 2 has no feed-forward to edit; allowed: .0, 1.'),
    ({'mlp_kind': ('none', 'linear_act')}, {}, 'has no feed-forward to edit; allowed: one of mlp, gated, linear'),
    ({'mlp_kind': ('none', 'mlp')}, {'layer': 0}, 'layer 0 has no feed-forward to edit; allowed: .1.'),
    ({}, {'num_rows': 0}, '0 rows; allowed: at least 1'),
])
def test_errors(changed, options, message):
    with pytest.raises(ConfigError, match=message):
        editing.compare(PARAMS, None, jax.random.key(0), with_model(**changed), **options)


def test_random_triggers_have_no_association():
    cfg = dataclasses.replace(TINY, task=dataclasses.replace(TINY.task, trigger_mode='random'))
    with pytest.raises(ConfigError, match='trigger_mode=random; allowed: fixed'):
        editing.compare(PARAMS, None, jax.random.key(0), cfg)


def test_the_last_feed_forward_is_edited_by_default():
    assert editing.editable_layer(ModelConfig(num_layers=3, mlp_kind=('mlp', 'linear', 'linear_act'))) == 1
    assert config.truncatable_roles(TINY.model, 1)[-1] == editing.EDITED['linear']


def test_figure_draws_every_method_and_counts_the_replicas_that_reach_a_level():
    series = as_series(measured())
    series['least/kl_text/half/edit/context'].values[0] = [0.2, np.nan]
    noise, target, least, margin = figures.editing(series, TINY).axes
    labels = noise.get_legend_handles_labels()[1]
    assert len(labels) == 7 and labels == target.get_legend_handles_labels()[1]
    curve = next(line for line in target.lines if line.get_label() == 'second matrix, top kept')
    np.testing.assert_allclose(curve.get_ydata(), measured()['budget/kl_text/p_correct/mlp_out/top'], rtol=1e-6)
    assert 'n=1' in {text.get_text() for text in least.texts}
    assert [label.get_text() for label in margin.get_xticklabels()] == ['FF 0', 'FF 1']
