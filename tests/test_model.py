import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import get_config

import lingrok.tasks  # noqa: F401  registers the tasks
from lingrok import config, model, names, optim, train
from lingrok.config import ConfigError, ModelConfig

# What is compiled here runs once: XLA's optimisations would take longer than they save.
quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
VOCAB, LENGTH = 11, 6
BASE = {'num_layers': 2, 'd_model': 8, 'd_mlp': 12, 'num_heads': 2, 'vocab_size': VOCAB, 'max_len': LENGTH}
# Every choice of every key of ModelConfig is here at least once; `test_every_choice_is_tested` sees to it.
VARIANTS = {
    'recall': {'num_heads': 1, 'query': 'identity'},
    'rope, pre-LN': {'position': 'rope', 'norm': 'layernorm', 'tied': True, 'rope_interleaved': True,
                     'activation': ('gelu',), 'bias': True},
    'llama': {'position': 'rope', 'norm': 'rmsnorm', 'mlp_kind': ('gated',), 'activation': ('silu',), 'num_heads': 4,
              'num_kv_heads': 2},
    'neox': {'position': 'rope', 'rope_fraction': 0.5, 'rope_factors': (4.0,), 'norm': 'layernorm', 'bias': True,
             'parallel': (True,), 'activation': ('gelu',), 'init': 'fan_in', 'num_layers': 1},
    'gpt2': {'norm': 'layernorm', 'bias': True, 'activation': ('gelu_tanh',), 'tied': True, 'init': 'normal',
             'init_depth_scaled': ('o', 'mlp_out'), 'num_layers': 1},
    'post norm': {'norm': 'layernorm', 'norm_position': 'post', 'position': 'sinusoidal', 'num_layers': 1,
                  'mlp_kind': ('linear',)},
    'post rms, parallel': {'norm': 'rmsnorm', 'norm_position': 'post', 'parallel': (False, True), 'position': 'none'},
    'merged': {'value_output': 'merged', 'd_head': 3, 'scale_scores': False, 'mlp_kind': ('linear_act', 'none'),
               'attn_residual': (True, False)},
    'types and taps': {'num_types': 3, 'conv_width': 3, 'position': 'none', 'num_layers': 1,
                       'activation': ('identity',)},
    'rope in one layer': {'position': 'rope', 'rope_layers': (0,), 'query': 'identity', 'mlp_kind': ('none', 'gated'),
                          'parallel': (True,), 'attn_residual': (False, True), 'rope_base': 100.0},
    'bfloat16': {'dtype': 'bfloat16', 'norm': 'layernorm', 'position': 'rope', 'num_types': 2, 'mlp_kind': ('gated',),
                 'num_layers': 1},
}


def make(variant: str) -> ModelConfig:
    return ModelConfig(**BASE | VARIANTS[variant])


def is_spec(x) -> bool:
    return isinstance(x, model.Spec)


def random_params(cfg: ModelConfig) -> dict:
    """Parameters of the specified scales; biases and norms differ from their initial 0 and 1, too."""
    rng = np.random.default_rng(0)

    def draw(spec):
        entries = rng.normal(size=spec.shape)
        value = spec.scale + 0.3 * entries if spec.law == 'constant' else spec.scale * entries
        return value.astype(np.float32)

    return jax.tree.map(draw, model.parameter_specs(cfg), is_leaf=is_spec)


# One sequence as often as it has positions, and a last row that differs from position CUT on.
CUT = 3
ASKED = slice(1, None, 3)  # positions
TOKENS = np.tile(np.array([4, 1, 9, 4, 10, 2]), (LENGTH + 1, 1))
TOKENS[-1, CUT:] = [0, 9, 3]


