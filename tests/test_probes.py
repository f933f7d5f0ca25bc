import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_characters import quick_jit, tiny

from lingrok import model
from lingrok.analysis import characters, probes

P = 5
ridge = quick_jit(functools.partial(probes.ridge_probe, p=P))


def rows(num_rows=500, seed=0):
    rng = np.random.default_rng(seed)
    return rng, jnp.asarray(rng.integers(0, P, (num_rows, 2))), jnp.asarray(np.arange(num_rows) % 5)


def test_a_probe_finds_what_is_linear_and_nothing_else():
    rng, labels, fold = rows()
    mixed = np.eye(P)[np.asarray(labels[:, 0])] @ rng.normal(size=(P, 6)) + 0.1 * rng.normal(size=(500, 6)) + 4
    found = ridge(jnp.asarray(mixed), labels, jnp.ones(500), fold)
    assert found['accuracy'][0] > 0.95 and (found['r2'][0] > 0.8).all()
    assert abs(found['accuracy'][1] - 1 / P) < 0.07 and (found['r2'][1] < 0.02).all()  # a label that features lack


def test_one_character_is_read_in_its_frequency():
    rng, labels, fold = rows()
    log = characters.log_table(P)
    wave = np.cos(2 * np.pi * log / 4) * (np.arange(P) > 0), np.sin(2 * np.pi * log / 4)
    features = np.stack(wave, -1)[np.asarray(labels[:, 0])] + 0.01 * rng.normal(size=(500, 2))
    found = ridge(jnp.asarray(np.pad(features, ((0, 0), (0, 4)))), labels, jnp.ones(500), fold)
    assert found['r2'][0, 0] > 0.95 and found['r2'][0, 1] < 0.5


def test_prediction_is_ridge_regression_on_other_rows():
    """Against numpy, row by row of a fold; rows that are not valid change nothing."""
    rng, labels, fold = rows(100, 1)
    features = rng.normal(size=(100, 6)) + np.asarray(labels[:, :1])
    valid = np.asarray(rng.random(100) < 0.8)
    x, one_hot = np.asarray(features), np.eye(P)[np.asarray(labels[:, 0])]
    predictions = np.zeros((100, P))
    for f in range(5):
        fit, choose, test = (valid & np.isin(fold, folds) for folds in ([(f + i) % 5 for i in (2, 3, 4)],
                                                                        [(f + 1) % 5], [f]))
        mean, level = x[fit].mean(0), one_hot[fit].mean(0)
        gram = (x[fit] - mean).T @ (x[fit] - mean) / fit.sum()
        cross = (x[fit] - mean).T @ (one_hot[fit] - level) / fit.sum()
        best = np.inf
        for penalty in probes.PENALTIES:
            weights = np.linalg.solve(gram + penalty * np.trace(gram) / 6 * np.eye(6), cross)
            predicted = (x - mean) @ weights + level
            error = ((predicted - one_hot)[choose] ** 2).sum()
            if error < best:
                best, predictions[test] = error, predicted[test]
    spoiled = np.where(valid[:, None], features, 1e3)
    found = ridge(jnp.asarray(spoiled), labels, jnp.asarray(valid), fold)
    hits = predictions.argmax(-1) == np.asarray(labels[:, 0])
    assert found['accuracy'][0] == pytest.approx(hits[valid].mean(), abs=1e-6)
    quadratic = (-1.0) ** characters.log_table(P) * (np.arange(P) > 0)
    true, guess = one_hot[valid] @ quadratic, predictions[valid] @ quadratic
    assert found['r2'][0, 1] == pytest.approx(1 - np.sum((true - guess) ** 2) / np.sum((true - true.mean()) ** 2),
                                              abs=1e-4)


def test_coefficients_solve_the_equations():
    inputs = jax.random.randint(jax.random.key(0), (200, 3, 2), 0, 7)
    found, valid = map(np.asarray, quick_jit(functools.partial(probes.coefficients, p=7))(inputs))
    e1, e2, e3 = np.asarray(inputs).transpose(1, 0, 2)
    combined = (found[:, :1] * e1 + found[:, 1:] * e2) % 7
    assert (combined == e3)[valid].all()
    np.testing.assert_array_equal(valid, (e1[:, 0] * e2[:, 1] - e1[:, 1] * e2[:, 0]) % 7 != 0)
    assert 0.5 < valid.mean() < 1


def test_residuals_are_those_of_the_model():
    cfg, params, _ = tiny()
    tokens = jnp.arange(48).reshape(6, 8) % 5

    @quick_jit
    def both(params, tokens):
        _, acts = model.apply(params, tokens, cfg=cfg.model, capture=('embed', 'blocks.*.resid_post'))
        return probes.residuals(params, tokens, (6, 7), cfg), acts

    found, acts = both(params, tokens)
    for n, name in enumerate(('embed', 'blocks.0.resid_post', 'blocks.1.resid_post')):
        np.testing.assert_allclose(found[n, 1], acts[name][:, 7], atol=1e-5)
        np.testing.assert_allclose(found[n, 0], acts[name][:, 6], atol=1e-5)


def test_probes_of_an_untrained_model():
    cfg, params, state = tiny(mlp_kind=('none', 'mlp'))
    found = quick_jit(functools.partial(probes.probes, cfg=cfg, num_rows=512))(params, state, jax.random.key(0))
    assert found['c/accuracy'].shape == found['c2/accuracy'].shape == (3, 2) and found['c1/r2'].shape == (3, 2, 2)
    assert found['a/accuracy'].shape == (3, 4) == (3, len(probes.probed_shots(cfg.task)))
    # At the x token before any block the other x is unknown, and no zero gives c away.
    assert abs(found['c/accuracy'][0, 0] - 1 / (P - 1)) < 0.12
    # Nobody can know the task before the first example, nor two coefficients at the x token.
    for name in ('a', 'b'):
        assert np.abs(found[f'{name}/accuracy'][:, 0] - 1 / P).max() < 0.1
    for name in ('c1', 'c2'):
        assert np.abs(found[f'{name}/accuracy'][:, 0] - 1 / P).max() < 0.1


def test_control_is_a_latin_square():
    table = np.asarray(quick_jit(functools.partial(probes.control_classes, p=7))(jax.random.key(1)))
    assert (table[0] == 0).all() and (table[:, 0] == 0).all()
    for inner in (table[1:, 1:], table[1:, 1:].T):
        np.testing.assert_array_equal(np.sort(inner, 1), np.tile(np.arange(1, 7), (6, 1)))
