"""Models of the official modular code: the same logits, the pools of its seeds, and a run directory of them."""

import itertools
import random
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import make_official_checkpoint as maker
import numpy as np
import pytest
from conftest import ROOT

from lingrok import load_run, model, train, verify
from lingrok.config import ConfigError
from lingrok.pretrained import modular
from lingrok.run import RunError, write_imported

SCRIPT = ROOT / 'experiments' / 'modular' / 'import_official.py'
TOKENS_BL = np.random.default_rng(1).integers(0, 5, (3, 17))
RELEASED = {  # of the official repository's figures
    'd4': 'rope_decoder_p29_base29_row32_ntask384_nvar2_dsplitTrue_dfrac80.0_relu_n512_h4_d4_lctx512_I1_dI0_adamw_'
          'bs1536_T200000_Tw10000_Trshf1_lr1.50e-04_wd2.00e+00',
    'd2': 'rope_decoder_p29_base29_row32_ntask512_nvar2_dsplitTrue_dfrac60.0_relu_n512_h4_d2_lctx512_I2_dI0_adamw_'
          'bs1024_T200000_Tw10000_Trshf1_lr1.50e-04_wd2.00e+00',
}


def save(directory, state, *, wrap='', **name):
    return maker.save(directory / maker.official_name(**name), state, wrap=wrap)


def official_logits(state, tokens_BL, *, heads, act, half_split=False):
    """The forward pass of the official model in float64, from its state dict."""
    w = {name: np.asarray(value, np.float64) for name, value in state.items()}

    def norm(name, x):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f'{name}.weight'] + w[f'{name}.bias']

    def rotate(x):  # (B, H, L, K) as complex numbers
        width = x.shape[-1]
        turn = np.exp(1j * np.arange(x.shape[2])[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width))
        if half_split:
            y = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turn
            return np.concatenate([y.real, y.imag], -1)
        y = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([y.real, y.imag], -1).reshape(x.shape)

    def attention(name, x):
        batch, length, width = x.shape
        q, k, v = (part.reshape(batch, length, heads, -1).swapaxes(1, 2)
                   for part in np.split(x @ w[f'{name}.to_qkv.weight'].T, 3, -1))
        scores = rotate(q) @ rotate(k).swapaxes(2, 3) / np.sqrt(width / heads)
        weights = np.exp(np.where(np.tri(length, dtype=bool), scores - scores.max(-1, keepdims=True), -np.inf))
        z = weights / weights.sum(-1, keepdims=True) @ v
        return z.swapaxes(1, 2).reshape(x.shape) @ w[f'{name}.o.weight'].T

    def feed_forward(name, x):
        if act == 'swiglu':
            gate = x @ w[f'{name}.w1.weight'].T
            return (gate / (1 + np.exp(-gate)) * (x @ w[f'{name}.w3.weight'].T)) @ w[f'{name}.w2.weight'].T
        x = x @ w[f'{name}.c_fc.weight'].T
        gelu = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return (gelu if act == 'gelu' else np.maximum(x, 0)) @ w[f'{name}.c_proj.weight'].T

    h = w['transformer.wte.weight'][tokens_BL]
    for n in range(sum(name.endswith('ln_1.bias') for name in w)):
        block = f'transformer.h.{n}'
        h = h + attention(f'{block}.attn', norm(f'{block}.ln_1', h))
        h = h + feed_forward(f'{block}.mlp', norm(f'{block}.ln_2', h))
    return norm('transformer.ln_f', h) @ w['lm_head.weight'].T


def logits(path, **given):
    cfg, params = modular.official(path, **given)
    return np.asarray(jax.jit(lambda params, tokens: model.apply(params, tokens, cfg=cfg)[0])(params, TOKENS_BL)), cfg


@pytest.mark.parametrize('act, tied, heads, depth', [
    ('relu', True, 2, 2), ('gelu', False, 1, 1), ('swiglu', True, 2, 1),
])
def test_logits_are_those_of_the_official_model(act, tied, heads, depth, tmp_path):
    state = maker.state_dict(np.random.default_rng(0), act=act, tied=tied, heads=heads, depth=depth)
    found, cfg = logits(save(tmp_path, state, act=act, heads=heads, depth=depth))
    expected = official_logits(state, TOKENS_BL, heads=heads, act=act)
    assert found.dtype == np.float32 and found.shape == (3, 17, 23)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert cfg.tied == tied and cfg.vocab_size == 23
    other = official_logits(state, TOKENS_BL, heads=heads, act=act, half_split=True)
    assert np.abs(other - expected).max() > 0.1


