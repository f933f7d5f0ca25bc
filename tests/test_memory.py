import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lingrok import analysis, config, model
from lingrok.analysis import associations, memory
from lingrok.config import ModelConfig
from lingrok.tasks.base import Batch

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})


trigger_attention = quick_jit(memory.trigger_attention)


def hand_made():
    """Three tokens as unit vectors; the feed-forward of layer 1 answers each with a row of this table."""
    cfg = ModelConfig(num_layers=2, d_model=3, d_mlp=3, vocab_size=3, max_len=4)
    answers = np.array([[2.0, 5.0, 1.0], [0.0, -1.0, 4.0], [3.0, 3.0, 3.5]])
    zeros = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), model.parameter_specs(cfg),
                         is_leaf=lambda x: isinstance(x, model.Spec))
    # Positions and the other parts hold large numbers, which must not count.
    params = jax.tree.map(lambda x: x + 100.0, zeros) | {'embed': np.eye(3), 'unembed': np.eye(3)}
    params['blocks_1'] = params['blocks_1'] | {'mlp_in': np.eye(3), 'mlp_out': answers}
    return cfg, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


def test_noise_margin_of_a_hand_made_model():
    cfg, params = hand_made()
    noise_margin = quick_jit(functools.partial(memory.noise_margin, cfg=cfg, layers=(1,)))
    margins = noise_margin(params, jnp.array([[0, 1], [2, 0]]), 1)
    # Token 0: 5 - max(2, 1); token 1: -1 - max(0, 4); token 2: 3 - max(3, 3.5).
    np.testing.assert_allclose(margins, [[3, -5], [-0.5, 3]])
    np.testing.assert_allclose(noise_margin(params, jnp.arange(3), 2), [-4, 4, 0.5])
    np.testing.assert_allclose(noise_margin(params, jnp.array(2), 0), -0.5)
    loaded = jax.tree.map(np.asarray, params)  # those of a loaded run are numpy
    traced = functools.partial(memory.noise_margin, loaded, noise_id=1, cfg=cfg, layers=(1,))
    assert jax.eval_shape(traced, jnp.arange(3)).shape == (3,)


def batch_by_hand():
    """Trigger 0 with target 1, trigger 5 with target 6, noise 3; row 1 holds no trigger twice.

    position    0 1 2 3 4 5 6 7
    token       0 3 0 1 5 0 5 6        repeated triggers at 2 (after noise), 5, 6
    """
    tokens = np.array([[0, 3, 0, 1, 5, 0, 5, 6], [2, 0, 1, 2, 5, 6, 4, 4]])
    occurrence = np.array([[1, 0, 2, 0, 1, 3, 2, 0], [0, 1, 0, 0, 1, 0, 0, 0]])
    answer = np.array([[1, -1, 1, -1, 6, 1, 6, -1], [-1, 1, -1, -1, 6, -1, -1, -1]])
    groups = {'occurrence_BL': jnp.asarray(occurrence), 'answer_BL': jnp.asarray(answer)}
    return Batch(jnp.asarray(tokens), None, None, groups)


def test_trigger_attention_by_hand():
    rng = np.random.default_rng(0)
    pattern = np.tril(rng.uniform(size=(2, 3, 8, 8)))
    pattern /= pattern.sum(-1, keepdims=True)
    found = trigger_attention(jnp.asarray(pattern, jnp.float32), batch_by_hand(), 3)
    mean = pattern.mean(1)[0]
    # Position 2 saw 0 followed by 3. Position 5 saw it followed by 3 (at 1) and by 1 (at 3).
    # Position 6 reads 5, which was followed by 0 at position 5: neither its target nor the noise.
    np.testing.assert_allclose(found['target'], (0 + mean[5, 3] + 0) / 3, rtol=1e-5)
    np.testing.assert_allclose(found['noise'], (mean[2, 1] + mean[5, 1] + 0) / 3, rtol=1e-5)
    np.testing.assert_allclose(found['uniform'], (0 + 1 / 6 + 0) / 3, rtol=1e-5)


