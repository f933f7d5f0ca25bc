"""Attention heads: their outputs against the model, their statistics against loops over hand-made patterns."""

import functools

import jax
import numpy as np
import pytest

from lingrok import config, model
from lingrok.analysis import heads
from lingrok.config import ModelConfig

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})

SMALL = {'num_layers': 2, 'd_model': 8, 'd_mlp': 8, 'vocab_size': 5, 'max_len': 11, 'num_heads': 4}


def random_params(cfg, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32), model.parameter_specs(cfg),
                        is_leaf=lambda x: isinstance(x, model.Spec))


@pytest.mark.parametrize('options', [{'num_kv_heads': 2}, {'value_output': 'merged'}],
                         ids=['factored, grouped', 'merged'])
def test_head_outputs_add_up_to_the_attention_output_and_each_is_the_loss_of_cutting_its_head(options):
    cfg = ModelConfig(**SMALL, **options)
    params = random_params(cfg)
    tokens = np.random.default_rng(1).integers(0, 5, (2, 11))

    @quick_jit
    def run(params, kept_H):
        hook = {'blocks.1.attn.z': lambda z: z * kept_H[:, None]}
        _, acts = model.apply(params, tokens, cfg=cfg, capture='blocks.1.*', hooks=hook)
        return heads.head_outputs(params, acts, cfg, 1), acts['blocks.1.attn_out']

    outputs, whole = run(params, np.ones(4, np.float32))
    assert outputs.shape == (2, 11, 4, 8)
    np.testing.assert_allclose(outputs.sum(2), whole, rtol=1e-4, atol=1e-4)
    for head in range(4):
        without = run(params, 1 - np.eye(4, dtype=np.float32)[head])[1]
        np.testing.assert_allclose(outputs[:, :, head], whole - without, rtol=1e-4, atol=1e-4)


def test_statistics_of_patterns():
    """Against loops, on random patterns among which head 1 of layer 0 looks at the token before."""
    rng = np.random.default_rng(0)
    pattern = np.tril(rng.uniform(size=(2, 3, 2, 14, 14)))
    pattern[0, :, 1] += 20 * np.eye(14, k=-1)
    pattern /= pattern.sum(-1, keepdims=True)
    found = {name.removeprefix('attention/'): np.asarray(value)
             for name, value in quick_jit(heads.statistics)(pattern.astype(np.float32)).items()}
    uniform = np.tril(np.ones((14, 14))) / np.arange(1, 15)[:, None]
    queries = range(7, 14)  # the later half of a short row

    def mass(pattern_LM, slot, chosen):
        """Mean over the queries of a slot of the mass on the keys that `chosen` names for them."""
        sums = [sum(pattern_LM[q, m] for m in chosen(q) if 0 <= m <= q) for q in queries
                if q % 3 == slot and any(0 <= m <= q for m in chosen(q))]
        return np.mean(sums) if sums else 0.0

    offset = lambda o: lambda q: [q - o]  # noqa: E731
    for layer, head in np.ndindex(2, 2):
        mean_LM = pattern[layer, :, head].mean(0)
        np.testing.assert_allclose(found['by_offset'][layer, head], [
            [mass(mean_LM, slot, offset(o)) for o in range(14)] for slot in range(3)], rtol=1e-4)
        np.testing.assert_allclose(found['by_slot'][layer, head], [
            [mass(mean_LM, slot, lambda q, to=to: range(to, q + 1, 3)) for to in range(3)] for slot in range(3)],
            rtol=1e-4)
        np.testing.assert_allclose(found['first_token'][layer, head], mean_LM[7:, 0].mean(), rtol=1e-4)
        rows = pattern[layer, :, head, 7:]
        entropy = -(rows * np.log(np.where(rows > 0, rows, 1))).sum(-1).mean()
        np.testing.assert_allclose(found['entropy'][layer, head], entropy, rtol=1e-4)
    np.testing.assert_allclose(found['best'][:, :4], found['by_offset'][..., :4].mean(2).max(1), rtol=1e-5)
    np.testing.assert_allclose(found['best'][:, 4], found['first_token'].max(1), rtol=1e-5)
    np.testing.assert_allclose(found['best'][:, 5], np.trace(found['by_slot'], axis1=2, axis2=3).max(1) / 3, rtol=1e-5)
    np.testing.assert_allclose(found['best_by_slot'], found['by_offset'][..., :4].max(1))
    np.testing.assert_allclose(found['uniform'][:2], np.mean([mass(uniform, s, offset(1)) for s in range(3)]),
                               rtol=1e-5)
    np.testing.assert_allclose(found['uniform'][4], uniform[7:, 0].mean(), rtol=1e-5)
    assert tuple(found['previous_head']) == (0, 1)
    assert found['previous_mass'] == found['best'][0, 1] > 0.6
    self_mass, before = found['by_offset'][0, 1, 1, :2]
    np.testing.assert_allclose(found['self_over_previous'], self_mass / before)


def test_queries_of_long_rows_are_those_of_the_published_numbers():
    """Positions 12 to 47: position 11 counts for nothing, and `attention` cuts its rows behind 47."""
    pattern = np.zeros((1, 1, 1, 48, 48), np.float32)
    pattern[..., :12, 0] = 1
    pattern[..., 12:, :] = np.eye(48, k=-1)[12:]
    found = quick_jit(heads.statistics)(pattern)
    assert found['attention/first_token'][0, 0] == 0
    assert found['attention/previous_mass'] == 1


@pytest.mark.parametrize('task', [None, (1, 2)])
def test_attention_maps_one_row_of_the_task_asked_for(task):
    cfg = tiny_config()
    params, state = random_params(cfg.model), quick_jit(cfg.task.init)(jax.random.key(3))
    fn = quick_jit(lambda params, state, key: heads.attention(params, state, key, cfg, task=task, tokens=8, num_rows=4))
    found = fn(params, state, jax.random.key(0))
    first_unseen = state.tasks_T2[cfg.task.num_tasks + (25 - cfg.task.num_tasks) // 4]
    np.testing.assert_array_equal(found['map/task'], task or first_unseen)
    seen = [tuple(map(int, pair)) for pair in state.tasks_T2[: cfg.task.num_tasks]]
    assert found['map/unseen'] == (tuple(map(int, found['map/task'])) not in seen)
    x, y, z = found['map/tokens'][:6].reshape(2, 3).T
    np.testing.assert_array_equal((found['map/task'][0] * x + found['map/task'][1] * y) % 5, z)
    run = quick_jit(lambda params, tokens: model.apply(params, tokens, cfg=cfg.model, capture='*.attn.pattern')[1])
    acts = run(params, found['map/tokens'][None])
    expected = np.stack([acts[f'blocks.{layer}.attn.pattern'][0] for layer in range(2)])
    np.testing.assert_allclose(found['map/pattern'], expected, rtol=1e-4, atol=1e-6)


def tiny_config(num_examples=4, **options):
    """An untrained model of the task modulo 5, with options of the model."""
    cfg = config.defaults('modular')
    cfg.task.p, cfg.task.num_examples, cfg.task.num_tasks, cfg.task.batching = 5, num_examples, 8, 'iid'
    cfg.task.geometry = 'random'
    cfg.model.update({'num_layers': 2, 'd_model': 8, 'd_mlp': 8, 'num_heads': 2} | options)
    return config.from_config_dict(cfg)
