"""Attention heads: their outputs against the model, their statistics against loops over hand-made patterns."""

import functools

import jax
import numpy as np
import pytest

from lingrok import model
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