def test_trigger_attention_looks_back_only_and_counts_every_showing():
    # Trigger 0 with target 1 throughout; the last label of the row, 1, is outside it.
    tokens = np.array([[0, 1, 0, 1, 0, 1, 0]])
    groups = {'occurrence_BL': jnp.array([[1, 0, 2, 0, 3, 0, 4]]), 'answer_BL': jnp.array([[1, -1, 1, -1, 1, -1, 1]])}
    batch = Batch(jnp.asarray(tokens), None, None, groups)
    found = trigger_attention(jnp.full((1, 2, 7, 7), 1.0), batch, 9)
    # One, two and three targets lie before positions 2, 4 and 6.
    assert found['target'] == 2 and found['noise'] == 0
    np.testing.assert_allclose(found['uniform'], (1 / 3 + 2 / 5 + 3 / 7) / 3, rtol=1e-6)


def test_trigger_attention_of_a_trigger_behind_itself():
    # The target of trigger 0 is 0: every occurrence but the first is a target that followed it.
    groups = {'occurrence_BL': jnp.array([[1, 2, 3]]), 'answer_BL': jnp.array([[0, 0, 0]])}
    batch = Batch(jnp.array([[0, 0, 0]]), None, None, groups)
    found = trigger_attention(jnp.full((1, 1, 3, 3), 1.0), batch, 7)
    assert found['target'] == 1.5
    np.testing.assert_allclose(found['uniform'], (1 / 2 + 2 / 3) / 2, rtol=1e-6)


def test_without_repeated_triggers_there_is_nothing_to_measure():
    batch = batch_by_hand()
    groups = {**batch.groups, 'occurrence_BL': jnp.minimum(batch.groups['occurrence_BL'], 1)}
    found = trigger_attention(jnp.full((2, 1, 8, 8), 0.1), batch._replace(groups=groups), 3)
    assert all(np.isnan(value) for value in found.values())


def test_previous_token_attention():
    pattern = np.zeros((2, 3, 4, 4))
    pattern[:, 0] = np.eye(4)  # reads itself
    pattern[:, 1] = np.eye(4, k=-1)  # reads the token before
    pattern[1, 1, 2] = [1, 0, 0, 0]  # but for one of six positions
    pattern[:, 2] = np.eye(4, k=1)
    assert memory.previous_token_attention(jnp.asarray(pattern)) == pytest.approx(5 / 6)


def test_recall_probe(smoke):
    """What the probe reports is what its parts measure, on the noisy batch."""
    smoke.model.num_layers = 3
    smoke.model.d_model = 8
    smoke.model.mlp_kind = ('mlp', 'none', 'linear_act')
    smoke.task.length = 8
    smoke.task.num_triggers = 2
    smoke.eval.truncations = ()
    cfg = config.from_config_dict(smoke)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32),
                          model.parameter_specs(cfg.model), is_leaf=lambda x: isinstance(x, model.Spec))
    triggers = np.array(cfg.task.fixed_triggers)
    tokens = rng.choice([*triggers, 4], (3, 8))
    groups = {'occurrence_BL': rng.integers(0, 4, (3, 8)), 'answer_BL': rng.choice([4, *triggers], (3, 8)),
              'triggers_Bk': np.tile(triggers, (3, 1))}
    noisy = Batch(tokens, tokens, np.ones((3, 8), np.float32), groups)
    clean = Batch(0 * tokens, tokens, np.ones((3, 8), np.float32), {name: 0 * x for name, x in groups.items()})

    @quick_jit
    def measure(params, noisy, clean):
        _, acts = model.apply(params, noisy.tokens_BL, cfg=cfg.model, capture='*.attn.pattern')
        margins = [memory.noise_margin(params, triggers, noise, cfg=cfg.model, layers=x) for x in ((0,), (2,), (0, 2))]
        return memory.recall_probe(params, {'noisy': noisy, 'clean': clean}, cfg), acts, margins

    noise = cfg.task.noise_id
    found, acts, margins = measure(params, noisy, clean)
    expected = {f'noise_margin/blocks.{layer}': margin.mean() for layer, margin in zip((0, 2), margins, strict=False)}
    expected['noise_margin/composed'] = margins[2].mean()
    attention = trigger_attention(acts['blocks.2.attn.pattern'], noisy, noise)
    expected |= {f'noisy/attention_{name}/blocks.2': value for name, value in attention.items()}
    previous = memory.previous_token_attention(acts['blocks.0.attn.pattern'])
    expected['noisy/attention_previous/blocks.0'] = previous
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)
    assert analysis.evaluation('recall')['probes'] == (memory.recall_probe, associations.association_probe)
    assert analysis.evaluation('something else')['probes'] == ()
