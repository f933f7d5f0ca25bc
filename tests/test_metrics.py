import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lingrok.tasks  # noqa: F401  registers the tasks
from lingrok import config, metrics, model, train
from lingrok.tasks.base import Batch

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter('error', RuntimeWarning)
        yield


@pytest.mark.parametrize('values, mean, half', [
    # By hand, with quantiles of Student's t distribution from a printed table.
    ([1, 3], 2, 12.706 * 1.0),
    ([1, 2, 3], 2, 4.303 / 3**0.5),
    ([0, 0, 4, 4], 2, 3.182 * (16 / 3) ** 0.5 / 2),
    ([5, 5, 5], 5, 0),
    ([1, np.nan, 3], 2, 12.706),
    ([np.nan, 1, np.nan, 2, 3, np.inf], 2, 4.303 / 3**0.5),
])
def test_interval_by_hand(values, mean, half):
    found = metrics.interval(np.array(values))
    np.testing.assert_allclose(found, (mean, half), rtol=1e-6)


@pytest.mark.parametrize('count, quantile', [
    # 97.5 % quantiles for count - 1 degrees of freedom, from a printed table.
    (10, 2.262), (20, 2.093), (31, 2.042), (32, 2.0395), (41, 2.0211), (61, 2.0003), (121, 1.9799), (9_999, 1.9602),
])
def test_quantiles_of_the_interval(count, quantile):
    values = np.arange(count) % 2 * 1.0
    _, half = metrics.interval(values)
    assert half == pytest.approx(quantile * values.std(ddof=1) / count**0.5, rel=1e-4)


def test_interval_without_an_error_bar():
    for values, mean in (([7], 7), ([np.nan, 7], 7), ([np.nan], np.nan), ([], np.nan)):
        np.testing.assert_array_equal(metrics.interval(np.array(values, float)), (mean, np.nan))


def test_interval_over_an_axis():
    values = np.random.default_rng(0).normal(size=(4, 3, 5))
    values[1, 2, 0] = np.nan
    for axis in (0, 1, -1):
        mean, half = metrics.interval(values, axis)
        moved = np.moveaxis(values, axis, -1)
        assert mean.shape == half.shape == moved.shape[:-1]
        for index in np.ndindex(mean.shape):
            np.testing.assert_allclose((mean[index], half[index]), metrics.interval(moved[index]))


def test_interval_covers_the_mean_19_times_in_20():
    values = np.random.default_rng(0).normal(3, 2, (20_000, 4))
    mean, half = metrics.interval(values)
    share = np.mean(abs(mean - 3) < half)
    assert abs(share - 0.95) < 4 * (0.95 * 0.05 / 20_000) ** 0.5


def test_text():
    assert metrics.text(np.array([0.5, 0.7])) == '0.600 ± 1.271 (n=2)'
    assert metrics.text(np.array([0.5])) == '0.500 (n=1)'
    assert metrics.text(np.array([0.25, np.nan, 0.25])) == '0.250 ± 0.000 (n=2)'
    assert metrics.text(np.array([np.nan])) == 'not defined (n=0)'


def test_metrics_of_variants_are_those_of_the_task(smoke):
    smoke.model.num_layers = 1
    smoke.task.length = 8
    smoke.train.batch_size = 2
    smoke.eval.batch_size = batch_size = 4
    smoke.eval.truncations = ()
    cfg = config.from_config_dict(smoke)
    rng = np.random.default_rng(0)
    specs = model.parameter_specs(cfg.model)
    params = {variant: jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32), specs,
                                    is_leaf=lambda x: isinstance(x, model.Spec)) for variant in ('', 'edited')}
    tokens, targets, answers = rng.integers(0, cfg.task.vocab_size, (3, 2, batch_size, 8))
    mask, occurrence = rng.integers(0, 2, (2, batch_size, 8)) * 1.0, rng.integers(0, 5, (2, batch_size, 8))
    batches = {split: Batch(tokens[i], targets[i], mask[i], {'occurrence_BL': occurrence[i], 'answer_BL': answers[i]})
               for i, split in enumerate(cfg.task.splits)}

    @quick_jit
    def both(params, batches):
        def measure(params, batch):
            return cfg.task.metrics(model.apply(params, batch.tokens_BL, cfg=cfg.model)[0], batch)

        every = jax.vmap(jax.vmap(measure, (None, 0)), (0, None))
        stacked = (jax.tree.map(lambda *x: jnp.stack(x), *tree.values()) for tree in (params, batches))
        by_hand = {f'{split}/{name}' + (f'/{variant}' if variant else ''): values[v, s]
                   for name, values in every(*stacked).items()
                   for v, variant in enumerate(params) for s, split in enumerate(batches)}
        return metrics.of_variants(params, batches, cfg), by_hand

    found, by_hand = both(params, batches)
    assert found.keys() == by_hand.keys()
    assert {'noisy/loss', 'clean/p_noise/edited', 'clean/accuracy_by_occurrence'} <= found.keys()
    for name, value in by_hand.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)
    assert found['noisy/loss'] != found['noisy/loss/edited'] != found['clean/loss/edited']


@pytest.mark.parametrize('size', [4, 3])
def test_logits_in_pieces_are_those_of_the_whole(smoke, size):
    """In pieces of the training batch (2 divides 4) and without (2 does not divide 3)."""
    smoke.model.num_layers = 1
    smoke.train.batch_size = 2
    smoke.eval.truncations = ()
    cfg = config.from_config_dict(smoke)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, cfg.task.vocab_size, (size, 5))
    params = jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32),
                          model.parameter_specs(cfg.model), is_leaf=lambda x: isinstance(x, model.Spec))
    found, whole = quick_jit(lambda params: (metrics._logits(params, tokens, cfg),
                                             model.apply(params, tokens, cfg=cfg.model)[0]))(params)
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)
    assert found.shape == (size, 5, cfg.task.vocab_size)


def test_evaluation_adds_baselines_variants_and_probes(smoke):
    smoke.model.num_layers = 1
    smoke.eval.truncations = ()
    cfg = config.from_config_dict(smoke)
    settings = {name: values[0] for name, values in cfg.coordinates().items()}

    def probe(params, batches, cfg):
        return {'probe': jnp.sum(params['embed']) + batches['clean'].tokens_BL[0, 0]}

    def measured(params, task_state):
        return train.evaluate(params, task_state, settings, cfg=cfg, probes=(probe,),
                              variants=lambda params, cfg: {'again': params})

    params = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg.model))
    names = set(jax.eval_shape(measured, params, jax.eval_shape(lambda: train.init_task(settings, cfg=cfg))))
    assert {'probe', 'noisy/loss', 'noisy/loss/again', 'noisy/loss/bayes', 'clean/loss/distribution_only'} <= names
