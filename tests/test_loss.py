import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lingrok import loss, model, optim
from lingrok.config import ModelConfig
from lingrok.tasks import base
from lingrok.tasks.base import Batch

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})

ROWS, LENGTH, VOCAB = 4, 6, 7
SIZE = ROWS * LENGTH
SCORED = slice(1, None, 3)
SIZES = sorted({math.ceil(SIZE * share) for share in loss.SHARES})
COUNTS = sorted({0, 1, SIZE, *SIZES, *(size + 1 for size in SIZES[:-1])})
CONFIGS = {
    'recall': {'query': 'identity', 'position': 'learned', 'mlp_kind': ('none', 'mlp')},
    'merged, parallel, tied': {'num_layers': 1, 'value_output': 'merged', 'parallel': (True,), 'tied': True,
                               'norm': 'layernorm', 'mlp_kind': ('linear',)},
}


@functools.cache
def program(case: str, some: bool = False):
    """Params, tokens, targets and a compiled function of weights: loss and gradient with skip, without, and plain.

    some: those of 'scored' are computed at the positions SCORED only.
    """
    cfg = ModelConfig(**{'num_layers': 2, 'd_model': 8, 'd_mlp': 12, 'num_heads': 2, 'vocab_size': VOCAB,
                         'max_len': LENGTH} | CONFIGS[case])
    tokens, targets = (np.random.default_rng(0).integers(0, VOCAB, (2, ROWS, LENGTH)))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda spec: (spec.scale * rng.normal(size=spec.shape)).astype(np.float32),
                          model.parameter_specs(cfg), is_leaf=lambda x: isinstance(x, model.Spec))
    trainable, frozen = optim.split(params, ('embed',) if not cfg.tied else ())

    @quick_jit
    def run(weights):
        batch = Batch(jnp.asarray(tokens), jnp.asarray(targets), weights, {})

        def plain(trainable):
            logits, _ = model.apply(optim.merge(trainable, frozen), batch.tokens_BL, cfg=cfg)
            log_probs = jax.nn.log_softmax(logits)
            picked = sum(jnp.where(batch.targets_BL == v, log_probs[..., v], 0) for v in range(VOCAB))
            return -jnp.sum(picked * weights) / jnp.where(jnp.sum(weights) > 0, jnp.sum(weights), 1)

        kinds = {'skip': True} if cfg.num_layers == 1 else {'skip': True, 'whole': False}
        return {'plain': jax.value_and_grad(plain)(trainable)} | {
            name: loss.loss_and_grad(trainable, frozen, batch, cfg=cfg, skip=skip) for name, skip in kinds.items()} | {
            'scored': loss.loss_and_grad(trainable, frozen, batch, cfg=cfg, skip=False,
                                         scored=SCORED if some else slice(None))}

    return run, trainable


def weights_of(count: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(count)
    weights = np.zeros(SIZE, np.float32)
    weights[rng.permutation(SIZE)[:count]] = 1 if kind == 'mask' else rng.uniform(0.01, 0.05, count)
    return weights.reshape(ROWS, LENGTH)


@pytest.mark.parametrize('case, count, kind', [
    *(('recall', count, 'mask') for count in COUNTS),
    ('recall', SIZES[0], 'small weights'),
    ('merged, parallel, tied', SIZES[0], 'mask'),
    ('merged, parallel, tied', SIZES[1], 'small weights'),
])
def test_loss_and_gradient_are_those_of_the_plain_loss(case, count, kind):
    run, trainable = program(case)
    found = run(weights_of(count, kind))
    value, grad = found.pop('plain')
    assert np.isfinite(value) and (value > 0) == (count > 0)
    for name, (other, other_grad) in found.items():
        # float32 sums in another order; entries of a gradient are compared at the scale of the largest.
        np.testing.assert_allclose(other, value, rtol=1e-5, err_msg=name)
        assert jax.tree.structure(other_grad) == jax.tree.structure(trainable)
        for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(other_grad), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * np.abs(a).max(), err_msg=name)
            assert np.isfinite(b).all() and (np.abs(b).max() > 0) == (count > 0)


@pytest.mark.parametrize('case', CONFIGS)
def test_positions_without_weight_need_not_be_computed(case):
    weights = np.zeros((ROWS, LENGTH), np.float32)
    weights[:, SCORED] = weights_of(8, 'small weights')[:, SCORED] + 0.1
    run, trainable = program(case, some=True)
    found = run(weights)
    (value, grad), (other, other_grad) = found['plain'], found['scored']
    np.testing.assert_allclose(other, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(other_grad), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * np.abs(a).max())


