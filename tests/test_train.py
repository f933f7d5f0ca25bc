import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import get_config

import lingrok.tasks  # noqa: F401  registers the tasks
from lingrok import config, loss, train

NUM, CAPACITY = 4, 8
RATES, NOISE = (0.1, 0.03, 0.3, 0.05), (0.5, 0.2, 0.8, 0.0)


def make_config(vary: dict, **changes) -> config.Config:
    """One layer, random tables of eight tokens. vary: name -> values; changes: section.key as section_key."""
    cfg = get_config('recall.py:smoke')
    cfg.task.update({'table': 'synthetic', 'table_size': 8, 'noise_token': '7', 'length': 16})
    cfg.model.update({'num_layers': 1, 'd_model': 8, 'd_mlp': 16})
    cfg.train.update({'num_steps': CAPACITY, 'batch_size': 4})
    cfg.eval.update({'batch_size': 8, 'truncations': ()})
    cfg.vary.seed.all = ()
    for name, values in vary.items():
        section, _, field = name.partition('.')
        cfg.vary[section][field or 'all'] = values
    for name, value in changes.items():
        section, _, field = name.partition('_')
        cfg[section][field] = value
    return config.from_config_dict(cfg)


VARIED = {'seed': (0, 1, 2, 3), 'optim.learning_rate': RATES, 'task.noise_prob': NOISE}


@functools.cache
def programs(num: int = NUM, layout: str = 'map', devices: int = 4) -> train.Programs:
    """Programs for `num` replicas. Seeds and rates are arguments of them, so that tests share the compiled ones."""
    cfg = make_config({'seed': tuple(range(num))}, train_layout=layout)
    return train.Programs(cfg, capacity=CAPACITY, devices=jax.devices()[:devices])


@pytest.fixture(name='whole_tail')
def _whole_tail(monkeypatch):
    """Programs first used here compute the tail of the model at all positions: they compile in half the time."""
    monkeypatch.setattr(loss, 'SHARES', (1,))


def settings_of(p: train.Programs, cfg: config.Config):
    return p.put({name: np.asarray(values, p.settings[name].dtype) for name, values in cfg.coordinates().items()})


class Result:
    """What training gives: the initial and the last state, losses (S, T), and evaluations before and after.

    `begin` is a result whose task and initial state are taken over, for programs of which only training is compared.
    """

    def __init__(self, vary: dict, *, chunks=(CAPACITY,), p: train.Programs | None = None,
                 begin: 'Result | None' = None, evaluate: bool = False):
        p = programs() if p is None else p
        self.settings = settings_of(p, make_config(vary))
        task_state = p.put(begin.task_state) if begin else p.init_task(self.settings)
        state = p.put(begin.start) if begin else p.init(self.settings)
        self.start, self.task_state = p.fetch(state), p.fetch(task_state)
        self.eval_start = p.fetch(p.evaluate(state.params, task_state, self.settings)) if evaluate else None
        self.states, losses = [], []
        for length in chunks:
            state, chunk = p.train_chunk(state, task_state, self.settings, np.int32(length))
            self.states.append(p.fetch(state))
            losses.append(p.fetch(chunk)[:, :length])
        self.state = self.states[-1]
        self.losses_ST = np.concatenate(losses, 1)
        self.eval_end = p.fetch(p.evaluate(state.params, task_state, self.settings)) if evaluate else None

    def of(self, *replicas: int) -> 'Result':
        """The beginning of some replicas, as `begin` of another result."""
        part = object.__new__(Result)
        part.task_state, part.start = pick(self.task_state, *replicas), pick(self.start, *replicas)
        return part


