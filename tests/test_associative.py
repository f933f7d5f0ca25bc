"""The linear associative memory with noise: its two kinds of direction, thresholds, and what truncation removes."""

import functools

import jax
import numpy as np
import pytest

from lingrok.analysis import associative, lowrank
from lingrok.config import ConfigError, ModelConfig

STEPS = (1, 10, 100, 1000, 20_000)


@functools.cache
def exact(n, steps=STEPS):
    """Trajectories of orthonormal embeddings in double precision: noise probability -> name -> (T, ...)."""
    with jax.enable_x64(True):
        run = jax.jit(lambda alphas: jax.lax.map(
            lambda alpha: associative.trajectory(associative.orthonormal(n), alpha, steps=steps), alphas))
        alphas = np.array([0.1, 0.3, 0.45, 0.6])
        found = jax.device_get(run(alphas))
    return {alpha: {name: x[i] for name, x in found.items()} for i, alpha in enumerate(alphas.tolist())}


@pytest.mark.parametrize('n', (2, 3, 5))
def test_singular_values_are_those_of_the_two_kinds_of_direction(n):
    for found in exact(n).values():
        predicted = np.sort(np.concatenate([np.repeat(found['sigma_contrast'][:, None], n - 1, 1),
                                            found['sigma_common'][:, None]], 1), 1)[:, ::-1]
        np.testing.assert_allclose(found['singular'], predicted, atol=1e-6)
        np.testing.assert_allclose(found['a'] + (n - 1) * found['b'] + found['c'], 0, atol=1e-9)


@pytest.mark.parametrize('n', (2, 3, 5, 8))
def test_threshold_of_the_first_step(n):
    """Just below 1 / sqrt(n + 1) the common direction is the smaller one, just above it is the larger one."""
    with jax.enable_x64(True):
        memory, limit = associative.orthonormal(n), associative.threshold(n)

        def ratio(alpha):
            c_OJ = associative.flow(memory, alpha, steps=(1,), step_size=1.0)[0]
            parts = associative.structure(associative.table(memory, c_OJ))
            return float(parts['sigma_common'] / parts['sigma_contrast'])

        assert ratio(limit) == pytest.approx(1, abs=1e-6)
        assert ratio(limit - 1e-4) < 1 < ratio(limit + 1e-4)


def test_noise_overtakes_with_many_inputs_only():
    common = {n: exact(n)[0.3]['sigma_common'] > exact(n)[0.3]['sigma_contrast'] for n in (2, 3, 5)}
    assert not common[2].any() and not common[3].any()
    assert list(common[5]) == [False, False, True, True, True] or list(common[5]) == [False, False, False, True, True]
    found = exact(5)[0.3]
    assert associative.crossing(STEPS, found['sigma_common'], found['sigma_contrast']) in (100, 1000)
    assert np.isnan(associative.crossing(STEPS, exact(2)[0.3]['sigma_common'], exact(2)[0.3]['sigma_contrast']))


def test_removing_the_right_direction_removes_the_noise_and_keeps_the_mapping():
    for n in (2, 3, 5):
        for alpha, found in exact(n).items():
            for t in range(len(STEPS)):
                if found['sigma_common'][t] < (1 - 1e-6) * found['sigma_contrast'][t]:
                    right = 'bottom'
                elif found['sigma_common'][t] > (1 + 1e-6) * found['sigma_contrast'][t]:
                    right = 'top'
                else:
                    continue
                lead = (found['a'] - found['b'])[t] * (1 - 1 / n)
                assert found[f'{right}/margin'][t] == pytest.approx(lead, rel=1e-5), (n, alpha, t)
                if found['c'][t] > 0:
                    assert found[f'{right}/p_correct'][t] > found['full/p_correct'][t], (n, alpha, t)


def test_checks_of_the_prototype():
    late = len(STEPS) - 1
    found = exact(2)[0.3]
    assert found['bottom/p_correct'][late] == pytest.approx(0.978, abs=0.002)
    assert found['full/p_correct'][late] == pytest.approx(0.7, abs=0.001)
    assert exact(2)[0.6]['bottom/p_correct'][late] == pytest.approx(0.971, abs=0.002)
    assert exact(2)[0.6]['bottom/margin'][0] < 0 < exact(2)[0.6]['bottom/margin'][late]
    assert exact(3)[0.3]['bottom/p_correct'][late] == pytest.approx(0.994, abs=0.001)
    found = exact(5)[0.3]
    assert found['bottom/p_correct'][2] == pytest.approx(0.753, abs=0.002)
    assert found['full/p_noise'][2] == pytest.approx(0.221, abs=0.002)
    assert found['bottom/margin'][late] < 0 < found['top/margin'][late]
    assert (exact(5)[0.45]['bottom/margin'] < 0).all()


def test_gaussian_embeddings_approach_orthonormal_ones():
    """Mean distance of 8 draws from the orthonormal probabilities falls as 1 / sqrt(width): here 16-fold."""
    def error(width):
        run = jax.jit(lambda keys: jax.lax.map(
            lambda k: associative.trajectory(associative.gaussian(2, width, k), 0.3, steps=(100,)), keys))
        found = run(jax.random.split(jax.random.key(0), 8))
        return np.mean([np.abs(found[f'{kind}/p_noise'][:, 0] - exact(2)[0.3][f'{kind}/p_noise'][2])
                        for kind in associative.KINDS])

    assert error(2048) < error(8) / 4


def test_rotation_keeps_table_and_truncations():
    memory = associative.gaussian(3, 6, jax.random.key(1))
    small = associative.rotated(memory)
    c_OJ = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    for kind in associative.KINDS:
        full, fast = (associative.read(m, associative.removed(associative.matrix(m, c_OJ), kind, 3))
                      for m in (memory, small))
        assert jax.tree.all(jax.tree.map(lambda x, y: np.allclose(x, y, atol=1e-4), full, fast)), kind


@pytest.mark.parametrize('kind, keep', [('bottom', 'top'), ('top', 'bottom')])
def test_removal_is_the_truncation_of_networks(kind, keep):
    """With rank n of n + 1 directions: lowrank.truncate of the same matrix keeps the same part."""
    w = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    cfg = ModelConfig(num_layers=1, d_model=4, mlp_kind=('linear',), vocab_size=3, max_len=2)
    expected = lowrank.truncate({'blocks_0': {'mlp_linear': w}}, cfg, 'mlp_linear', 0, 0.75, keep=keep)
    np.testing.assert_allclose(associative.removed(w, kind, 4), expected['blocks_0']['mlp_linear'], atol=1e-5)
    np.testing.assert_array_equal(associative.removed(w, 'full', 4), w)


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match='increasing'):
        associative.flow(associative.orthonormal(2), 0.3, steps=(10, 1))
    with pytest.raises(ConfigError, match="kind='middle'"):
        associative.removed(np.eye(2), 'middle', 2)
