"""The one-layer model of the recall theory, against enumeration, autodiff and the derived formulas."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import get_config

from lingrok import config, model
from lingrok.analysis import one_layer
from lingrok.analysis.one_layer import Law, Sequences

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
LAW = Law(20, 64, 0.5)


@functools.cache
def batch(law=LAW, size=256, seed=0) -> Sequences:
    return jax.device_get(quick_jit(lambda k: one_layer.sample(law, k, size))(jax.random.key(seed)))


def enumerated(law: Law) -> np.ndarray:
    """Expected mean of every coordinate (N - 1, C), from the probability of each of the N + 1 to the T sequences."""
    N, T, alpha = law
    total = np.zeros((N - 1, 2 * (N + 1)))
    for target in range(1, N):
        mass = 0
        for tokens in itertools.product(range(N + 1), repeat=T - 1):
            p = 1 / N if tokens[0] < N else 0
            for before, token in itertools.pairwise(tokens):
                after_trigger = {target: 1 - alpha, N: alpha}.get(token, 0)
                p *= after_trigger if before == 0 else (token < N) / N
            full = (*tokens, 0)
            mass += p
            np.add.at(total[target - 1], list(full), p / T)
            np.add.at(total[target - 1], [N + 1 + t for t in full[:-1]], p / T)
        assert mass == pytest.approx(1)
    return total


@pytest.mark.parametrize('law', [Law(3, 5, 0.3), Law(4, 4, 0.7), Law(3, 2, 0.5)])
def test_frequencies_are_those_of_all_sequences(law):
    np.testing.assert_allclose(quick_jit(lambda: one_layer.frequencies(law))(), enumerated(law), atol=2e-6)


def test_sequences_follow_the_law():
    """Targets, what follows triggers, the text, the forced end and the label."""
    law = Law(5, 40, 0.3)
    tokens, label, target = batch(law, 4000)
    assert (tokens[:, -1] == 0).all() and set(np.unique(target)) == {1, 2, 3, 4}
    follows = np.append(tokens, label[:, None], 1)[:, 1:]
    after = (tokens == 0) & (np.arange(40) != 38)  # position 38 precedes the forced trigger
    drawn = follows[after]
    assert ((drawn == 5) | (drawn == np.broadcast_to(target[:, None], after.shape)[after])).all()
    assert np.mean(drawn == 5) == pytest.approx(0.3, abs=4 * (0.21 / len(drawn)) ** 0.5)
    text = follows[(tokens != 0) & (np.arange(40) < 38)]
    np.testing.assert_allclose(np.bincount(text, minlength=6)[:5] / len(text), 0.2, atol=4 * (0.16 / len(text)) ** 0.5)
    assert text.max() == 4
    assert np.mean(label == 5) == pytest.approx(0.3, abs=4 * (0.21 / 4000) ** 0.5)


def random_params(law: Law, scale=0.7):
    rng = np.random.default_rng(0)
    return {name: scale * rng.normal(size=x.shape).astype(np.float32) for name, x in one_layer.zeros(law).items()}


def test_model_is_its_definition():
    """Sums over positions in numpy, coordinate by coordinate."""
    law = Law(4, 6, 0.4)
    params, (tokens, _, _) = random_params(law), batch(law, 7)
    x = np.zeros((7, 6, 10))
    for b, t in np.ndindex(7, 6):
        x[b, t, tokens[b, t]] = 1
        if t:
            x[b, t, 5 + tokens[b, t - 1]] = 1
    scores = np.einsum('bc,cd,bmd->bm', x[:, -1], params['key_query'], x)
    pattern = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    attn, ff, found = quick_jit(one_layer.apply)(params, tokens)
    np.testing.assert_allclose(found, pattern, rtol=1e-4)
    np.testing.assert_allclose(attn, np.einsum('bm,bmc,vc->bv', pattern, x, params['value']), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ff, x[:, -1] @ params['ff'].T, rtol=1e-4, atol=1e-5)


def test_key_query_gradient_is_the_formula_whatever_the_matrices_and_zero_at_the_start():
    law = Law(4, 6, 0.4)
    grad = quick_jit(jax.grad(one_layer.loss))
    params = random_params(law)
    expected = quick_jit(one_layer.key_query_formula)(params, batch(law, 7))
    np.testing.assert_allclose(-grad(params, batch(law, 7))['key_query'], expected, rtol=1e-3, atol=1e-6)
    assert np.abs(expected).max() > 1e-3
    start = grad(one_layer.zeros(law), batch(law, 7))
    assert not np.any(start['key_query']) and np.any(start['value']) and np.any(start['ff'])


@functools.cache
def moments(law=LAW):
    """First steps of 256 sequences, 128 repetitions: name -> number."""
    fn = quick_jit(lambda k: one_layer.first_step_moments(law, k, sizes=(64, 256), total=2**15))
    return {name: np.asarray(x) for name, x in fn(jax.random.key(1)).items()}


def test_first_step_has_the_exact_means():
    """Within 4 standard errors of the exact finite-T expectation (acceptance test of the theory)."""
    found = moments()
    exact = one_layer.entries(one_layer.expected_first_step(LAW), batch().tokens_BM)
    for name in ('ff_noise', 'value_other', 'value_noise', 'value_trigger', 'value_copy', 'copy'):
        error = found[f'sd/{name}'][0] / (2**15 / 64) ** 0.5
        assert abs(found[f'mean/{name}'][0] - exact[name]) < 4 * error, name
        assert abs(found[f'mean/{name}'][0]) > 4 * error or name == 'value_copy', name
    assert found['mean/key_query'][0] == 0


def test_derived_formulas_hold_to_their_order():
    """Means within 5 %, standard deviations within 20 % (128 estimates have 6 %, the formulas drop terms of 1/N)."""
    found, predicted = moments(), one_layer.predicted_first_step(LAW, 256)
    for name in ('ff_noise', 'value_other', 'value_noise', 'value_trigger'):
        assert found[f'mean/{name}'][1] == pytest.approx(predicted[f'mean/{name}'], rel=0.05), name
    for name in ('ff_noise', 'value_other', 'value_noise'):
        assert found[f'sd/{name}'][1] == pytest.approx(predicted[f'sd/{name}'], rel=0.2), name
        assert found[f'sd/{name}'][0] == pytest.approx(2 * found[f'sd/{name}'][1], rel=0.25), name
    assert found['mean/margin_attn'][1] == pytest.approx(predicted['mean/margin_attn'], rel=0.12)
    assert found['mean/margin_ff'][1] == pytest.approx(predicted['mean/margin_ff'], rel=0.1)


def test_exact_expectation_at_large_size():
    """Every entry of the mean of 2^15 steps' worth of sequences, against the expectation, at 5 standard errors."""
    law = Law(5, 8, 0.3)
    fn = quick_jit(lambda k: jax.lax.map(lambda k: one_layer.first_step(law, k, 512), jax.random.split(k, 64)))
    found, expected = fn(jax.random.key(0)), one_layer.expected_first_step(law)
    for name in ('value', 'ff'):
        mean, sd = np.mean(found[name], 0), np.std(found[name], 0, ddof=1)
        assert (np.abs(mean - expected[name]) < 5 * sd / 8 + 1e-6).all(), name


