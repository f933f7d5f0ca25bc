import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lingrok
from lingrok import model
from lingrok.analysis import lowrank
from lingrok.config import ConfigError
from lingrok.lm import forward

FOLDER = Path(__file__).parent / 'language'
NAMES = ('gpt2', 'llama', 'neox', 'neox_sequential')


@functools.cache
def load(name):
    return lingrok.load_pretrained(FOLDER / name)


def tokens(loaded, rows=2, length=7):
    return jnp.array(np.random.default_rng(3).integers(0, loaded.config.vocab_size, (rows, length)), jnp.int32)


@pytest.mark.parametrize('name', NAMES)
def test_block_by_block_is_the_model(name):
    loaded = load(name)
    cfg, params, tokens_BL = loaded.config, loaded.params, tokens(loaded)
    names = [*(f'blocks.{layer}.resid_pre' for layer in range(cfg.num_layers)),
             f'blocks.{cfg.num_layers - 1}.resid_post']
    logits_BLV, acts = model.apply(params, tokens_BL, cfg=cfg, capture=names)
    stream = forward.residuals(params, tokens_BL, cfg=cfg)
    for h_BLD, key in zip(stream, names, strict=True):
        np.testing.assert_allclose(h_BLD, acts[key], atol=1e-4)
    for start, h_BLD in enumerate(stream):
        last = forward.resume(params, h_BLD, cfg=cfg, start=start)
        np.testing.assert_allclose(forward.log_probs(params, last, cfg=cfg), jax.nn.log_softmax(logits_BLV), atol=1e-4)


@pytest.mark.parametrize('name', NAMES)
def test_what_an_edit_leaves_alone_need_not_be_computed_again(name):
    loaded = load(name)
    cfg, params, tokens_BL = loaded.config, loaded.params, tokens(loaded)
    edited = lowrank.truncate(params, cfg, 'mlp_in', 1, 0.25)
    wanted, _ = model.apply(edited, tokens_BL, cfg=cfg)
    stream = forward.residuals(params, tokens_BL, cfg=cfg)
    found = forward.resume(edited, stream[1], cfg=cfg, start=1)
    np.testing.assert_allclose(forward.log_probs(edited, found, cfg=cfg), jax.nn.log_softmax(wanted), atol=1e-4)
    assert np.abs(wanted - model.apply(params, tokens_BL, cfg=cfg)[0]).max() > 0.01


@pytest.mark.parametrize('name', NAMES)
def test_a_replacement_is_a_hook(name):
    loaded = load(name)
    cfg, params, tokens_BL = loaded.config, loaded.params, tokens(loaded)
    other = jax.random.normal(jax.random.key(0), (1, 1, 1, cfg.d_head))
    head_H1 = (jnp.arange(cfg.num_heads) == 1)[:, None]
    hook = {'blocks.1.attn.z': lambda z: jnp.where(head_H1, other, z)}
    wanted, acts = model.apply(params, tokens_BL, cfg=cfg, hooks=hook, capture='blocks.1.attn.pattern')
    h_BLD = forward.residuals(params, tokens_BL, cfg=cfg)[1]
    _, own = forward.block(params, h_BLD, cfg=cfg, layer=1, capture=['attn.pattern'])
    np.testing.assert_allclose(own['attn.pattern'], acts['blocks.1.attn.pattern'], atol=1e-5)
    found = forward.resume(params, h_BLD, cfg=cfg, start=1, replace={1: {'attn.z': (head_H1, other)}})
    np.testing.assert_allclose(forward.log_probs(params, found, cfg=cfg), jax.nn.log_softmax(wanted), atol=1e-4)


def test_one_compiled_block_serves_all_layers():
    cfg = lingrok.ModelConfig(vocab_size=11, d_model=8, d_mlp=16, num_layers=5, num_heads=2, max_len=6)
    params = model.init(jax.random.key(0), cfg)
    before = forward._block._cache_size()
    forward.residuals(params, jnp.zeros((3, 6), jnp.int32), cfg=cfg)
    assert forward._block._cache_size() == before + 1
    mixed = lingrok.ModelConfig(vocab_size=11, d_model=8, d_mlp=16, num_layers=4, num_heads=2, max_len=6,
                                mlp_kind=('mlp', 'none', 'mlp', 'none'))
    assert [forward._alike(mixed, n) for n in range(4)] == [0, 1, 0, 1]


def test_wrong_arguments_end_in_one_line():
    loaded = load('gpt2')
    h_BLD = forward.residuals(loaded.params, tokens(loaded), cfg=loaded.config)[0]
    with pytest.raises(ConfigError, match=r'layer 9; allowed: 0 to 1'):
        forward.block(loaded.params, h_BLD, cfg=loaded.config, layer=9)
    with pytest.raises(ConfigError, match=r'replacements in layers \[0\]; allowed: 1'):
        forward.resume(loaded.params, h_BLD, cfg=loaded.config, start=1, replace={0: {}})
    with pytest.raises(ConfigError, match='unknown activation'):
        forward.block(loaded.params, h_BLD, cfg=loaded.config, layer=0, replace={'attn.zz': (True, jnp.zeros(1))})
