import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import get_config

from lingrok import config, model
from lingrok.analysis import characters, scan
from lingrok.analysis.heads import head_outputs
from lingrok.config import ConfigError

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})


def tiny(**changes):
    """A config with p = 5 and rows of 4 examples, and the parameters and task state of one replica."""
    c = get_config('modular.py:smoke')
    c.vary.seed.all, c.vary.task.num_tasks = (), ()
    c.task.p, c.task.num_tasks, c.train.batch_size = 5, 9, 9
    c.model.d_model, c.model.d_mlp, c.model.num_heads = 8, 12, 2
    for name, value in changes.items():
        c.model[name] = value
    cfg = config.from_config_dict(c)
    return cfg, model.init(jax.random.key(0), cfg.model), cfg.task.init(jax.random.key(1))


@pytest.mark.parametrize('p', (5, 7, 29))
def test_discrete_logarithms(p):
    assert 27 in characters.primitive_roots(29)
    for root in (None, *characters.primitive_roots(p)):
        log = characters.log_table(p, root)
        base = root or (27 if p == 29 else min(characters.primitive_roots(p)))
        assert log[0] == 0 and log[1] == p - 1
        assert [pow(base, int(log[r]), p) for r in range(1, p)] == list(range(1, p))
        np.testing.assert_array_equal(np.sort(log), np.arange(p))


def test_table_of_the_paper():
    assert characters.log_table(29)[[2, 3, 4, 14, 28]].tolist() == [15, 19, 2, 27, 14]


@pytest.mark.parametrize(('p', 'root', 'says'), ((3, None, 'p=3; allowed: primes from 5'), (7, 2, '3, 5')))
def test_bad_roots(p, root, says):
    with pytest.raises(ConfigError, match=says):
        characters.log_table(p, root)


def test_basis_is_unitary_and_multiplicative():
    basis = characters.character_basis(11)
    np.testing.assert_allclose(basis @ basis.conj().T, np.eye(11), atol=1e-5)
    r, s = np.meshgrid(np.arange(1, 11), np.arange(1, 11))
    for row in basis[1:] * np.sqrt(10):
        np.testing.assert_allclose(row[r * s % 11], row[r] * row[s], atol=1e-4)


def test_power_of_known_functions():
    p, log = 11, characters.log_table(11)
    for k in range(1, 6):
        wave = np.cos(2 * np.pi * k * log / 10 + 0.4) * (np.arange(p) > 0)
        found = characters.shares(characters.power(jnp.asarray(wave)))
        np.testing.assert_allclose(found, np.eye(5)[k - 1], atol=1e-5)
    # The last frequency is the quadratic character: squares against the others.
    squares = np.isin(np.arange(p), np.arange(1, p) ** 2 % p) - 0.5
    assert characters.power(jnp.asarray(squares * (np.arange(p) > 0)))[-1] == pytest.approx(10 / 4, rel=1e-4)
    # Whatever the root: a set of powers, in another order.
    values = np.random.default_rng(0).normal(size=(p, 3))
    totals = [np.sort(characters.power(jnp.asarray(values), root)[:, 0]) for root in characters.primitive_roots(p)]
    np.testing.assert_allclose(totals[0], totals[1], rtol=1e-3)
    rest = np.var(values[1:], 0) * 10
    np.testing.assert_allclose(np.sum(characters.power(jnp.asarray(values)), 0), rest, rtol=1e-4)


def test_joint_power_tells_ratio_from_product():
    log = characters.log_table(7)
    full = np.arange(7) > 0
    for sign in (1, -1):
        values = np.cos(2 * np.pi * (log[:, None] + sign * log[None]) / 6) * np.outer(full, full)
        found = np.asarray(characters.joint_power(jnp.asarray(values)))
        expected = {(2, 2), (6, 6)} if sign > 0 else {(2, 6), (6, 2)}  # row 1 + k is frequency k
        assert set(zip(*np.nonzero(found > 0.1), strict=True)) == expected