def test_prefixes_wrappings_and_buffers_change_nothing(tmp_path):
    state = maker.state_dict(np.random.default_rng(0), depth=1)
    cfg, params = modular.official(save(tmp_path, state, depth=1))
    bare = {name: value for name, value in state.items() if not name.endswith('freqs')}
    for prefix, wrap, kept in (('module.', '', state), ('_orig_mod.module.', 'model', state), ('', '', bare)):
        other = {prefix + name: value for name, value in kept.items()}
        again = modular.official(save(tmp_path, other, wrap=wrap, depth=1))
        assert again[0] == cfg
        jax.tree.map(np.testing.assert_array_equal, again[1], params)


def test_half_precision_is_read_as_float32(tmp_path):
    state = {name: value.astype(jnp.bfloat16) for name, value in maker.state_dict(np.random.default_rng(0)).items()}
    _, params = modular.official(save(tmp_path, state))
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
    expected = state['transformer.h.1.mlp.c_fc.weight'].astype(np.float32).T
    np.testing.assert_array_equal(params['blocks_1']['mlp_in'], expected)


def test_every_parameter_has_the_shape_of_its_config(tmp_path):
    for act in modular.KINDS:
        state = maker.state_dict(np.random.default_rng(0), act=act, tied=act != 'gelu')
        cfg, params = modular.official(save(tmp_path, state, act=act))
        specs = model.parameter_specs(cfg)
        shapes = jax.tree.map(lambda spec: spec.shape, specs, is_leaf=lambda x: isinstance(x, model.Spec))
        assert shapes == jax.tree.map(np.shape, params)


def test_heads_follow_from_the_frequencies(tmp_path):
    state = maker.state_dict(np.random.default_rng(0), depth=1)
    path = maker.save(tmp_path / 'renamed.pth', state)
    assert modular.official(path)[0].num_heads == 2
    bare = {name: value for name, value in state.items() if not name.endswith('freqs')}
    path = maker.save(tmp_path / 'renamed.pth', bare)
    assert modular.official(path, num_heads=4)[0].num_heads == 4
    with pytest.raises(ConfigError, match='give --num_heads'):
        modular.official(path)


def changed(name, value=None, **options):
    """A state dict with one tensor changed, or without it."""
    state = maker.state_dict(np.random.default_rng(0), depth=1, **options)
    return {**state, name: value} if value is not None else {k: v for k, v in state.items() if k != name}


F32 = np.float32
QKV = 'transformer.h.0.attn.to_qkv.weight'
FREQS = 'transformer.h.0.attn.rotary_emb.freqs'
BAD_STATES = {
    'no queries': (changed(QKV), f"no tensor '{QKV}'"),
    'no final norm': (changed('transformer.ln_f.bias'), "no tensor 'transformer.ln_f.bias'"),
    'no head': (changed('lm_head.weight'), "no tensor 'lm_head.weight'"),
    'no embedding': (changed('transformer.wte.weight'), 'another model'),
    'an embedding of rank 1': (changed('transformer.wte.weight', np.ones(23, F32)), 'another model'),
    'an empty embedding': (changed('transformer.wte.weight', np.ones((23, 0), F32)), 'another model'),
    'another model': ({'fc.weight': np.ones((2, 2), F32)}, 'another model'),
    'a position table': (changed('transformer.wpe.weight', np.ones((9, 8), F32)), 'unknown tensors.*wpe'),
    'a bias': (changed('transformer.h.0.attn.o.bias', np.ones(8, F32)), 'unknown tensors.*o.bias'),
    'queries of another shape': (changed(QKV, np.ones((16, 8), F32)), r'has shape \[16, 8\]; allowed: \[24, 8\]'),
    'queries transposed': (changed(QKV, np.ones((8, 24), F32)), r'allowed: \[24, 8\]'),
    'a norm of another width': (changed('transformer.h.0.ln_2.bias', np.ones(9, F32)), r'allowed: \[8\]'),
    'a scalar feed-forward': (changed('transformer.h.0.mlp.c_fc.weight', np.ones((), F32)), 'd_mlp=0'),
    'whole numbers': (changed(QKV, np.ones((24, 8), np.int64)), 'int64; allowed: floating point'),
    'frequencies of another base': (changed(FREQS, np.array([1, 0.2], F32)), 'not those of base 10000'),
    'frequencies of another width': (changed(FREQS, np.ones(3, F32)), r'freqs has shape \[3\]; allowed: \[2\]'),
    'another depth': (maker.state_dict(np.random.default_rng(0), depth=2), 'num_layers=2, .* says 1'),
    'another width': (maker.state_dict(np.random.default_rng(0), depth=1, width=16), 'd_model=16, .* says 8'),
    'another vocabulary': (maker.state_dict(np.random.default_rng(0), p=7), '25 embeddings; allowed: 23 for p=5'),
    'another feed-forward': (maker.state_dict(np.random.default_rng(0), act='swiglu', depth=1), 'c_fc'),
}