@functools.cache
def measure(variant: str) -> dict:
    """What one compiled program says about a variant."""
    cfg, order = make(variant), []
    mixture_BLV = np.random.default_rng(1).normal(size=(LENGTH + 1, LENGTH, VOCAB)).astype(np.float32)
    chosen = np.array([7, 2, 2, 41])

    @quick_jit
    def program(params):
        logits, acts = model.apply(params, TOKENS, cfg=cfg, capture='*')
        order.extend(acts)
        def mixture(shift):
            """Sum over rows t of a random mixture of the logits at position t."""
            logits, _ = model.apply(params, TOKENS, cfg=cfg, hooks={'embed': lambda x: x + shift})
            return jnp.sum((logits * mixture_BLV)[jnp.arange(LENGTH), jnp.arange(LENGTH)])

        h, z = model.trunk(params, TOKENS, cfg=cfg)
        some = model.tail(params, h.reshape(-1, *h.shape[2:])[chosen], z.reshape(-1, *z.shape[2:])[chosen], cfg=cfg)
        asked = model.trunk(params, TOKENS, cfg=cfg, queries=ASKED)
        gradients_TLD = jax.grad(mixture)(jnp.zeros_like(acts['embed']))[:LENGTH]
        return {'logits': logits, 'acts': acts, 'some': some, 'gradients': gradients_TLD,
                'trunk': (h, z), 'asked': asked}

    params = random_params(cfg)
    found = jax.tree.map(np.asarray, program(params))
    # bfloat16 keeps 8 bits.
    return {**found, 'cfg': cfg, 'params': params, 'order': tuple(order), 'chosen': chosen,
            'atol': 0.1 if cfg.dtype == 'bfloat16' else 1e-5}


@pytest.fixture(params=VARIANTS)
def run(request):
    return measure(request.param)


def test_the_last_block_can_read_at_some_positions_only(run):
    for whole, asked in zip(run['trunk'], run['asked'], strict=True):
        assert asked.shape == whole[:, ASKED].shape
        np.testing.assert_allclose(asked, whole[:, ASKED], rtol=1e-4, atol=run['atol'])


def test_every_choice_is_tested():
    seen = {}
    for variant in VARIANTS:
        for field in dataclasses.fields(ModelConfig):
            value = getattr(make(variant), field.name)
            seen.setdefault(field.name, set()).update(value if isinstance(value, tuple) else (value,))
    for field in dataclasses.fields(ModelConfig):
        for choice in field.metadata['choices'] or ():
            assert choice in seen[field.name], (field.name, choice)
        if isinstance(field.default, bool) or field.name in ('parallel', 'attn_residual'):
            assert seen[field.name] == {True, False}, field.name


# Properties of every model ------------------------------------------------------------------------------------------


def test_logits_and_activations_are_sound(run):
    cfg, logits = run['cfg'], run['logits']
    assert logits.shape == (LENGTH + 1, LENGTH, VOCAB) and logits.dtype == np.float32
    for name, value in run['acts'].items():
        expected = 'float32' if name.endswith(('scores', 'logits')) else cfg.dtype
        assert value.dtype == expected, name
        assert np.isfinite(value.astype(np.float32)).all(), name
        assert value.astype(np.float32).std() > 0, name


def test_capture_of_everything_is_all_names_in_order(run):
    assert run['order'] == names.activation_names(run['cfg'])
    cfg, acts = run['cfg'], run['acts']
    size = {'D': cfg.d_model, 'H': cfg.num_heads, 'G': cfg.num_kv_heads, 'K': cfg.d_head, 'F': cfg.d_mlp, 'L': LENGTH}
    for layer, kind in enumerate(cfg.mlp_kind):
        value = 'D' if cfg.value_output == 'merged' else 'K'
        hidden = 'LD' if kind == 'linear_act' else 'LF'
        axes = {'resid_pre': 'LD', 'attn.q': 'LHK', 'attn.k': 'LGK', 'attn.v': 'LG' + value, 'attn.scores': 'HLL',
                'attn.pattern': 'HLL', 'attn.z': 'LH' + value, 'attn_out': 'LD', 'resid_mid': 'LD', 'mlp.pre': hidden,
                'mlp.gate': hidden, 'mlp.post': hidden, 'mlp_out': 'LD', 'resid_post': 'LD'}
        for name, letters in axes.items():
            if f'blocks.{layer}.{name}' in acts:
                shape = (LENGTH + 1, *(size[letter] for letter in letters))
                assert acts[f'blocks.{layer}.{name}'].shape == shape, name


def test_later_inputs_do_not_reach_earlier_logits(run):
    # Row t: gradient of the logits at position t for what enters at every position.
    reach_TL = abs(run['gradients'].astype(np.float32)).max(-1)
    np.testing.assert_array_equal(reach_TL > 0, np.tril(np.ones((LENGTH, LENGTH))))


def test_logits_of_a_prefix_do_not_depend_on_the_rest(run):
    np.testing.assert_allclose(run['logits'][-1, :CUT], run['logits'][0, :CUT], atol=run['atol'])
    assert np.abs(run['logits'][-1, CUT:] - run['logits'][0, CUT:]).max(-1).min() > 0.01


