"""What layers of a text model hold: against models built by hand that store, attend and copy in known places."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import get_config

from lingrok import model
from lingrok.analysis import copying
from lingrok.config import from_config_dict
from lingrok.figures import text as text_figures
from lingrok.log import Series

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
KEY = jax.random.key(0)
ROWS = 20


@functools.cache
def config(**options):
    tree = get_config('text.py:smoke')
    tree.name = 'text'
    tree.model.update(options)
    return from_config_dict(tree)


@functools.cache
def state_of(task):
    return jax.tree.map(np.asarray, quick_jit(task.init)(KEY))


@functools.cache
def measured():
    """Of a random model whose attention of layer 0 and feed-forward of layer 1 write nothing."""
    cfg = config()
    params = jax.tree.map(np.array, quick_jit(lambda key: model.init(key, cfg.model))(KEY))
    params['embed'] *= 10
    params['blocks_0']['o'][:] = 0
    params['blocks_1']['mlp_out'][:] = 0
    measure = quick_jit(lambda params, state: copying.dynamics(params, state, KEY, cfg, num_rows=ROWS))
    return cfg, params, {name: np.asarray(x) for name, x in measure(params, state_of(cfg.task)).items()}


def test_a_layer_that_writes_nothing_is_not_missed():
    cfg, _, found = measured()
    for split in cfg.task.splits:
        for quantity in ('loss', 'bigram_kl'):
            name = f'{split}/{quantity}'
            for kind in copying.KINDS:
                assert found[f'{name}/{kind}/attention'][0] == found[f'{name}/intact']
                assert found[f'{name}/{kind}/feed_forward'][1] == found[f'{name}/intact']
                assert found[f'{name}/{kind}/attention'][1] == found[f'{name}/{kind}/all_attention']
                assert found[f'{name}/{kind}/feed_forward'][0] == found[f'{name}/{kind}/all_feed_forward']
                assert found[f'{name}/{kind}/feed_forward'][0] != found[f'{name}/intact']
    assert found['test/loss/mean/attention'][1] != found['test/loss/zero/attention'][1]


def test_numbers_without_a_layer_are_those_of_hooks_by_hand():
    """Zero and mean ablation of both parts, on the windows that the task draws."""
    cfg, params, found = measured()

    @quick_jit
    def by_hand(params, state):
        key, _ = jax.random.split(KEY)
        key, reference_key = jax.random.split(key)
        split = cfg.task.splits.index('repeated')
        batch = cfg.task.sample(state, jax.random.fold_in(key, split), split='repeated', batch_size=ROWS)
        rows = cfg.task.sample(state, reference_key, split='train_text', batch_size=ROWS).tokens_BL
        _, acts = model.apply(params, rows, cfg=cfg.model, capture=('*.attn_out', '*.mlp_out'))

        def loss(name, scale):
            hooks = {name: lambda x: 0 * x + scale * jnp.mean(acts[name], 0)} if name else {}
            logits_BLV = model.apply(params, batch.tokens_BL, cfg=cfg.model, hooks=hooks)[0]
            return cfg.task.metrics(logits_BLV, batch)['loss']

        sites = ('', 'blocks.1.attn_out', 'blocks.0.mlp_out')
        return [[loss(name, scale) for name in sites] for scale in (0, 1)]

    zero, mean = by_hand(params, state_of(cfg.task))
    name = 'repeated/loss'
    np.testing.assert_allclose(found[f'{name}/intact'], zero[0], rtol=1e-5)
    for kind, (_, attention, mlp) in (('zero', zero), ('mean', mean)):
        np.testing.assert_allclose(found[f'{name}/{kind}/attention'][1], attention, rtol=1e-4)
        np.testing.assert_allclose(found[f'{name}/{kind}/feed_forward'][0], mlp, rtol=1e-4)


def bigram_model(where: str):
    """Parameters whose part `where` alone says the bigram law of each token; one-hot embeddings, no norm."""
    V = config().task.vocab_size
    cfg = config(d_model=2 * V, d_mlp=V, num_heads=1, norm='none', activation=('relu',))
    law_VV = np.log(state_of(cfg.task).bigram_VV)
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), jax.eval_shape(lambda: model.init(KEY, cfg.model)))
    params['embed'][:, :V] = np.eye(V)
    params['unembed'][V:] = np.eye(V)  # what is written is read from the second half of the stream
    if where == 'feed_forward':
        params['blocks_1']['mlp_in'][:V] = np.eye(V)
        params['blocks_1']['mlp_out'][:, V:] = law_VV
    else:
        params['unembed'][:V] = law_VV
    return cfg, params


@pytest.mark.parametrize('where', ['feed_forward', 'embedding'])
def test_the_bigram_law_is_found_where_it_is_stored(where):
    cfg, params = bigram_model(where)
    state = state_of(cfg.task)
    found = quick_jit(lambda params, state: copying.bigram_memory(params, state, cfg))(params, state)
    uniform = found['memory/uniform']
    kl = [sum(p * np.log(p * cfg.task.vocab_size) for p in row) for row in state.bigram_VV]
    np.testing.assert_allclose(uniform, np.dot(state.unigram_V, kl), rtol=1e-4)
    kl = [sum(p * np.log(p / q) for p, q in zip(row, state.unigram_V, strict=True)) for row in state.bigram_VV]
    np.testing.assert_allclose(found['memory/unigram'], np.dot(state.unigram_V, kl), rtol=1e-4)
    np.testing.assert_allclose(found['memory/feed_forward'][0], uniform, rtol=1e-4)  # it writes nothing
    stored, other = found['memory/feed_forward'][1], found['memory/embedding']
    stored, other = (stored, other) if where == 'feed_forward' else (other, stored)
    np.testing.assert_allclose(stored, 0, atol=1e-5)
    np.testing.assert_allclose(other, uniform, rtol=1e-4)


def test_a_layer_without_a_feed_forward_has_no_number():
    cfg = config(mlp_kind=('none', 'mlp'))
    params = quick_jit(lambda key: model.init(key, cfg.model))(KEY)
    found = quick_jit(lambda params, state: copying.bigram_memory(params, state, cfg))(params, state_of(cfg.task))
    assert np.isnan(found['memory/feed_forward'][0]) and np.isfinite(found['memory/feed_forward'][1])


def test_induction_is_seen_where_a_head_looks():
    """Positions as one-hot vectors: head 0 looks L / 2 - 1 back, head 1 at the token before."""
    L, H = 16, 2
    cfg = config(num_layers=1, position='learned', norm='none', d_model=2 * L, num_heads=H, mlp_kind=('none',))
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), jax.eval_shape(lambda: model.init(KEY, cfg.model)))
    params['pos'][:, :L] = np.eye(L)
    params['blocks_0']['k'][:L, :L], params['blocks_0']['k'][:L, L:] = np.eye(L), np.eye(L)
    for head, back in enumerate((L // 2 - 1, 1)):
        params['blocks_0']['q'][back:L, head * L : head * L + L - back] = 200 * np.eye(L - back)
    tokens = np.random.default_rng(0).integers(0, 5, (3, L))
    found = quick_jit(lambda params: copying.induction(params, tokens, cfg))(params)
    np.testing.assert_allclose(found['induction/head'], [[1, 0]], atol=1e-5)
    np.testing.assert_allclose(found['induction/previous'], [[0, 1]], atol=1e-5)
    assert found['induction/best_head'] == found['induction/head'].max()
    assert found['induction/best_previous'] == found['induction/previous'].max()
    np.testing.assert_allclose(found['induction/uniform'], np.mean([1 / (t + 1) for t in range(L // 2, L)]), rtol=1e-5)


def series(count: int, replicas: int = 3) -> dict:
    """What `dynamics` measured, as if at several steps."""
    _, _, found = measured()
    return {name: Series(np.arange(count) * 10, np.broadcast_to(x, (count, replicas, *x.shape)))
            for name, x in found.items()}


@pytest.mark.parametrize('count', [1, 3])
def test_the_figure_of_layers_shows_the_model_and_each_layer(count):
    cfg = measured()[0]
    figure = text_figures.dynamics(series(count), cfg)
    axes = figure.axes
    assert len(axes) == 6 and all(axis.get_xlabel() == 'step' and axis.get_ylabel() for axis in axes)
    labels = [line.get_label() for line in axes[4].lines]
    assert {'model', 'no attention 0', 'no attention 1', 'no FF 0', 'no FF 1'} <= set(labels)
    line = axes[4].lines[labels.index('no FF 0')]
    np.testing.assert_allclose(line.get_ydata(), measured()[2]['test/loss/mean/feed_forward'][0], rtol=1e-6)
    assert line.get_marker() == ('o' if count == 1 else 'None')