@pytest.mark.parametrize('case', BAD_STATES)
def test_a_state_dict_of_another_model_is_refused(case, tmp_path):
    state, message = BAD_STATES[case]
    with pytest.raises(ConfigError, match=message) as error:
        modular.official(save(tmp_path, state, depth=1))
    assert '\n' not in str(error.value)


def test_a_missing_block_is_named(tmp_path):
    state = changed('transformer.h.2.ln_1.bias', np.ones(8, F32))
    with pytest.raises(ConfigError, match="no tensor 'transformer.h.1.attn"):
        modular.official(maker.save(tmp_path / 'renamed.pth', state))


def test_settings_are_read_from_the_name():
    found = modular.settings(f'/some/place/{RELEASED["d4"]}.pth')
    assert found == modular.Settings(
        p=29, num_examples=32, num_tasks=384, alpha=0.8, activation='relu', num_heads=4, num_layers=4,
        d_model=512, max_len=512, seed=1,
        input_seed=0, batch_size=1536, num_steps=200_000, warmup_steps=10_000, learning_rate=1.5e-4, weight_decay=2.0,
    )
    early = RELEASED['d4'].replace('_T200000', '_t160000_T200000').replace('dI0', 'dI7').replace('wd2', 'wd5')
    found = modular.settings(f'noembdTrue_paraleFalse_pltask128_{early}.pth', num_heads=8)
    assert (found.rectangles, found.num_rectangular, found.step, found.num_steps) == (False, 128, 160_000, 200_000)
    assert (found.input_seed, found.weight_decay, found.num_heads) == (7, 5.0, 8)


@pytest.mark.parametrize('name, message', [
    ('rope_encoder_p29.pth', 'encoder'), ('rope_decoder_p29_base7.pth', 'base 7'), ('p29_nvar3.pth', '3 variables'),
    ('p2.5.pth', "cannot read 'p2.5'"), ('lr1e-4e.pth', 'cannot read'), ('row1.pth', 'num_examples=1'),
    ('dfrac180.0.pth', 'alpha=1.8'), ('t30_T20.pth', 'step=30'), ('paraleTrue_pTrue.pth', "cannot read 'pTrue'"),
])
def test_names_of_other_models_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        modular.settings(name)


def test_task_lists_of_the_released_models():
    """Beginning of both lists, and whether the task (6, 6) of the paper's figures is a pre-training task."""
    for name, first, holds in (('d4', [(4, 21), (20, 2), (28, 9), (26, 28)], False),
                               ('d2', [(1, 28), (3, 6), (2, 28), (12, 21)], True)):
        found = modular.settings(RELEASED[name])
        tasks = modular.official_tasks(found, 29)
        assert tasks[:4] == first and ((6, 6) in tasks[: found.num_tasks]) == holds
        assert sorted(tasks) == list(itertools.product(range(29), repeat=2))


