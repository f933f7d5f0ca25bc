"""Probes of memories on weights made by hand, and the three gradient steps on a tiny model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, get_config

from lingrok import config, model, optim, sweep
from lingrok.analysis import associations, three_steps
from lingrok.config import ConfigError, ModelConfig
from lingrok.figures import induction
from lingrok.log import Series
from lingrok.tasks.base import Batch

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
V, L, D = 20, 16, 512


def hand_made(query='identity', value_output='factored'):
    """(cfg, params): nearly orthogonal random vectors, and memories stored as sums of outer products.

    wo1: even tokens answer with themselves, odd ones with the token before. wk0: position t + 1 finds t for t < 6,
    else position 0. wk1: triggers 3 and 5; trigger 3 finds itself, trigger 5 finds 7 before itself.
    """
    cfg = ModelConfig(d_model=D, vocab_size=V, max_len=L, query=query, value_output=value_output,
                      mlp_kind=('none', 'linear'), init='fan_in')
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda spec: rng.normal(size=spec.shape) * D**-0.5, model.parameter_specs(cfg),
                          is_leaf=lambda x: isinstance(x, model.Spec))
    embed, pos, unembed = params['embed'], params['pos'], params['unembed']
    first, last = params['blocks_0'], params['blocks_1']
    read = embed if value_output == 'merged' else embed @ last['v']
    copy = sum(np.outer(read[v], unembed[:, v - v % 2]) for v in range(V))
    last['ov' if value_output == 'merged' else 'o'] = copy
    written = embed @ (first['ov'] if value_output == 'merged' else first['v'] @ first['o'])
    keys = {'blocks_0': sum(np.outer(pos[t if t < 6 else 0], pos[t + 1]) for t in range(L - 1)),
            'blocks_1': np.outer(written[3], embed[3]) + np.outer(written[7] + 0.5 * written[5], embed[5])}
    for block, matrix in keys.items():
        # Queries turned by an orthogonal matrix meet keys turned by it.
        turn = np.linalg.qr(rng.normal(size=(D, D)))[0] if query == 'full' else np.eye(D)
        params[block] |= {'q': turn, 'k': matrix @ turn} if query == 'full' else {'k': matrix}
    bigram = rng.dirichlet(np.full(V, 0.3), V)
    last['mlp_linear'] = np.linalg.pinv(embed) @ np.log(bigram) @ np.linalg.pinv(unembed)
    return cfg, jax.tree.map(lambda x: np.asarray(x, np.float32), params), bigram


@pytest.mark.parametrize('query, value_output', [('identity', 'factored'), ('full', 'merged')])
def test_memories_made_by_hand(query, value_output):
    cfg, params, bigram = hand_made(query, value_output)
    most = jnp.arange(V) != 4

    @quick_jit
    def probes(params):
        flat = {**params, 'blocks_1': {**params['blocks_1'], 'mlp_linear': jnp.zeros((D, D))}}
        ff1 = functools.partial(associations.ff1, cfg=cfg, bigram_VV=bigram, mask_V=most)
        return {'wo1': associations.wo1(params, cfg), 'wk0': associations.wk0(params, cfg),
                'wk0_early': associations.wk0(params, cfg, positions=6),
                'wk1': associations.wk1(params, cfg, (3, 5)),
                'wk1_official': associations.wk1(params, cfg, (3, 5), candidates=(3, 5)),
                'ff1': ff1(params), 'ff1_uniform': ff1(flat)}

    found = probes(params)
    expected = {'wo1': 0.5, 'wk0': 6 / (L - 1), 'wk0_early': 1, 'wk1': 0.5, 'wk1_official': 1, 'ff1': 0,
                'ff1_uniform': np.delete(np.log(V) + (bigram * np.log(bigram)).sum(1), 4).mean()}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4, err_msg=name)


def test_random_weights_are_at_chance():
    cfg = ModelConfig(d_model=32, vocab_size=100, max_len=101, mlp_kind=('none',), num_heads=1)

    @quick_jit
    def probes(key):
        params = model.init(key, cfg)
        return jnp.stack([associations.wo1(params, cfg), associations.wk0(params, cfg), associations.wk1(params, cfg)])

    shares = np.mean([probes(key) for key in jax.random.split(jax.random.key(0), 10)], 0)
    # 1,000 answers, each right with probability 1/100: .01 with a standard error of .003.
    assert (shares > 0.001).all() and (shares < 0.022).all()


@pytest.mark.parametrize('probe, options, message', [
    ('wo1', {'num_heads': 2}, 'one head.*num_heads=2'),
    ('wo1', {'norm': 'rmsnorm'}, "model.norm='rmsnorm'"),
    ('wk0', {'conv_width': 2}, 'conv_width=2'),
    ('wk0', {'position': 'none'}, "model.position='none'"),
    ('wk0', {'max_len': 1}, 'max_len=1'),
    ('wk1', {'num_layers': 3}, 'num_layers=3'),
    ('ff1', {'mlp_kind': ('mlp', 'none')}, 'layer 1 has no feed-forward'),
])
def test_a_model_that_a_probe_cannot_read_is_refused(probe, options, message):
    cfg = ModelConfig(**{'d_model': 4, 'd_mlp': 4, 'vocab_size': 3, 'max_len': 2, **options})
    params = jax.tree.map(lambda spec: np.ones(spec.shape), model.parameter_specs(cfg),
                          is_leaf=lambda x: isinstance(x, model.Spec))
    more = (np.eye(3), np.ones(3)) if probe == 'ff1' else ()
    with pytest.raises(ConfigError, match=message):
        getattr(associations, probe)(params, cfg, *more)


def test_argmax_attention_by_hand():
    """Trigger 0 with target 1 in row 0, target 0 in row 1; the last label of row 0 is 2.

    position    0 1 2 3 4 5
    row 0       0 1 3 0 1 0
    row 1       3 0 0 0 3 3
    """
    tokens = np.array([[0, 1, 3, 0, 1, 0], [3, 0, 0, 0, 3, 3]])
    labels = np.concatenate([tokens[:, 1:], [[2], [3]]], 1)
    occurrence = np.array([[1, 0, 0, 2, 0, 3], [0, 1, 2, 3, 0, 0]])
    first = np.array([[0, 0, 1, 2, 0, 4], [0, 0, 1, 0, 3, 4]])  # what the first layer looks at
    last = np.array([[0, 0, 0, 1, 0, 4], [0, 0, 0, 2, 0, 0]])
    logits = np.zeros((2, 6, 4))
    logits[:, :, 1] = 1
    batch = Batch(tokens, labels, np.ones((2, 6)), {'occurrence_BL': occurrence})
    pattern = lambda chosen: jnp.asarray(np.eye(6)[chosen])  # noqa: E731
    measure = quick_jit(associations.argmax_attention)
    found = measure(pattern(first), pattern(last), logits, batch)
    # Behind triggers: row 0 positions 1 (looks at 0) and 4 (looks at 0, wrong); row 1 positions 2, 3 (wrong), 4.
    # Repeated triggers: row 0 at 3 (chose 1) and 5 (chose 4, label 2); row 1 at 2 (chose 0), 3 (chose 2, label 3).
    expected = {'previous': 3 / 5, 'previous_first': 1, 'follows': 3 / 4, 'label': 1 / 4, 'prediction': 2 / 4,
                'chosen_previous': 2 / 4, 'chosen_previous_own': 0, 'own_label': 2 / 6}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
    nothing = batch._replace(groups={'occurrence_BL': 0 * occurrence})
    assert all(np.isnan(x) for x in measure(pattern(first), pattern(last), logits, nothing).values())


def smoke_config(**options):
    smoke = get_config('induction.py:smoke')
    for name, value in options.items():
        section, _, field = name.partition('__')
        smoke[section][field] = value
    return config.from_config_dict(smoke)


def random_params(cfg: ModelConfig):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32), model.parameter_specs(cfg),
                        is_leaf=lambda x: isinstance(x, model.Spec))


def test_the_probe_reports_what_its_parts_measure():
    cfg = smoke_config(model__mlp_kind=('none', 'linear'))
    params, triggers = random_params(cfg.model), cfg.task.fixed_triggers

    @quick_jit
    def both(params, key):
        state = cfg.task.init(key)
        batch = cfg.task.sample(state, key, split='noisy', batch_size=8)
        logits, acts = model.apply(params, batch.tokens_BL, cfg=cfg.model, capture='*.attn.pattern')
        patterns = (acts[f'blocks.{layer}.attn.pattern'][:, 0] for layer in (0, 1))
        shares = associations.argmax_attention(*patterns, logits, batch)
        text = jnp.ones(cfg.task.vocab_size).at[jnp.array(triggers)].set(0)
        parts = {'wo1': associations.wo1(params, cfg.model), 'wk0': associations.wk0(params, cfg.model),
                 'wk0_early': associations.wk0(params, cfg.model), 'wk1': associations.wk1(params, cfg.model, triggers),
                 'wk1_triggers': associations.wk1(params, cfg.model, triggers, candidates=triggers),
                 'ff1': associations.ff1(params, cfg.model, state.bigram_VV, text)}
        expected = {f'association/{name}': x for name, x in parts.items()}
        expected |= {f'noisy/argmax_{name}': x for name, x in shares.items()}
        return associations.association_probe(params, {'noisy': batch}, cfg), expected

    found, expected = both(params, jax.random.key(0))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    assert np.isfinite(found['association/ff1']) and found['association/ff1'] > 0.1


@pytest.mark.parametrize('options, absent', [
    ({}, {'ff1'}),
    ({'task__num_triggers': 1}, {'ff1', 'wk1_triggers'}),
    ({'model__num_heads': 2}, {'wo1', 'wk0', 'wk0_early', 'wk1', 'wk1_triggers', 'ff1'}),
    ({'model__num_layers': 1, 'model__mlp_kind': ('mlp',)}, {'wk1', 'wk1_triggers'}),
])
def test_what_a_model_lacks_is_nan(options, absent):
    cfg = smoke_config(**options)
    noisy = np.tile(np.array(cfg.task.fixed_triggers[:1]), (1, 16))
    batch = Batch(noisy, noisy, None, {'occurrence_BL': np.ones((1, 16), int)})
    found = quick_jit(lambda params: associations.association_probe(params, {'noisy': batch}, cfg))(
        random_params(cfg.model))
    names = {name.partition('/')[2] for name, x in found.items() if name.startswith('association') and np.isnan(x)}
    assert names == absent


def test_transfer_tells_the_laws_of_targets_apart():
    """A model that knows the bigrams alone, on both laws."""
    vocab = smoke_config().task.vocab_size
    cfg = smoke_config(model__d_model=vocab, model__num_layers=1, model__position='none', eval__batch_size=200,
                       task__num_triggers=1)

    @quick_jit
    def found(key):
        state = cfg.task.init(key)
        params = jax.tree.map(lambda x: 0 * x, random_params(cfg.model))
        params = params | {'embed': jnp.eye(vocab), 'unembed': jnp.log(jnp.maximum(state.bigram_VV, 1e-9))}
        return associations.transfer(params, state, key, cfg), state.bigram_VV[cfg.task.fixed_triggers[0]]

    shares, row = found(jax.random.key(0))
    assert shares['transfer/bigram'] == pytest.approx(float(row.max()), abs=0.06)
    assert shares['transfer/uniform'] < 0.06 < shares['transfer/bigram']


def test_half_step():
    """Up, down, not at all, passing the middle twice, NaN."""
    steps = [0, 10, 20, 40]
    values = np.array([[0, 0.2, 0.6, 1], [3, 1, 1, 1], [0, 0.9, 0, 0.05], [0, 0.8, 0.2, 1], [0, np.nan, 1, 1]]).T
    np.testing.assert_allclose(associations.half_step(steps, values), [17.5, 5, np.nan, 6.25, np.nan])


STEPS = three_steps.model_config(8, 8, 128)


def test_sequences_of_the_three_steps():
    """Triggers stand where they should, nowhere else; labels, triggers and their pairs are balanced."""
    size = three_steps.piece_size(STEPS)
    sample = quick_jit(functools.partial(three_steps.sample, cfg=STEPS))
    batches = [sample(jax.random.key(i), index=i) for i in range(7)]
    tokens, labels = (np.concatenate([getattr(b, name) for b in batches]) for name in ('tokens_BL', 'targets_BL'))
    trigger, first = (np.concatenate([b.groups[name] for b in batches]) for name in ('trigger_B', 'first_B'))
    rows = np.arange(7 * size)
    assert size == 64 and ((tokens == trigger[:, None]).sum(1) == 2).all()
    second = 7 - np.argmax(tokens[:, ::-1] == trigger[:, None], 1)
    assert (tokens[rows, first] == trigger).all() and (second >= first + 2).all()
    answer, other = labels[rows, second], np.arange(8) != second[:, None]
    assert (answer == tokens[rows, first + 1]).all() and (labels[:, :-1] == tokens[:, 1:])[other[:, :-1]].all()
    assert set(first) == set(range(6)) and set(second) == set(range(2, 8)) and set(tokens[:, 3]) == set(range(8))
    pairs = np.bincount(trigger * 8 + answer, minlength=64).reshape(8, 8)
    np.testing.assert_array_equal(pairs, 8 * (1 - np.eye(8)))
    np.testing.assert_array_equal(np.concatenate([b.mask_BL for b in batches]), ~other)


def test_a_step_moves_its_own_memory_and_needs_the_one_above():
    """From zero the output matrix learns to copy; a key matrix below a zero output matrix has no gradient at all."""
    params = three_steps.init(jax.random.key(0), STEPS)
    assert not params['blocks_0']['k'].any() and params['blocks_0']['o'].any()
    key = jax.random.key(1)
    moved, _ = three_steps.update(params, key, 64.0, cfg=STEPS, role='blocks.1.o', pieces=14)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), params, moved)
    names = optim.parameter_names(params)
    assert [name for name, x in zip(names, jax.tree.leaves(changed), strict=True) if x] == ['blocks.1.o']
    assert associations.wo1(moved, STEPS) == 1 > associations.wo1(params, STEPS)
    _, norm = three_steps.update(params, key, 1.0, cfg=STEPS, role='blocks.1.k', pieces=14)
    assert norm == 0
    _, norm = three_steps.update(moved, key, 1.0, cfg=STEPS, role='blocks.1.k', pieces=14)
    assert norm > 0


@pytest.mark.parametrize('variant', ['simplified', 'staged', 'depth', 'bigrams', 'data', 'width', 'smoke'])
def test_every_point_of_the_induction_sweeps_can_train(variant):
    file = sweep.load_config_file(ROOT / 'configs' / 'induction.py')
    for name in (variant, f'{variant}_paper')[: 1 + (variant != 'smoke')]:
        _, points, groups = sweep.resolve(file.get_config(name).to_dict(), file.get_sweep(name))
        assert sum(len(group.rows) for group in groups) == len(points)
        for group in groups:
            shapes = jax.eval_shape(lambda cfg=group.config: model.init(jax.random.key(0), cfg.model))
            optim.check_patterns(shapes, group.config.optim)


def test_figures_draw_what_they_are_given():
    """Events that no replica has are left out; the curves are the means of the replicas."""
    cfg, rng, steps = smoke_config(), np.random.default_rng(0), np.arange(4)
    series = {name: Series(steps, rng.uniform(size=(4, 2))) for name in (
        *induction.EVENTS, 'noisy/loss', 'noisy/loss/bayes', 'noisy/loss/distribution_only')}
    series |= {f'half/{name}': Series(np.array([3]), rng.uniform(1, 3, (1, 2))) for name in induction.EVENTS}
    series['half/association/ff1'] = Series(np.array([3]), np.full((1, 2), np.nan))
    memory, _, loss, order = induction.training(series, cfg).axes
    np.testing.assert_array_equal(memory.get_lines()[0].get_ydata(), series['association/wo1'].values.mean(1))
    np.testing.assert_array_equal(loss.get_lines()[0].get_ydata(), series['noisy/loss'].values.mean(1))
    labels = [text.get_text() for text in order.get_yticklabels()]
    assert labels == [label for name, (_, label) in induction.EVENTS.items() if name != 'association/ff1']

    values = rng.uniform(size=(1, 3, 4))
    found = {f'{name}/{key}': Series(np.array([0]), values + i) for name in three_steps.ORDERS
             for i, key in enumerate((*induction.MEMORIES, 'accuracy'))}
    left, right = induction.three_steps(found | {'chance': Series(np.array([0]), np.array([[0.1]]))}).axes
    shown = [label.get_text() for label in right.get_xticklabels()]
    assert shown == ['start', 'k, layer 0', 'k, layer 1', 'o, layer 1']
    np.testing.assert_allclose(left.get_lines()[0].get_ydata(), values[0].mean(0))

    table = {label: {key: (steps, rng.uniform(size=(4, 2))) for key in induction.QUANTITIES} for label in 'ab'}
    panels = induction.comparison(table, 'x').axes
    assert [axis.get_ylabel() for axis in panels] == list(induction.QUANTITIES.values())
    np.testing.assert_array_equal(panels[1].get_lines()[3].get_ydata(), table['b']['association/wo1'][1].mean(1))
