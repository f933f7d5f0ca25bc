import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lingrok import model, optim
from lingrok.config import ConfigError, ModelConfig, OptimConfig

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})

PARAMS = {'embed': np.array([[1.0, -2.0]], np.float32), 'blocks_0': {'q': np.array([[0.5, 3.0]], np.float32)}}
STEPS = 6


def gradients(step):
    """The same gradients for the library and for the loops below; they depend on nothing but the step."""
    return {'embed': np.array([[0.3, -0.1]]) * (step + 1), 'blocks_0': {'q': np.array([[np.cos(step), 2.0]])}}


def values(cfg: OptimConfig, **changes):
    names = ('learning_rate', 'momentum', 'weight_decay', 'adam_learning_rate', 'adam_weight_decay')
    return {name: getattr(cfg, name) for name in names} | changes


def trained(cfg: OptimConfig, num_steps: int = STEPS, **changes):
    """Parameters after each of a few steps."""
    grads = jax.tree.map(lambda *x: np.stack(x).astype(np.float32), *(gradients(step) for step in range(num_steps)))

    @quick_jit
    def run(values, params):
        optimizer = optim.make_optimizer(cfg, num_steps, values)

        def step(carry, grad):
            params, state = carry
            updates, state = optimizer.update(grad, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return jax.lax.scan(step, (params, optimizer.init(params)), grads)[1]

    return jax.tree.map(np.asarray, run(values(cfg, **changes), jax.tree.map(jnp.asarray, PARAMS)))


def at(tree, step):
    return tree['embed'][step], tree['blocks_0']['q'][step]


def test_sgd_with_momentum_and_l2_against_a_loop():
    cfg = OptimConfig(learning_rate=0.1, momentum=0.8, weight_decay=0.05, decay=('blocks.*',), warmup_steps=3,
                      warmup_from=0.5)
    found = trained(cfg)
    w, buffers = [PARAMS['embed'], PARAMS['blocks_0']['q']], [0, 0]
    for step in range(STEPS):
        rate = 0.1 * min(0.5 + 0.5 * step / 3, 1)
        grads = gradients(step)
        for i, (grad, decay) in enumerate(((grads['embed'], 0), (grads['blocks_0']['q'], 0.05))):
            buffers[i] = 0.8 * buffers[i] + grad + decay * w[i]
            w[i] = w[i] - rate * buffers[i]
        for expected, value in zip(w, at(found, step), strict=True):
            np.testing.assert_allclose(value, expected, rtol=2e-6, atol=1e-6)


def test_adamw_with_a_decay_mask_against_a_loop():
    cfg = OptimConfig(optimizer='adamw', learning_rate=0.1, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.3,
                      decay=('embed',), schedule='cosine', floor=0.2)
    found = trained(cfg)
    w, m, v = [PARAMS['embed'], PARAMS['blocks_0']['q']], [0, 0], [0, 0]
    for step in range(STEPS):
        rate = 0.1 * (0.2 + 0.8 * (1 + np.cos(np.pi * step / STEPS)) / 2)
        grads = gradients(step)
        for i, (grad, decay) in enumerate(((grads['embed'], 0.3), (grads['blocks_0']['q'], 0))):
            m[i] = 0.8 * m[i] + 0.2 * grad
            v[i] = 0.95 * v[i] + 0.05 * grad**2
            mean, root = m[i] / (1 - 0.8 ** (step + 1)), np.sqrt(v[i] / (1 - 0.95 ** (step + 1)))
            w[i] = w[i] - rate * (mean / (root + 1e-3) + decay * w[i])
        for expected, value in zip(w, at(found, step), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize('optimizer', ['sgd', 'adamw'])
def test_a_traced_setting_is_that_of_the_config(optimizer):
    """Three settings in one compiled program equal three programs with the numbers written into them."""
    cfg = OptimConfig(optimizer=optimizer, weight_decay=0.2)
    rates, momenta, decays = np.array([0.0, 0.01, 0.1]), np.array([0.5, 0.9, 0.0]), np.array([0.1, 0.0, 0.2])
    grads = jax.tree.map(lambda x: x.astype(np.float32), gradients(1))

    def two_steps(rate, momentum, decay):
        params = jax.tree.map(jnp.asarray, PARAMS)
        optimizer = optim.make_optimizer(cfg, 10, values(cfg, learning_rate=rate, momentum=momentum,
                                                         weight_decay=decay))
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    together = quick_jit(jax.vmap(two_steps))(rates, momenta, decays)
    for i, setting in enumerate(zip(rates.tolist(), momenta.tolist(), decays.tolist(), strict=True)):
        alone = quick_jit(lambda setting=setting: two_steps(*setting))()
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6)
    assert np.array_equal(together['embed'][0], PARAMS['embed'])  # rate 0
    assert not np.array_equal(together['embed'][1], together['embed'][2])


def test_muon_turns_the_matrices_of_blocks_only():
    cfg = OptimConfig(optimizer='muon', learning_rate=0.1, weight_decay=0.0, adam_weight_decay=0.0, momentum=0.0)
    rng = np.random.default_rng(0)
    params = {'embed': jnp.zeros((3, 4)), 'blocks_0': {'q': jnp.zeros((4, 4)), 'attn_norm_scale': jnp.ones(4)}}
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    optimizer = optim.make_optimizer(cfg, 10, values(cfg, adam_learning_rate=0.02))
    updates, _ = quick_jit(lambda: optimizer.update(grads, optimizer.init(params), params))()
    # Newton-Schulz steps bring all singular values of an update near to one, but not exactly to it.
    singular = np.linalg.svd(np.asarray(updates['blocks_0']['q']) / 0.1, compute_uv=False)
    assert 0.6 < singular.min() and singular.max() < 1.3
    for update, grad in ((updates['embed'], grads['embed']),
                         (updates['blocks_0']['attn_norm_scale'], grads['blocks_0']['attn_norm_scale'])):
        # The first step of Adam; the Nesterov momentum that optax gives it makes it longer by b1 / (1 + b1).
        np.testing.assert_allclose(update, -0.02 * (1 + 0.9 / 1.9) * np.sign(grad), rtol=1e-4)


MODULAR = OptimConfig(warmup_steps=10_000, warmup_from=0.01, schedule='cosine', floor=0.1)


@pytest.mark.parametrize('step, expected', [
    (0, 0.01), (5_000, 0.505), (10_000, 1), (50_000, 0.905), (100_000, 0.587), (150_000, 0.245), (199_999, 0.1),
])
def test_schedule_of_the_modular_paper(step, expected):
    # spec/modular.md, b.2, to three decimals.
    assert optim.schedule(MODULAR, 200_000, step) == pytest.approx(expected, abs=5.1e-4)


def test_schedule_of_other_kinds():
    steps = np.arange(13)
    schedule = lambda cfg: np.asarray(optim.schedule(cfg, 10, steps))  # noqa: E731
    np.testing.assert_array_equal(schedule(OptimConfig()), 1)
    np.testing.assert_allclose(schedule(OptimConfig(warmup_steps=4)), np.minimum(steps / 4, 1))
    cosine = schedule(OptimConfig(schedule='cosine', floor=0.25))
    assert cosine[0] == 1 and np.all(cosine[10:] == 0.25) and cosine[5] == pytest.approx(0.625)
    # Stable, then linear to the floor in the last 40 %.
    wsd = schedule(OptimConfig(schedule='wsd', decay_share=0.4, floor=0.2))
    np.testing.assert_allclose(wsd, [1] * 7 + [0.8, 0.6, 0.4, 0.2, 0.2, 0.2], rtol=1e-6)



def named(tree) -> dict:
    return dict(zip(optim.parameter_names(tree), jax.tree.leaves(tree), strict=True))


@pytest.fixture(name='params')
def _params():
    cfg = ModelConfig(d_model=4, d_mlp=8, vocab_size=3, max_len=2, norm='layernorm')
    return jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))