def test_unscored_positions_do_not_count():
    run, _ = program('recall')
    one, two = np.zeros((2, ROWS, LENGTH), np.float32)
    one[1, 3], two[2, 5] = 1, 1
    first, second = (run(weights)['skip'][0] for weights in (one, two))
    assert first != second
    np.testing.assert_allclose(run(one + two)['skip'][0], (first + second) / 2, rtol=1e-5)
    np.testing.assert_allclose(run(3 * one + two)['skip'][0], (3 * first + second) / 4, rtol=1e-5)


cross_entropy, masked_mean = quick_jit(loss.cross_entropy), quick_jit(base.masked_mean)


def test_cross_entropy_of_uniform_logits():
    targets = np.arange(6).reshape(2, 3)
    weights = np.array([[1.0, 0.0, 1.0], [0.25, 0.0, 0.0]])
    for logits in (np.zeros((2, 3, 50)), np.full((2, 3, 50), 100.0)):
        np.testing.assert_allclose(loss.cross_entropy(logits, targets, weights), math.log(50), rtol=1e-5)
    assert cross_entropy(np.zeros((2, 3, 50)), targets, np.zeros((2, 3))) == 0


def test_cross_entropy_by_hand():
    p = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    value = cross_entropy(np.log(p) - 7, np.array([0, 2]), np.array([1.0, 3.0]))
    assert value == pytest.approx(-(math.log(0.5) + 3 * math.log(0.1)) / 4, rel=1e-6)
    # A mean of weights, however small they are.
    value = cross_entropy(np.log(p), np.array([0, 2]), np.array([0.1, 0.3]))
    assert value == pytest.approx(-(math.log(0.5) + 3 * math.log(0.1)) / 4, rel=1e-6)


def test_masked_mean():
    values = np.array([1.0, np.nan, 3.0, 8.0])
    assert masked_mean(values, np.array([1.0, 0, 1, 0])) == 2
    assert masked_mean(values, np.array([0.3, 0, 0.1, 0])) == pytest.approx(1.5)
    assert masked_mean(values, np.array([True, False, False, True])) == 4.5
    assert np.isnan(masked_mean(values, np.zeros(4)))


def test_exact_loss_keeps_its_digits_where_the_softmax_is_zero():
    logits, targets, one = jnp.array([[20.0, 0.0, -1.0]]), jnp.array([0]), jnp.ones(1)
    truth = math.log1p(math.exp(-20) + math.exp(-21))
    assert loss.cross_entropy(logits, targets, one) == 0
    np.testing.assert_allclose(loss.cross_entropy(logits, targets, one, form='exact'), truth, rtol=1e-5)
    slope = jax.grad(lambda x: loss.cross_entropy(x, targets, one, form='exact'))(logits)
    np.testing.assert_allclose(slope[0, 1:], np.exp([-20, -21]), rtol=1e-4)
    np.testing.assert_allclose(slope[0, 0], -slope[0, 1:].sum(), rtol=1e-4)


def test_exact_loss_is_the_softmax_loss():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(50, 7)).astype(np.float32) * 9, rng.integers(0, 7, 50)
    both = [jax.value_and_grad(functools.partial(loss.cross_entropy, targets=targets, weights=jnp.ones(50), form=form))(
        jnp.asarray(logits)) for form in ('softmax', 'exact')]
    for a, b in zip(*both, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)
    far = loss.cross_entropy(jnp.array([[-200.0, 200.0]]), jnp.array([0]), jnp.ones(1), form='exact')
    np.testing.assert_allclose(far, 400)


def test_stablemax_by_hand():
    value = loss.cross_entropy(jnp.array([[2.0, -1.0, 0.0]]), jnp.array([1]), jnp.ones(1), form='stablemax')
    np.testing.assert_allclose(value, -math.log(0.5 / (3 + 0.5 + 1)), rtol=1e-6)


def test_mean_over_positive_losses_leaves_out_what_is_solved():
    logits, targets = jnp.array([[30.0, 0.0], [0.0, 0.0]]), jnp.array([0, 0])
    np.testing.assert_allclose(loss.cross_entropy(logits, targets, jnp.ones(2)), math.log(2) / 2, rtol=1e-6)
    value = loss.cross_entropy(logits, targets, jnp.ones(2), mean='positive')
    np.testing.assert_allclose(value, math.log(2), rtol=1e-6)
    assert loss.cross_entropy(logits[:1], targets[:1], jnp.ones(1), mean='positive') == 0