@pytest.mark.parametrize('num_first, rectangles, num_random', [(8, True, 0), (8, True, 6), (0, True, 9), (7, False, 0)])
def test_pools_are_drawn_as_the_official_script_draws_them(num_first, rectangles, num_random):
    """With the global generators, in the order of the script: tasks, corners, more tasks, unseen tasks, inputs."""
    p, seed, input_seed = 7, 5, 3
    random.seed(seed)
    plane = list(itertools.product(range(p), repeat=2))
    listed = [list(task) for task in random.sample(plane, num_first // 4 if rectangles else num_first)]
    for a, b in listed[:] if rectangles else []:
        found = False
        while not found:
            x = random.choice([i for i in range(p) if i != a and i != b])
            y = random.choice([i for i in range(p) if i != a and i != b and i != x])
            found = not any(corner in listed for corner in ([a, y], [x, b], [x, y]))
        listed.extend([[a, y], [x, b], [x, y]])
    left = list(set(plane) - {tuple(task) for task in listed})
    listed += [list(task) for task in random.sample(left, num_random)]
    unseen = list(set(plane) - {tuple(task) for task in listed})
    random.shuffle(unseen)
    np.random.seed(input_seed)
    numbers = np.arange(4 * p * p).reshape(4, p * p)
    np.random.shuffle(numbers.T)

    options = modular.Settings(num_tasks=num_first + num_random, num_rectangular=num_first, rectangles=rectangles,
                               alpha=0.6, seed=seed, input_seed=input_seed)
    state = modular.task_state(options, p)
    assert state.tasks_T2[: state.num_tasks].tolist() == listed
    assert state.tasks_T2[state.num_tasks:][::-1].tolist() == [list(task) for task in unseen]
    assert (state.inputs_T2 @ [p, 1]).tolist() == numbers[0].tolist()
    assert (state.num_tasks, state.num_inputs) == (num_first + num_random, 29)


@pytest.mark.parametrize('options, p, message', [
    ({'num_tasks': 0}, 29, 'give --num_tasks'), ({'seed': -1}, 29, 'give --seed'), ({'alpha': 0.0}, 29, 'give --alpha'),
    ({'num_tasks': 6}, 29, 'multiple of 4'), ({'num_tasks': 8, 'num_rectangular': 12}, 29, 'more than'),
    ({'num_tasks': 24}, 5, 'no rectangle is left'), ({'num_tasks': 28}, 5, 'no unseen task'),
    ({'num_tasks': 4}, 3, 'at least 5'),
])
def test_impossible_pools_are_refused(options, p, message):
    with pytest.raises(ConfigError, match=message):
        modular.task_state(modular.Settings(**{'num_tasks': 8, 'alpha': 0.5, 'seed': 0, **options}), p)


def start(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300)


@pytest.fixture(name='imported', scope='module')
def _imported(tmp_path_factory):
    """A run directory made of the files of two steps, and the two state dicts."""
    directory = tmp_path_factory.mktemp('official')
    states = {step: maker.state_dict(np.random.default_rng(step), depth=1) for step in (12, 20)}
    files = [save(directory, state, depth=1, step=step) for step, state in states.items()]
    done = start(*files, f'--workdir={directory / "run"}', '--eval_batch_size=32')
    assert done.returncode == 0, done.stderr
    assert 'ood_test/accuracy_last' in done.stdout
    return load_run(directory / 'run'), states


def test_an_imported_run_is_a_sound_run(imported):
    run, states = imported
    assert list(verify.problems(run.path)) == []
    assert run.finished and run.steps == [12, 20] and run.config.num_replicas == 1
    expected = modular.task_state(modular.settings(maker.official_name()), 5)
    jax.tree.map(np.testing.assert_array_equal, run.task_state(), expected)
    for step, state in states.items():
        params = run.params(step)
        np.testing.assert_array_equal(params['embed'], state['transformer.wte.weight'])
        np.testing.assert_array_equal(params['blocks_0']['v'], state[QKV][16:].T)


def test_an_imported_run_has_its_metrics(imported):
    run, states = imported
    metrics = run.metrics()
    accuracy = metrics['ood_test/accuracy_last']
    assert accuracy.steps.tolist() == [12, 20] and metrics['ood_test/accuracy_by_shot'].values.shape == (2, 1, 6)
    config = run.config
    assert (config.task.num_tasks, config.task.alpha, config.task.geometry) == (8, 0.6, 'rectangular_official')
    assert (config.optim.learning_rate, config.optim.warmup_steps, config.train.batch_size) == (1.5e-4, 5, 16)

    # The same sequences as the evaluation has, and the logits of the official model.
    key = train.stream_key({'seed.eval': 0}, 'eval')
    draw = jax.jit(lambda state: config.task.sample(state, key, split='ood_test', batch_size=32))
    batch = jax.device_get(draw(run.task_state()))
    for place, state in enumerate(states.values()):
        guess = official_logits(state, batch.tokens_BL, heads=2, act='relu')[:, -1].argmax(-1)
        assert accuracy.values[place, 0] == pytest.approx(np.mean(guess == batch.targets_BL[:, -1]))


def test_an_early_file_makes_an_unfinished_run(imported, tmp_path, monkeypatch):
    class Programs:
        settings = {}

        def __init__(self, cfg, **evaluation):
            self.put = self.fetch = lambda tree: tree

        def evaluate(self, params, task_state, settings):
            return {'ood_test/accuracy_last': np.zeros(1)}

    monkeypatch.setattr(train, 'Programs', Programs)
    cfg, params, state = imported[0].config, imported[0].params(12), imported[0].task_state()
    early = write_imported(cfg, {12: params}, state, tmp_path / 'run', origin={'file': 'hash'})
    assert not early.finished and early.steps == [12] and list(verify.problems(early.path)) == []
    with pytest.raises(RunError, match='choose another --workdir'):
        write_imported(cfg, {20: params}, state, tmp_path / 'run', origin={})
    assert early.steps == [12]


def test_a_bad_file_leaves_nothing_behind(tmp_path):
    path = save(tmp_path, maker.state_dict(np.random.default_rng(0)))
    with zipfile.ZipFile(path, 'a') as archive:
        archive.writestr('other/data.pkl', b'cposix\nsystem\n.')
    done = start(path, f'--workdir={tmp_path / "run"}')
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert 'error: ' in done.stderr and 'NAME/data.pkl' in done.stderr and not (tmp_path / 'run').exists()