def test_random_functions_have_the_analytic_shares():
    drawn = jax.random.normal(jax.random.key(0), (11, 4000))
    mean = np.mean(characters.shares(characters.power(drawn)), 1)
    np.testing.assert_allclose(mean, characters.random_shares(11), atol=0.01)
    assert characters.random_shares(11).sum() == pytest.approx(1)


def test_spectra_against_a_direct_computation():
    cfg, params, state = tiny()
    log = characters.log_table(5)
    wave = np.cos(2 * np.pi * log / 4) * (np.arange(5) > 0)
    params = {**params, 'embed': params['embed'] * 0 + wave[:, None] * np.arange(1, 9)}
    found = quick_jit(lambda *a: characters.spectra(*a, cfg))(params, state, jax.random.key(2))
    assert found['embedding/concentration'] == pytest.approx(1, abs=1e-5)

    @quick_jit
    def direct(params, state, key):
        tokens = scan.scanned_rows(cfg.task, state, key, slot=2)
        _, acts = model.apply(params, tokens, cfg=cfg.model, capture=('blocks.1.attn.z', 'blocks.0.mlp.post'))
        return head_outputs(params, acts, cfg.model, 1), acts['blocks.0.mlp.post']

    heads, post = map(np.asarray, direct(params, state, jax.random.key(2)))
    heads = heads[:, 7].reshape(5, 5, 2, 8).mean(0)  # of y, at y
    post = post[:, 7].reshape(5, 5, 12).mean(1)  # of x, at y
    basis = np.stack([np.cos(np.pi * log / 2) * (log > 0), np.sin(np.pi * log / 2), np.cos(np.pi * log) * (log > 0)])
    basis /= np.linalg.norm(basis, axis=1, keepdims=True)
    squares = (np.einsum('kr,rhd->khd', basis, heads) ** 2).sum(-1)
    expected = np.stack([squares[0] + squares[1], squares[2]]) / squares.sum(0)
    np.testing.assert_allclose(found['heads/power'][:, 2, 1], expected, atol=1e-4)
    np.testing.assert_allclose(found['heads/concentration'][2, 1], expected.max(0), atol=1e-4)
    squares = (basis @ post) ** 2
    folded = np.stack([squares[0] + squares[1], squares[2]])
    np.testing.assert_allclose(found['neurons/power'][:, 1, 0], folded.sum(1) / folded.sum(), atol=1e-4)
    assert found['neurons/concentration'][1, 0] == pytest.approx(folded.max(0).sum() / folded.sum(), abs=1e-4)


def test_models_without_neurons_have_the_rest():
    cfg, params, state = tiny(mlp_kind=('none', 'linear'))
    found = jax.eval_shape(functools.partial(characters.spectra, cfg=cfg), params, state, jax.random.key(0))
    assert 'heads/power' in found and not any('neurons' in name for name in found)


def test_scanned_rows():
    cfg, _, state = tiny()
    draw = quick_jit(lambda: [scan.scanned_rows(cfg.task, state, jax.random.key(0), slot=2, vector=v)
                              for v in ((2, 3), None)] + [scan.unseen_task(state)])
    *both, (a, b) = map(np.asarray, draw())
    for rows, (c, d) in zip(both, ((2, 3), (a, b)), strict=True):
        rows = rows.reshape(25, 3, 3)
        np.testing.assert_array_equal(rows[..., 2], (c * rows[..., 0] + d * rows[..., 1]) % 5)
        assert (rows[:, :2] == rows[:1, :2]).all() and (rows[:, 2, 0] * 5 + rows[:, 2, 1] == np.arange(25)).all()
    listed = np.asarray(state.tasks_T2).tolist()
    assert listed.index([a, b]) >= 9 + (25 - 9) // 4 and a * b > 0
    for bad in ({'slot': 3}, {'slot': 1, 'vector': (5, 0)}):
        with pytest.raises(ConfigError, match='allowed'):
            scan.scanned_rows(cfg.task, state, jax.random.key(0), **bad)