@pytest.mark.parametrize('variant', ['types and taps', 'rope in one layer'])
def test_a_prefix_alone_has_the_same_logits(variant):
    run = measure(variant)
    logits = quick_jit(lambda p: model.apply(p, TOKENS[:, :CUT], cfg=run['cfg'])[0])(run['params'])
    np.testing.assert_allclose(logits, run['logits'][:, :CUT], atol=1e-5)


def test_patterns_are_causal_laws(run):
    for name, pattern in run['acts'].items():
        if name.endswith('pattern'):
            pattern = pattern.astype(np.float32)
            np.testing.assert_allclose(pattern.sum(-1), 1, atol=0.01 if run['cfg'].dtype == 'bfloat16' else 1e-6)
            assert np.all(np.triu(pattern, 1) == 0)
            assert np.all(pattern[..., 0] > 0)


@pytest.mark.parametrize('variant', VARIANTS)
def test_hooks_that_return_their_input_change_nothing(variant):
    """The very same program is traced with them and without."""
    cfg = make(variant)

    def program(hooks):
        traced = jax.make_jaxpr(lambda params: model.apply(params, TOKENS, cfg=cfg, capture='*', hooks=hooks))
        return re.sub(r' at 0x\w+', '', str(traced(random_params(cfg))))

    identity = dict.fromkeys(names.activation_names(cfg), lambda x: x)
    assert program(identity) == program({})
    assert program(identity | {'embed': lambda x: 2 * x}) != program({})


def test_tail_of_chosen_positions(run):
    expected = run['logits'].reshape(-1, VOCAB)[run['chosen']]
    np.testing.assert_allclose(run['some'], expected, atol=run['atol'])


@pytest.mark.parametrize('copies', [1, 3], ids=['few rows', 'many rows'])
def test_parameters_stored_by_output_give_the_same_logits(run, copies):
    cfg = run['cfg']
    if cfg.conv_width or cfg.num_types:
        pytest.skip('reads whole sequences only')
    turned = model.by_output(run['params'])
    assert len(jax.tree.leaves(turned)) < len(jax.tree.leaves(run['params'])) or cfg.query == 'identity'
    tokens = np.tile(TOKENS, (copies, 1))
    assert (tokens[:, 2:].size < model.FEW_ROWS) == (copies == 1)

    @quick_jit
    def program(turned, tokens):
        cache = model.empty_cache(cfg, jnp.zeros(len(tokens), jnp.int32), LENGTH)
        _, cache = model.step(turned, tokens[:, :2], cache, cfg=cfg, by_output=True)
        return model.step(turned, tokens[:, 2:], cache, cfg=cfg, by_output=True)[0]

    wanted = np.tile(run['logits'][:, -1], (copies, 1))
    np.testing.assert_allclose(program(turned, tokens), wanted, atol=run['atol'])


@pytest.mark.parametrize('variant', VARIANTS)
def test_init_makes_what_the_specs_say(variant):
    cfg = make(variant)
    specs = model.parameter_specs(cfg)
    made = jax.eval_shape(lambda key: model.init(key, cfg), jax.random.key(0))
    assert jax.tree.map(lambda spec: spec.shape, specs, is_leaf=is_spec) == jax.tree.map(lambda x: x.shape, made)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(made))
    assert model.num_parameters(cfg) == sum(leaf.size for leaf in jax.tree.leaves(made))


# Against NumPy --------------------------------------------------------------------------------------------------------


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


gelu = np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2)


def attention(q, k, v):
    """z (L, K) of one head for q, k (L, K) and v (M, K)."""
    length = len(q)
    scores = q @ k.T / math.sqrt(q.shape[1])
    scores = np.where(np.tril(np.ones((length, length))) > 0, scores, -1e30)
    return softmax(scores) @ v


def float64(params):
    return jax.tree.map(lambda x: x.astype(np.float64), params)


def test_recall_model_against_numpy():
    """arXiv 2406.03068: identity query, no norm, one head, x + attention(x), then + relu(x W1) W2."""
    run = measure('recall')
    w = float64(run['params'])
    for row in (0, -1):
        h = w['embed'][TOKENS[row]] + w['pos'][:LENGTH]
        for layer in range(2):
            block = w[f'blocks_{layer}']
            h = h + attention(h, h @ block['k'], h @ block['v']) @ block['o']
            h = h + np.maximum(h @ block['mlp_in'], 0) @ block['mlp_out']
        np.testing.assert_allclose(run['logits'][row], h @ w['unembed'], rtol=1e-5, atol=1e-5)