@pytest.mark.parametrize('patterns, expected', [
    ((), set()),
    (('embed',), {'embed'}),
    (('*embed',), {'embed', 'unembed'}),
    (('blocks.1.mlp_*',), {'blocks.1.mlp_in', 'blocks.1.mlp_out', 'blocks.1.mlp_norm_scale',
                           'blocks.1.mlp_norm_bias'}),
    (('blocks.?.q', 'pos'), {'blocks.0.q', 'blocks.1.q', 'pos'}),
    (('Embed', 'blocks_0.q', 'q'), set()),
])
def test_patterns_and_split_and_merge(params, patterns, expected):
    chosen = optim.match(params, patterns)
    assert {name for name, value in named(chosen).items() if value} == expected
    trainable, frozen = optim.split(params, patterns)
    assert set(named(frozen)) == expected
    assert set(named(trainable)) | expected == set(named(params)) and not set(named(trainable)) & expected
    merged = optim.merge(trainable, frozen)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    assert jax.tree.leaves(merged) == jax.tree.leaves(params)
    assert optim.merge(*optim.split(params, ('*',))).keys() == params.keys()


def test_names_follow_the_order_of_the_leaves(params):
    shapes = {'embed': (3, 4), 'unembed': (4, 3), 'pos': (2, 4), 'blocks.0.mlp_in': (4, 8), 'blocks.1.mlp_out': (8, 4)}
    for name, shape in shapes.items():
        assert named(params)[name].shape == shape
    assert 'blocks.0.attn_norm_scale' in named(params)


