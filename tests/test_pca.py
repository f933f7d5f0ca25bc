import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_characters import quick_jit, tiny

from lingrok import model
from lingrok.analysis import characters, pca, scan
from lingrok.analysis.heads import head_outputs
from lingrok.config import ConfigError

ring = quick_jit(pca.ring, static_argnums=2)


def circles(p, ratio, frequency=1, root=None):
    """The picture of the paper: circles in log y on a circle in log x, 0 in the middle of each."""
    log = characters.log_table(p, root)
    point = np.exp(2j * np.pi * frequency * log / (p - 1)) * (np.arange(p) > 0)
    both = (point[:, None] + ratio * point[None]).reshape(-1)
    return jnp.asarray(np.stack([both.real, both.imag], -1))


def test_components_are_those_of_the_covariance():
    values = np.random.default_rng(0).normal(size=(30, 6)) * [3, 2, 1, 0.5, 0.2, 0.1] + 5
    scores, share = quick_jit(pca.components)(jnp.asarray(values))
    eigenvalues, vectors = np.linalg.eigh(np.cov(values.T))
    np.testing.assert_allclose(share, eigenvalues[::-1][:4] / eigenvalues.sum(), rtol=1e-4)
    expected = (values - values.mean(0)) @ vectors[:, ::-1][:, :4]
    np.testing.assert_allclose(np.abs(scores), np.abs(expected), atol=1e-3)
    # The official form differs from projections of the same data by what the mean adds, the same for all components.
    skewed, same_share = quick_jit(functools.partial(pca.components, uncentred=True))(jnp.asarray(values))
    np.testing.assert_allclose(same_share, share, rtol=1e-5)
    shift = np.asarray(skewed - scores)
    added = values @ values.mean(0)
    np.testing.assert_allclose(shift - shift.mean(0), np.tile((added - added.mean())[:, None], 4), atol=1e-2)
    # Directions of some of the vectors, on which all are projected.
    some, share = quick_jit(functools.partial(pca.components, fit=np.arange(10)))(jnp.asarray(values))
    np.testing.assert_allclose(share, (np.linalg.svd(values[:10] - values[:10].mean(0))[1] ** 2)[:4]
                               / (np.var(values[:10], 0).sum() * 10), rtol=1e-4)
    assert some.shape == (30, 4) and abs(some[:10].mean()) < 1e-4


@pytest.mark.parametrize('root', (2, 6))
def test_circle_of_circles(root):
    found = ring(circles(11, 0.1, root=2) * 3 + 7, jax.random.key(0), root)
    assert found['radius_ratio'] == pytest.approx(0.1, abs=1e-4)
    assert found['ring'] == pytest.approx(1 / 1.01, abs=1e-4)  # whatever the root: the ring has another frequency
    assert found['centre'] == pytest.approx(0, abs=1e-4)
    assert 0.2 < found['shuffled'] < 0.7


def test_what_is_no_ring():
    p, key = 11, jax.random.key(1)
    assert ring(circles(p, 0.1, frequency=5), key, None)['ring'] < 1e-5  # two clusters
    swapped = circles(p, 0.1).reshape(p, p, 2).swapaxes(0, 1).reshape(-1, 2)  # a ring of y
    assert ring(swapped, key, None)['ring'] == pytest.approx(0.01 / 1.01, abs=1e-4)
    noise = jnp.asarray(np.random.default_rng(0).normal(size=(p, 1, 2)) + np.zeros((p, p, 2))).reshape(-1, 2)
    found = ring(noise, key, None)
    assert abs(found['ring'] - found['shuffled']) < 0.35
    alternating = jnp.asarray((characters.log_table(p) % 2)[:, None, None] + np.zeros((p, p, 2))).reshape(-1, 2)
    assert ring(alternating, key, None)['ring'] < 1e-5


def test_features_are_head_outputs_at_two_tokens():
    cfg, params, state = tiny()
    key = jax.random.key(3)
    measure = functools.partial(pca.scanned_components, cfg=cfg, tokens='yz', slot=1)
    without = jax.eval_shape(functools.partial(measure, zero=False), params, state, key)
    found = quick_jit(measure)(params, state, key)

    @quick_jit
    def direct(params, state, key):
        tokens = scan.scanned_rows(cfg.task, state, key, slot=1)
        _, acts = model.apply(params, tokens, cfg=cfg.model, capture=('blocks.1.attn.z', 'blocks.1.attn.pattern'))
        return head_outputs(params, acts, cfg.model, 1), acts['blocks.1.attn.pattern']

    assert without['heads/scores'].shape == (2, 2, 25, 4)
    heads, pattern = map(np.asarray, direct(params, state, key))
    values = np.concatenate([heads[:, 4, 1], heads[:, 5, 1]], -1)
    s = np.linalg.svd(values - values.mean(0), compute_uv=False)
    np.testing.assert_allclose(found['heads/variance'][1, 1], s[:4] ** 2 / np.sum(s**2), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(np.std(found['heads/scores'][1, 1], 0), s[:4] / 5, rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(found['heads/previous'][1], pattern[:, :, 4, 3].mean(0), atol=1e-5)
    np.testing.assert_allclose(found['heads/self'][1], pattern[:, :, 4, 4].mean(0), atol=1e-5)
    layer, head = np.unravel_index(np.argmax(found['heads/ring']), (2, 2))
    assert found['best/radius_ratio'] == found['heads/radius_ratio'][layer, head]


def test_parts_that_a_model_lacks():
    cfg, params, state = tiny(mlp_kind=('none', 'linear'))
    shape = lambda **o: jax.eval_shape(functools.partial(pca.scanned_components, cfg=cfg, **o), params, state,  # noqa: E731
                                       jax.random.key(0))
    assert shape(part='mlp_out')['mlp_out/scores'].shape == (1, 1, 25, 4)
    assert shape(part='attn_out')['attn_out/ring'].shape == (2, 1)
    for bad in ({'part': 'head'}, {'tokens': 'zz'}):
        with pytest.raises(ConfigError, match='(?i)allowed'):
            shape(**bad)
    cfg, params, state = tiny(mlp_kind=('none',))
    with pytest.raises(ConfigError, match='no mlp_out'):
        jax.eval_shape(functools.partial(pca.scanned_components, cfg=cfg, part='mlp_out'), params, state,
                       jax.random.key(0))