def test_random_embeddings_read_the_same_gradient_through_their_overlaps():
    """U (W_U' G W_E) E' is the Gram matrix of U, times the coordinate gradient G, times that of E."""
    law, key = Law(4, 6, 0.4), jax.random.key(3)
    embeddings = one_layer.random_embeddings(law, jax.random.key(0), 9)
    coordinates, found = quick_jit(lambda k: (one_layer.first_step(law, k, 32),
                                              one_layer.first_step(law, k, 32, embeddings)))(key)
    E, U = map(np.asarray, embeddings)
    for name in ('value', 'ff'):
        np.testing.assert_allclose(found[name], U @ U.T @ coordinates[name] @ E @ E.T, rtol=1e-3, atol=1e-5)
    assert found['key_query'].shape == (10, 10) and not np.any(found['key_query'])


@functools.cache
def trained(name: str, num_steps: int):
    optimizer = {'sgd': optax.sgd(1.0), 'adam': optax.adam(0.03, b1=0.9, b2=0.99)}[name]
    run = jax.jit(lambda k: one_layer.train(LAW, k, optimizer, num_steps=num_steps, batch_size=512))
    return jax.device_get(run(jax.random.key(0)))


def test_ten_sgd_steps_put_the_noise_into_the_feed_forward_and_leave_attention_uniform():
    found = trained('sgd', 10)
    assert found['margin/ff'][10] > 2
    assert found['attention_target'][10] < 0.03
    assert found['p_noise/no_ff'][10] < 0.1 < 0.4 < found['p_noise'][10]
    assert found['loss/model'][0] == pytest.approx(np.log(21), rel=1e-5)
    assert found['loss/bayes'][0] < found['loss/distribution_only'][0] < found['loss/model'][5]


@pytest.mark.slow
def test_adam_finds_the_targets():
    found = trained('adam', 400)
    assert found['attention_target'][400] > 0.7
    assert 0.45 < found['p_noise'][400] < 0.55
    assert found['loss/model'][400] < found['loss/bayes'][0] + 0.05


def test_solution_by_hand_is_right_where_the_target_has_been_shown():
    """In the limit of large strength: the target and the noise with their probabilities, attention on targets.

    But for sequences that end in two triggers: the second one has followed a trigger, too.
    """
    law = Law(20, 64, 0.3)
    rows = jax.tree.map(lambda x: x[batch(law).tokens_BM[:, -2] != 0], batch(law))
    found = quick_jit(lambda b: one_layer.evaluate(one_layer.reference_params(law, 12.0, 20.0), b))(rows)
    assert found['p_target'] == pytest.approx(0.7, abs=0.01)
    assert found['attention_target'] == pytest.approx(float(one_layer.is_visible(rows).mean()), abs=0.02)
    assert found['attention_noise'] < 0.02