def test_rope_model_against_numpy():
    """arXiv 2406.02550: pre-LayerNorm, interleaved rotary positions, exact GELU, tied unembedding; here with biases."""
    run = measure('rope, pre-LN')
    w = float64(run['params'])

    def norm(x, scale, bias):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale + bias

    def rotate(x):
        """Pairs (2 i, 2 i + 1) of x (L, K) as complex numbers, turned by position * base^(-2 i / K)."""
        width = x.shape[1]
        angles = np.arange(len(x))[:, None] * 10000.0 ** (-2 * np.arange(width // 2) / width)
        turned = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angles)
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

    for row in (0, -1):
        h = w['embed'][TOKENS[row]]
        for layer in range(2):
            block = w[f'blocks_{layer}']
            x = norm(h, block['attn_norm_scale'], block['attn_norm_bias'])
            q, k, v = (x @ block[role] + block[f'{role}_bias'] for role in 'qkv')
            heads = [slice(0, 4), slice(4, 8)]
            z = np.concatenate([attention(rotate(q[:, s]), rotate(k[:, s]), v[:, s]) for s in heads], -1)
            h = h + z @ block['o'] + block['o_bias']
            x = norm(h, block['mlp_norm_scale'], block['mlp_norm_bias'])
            h = h + gelu(x @ block['mlp_in'] + block['mlp_in_bias']) @ block['mlp_out'] + block['mlp_out_bias']
        h = norm(h, w['norm_scale'], w['norm_bias'])
        np.testing.assert_allclose(run['logits'][row], h @ w['embed'].T, rtol=1e-5, atol=1e-5)


def test_llama_block_against_numpy():
    """RMSNorm, rotary halves, four query heads that share two key-value heads, gated feed-forward."""
    run = measure('llama')
    w, acts = run['params']['blocks_0'], run['acts']
    x = acts['blocks.0.resid_pre'][0]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w['attn_norm_scale']
    q, k, v = ((x @ w[role]).reshape(LENGTH, -1, 2) for role in 'qkv')

    def rotate(x):
        angles = np.arange(LENGTH)[:, None]  # heads of width 2 have the one frequency 1
        a, b = x[..., :1], x[..., 1:]
        return np.concatenate([a * np.cos(angles)[:, None] - b * np.sin(angles)[:, None],
                               a * np.sin(angles)[:, None] + b * np.cos(angles)[:, None]], -1)

    q, k = rotate(q), rotate(k)
    z = np.concatenate([attention(q[:, head], k[:, head // 2], v[:, head // 2]) for head in range(4)], -1)
    mid = acts['blocks.0.resid_pre'][0] + z @ w['o']
    np.testing.assert_allclose(acts['blocks.0.resid_mid'][0], mid, atol=1e-5)
    x = mid / np.sqrt((mid**2).mean(-1, keepdims=True) + 1e-5) * w['mlp_norm_scale']
    gate = x @ w['mlp_gate']
    out = mid + (gate / (1 + np.exp(-gate)) * (x @ w['mlp_in'])) @ w['mlp_out']
    np.testing.assert_allclose(acts['blocks.0.resid_post'][0], out, atol=1e-5)


def test_partial_rotation_turns_halves_of_the_first_share():
    run = measure('neox')
    cfg, acts, w = run['cfg'], run['acts'], run['params']['blocks_0']
    h = acts['blocks.0.resid_pre'][0]
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5)
    x = h * w['attn_norm_scale'] + w['attn_norm_bias']
    q = (x @ w['q'] + w['q_bias']).reshape(LENGTH, 2, 4)
    angles = np.arange(LENGTH)[:, None] / 4  # two dimensions are rotated, by the one frequency 1, divided by 4
    first = q[..., 0] * np.cos(angles) - q[..., 1] * np.sin(angles)
    second = q[..., 0] * np.sin(angles) + q[..., 1] * np.cos(angles)
    expected = np.concatenate([first[..., None], second[..., None], q[..., 2:]], -1)
    np.testing.assert_allclose(acts['blocks.0.attn.q'][0], expected, atol=1e-5)
    # Parallel: the feed-forward reads the input of the block.
    x = h * w['mlp_norm_scale'] + w['mlp_norm_bias']
    mid = acts['blocks.0.resid_mid'][0]
    expected = mid + gelu(x @ w['mlp_in'] + w['mlp_in_bias']) @ w['mlp_out'] + w['mlp_out_bias']
    np.testing.assert_allclose(acts['blocks.0.resid_post'][0], expected, atol=1e-5)
    assert config.rotary_width(cfg) == 2


def test_embedding_with_types_and_taps():
    run = measure('types and taps')
    w = run['params']
    x = w['embed'][TOKENS] + w['type'][np.arange(LENGTH) % 3]
    padded = np.pad(x, ((0, 0), (2, 0), (0, 0)))
    expected = sum(w['conv'][back] * padded[:, 2 - back : 2 - back + LENGTH] for back in range(3))
    np.testing.assert_allclose(run['acts']['embed'], expected, atol=1e-6)


def test_merged_blocks_and_missing_residual():
    run = measure('merged')
    acts, w = run['acts'], run['params']
    h = acts['blocks.1.resid_pre'][0]
    q, k = h @ w['blocks_1']['q'], h @ w['blocks_1']['k']
    attn = 0
    for head in range(2):
        own = slice(3 * head, 3 * head + 3)
        ov = w['blocks_1']['ov'][:, 8 * head : 8 * head + 8]
        attn = attn + attention(math.sqrt(3) * q[:, own], k[:, own], h @ ov)  # scores are not scaled
    np.testing.assert_allclose(acts['blocks.1.attn_out'][0], attn, atol=1e-5)
    # No residual, no feed-forward: the block is its attention.
    np.testing.assert_array_equal(acts['blocks.1.resid_post'], acts['blocks.1.attn_out'])
    mid = acts['blocks.0.resid_mid'][0]
    expected = mid + np.maximum(mid @ w['blocks_0']['mlp_linear'], 0)
    np.testing.assert_allclose(acts['blocks.0.resid_post'][0], expected, atol=1e-5)


def test_sinusoids_and_post_norm():
    run = measure('post norm')
    acts, w = run['acts'], run['params']
    position = acts['embed'] - w['embed'][TOKENS]
    t, pair = np.arange(LENGTH)[:, None], np.arange(4)
    angles = t / 10000.0 ** (2 * pair / 8)
    np.testing.assert_allclose(position[0, :, 0::2], np.sin(angles), atol=1e-5)
    np.testing.assert_allclose(position[0, :, 1::2], np.cos(angles), atol=1e-5)
    for name, role in (('resid_mid', 'attn_norm'), ('resid_post', 'mlp_norm')):
        block = w['blocks_0']
        value = (acts[f'blocks.0.{name}'] - block[f'{role}_bias']) / block[f'{role}_scale']
        np.testing.assert_allclose(value.mean(-1), 0, atol=1e-5)
        np.testing.assert_allclose(value.var(-1), 1, atol=1e-3)
    np.testing.assert_array_equal(acts['final'], acts['blocks.0.resid_post'])


# Hooks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('variant', ['llama', 'merged'])
def test_a_hook_changes_its_activation_and_what_follows(variant):
    cfg = make(variant)
    every = names.activation_names(cfg)

    def noise(shape):
        return np.random.default_rng(7).normal(size=shape).astype(np.float32)

    @quick_jit
    def noised(params, amounts):
        hooks = {name: lambda x, amount=amount: x + amount * noise(x.shape) for name, amount in amounts.items()}
        return model.apply(params, TOKENS, cfg=cfg, hooks=hooks, capture='*')

    params, none = random_params(cfg), dict.fromkeys(every, 0.0)
    plain, acts = noised(params, none)
    for place, name in enumerate(every):
        logits, changed = noised(params, none | {name: 0.5})
        np.testing.assert_allclose(changed[name], acts[name] + 0.5 * noise(acts[name].shape), atol=1e-6)
        assert np.abs(logits - plain).max() > 1e-2, name
        # What is computed before stays as it was.
        for earlier in every[:place]:
            np.testing.assert_array_equal(changed[earlier], acts[earlier])
        np.testing.assert_array_equal(changed['logits'], logits)


def test_patching_the_first_input_gives_the_logits_of_its_source():
    cfg = make('rope in one layer')

    @quick_jit
    def patch(params, source, target):
        clean, acts = model.apply(params, source, cfg=cfg, capture='blocks.0.resid_pre')
        hooks = {'blocks.0.resid_pre': lambda x: acts['blocks.0.resid_pre']}
        return clean, model.apply(params, target, cfg=cfg, hooks=hooks)[0], model.apply(params, target, cfg=cfg)[0]

    clean, patched, corrupted = patch(random_params(cfg), TOKENS, (TOKENS + 3) % VOCAB)
    np.testing.assert_array_equal(patched, clean)
    assert np.abs(corrupted - clean).max() > 0.1


def test_capture_takes_names_and_patterns():
    cfg = make('recall')
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))

    def captured(capture):
        return set(jax.eval_shape(lambda p: model.apply(p, TOKENS, cfg=cfg, capture=capture)[1], params))

    assert captured(()) == set()
    assert captured('embed') == {'embed'}
    assert captured('blocks.*.attn.pattern') == {'blocks.0.attn.pattern', 'blocks.1.attn.pattern'}
    assert captured(['blocks.1.mlp.post', 'final', 'blocks.1.mlp*']) == {
        'blocks.1.mlp.pre', 'blocks.1.mlp.post', 'blocks.1.mlp_out', 'final'}


@pytest.mark.parametrize('options, found, advice', [
    ({'capture': 'blocks.0.atn.pattern'}, "'blocks.0.atn.pattern'", "did you mean 'blocks.0.attn.pattern'?"),
    ({'capture': ['embed', 'blocks.2.*']}, "'blocks.2.*'", 'Allowed: embed, blocks.0.resid_pre'),
    ({'capture': 'blocks.0.mlp.gate'}, "'blocks.0.mlp.gate'", "did you mean 'blocks.0.mlp.pre'?"),
    ({'hooks': {'blocks.0.mlp.posts': lambda x: x}}, "'blocks.0.mlp.posts'", "did you mean 'blocks.0.mlp.post'?"),
    ({'hooks': {'blocks.*.mlp.post': lambda x: x}}, "'blocks.*.mlp.post'", 'Allowed: embed'),
    ({'hooks': {'embed': lambda x: x[:, :2]}}, "'embed' returned float32[7, 2, 8]", 'float32[7, 6, 8]'),
    ({'hooks': {'embed': lambda x: x.astype(jnp.bfloat16)}}, 'bfloat16[7, 6, 8]', 'float32[7, 6, 8]'),
    ({'hooks': {'embed': lambda x: 0.0}}, "'embed' returned float32[]", 'float32[7, 6, 8]'),
])
def test_errors_of_hooks_and_captures(options, found, advice):
    cfg = make('recall')
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))
    with pytest.raises(ConfigError) as error:
        jax.eval_shape(lambda p: model.apply(p, TOKENS, cfg=cfg, **options), params)
    message = str(error.value)
    assert message.isprintable() and found in message and advice in message and 'llowed' in message