@pytest.mark.parametrize('options, found', [
    ({'frozen': ('embedd',)}, "optim.frozen: 'embedd' names no parameter of this model; did you mean 'embed'?"),
    ({'decay': ('*', 'blocks.2.q')}, "optim.decay: 'blocks.2.q' names no parameter of this model; did you mean"),
    ({'decay': ('type',)}, "optim.decay: 'type' names no parameter"),
    ({'freeze_schedule': ('blocks.0.kk@0-5',)}, "optim.freeze_schedule: 'blocks.0.kk' names no parameter"),
    ({'freeze_schedule': ('*@0-',)}, "optim.frozen=(), optim.freeze_schedule=('*@0-',) freezes every parameter"),
    ({'frozen': ('*',)}, "optim.frozen=('*',) freezes every parameter; leave one to train"),
    ({'frozen': ('blocks.*', '*embed', 'norm_*', 'pos')}, 'freezes every parameter'),
])
def test_patterns_without_sense_are_refused_in_one_line(params, options, found):
    with pytest.raises(ConfigError) as error:
        optim.check_patterns(params, OptimConfig(**options))
    assert found in str(error.value) and str(error.value).isprintable()


def test_patterns_with_sense_pass(params):
    optim.check_patterns(params, OptimConfig(decay=('*.q', '*norm*'), frozen=('embed', 'blocks.0.*')))
    optim.check_patterns(params, OptimConfig(decay=(), frozen=()))


@pytest.mark.parametrize('step, frozen', [(0, {'blocks.0.q', 'embed'}), (2, {'blocks.0.q', 'embed'}), (3, {'embed'}),
                                          (5, {'embed', 'pos'}), (99, {'embed', 'pos'})])
def test_gate_closes_for_the_steps_of_the_schedule(params, step, frozen):
    cfg = OptimConfig(freeze_schedule=('blocks.0.q@0-3', 'embed@0-', 'pos@5-'))
    ones = jax.tree.map(lambda x: np.ones(x.shape), params)
    gated = named(optim.gate(ones, cfg, np.int32(step)))
    assert {name for name, value in gated.items() if not value.any()} == frozen
    assert all((value == 1).all() for name, value in gated.items() if name not in frozen)


def test_frozen_parameters_have_no_optimiser_state(params):
    trainable, _ = optim.split(params, ('embed', 'blocks.0.*'))
    cfg = OptimConfig(optimizer='adamw')
    state = jax.eval_shape(lambda p: optim.make_optimizer(cfg, 10, values(cfg)).init(p), trainable)
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.ndim)  # noqa: E731
    assert size(state) == 2 * size(trainable) < 2 * size(params)
