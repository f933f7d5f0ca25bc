"""Fine-tuning of a part, against training with everything else frozen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import get_config
from test_truncation import as_series, quick_jit, random_params

from lingrok import config, model, names, optim, train
from lingrok.analysis import finetune
from lingrok.config import VARIABLE_OPTIM, ConfigError
from lingrok.figures import editing as figures

ROWS, PARTS = 16, ('everything', 'feed-forwards', 'blocks.*.v')


def tiny():
    cfg = get_config('recall.py:smoke')
    cfg.model.d_model, cfg.model.d_mlp = 8, 12
    cfg.task.table, cfg.task.table_size, cfg.task.noise_token, cfg.task.length = 'uniform', 6, '5', 12
    cfg.optim.learning_rate = 0.1
    cfg.eval.truncations = ()
    return config.from_config_dict(cfg)


CFG = tiny()
PARAMS = jax.tree.map(lambda x: 0.6 * x, random_params(CFG.model, seed=4))  # far from saturated
NAMES = optim.parameter_names(PARAMS)


def trained_names(before, after) -> set[str]:
    changed = jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b))), before, after))
    return {name for name, is_changed in zip(NAMES, changed, strict=True) if is_changed}


def start(cfg):
    values = {name: jnp.float32(getattr(cfg.optim, name)) for name in VARIABLE_OPTIM}
    settings = {f'optim.{name}': value for name, value in values.items()} | {'seed.batch': jnp.int32(3)}
    trainable, _ = optim.split(PARAMS, cfg.optim.frozen)
    opt_state = optim.make_optimizer(cfg.optim, cfg.train.num_steps, values).init(trainable)
    return train.State(PARAMS, opt_state, jnp.int32(0), jnp.int32(-1)), settings


@functools.cache
def tuned():
    """Parameters after 3 steps of every part."""
    state, settings = start(CFG)
    task_state = CFG.task.init(jax.random.key(1))
    mask_P = finetune.masks(PARAMS, CFG.optim.frozen, PARTS)
    run = quick_jit(lambda mask_P: jax.lax.map(
        lambda mask: finetune.tune(state, task_state, settings, mask, 3, cfg=CFG).params, mask_P))
    after = run(mask_P)
    return {part: jax.tree.map(lambda x, i=i: np.asarray(x[i]), after) for i, part in enumerate(PARTS)}


def test_what_is_not_of_the_part_keeps_its_bits():
    found = {part: trained_names(PARAMS, after) for part, after in tuned().items()}
    blocks = {name for name in NAMES if name.startswith('blocks')}
    assert found['everything'] == blocks  # the run froze embeddings, positions and the unembedding
    assert found['feed-forwards'] == {name for name in blocks if '.mlp_' in name}
    assert found['blocks.*.v'] == {'blocks.0.v', 'blocks.1.v'}


def test_a_part_learns_as_if_the_rest_were_frozen():
    frozen = (*CFG.optim.frozen, *(name for name in NAMES if '.mlp_' not in name))
    cfg = dataclasses.replace(CFG, optim=dataclasses.replace(CFG.optim, frozen=frozen))
    state, settings = start(cfg)
    task_state = CFG.task.init(jax.random.key(1))
    step = quick_jit(lambda state: train.train_step(state, task_state, settings, cfg=cfg, skip=False)[0])
    for _ in range(3):
        state = step(state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), tuned()['feed-forwards'],
                 jax.tree.map(np.asarray, state.params))


@functools.cache
def measured():
    state = quick_jit(CFG.task.init)(jax.random.key(1))

    @quick_jit
    def fn(params, state, key):
        clean = CFG.task.sample(state, jax.random.split(key)[0], split='clean', batch_size=ROWS)
        run = functools.partial(finetune.finetune, params, state, key, CFG, num_steps=6, every=2, num_rows=ROWS)
        return run(parts=PARTS), clean, run(parts=PARTS[:1], noise_prob=1.0)

    return jax.tree.map(np.asarray, fn(PARAMS, state, jax.random.key(5)))


def test_curves_start_at_the_model_and_part_ways():
    found, clean, _ = measured()
    np.testing.assert_array_equal(found['finetune/steps'], [0, 2, 4, 6])
    metrics = quick_jit(lambda params: CFG.task.metrics(model.apply(params, clean.tokens_BL, cfg=CFG.model)[0], clean))
    expected = metrics(PARAMS)
    for quantity in finetune.QUANTITIES:
        for part in PARTS:
            assert found[f'{part}/{quantity}'].shape == (4,)
            assert found[f'{part}/{quantity}'][0] == pytest.approx(float(expected[quantity]), rel=1e-4, abs=1e-6)
    ends = [found[f'{part}/p_noise'][-1] for part in PARTS]
    assert len({round(float(x), 6) for x in ends}) == 3


def test_clean_data_lower_the_noise():
    """Clean sequences never show the noise token behind a trigger, those of noise_prob=1 nothing else."""
    found, _, noisy = measured()
    assert found['everything/p_noise'][-1] < found['everything/p_noise'][0] < noisy['everything/p_noise'][-1]


def test_when_gone():
    curves = {'p_noise': jnp.array([0.5, 0.2, 0.049, 0.3, 0.01]), 'p_correct': jnp.array([0.5, 0.6, 0.8, 0.7, 0.9])}
    found = finetune.when_gone(jnp.arange(5) * 3, curves)
    assert found['steps'] == 6
    assert found['change/p_correct'] == pytest.approx(0.3) and found['change/p_noise'] == pytest.approx(-0.451)
    never = finetune.when_gone(jnp.arange(2), {name: x[:2] for name, x in curves.items()})
    assert all(np.isnan(value) for value in never.values())


def test_parts_cover_every_role():
    """Attention and feed-forwards share no parameter, and no matrix is in neither."""
    cfg = config.ModelConfig(num_layers=5, d_model=4, d_mlp=4, vocab_size=3, max_len=2, bias=True, norm='layernorm',
                             mlp_kind=('mlp', 'gated', 'linear', 'linear_act', 'none'))
    params = random_params(cfg)
    chosen = {part: jax.tree.leaves(optim.match(params, patterns)) for part, patterns in finetune.PARTS.items()}
    for name, attention, feed in zip(optim.parameter_names(params), chosen['attention'], chosen['feed-forwards'],
                                     strict=True):
        role = name.rpartition('.')[2].removesuffix('_bias')
        assert attention == (role in ('q', 'k', 'v', 'o'))
        assert feed == (role in names.MATRIX_ROLES and not attention)


@pytest.mark.parametrize('options, message', [
    ({'parts': ('atention',)}, "no parameter is called 'atention'; did you mean 'attention'"),
    ({'parts': ('embed',)}, "nothing of 'embed' is left to train in this model; it has .*froze embed, pos, unembed"),
    ({'num_steps': 3, 'every': 4}, '3 steps, measured every 4; allowed'),
    ({'num_steps': 3, 'every': 0}, '3 steps, measured every 0; allowed'),
    ({'noise_prob': 1.5}, 'noise_prob=1.5; allowed: a number from 0 to 1'),
    ({'num_rows': 0}, '0 rows; allowed: at least 1'),
])
def test_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        finetune.finetune(PARAMS, None, jax.random.key(0), CFG, **options)


def test_learning_rates_that_differ_between_replicas_are_refused():
    cfg = dataclasses.replace(CFG, vary={'optim.learning_rate': (0.1, 0.2)})
    with pytest.raises(ConfigError, match='differ in optim.learning_rate; allowed: seeds and task values'):
        finetune.finetune(PARAMS, None, jax.random.key(0), cfg)


def test_figure_draws_every_part():
    series = as_series(measured()[0])
    series['feed-forwards/steps'].values[0] = [4, np.nan]
    noise, target, _, needed = figures.finetune(series, CFG).axes
    assert noise.get_legend_handles_labels()[1] == list(PARTS)
    np.testing.assert_allclose(target.lines[0].get_ydata(), measured()[0]['everything/p_correct'], rtol=1e-6)
    assert 'n=1 of 2' in {text.get_text() for text in needed.texts}