@pytest.mark.parametrize('shape, found', [((LENGTH,), 'tokens[None]'), ((2, LENGTH + 1), 'length 7'), ((2, 0), '0')])
def test_errors_of_tokens(shape, found):
    cfg = make('recall')
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))
    with pytest.raises(ConfigError) as error:
        jax.eval_shape(lambda p: model.apply(p, jnp.zeros(shape, int), cfg=cfg), params)
    assert found in str(error.value) and 'allowed' in str(error.value) and str(error.value).isprintable()


@pytest.mark.parametrize('variant', ['types and taps', 'recall'])
def test_numpy_parameters_serve_in_a_function_of_the_tokens(variant):
    cfg = make(variant)
    params = random_params(cfg)  # numpy, as the parameters of a loaded run
    logits = jax.eval_shape(lambda tokens: model.apply(params, tokens, cfg=cfg)[0], jnp.asarray(TOKENS))
    assert logits.shape == (*TOKENS.shape, VOCAB)


def test_feed_forward_and_unembedding_alone():
    run = measure('llama')
    cfg, params, acts = run['cfg'], run['params'], run['acts']

    @quick_jit
    def alone(params, mid, final):
        return model.feed_forward(params, mid, cfg=cfg, layer=1), model.unembed(params, final, cfg=cfg)

    out, logits = alone(params, acts['blocks.1.resid_mid'], acts['final'])
    np.testing.assert_allclose(out, acts['blocks.1.mlp_out'], atol=1e-6)
    np.testing.assert_allclose(logits, run['logits'], atol=1e-6)
    with pytest.raises(ConfigError, match='layer 1 has no feed-forward'):
        model.feed_forward(params, acts['final'], cfg=make('merged'), layer=1)