def test_exact_predictors_by_hand():
    tokens = np.array([[0, 2, 1, 0], [0, 3, 1, 0], [1, 1, 1, 0]])  # shown, hidden by noise (3), no earlier trigger
    found = one_layer.reference_losses(Law(3, 4, 0.4), Sequences(tokens, np.array([2, 3, 1]), np.array([2, 2, 1])))
    assert found['loss/bayes'] == pytest.approx(-np.mean(np.log([0.6, 0.4, 0.6 / 2])))
    assert found['loss/distribution_only'] == pytest.approx(-np.mean(np.log([0.3, 0.4, 0.3])))


def test_second_step_avoids_noise_and_what_followed_the_trigger_until_the_feed_forward_is_trained():
    fn = quick_jit(lambda k: [one_layer.key_query_row(LAW, k, size=8000, trained_ff=trained, block=2000)
                              for trained in (False, True)])
    before, after = fn(jax.random.key(0))
    assert before['trigger'] > 1e-4 and max(before['noise'], before['after_trigger'], before['after_noise']) < -8e-5
    assert after['after_trigger'] > abs(after['noise'])
    assert abs(after['trigger']) < before['trigger'] / 5
    assert before['formula_error'] < 1e-3 and after['formula_error'] < 1e-3


def test_bad_arguments_are_refused():
    with pytest.raises(config.ConfigError, match='num_tokens=2'):
        one_layer.sample(Law(2, 4, 0.5), jax.random.key(0), 3)
    with pytest.raises(config.ConfigError, match='multiples of the smallest'):
        one_layer.first_step_moments(LAW, jax.random.key(0), sizes=(64, 100), total=6400)


def test_replicas_of_several_devices_are_those_of_one_loop():
    keys = jax.random.split(jax.random.key(0), 6)
    found = one_layer.per_key(lambda k: {'x': jax.random.normal(k, (2,))}, keys)
    np.testing.assert_array_equal(found['x'], [jax.random.normal(k, (2,)) for k in keys])


@functools.cache
def network():
    """Config, parameters and state of the smoke network with a feed-forward in both layers."""
    cfg = config.from_config_dict(get_config('recall.py:smoke'))
    params = jax.device_get(quick_jit(lambda: model.init(jax.random.key(0), cfg.model))())
    return cfg, params, jax.device_get(quick_jit(lambda: cfg.task.init(jax.random.key(1)))())


def test_projections_on_a_network_are_the_change_after_a_small_step():
    """Of the model's logits in context, with one part moved alone; one minibatch, by finite differences."""
    cfg, params, state = network()
    size, rate, key, V = 64, 1e-2, jax.random.key(5), cfg.model.vocab_size
    found = quick_jit(lambda p, s, k: one_layer.network_first_step(p, s, k, cfg, sizes=(size,), repetitions=2,
                                                                   num_test=16))(params, state, key)

    @quick_jit
    def by_hand(params, state):
        test_key, rest = jax.random.split(key)
        test = cfg.task.sample(state, test_key, split='clean', batch_size=16)
        weight = (test.groups['occurrence_BL'] >= 2)[..., None] * (
            jnp.eye(V)[cfg.task.noise_id] * V / (V - 1) - 1 / (V - 1))

        def lead(block):
            logits = model.apply({**params, 'blocks_1': block}, test.tokens_BL, cfg=cfg.model)[0]
            return jnp.sum(logits * weight) / jnp.sum(test.groups['occurrence_BL'] >= 2)

        def train_loss(block, k):
            batch = cfg.task.sample(state, k, split='train', batch_size=size)
            log_p = jax.nn.log_softmax(model.apply({**params, 'blocks_1': block}, batch.tokens_BL, cfg=cfg.model)[0])
            picked = jnp.take_along_axis(log_p, batch.targets_BL[..., None], -1)[..., 0]
            return -jnp.sum(picked * batch.mask_BL) / jnp.sum(batch.mask_BL)

        def change(k):
            grad = jax.grad(train_loss)(params['blocks_1'], k)
            moved = lambda roles, sign: {name: x - sign * rate * grad[name] * (name in roles)  # noqa: E731
                                         for name, x in params['blocks_1'].items()}
            return {part: (lead(moved(roles, 1)) - lead(moved(roles, -1))) / (2 * rate)
                    for part, roles in {'ff': ('mlp_in', 'mlp_out'), 'attn': ('v', 'o')}.items()}

        changes = jax.lax.map(change, jax.random.split(jax.random.fold_in(rest, 0), 2))
        return {part: jnp.mean(x) for part, x in changes.items()}

    for part, value in by_hand(params, state).items():
        assert found[f'mean/{part}/context'][0] == pytest.approx(float(value), rel=0.05, abs=1e-4), part
    assert found['mean/ff/alone'][0] > found['mean/attn/alone'][0]
    assert np.isfinite([float(x[0]) for x in found.values()]).all()
