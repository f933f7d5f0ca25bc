import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_characters import quick_jit, tiny

from lingrok import model
from lingrok.analysis import characters, neurons, scan
from lingrok.config import ConfigError

P = 7
X, Y = np.divmod(np.arange(P * P), P)
LOG = characters.log_table(P)
ANSWER = (2 * X + 3 * Y) % P


RATIO = np.array([b * pow(a, -1, P) % P if a else 0 for a, b in zip(X.tolist(), Y.tolist(), strict=True)])
FULL = X * Y > 0


def wave(k, m):
    return np.cos(np.pi / 3 * (k * LOG[X] + m * LOG[Y]) + 0.3) * (X * Y > 0)


@quick_jit
def measured(maps_BF):
    """Scores, shares of all but the last four neurons, preferred ratios of these."""
    found = neurons.scores(maps_BF, jnp.asarray(ANSWER), types.SimpleNamespace(p=P))
    return found, neurons.kind_shares(found[:, :-4]), neurons.preferred_ratios(maps_BF[:, -4:], found[:, -4:], P)


def test_neurons_of_every_kind():
    rng = np.random.default_rng(0)
    tables = rng.normal(size=(6, P + 2))
    maps = [tables[0][(X > 0) + 2 * (Y > 0)], tables[1][X], tables[2][Y], tables[3][RATIO], tables[4][X * Y % P],
            tables[5][ANSWER], wave(1, 1), wave(2, -2), wave(1, 2), rng.normal(size=P * P), np.full(P * P, 3.0),
            1.0 * (X + Y == 0), 1.0 * (X == 0)]
    lines = [1.0 * FULL * (RATIO == r) for r in (3, 5, 5)] + [1.0 * (X == 2)]
    found, shares, preferred = map(np.asarray, measured(jnp.asarray(maps + lines).T))
    assert np.diag(found[:6]) == pytest.approx(1, abs=1e-4)
    assert (found[1:6, 1:6] - np.eye(5) < 0.7).all()
    assert found[6, 6:9] == pytest.approx(1, abs=1e-4)
    assert found[4, 6] == pytest.approx(1, abs=1e-4) and found[3, 7] == pytest.approx(1, abs=1e-4)
    assert (found[:6, 8] < 0.4).all() and (found[:, 9] < 0.4).all() and np.isnan(found[:, 10]).all()
    names = dict(zip(neurons.SHARES, shares * len(maps), strict=True))
    # Neurons of (0, 0) and of x = 0 know zeros and no ratio; a wave in log x + log y is one of the product.
    assert names == pytest.approx({'zero': 3, 'x': 1, 'y': 1, 'answer': 1, 'other': 1, 'silent': 1,
                                   **{name: names[name] for name in ('ratio', 'product', 'character')}})
    assert names['ratio'] + names['product'] + names['character'] == pytest.approx(5)
    assert preferred.tolist() == [0, 0, 0.25, 0, 0.5, 0]


def test_explained_variance_is_adjusted():
    maps = np.random.default_rng(1).normal(size=(P * P, 400))
    found = np.asarray(quick_jit(neurons.explained, static_argnums=2)(jnp.asarray(maps), jnp.asarray(X), P + 2))
    assert abs(found.mean()) < 0.02
    means = maps.reshape(P, P, -1).mean(1)
    plain = P * ((means - maps.mean(0)) ** 2).sum(0) / (P * P * maps.var(0))
    np.testing.assert_allclose(found, 1 - (1 - plain) * (P * P - 1) / (P * P - P), atol=1e-4)


def test_maps_are_activations_at_their_token():
    cfg, params, state = tiny(mlp_kind=('none', 'gated'))
    key = jax.random.key(4)
    found = quick_jit(functools.partial(neurons.neuron_kinds, cfg=cfg, slot=1))(params, state, key)

    @quick_jit
    def direct(params, state, key):
        tokens = scan.scanned_rows(cfg.task, state, key, slot=1)
        return model.apply(params, tokens, cfg=cfg.model, capture=('blocks.1.mlp.post',))[1]['blocks.1.mlp.post']

    post = np.asarray(direct(params, state, key))
    for token, place in (('y', 4), ('z', 5)):
        maps = post[:, place].reshape(5, 5, 12)
        inner = maps[1:, 1:]
        variance = inner.reshape(16, 12).var(0)
        share = np.where(variance > 0, inner.mean(1).var(0) / np.where(variance > 0, variance, 1), -1)
        best = int(np.argmax(share))
        np.testing.assert_allclose(found[f'{token}/top'][0, 1], maps[..., best], atol=1e-5)
        assert found[f'{token}/top_score'][0, 1] == pytest.approx(1 - (1 - share[best]) * 15 / 12, abs=1e-4)
        np.testing.assert_allclose(np.sum(found[f'{token}/shares'], -1), 1, rtol=1e-5)


def test_model_without_neurons():
    cfg, params, state = tiny(mlp_kind=('none', 'linear'))
    with pytest.raises(ConfigError, match='no MLP neurons'):
        jax.eval_shape(functools.partial(neurons.neuron_kinds, cfg=cfg), params, state, jax.random.key(0))