# Initialisation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('init', ['torch', 'fan_in', 'normal'])
def test_scale_of_initial_parameters(init):
    cfg = ModelConfig(num_layers=2, d_model=64, d_mlp=256, vocab_size=64, max_len=64, num_types=64, conv_width=2,
                      init=init, init_std=0.05, embed_std=0.7, pos_std=0.3, conv_init=0.25, init_depth_scaled=('o',),
                      norm='layernorm', bias=True)
    draw = quick_jit(lambda seed: model.init(jax.random.key(seed), cfg))
    params, again, other = jax.tree.map(np.asarray, [draw(0), draw(0), draw(1)])
    jax.tree.map(np.testing.assert_array_equal, params, again)

    np.testing.assert_array_equal(params['conv'], 0.25)
    stds = {'embed': 0.7, 'type': 0.7, 'pos': 0.3}
    matrices = {'unembed': 64, **dict.fromkeys(('q', 'k', 'v', 'o', 'mlp_in'), 64), 'mlp_out': 256}
    law = {'torch': lambda n: 1 / math.sqrt(3 * n), 'fan_in': lambda n: 1 / math.sqrt(n), 'normal': lambda n: 0.05}
    stds |= {role: law[init](fan_in) for role, fan_in in matrices.items()}
    stds['o'] /= 2  # sqrt(2 num_layers)
    normalised = []
    for role, std in stds.items():
        for tree in (params, other):
            values = (tree | tree['blocks_1'])[role].ravel()
            # The standard error of a standard deviation is at most std / sqrt(2 n), that of a mean std / sqrt(n).
            assert abs(values.std() / std - 1) < 4 / math.sqrt(2 * values.size), role
            assert abs(values.mean()) < 4 * std / math.sqrt(values.size), role
            uniform = init == 'torch' and role in matrices
            assert (abs(values).max() <= std * math.sqrt(3) * (1 + 1e-6)) == uniform, role
            if uniform:
                assert abs(values).max() > 0.99 * std * math.sqrt(3)
            normalised.append(values / std)
    # No entry is drawn twice, within a seed or between seeds: independent draws are nearly all different.
    values = np.concatenate(normalised).round(6)
    assert len(np.unique(values)) > 0.95 * len(values)
    assert {role for role, value in params['blocks_0'].items() if np.all(value == 1)} == {
        'attn_norm_scale', 'mlp_norm_scale'}
    assert {role for role, value in params['blocks_0'].items() if np.all(value == 0)} == {
        'attn_norm_bias', 'mlp_norm_bias', *(f'{role}_bias' for role in ('q', 'k', 'v', 'o', 'mlp_in', 'mlp_out'))}