def assert_same(a, b):
    """Bit for bit, so that NaN equals NaN."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def assert_close(a, b):
    # Eight steps of float32 with sums in another order: 1e-7 a step, times the growth of a perturbation.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6), a, b)


def pick(tree, *replicas: int):
    return jax.tree.map(lambda x: x[list(replicas)], tree)


def differ_pairwise(values) -> bool:
    return len({np.asarray(value).tobytes() for value in values}) == len(values)


@functools.cache
def reference() -> Result:
    """Four replicas with seeds, learning rates and noise of their own, on four devices."""
    return Result(VARIED, evaluate=True)


def test_replicas_equal_a_loop_over_single_ones(whole_tail):
    """On one device, one after the other: the very bits of a program that knows only one replica."""
    together = Result(VARIED, p=programs(NUM, 'map', 1), begin=reference())
    for i in range(NUM):
        alone = Result({name: (values[i],) for name, values in VARIED.items()}, p=programs(1), begin=reference().of(i))
        assert_same(pick(together.state, i), alone.state)
        assert_same(pick(together.losses_ST, i), alone.losses_ST)
    # Over several devices XLA partitions the program and may order its sums otherwise; and there, only the scored
    # positions pass through the tail of the model.
    assert_close(together.state, reference().state)
    assert_close(together.losses_ST, reference().losses_ST)


def test_replicas_side_by_side_equal_those_in_a_loop():
    side_by_side = Result(VARIED, p=programs(NUM, 'vmap', 1), begin=reference())
    assert_close(side_by_side.state, reference().state)
    assert_close(side_by_side.losses_ST, reference().losses_ST)


def test_where_devices_do_not_divide_the_replicas():
    """Three replicas on two devices: nobody outside the programs sees the padding."""
    p = programs(3, 'map', 2)
    assert p.settings['seed.init'].shape == (4,) and len(p.settings['seed.init'].addressable_shards) == 2
    assert p.fetch(p.settings)['seed.init'].tolist() == [0, 1, 2]
    tree = {'a': np.arange(6, dtype=np.float32).reshape(3, 2), 'b': {'c': np.arange(3, dtype=np.int32)}}
    assert_same(p.fetch(p.put(tree)), tree)
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(p.fetch(p.put(tree))))


def test_a_setting_means_the_same_varied_or_not():
    """The settings of a replica are those of a config with its values as plain keys."""
    table = make_config(VARIED).coordinates()
    for i in range(NUM):
        cfg = make_config({}, optim_learning_rate=RATES[i], task_noise_prob=NOISE[i])
        cfg = dataclasses.replace(cfg, seed=config.SeedConfig(i, i, i, i))
        assert {name: values[i] for name, values in table.items()} == {k: v[0] for k, v in cfg.coordinates().items()}


@pytest.mark.parametrize('chunks', [(3, 5), (1, 1, 6), (7, 1), (0, 8)])
def test_chunks_of_any_length_give_the_same_bits(chunks):
    other = Result(VARIED, chunks=chunks)
    assert_same(other.state, reference().state)
    assert_same(other.losses_ST, reference().losses_ST)


def test_resuming_from_host_arrays_gives_the_same_bits():
    p, first = programs(), Result(VARIED, chunks=(3,))
    task_state = p.put(first.task_state)
    state, losses = p.train_chunk(p.put(first.state), task_state, first.settings, np.int32(5))
    assert_same(p.fetch(state), reference().state)
    assert_same(p.fetch(losses)[:, :5], reference().losses_ST[:, 3:])
    assert np.isnan(p.fetch(losses)[:, 5:]).all()


def test_steps_count_and_what_is_frozen_stays():
    start, state = reference().start, reference().state
    assert state.step.tolist() == [CAPACITY] * NUM and state.nan_step.tolist() == [-1] * NUM
    assert np.isfinite(reference().losses_ST).all()
    for name in ('embed', 'pos', 'unembed'):  # optim.frozen of the config
        assert_same(start.params[name], state.params[name])
    for name, value in state.params['blocks_0'].items():
        assert all((value[i] != start.params['blocks_0'][name][i]).any() for i in range(NUM)), name


def test_a_freeze_schedule_holds_parameters_for_its_steps():
    dict_ = get_config('recall.py:smoke')
    dict_.optim.freeze_schedule = ('blocks.0.k@0-3', 'blocks.1.*@2-')
    dict_.optim.weight_decay = 0.1  # which must not gather momentum meanwhile
    cfg = config.from_config_dict(dict_)
    settings = {name: np.asarray(values[0], np.int32 if name.startswith('seed') else np.float32)
                for name, values in cfg.coordinates().items()}
    begin, begin_task = (jax.jit(functools.partial(fn, cfg=cfg)) for fn in (train.init, train.init_task))
    step = jax.jit(functools.partial(train.train_step, cfg=cfg, skip=False))
    state, task_state = begin(settings), begin_task(settings)
    names = [(block, role) for block in ('blocks_0', 'blocks_1') for role in ('k', 'v')]
    moved, traces = [], []
    for _ in range(4):
        new, _ = step(state, task_state, settings)
        moved.append({name for name in names if (new.params[name[0]][name[1]] != state.params[name[0]][name[1]]).any()})
        traces.append(optax.tree.get(new.opt_state, 'trace')['blocks_0']['k'])
        state = new
    first, second = set(names[:2]), set(names[2:])
    assert moved == [first - {('blocks_0', 'k')} | second] * 2 + [first - {('blocks_0', 'k')}, first]
    assert not any(trace.any() for trace in traces[:3]) and traces[3].any()


def test_training_learns():
    result = Result({'seed': (0, 1, 2, 3), 'optim.learning_rate': (0.03,) * 4}, chunks=(8,) * 20, evaluate=True)
    assert (result.eval_end['noisy/loss'] < result.eval_start['noisy/loss'] - 0.1).all()


def test_without_a_learning_rate_nothing_moves_but_every_step_has_its_own_batch():
    result = Result({'seed': (0, 1, 2, 3), 'optim.learning_rate': (0.0,) * 4})
    assert_same(result.state.params, result.start.params)
    assert all(differ_pairwise(losses_T) for losses_T in result.losses_ST)


def test_same_seed_same_numbers():
    result = Result({'seed': (5, 6, 5, 6)}, evaluate=True)
    for tree in (result.start, result.state, result.losses_ST, result.task_state, result.eval_end):
        assert_same(pick(tree, 0, 1), pick(tree, 2, 3))
    assert differ_pairwise(result.losses_ST[:2])


def test_no_two_replicas_share_anything_random():
    result = Result({'seed': (0, 1, 2, 3)}, evaluate=True)
    for values in (result.start.params['embed'], result.start.params['blocks_0']['k'], result.task_state.bigram_VV,
                   result.losses_ST[:, 0], result.eval_start['noisy/loss/bayes']):
        assert differ_pairwise(values)


def test_streams_never_meet():
    """No two of (seed, stream) have the same key, nor do the batches of any two steps or of an evaluation."""
    keys = []
    for seed in range(4):
        settings = {f'seed.{stream}': jnp.int32(seed) for stream in config.SEED_STREAMS}
        streams = {stream: train.stream_key(settings, stream) for stream in config.SEED_STREAMS}
        keys += [*streams.values(), *(jax.random.fold_in(streams['batch'], step) for step in range(50))]
    assert differ_pairwise([jax.random.key_data(key) for key in keys])


def same_rows(tree) -> bool:
    return all((x == x[:1]).all() for x in map(np.asarray, jax.tree.leaves(tree)))


@pytest.mark.parametrize('stream', config.SEED_STREAMS)
def test_a_seed_changes_its_own_stream_only(stream):
    result = Result({f'seed.{stream}': (0, 1, 2, 3)}, evaluate=True)
    changes = {
        'init': not same_rows(result.start.params),
        'task': not same_rows(result.task_state),
        'batch': not same_rows(result.losses_ST),
        # What an exact predictor makes of the evaluation sequences depends on them and on the task, not on the model.
        'eval': not same_rows(result.eval_start['noisy/loss/bayes']),
    }
    assert changes == {
        'init': stream == 'init',
        'task': stream == 'task',
        'batch': stream in ('init', 'task', 'batch'),  # a loss depends on all three
        'eval': stream in ('task', 'eval'),
    }
    if stream == 'eval':
        assert same_rows(result.state)


def test_the_seed_of_the_initial_parameters_leaves_the_batches():
    """With one set of parameters for all, replicas of other init seeds see the same loss."""
    p, first = programs(), Result({'seed.init': (0, 1, 2, 3)})
    state = jax.tree.map(lambda x: np.repeat(x[:1], NUM, 0), first.start)
    _, losses = p.train_chunk(p.put(state), p.put(first.task_state), first.settings, np.int32(CAPACITY))
    assert same_rows(p.fetch(losses)) and not same_rows(first.losses_ST)


def test_an_evaluation_sees_the_same_sequences_each_time():
    result = reference()
    again = Result(VARIED, chunks=(2,), evaluate=True)
    assert_same(result.eval_start, again.eval_start)
    baselines = [name for name in result.eval_start if name.endswith(('bayes', 'distribution_only'))]
    assert len(baselines) >= 4
    for name in baselines:
        assert_same(result.eval_start[name], result.eval_end[name])
    assert (result.eval_start['noisy/loss'] != result.eval_end['noisy/loss']).all()


EXPLODING = 3e4


@functools.cache
def exploded() -> tuple[Result, Result]:
    """(with, without) a learning rate that makes replica 1 overflow."""
    seeds = {'seed': (0, 1, 2, 3)}
    rates = [{**seeds, 'optim.learning_rate': (0.1, rate, 0.1, 0.1)} for rate in (EXPLODING, 0.1)]
    return tuple(Result(vary, chunks=(1,) * 24) for vary in rates)


def test_a_replica_that_turns_nan_is_frozen_at_its_last_sound_parameters():
    result, _ = exploded()
    losses_T, when = result.losses_ST[1], int(result.state.nan_step[1])
    assert 1 < when < 20, 'choose another EXPLODING'
    assert np.isfinite(losses_T[:when]).all() and np.isnan(losses_T[when:]).all()
    history = [pick(state.params['blocks_0'], 1) for state in result.states]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(history))
    moved = [(a['mlp_in'] != b['mlp_in']).any() for a, b in zip(history, history[1:], strict=False)]
    # history[t] is the state after step t: step `when` changes nothing any more, the one before it still did.
    assert all(moved[: when - 1]) and not any(moved[when - 1 :])
    assert [int(state.nan_step[1]) for state in result.states] == [-1] * when + [when] * (24 - when)
    for field in ('params', 'opt_state'):
        assert_same(pick(getattr(result.states[when - 1], field), 1), pick(getattr(result.state, field), 1))


def test_the_others_go_on_bit_for_bit():
    with_nan, without = exploded()
    others = (0, 2, 3)
    assert_same(pick(with_nan.state, *others), pick(without.state, *others))
    assert_same(pick(with_nan.losses_ST, *others), pick(without.losses_ST, *others))
    assert without.state.nan_step.tolist() == [-1] * 4


def test_an_update_that_overflows_is_not_taken():
    """The loss of step 0 is finite, what it would do to the parameters is not."""
    result = Result({'seed': (0, 1, 2, 3), 'optim.learning_rate': (0.1, 1e38, 0.1, 0.1)})
    assert result.state.nan_step.tolist() == [-1, 0, -1, -1]
    assert_same(pick(result.state.params, 1), pick(result.start.params, 1))


def test_a_frozen_replica_stays_frozen_whatever_comes():
    """Even where it could go on: what it reports has an end, and no gap."""
    p, sound = programs(), reference()
    state = sound.state._replace(nan_step=np.array([-1, 5, -1, -1], np.int32))
    state, losses = p.train_chunk(p.put(state), p.put(sound.task_state), sound.settings, np.int32(CAPACITY))
    state, losses = p.fetch((state, losses))
    assert np.isnan(losses[1]).all() and np.isfinite(losses[[0, 2, 3]]).all()
    assert state.nan_step.tolist() == [-1, 5, -1, -1] and state.step.tolist() == [2 * CAPACITY] * NUM
    for field in ('params', 'opt_state'):
        assert_same(pick(getattr(state, field), 1), pick(getattr(sound.state, field), 1))
    assert (state.params['blocks_0']['k'][0] != sound.state.params['blocks_0']['k'][0]).any()
