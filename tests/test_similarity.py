import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_characters import quick_jit, tiny

from lingrok import model
from lingrok.analysis import scan, similarity


def ratios(p):
    x, y = np.divmod(np.arange(p * p), p)
    return np.array([int(b) * pow(int(a), -1, p) % p if a else (p if b else -1) for a, b in zip(x, y, strict=True)])


def test_similarities_and_contrast_against_loops():
    cfg, params, state = tiny()
    key = jax.random.key(5)

    def measure(params, state, key):
        return [similarity.similarities(params, state, key, cfg, **options)
                for options in ({}, {'centred': True}, {'part': 'heads'})]

    found, centred, of_heads = quick_jit(measure)(params, state, key)

    @quick_jit
    def direct(params, state, key):
        tokens = scan.scanned_rows(cfg.task, state, key, slot=2)
        _, acts = model.apply(params, tokens, cfg=cfg.model, capture=('blocks.1.resid_post', 'blocks.1.attn.z'))
        heads, width = cfg.model.num_heads, cfg.model.d_head
        o_HKD = params['blocks_1']['o'].reshape(heads, width, -1)
        return acts['blocks.1.resid_post'], jnp.einsum('blhk,hkd->blhd', acts['blocks.1.attn.z'], o_HKD)

    resid, heads_BLHD = map(np.asarray, direct(params, state, key))
    num = cfg.model.num_heads
    assert of_heads['z/similarity'].shape[0] == 2 * num and (np.diff(of_heads['z/contrast'][num:]) <= 0).all()
    pictures = [np.corrcoef(heads_BLHD[:, 8, h]) for h in range(num)]
    for picture in of_heads['z/similarity'][num:]:
        assert min(np.abs(picture - each).max() for each in pictures) < 1e-4
    expected = np.corrcoef(resid[:, 8])
    np.testing.assert_allclose(found['z/similarity'][1], expected, atol=1e-4)
    np.testing.assert_allclose(found['x/similarity'][1], np.corrcoef(resid[::5, 6]), atol=1e-4)
    np.testing.assert_allclose(centred['z/similarity'][1], np.corrcoef(resid[:, 8] - resid[:, 8].mean(0)), atol=1e-4)
    (x, y), ratio = np.divmod(np.arange(25), 5), ratios(5)
    same, other, lines = [], [], {}
    for i in range(25):
        for j in range(25):
            if i != j and ratio[i] >= 0 and ratio[j] >= 0:
                lines.setdefault((ratio[i], ratio[j]), []).append(expected[i, j])
            if x[i] * y[i] * x[j] * y[j] and x[i] != x[j] and y[i] != y[j]:
                (same if ratio[i] == ratio[j] else other).append(expected[i, j])
    assert found['z/contrast'][1] == pytest.approx(np.mean(same) - np.mean(other), abs=1e-4)
    table = np.array([[np.mean(lines[r, s]) for s in range(6)] for r in range(6)])
    np.testing.assert_allclose(found['z/by_direction'][1], table, atol=1e-4)


def test_contrast_of_known_pictures():
    task, ratio = tiny()[0].task, ratios(5)
    contrast = quick_jit(lambda s: similarity.ratio_contrast(s, jax.random.key(0), task))
    equal = contrast(jnp.asarray(ratio[:, None] == ratio, jnp.float32))
    assert equal['contrast'] == pytest.approx(1) and 0 < equal['shuffled'] < 0.5
    x = np.arange(25) // 5
    assert contrast(jnp.asarray(x[:, None] == x, jnp.float32))['contrast'] == pytest.approx(0)  # only x: no ratio
    assert contrast(jnp.ones((25, 25)))['contrast'] == pytest.approx(0, abs=1e-6)


def test_pictures_stay_out_where_not_wanted():
    cfg, params, state = tiny(mlp_kind=('none',))
    measure = functools.partial(similarity.similarities, cfg=cfg, pictures=False)
    shapes = jax.eval_shape(measure, params, state, jax.random.key(0))
    assert not any(name.endswith('/similarity') for name in shapes) and shapes['y/contrast'].shape == (2,)