def test_size_of_the_model_of_the_paper():
    cfg = config.from_config_dict(get_config('recall.py:'))
    assert cfg.model.d_model == 256
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg.model))
    trainable, frozen = optim.split(shapes, cfg.optim.frozen)
    count = lambda tree: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))  # noqa: E731
    assert count(trainable) == 1_441_792  # spec/recall.md, 3.1
    assert count(frozen) == model.num_parameters(cfg.model) - 1_441_792


def test_frozen_parameters_do_not_move(smoke):
    smoke.model.num_layers = 1
    smoke.eval.truncations = ()
    smoke.task.update(table='uniform', table_size=5, noise_token='extra', length=4, loss_on='all')
    assert smoke.optim.frozen == ('embed', 'pos', 'unembed')
    cfg = config.from_config_dict(smoke)
    settings = {name: values[0] for name, values in cfg.coordinates().items()}
    # Drawing parameters would take longer to compile than the step itself.
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(lambda: train.init(settings, cfg=cfg)))
    state = state._replace(params=random_params(cfg.model), nan_step=np.int32(-1))

    @quick_jit
    def step(state):
        return train.train_step(state, train.init_task(settings, cfg=cfg), settings, cfg=cfg, skip=False)

    new_state, loss = step(state)
    assert np.isfinite(loss) and new_state.step == 1 and new_state.nan_step == -1
    before, after = dict(state.params), dict(new_state.params)
    for role in cfg.optim.frozen:
        np.testing.assert_array_equal(before.pop(role), after.pop(role))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.mean(old != new) > 0.5
