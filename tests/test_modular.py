"""The modular task: its pools, its rows, and its exact baselines."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lingrok.config import ConfigError
from lingrok.tasks.modular import SPLITS, Modular

SMALL = Modular(p=7, num_examples=6, num_tasks=20, alpha=0.6, splits=SPLITS)
FULL = dataclasses.replace(SMALL, alpha=1.0, splits=('id_train',))


@functools.cache
def init(task):
    return jax.jit(lambda key, values: task.init(key, **values))


def draw(task, seed=1, **variable):
    return init(task)(jax.random.key(seed), variable)


@functools.cache
def sampler(task, split, batch_size):
    return jax.jit(lambda state, key, step: task.sample(state, key, split=split, batch_size=batch_size, step=step))


def rows(task, split, batch_size=60, seed=0, step=0, **variable):
    """State, batch and the whole rows (B, S, 3) of a task."""
    state = draw(task, **variable)
    batch = sampler(task, split, batch_size)(state, jax.random.key(seed), step)
    tokens = np.concatenate([batch.tokens_BL, batch.targets_BL[:, -1:]], 1)
    return state, batch, tokens.reshape(batch_size, -1, 3)


def pairs(x):
    return {tuple(map(int, pair)) for pair in np.asarray(x).reshape(-1, 2)}


@pytest.mark.parametrize('split', SPLITS)
def test_rows_hold_examples_of_one_task_of_the_right_set(split):
    state, batch, rows_BS3 = rows(SMALL, split)
    task_B2 = np.asarray(batch.groups['task_B2'])
    np.testing.assert_array_equal(rows_BS3[..., 2], (rows_BS3[..., :2] * task_B2[:, None]).sum(-1) % 7)
    seen_tasks = pairs(state.tasks_T2[:20])
    train_inputs = pairs(state.inputs_T2[: round(0.6 * 49)])
    which, part = split.split('_')
    assert pairs(task_B2) <= seen_tasks if which == 'id' else not pairs(task_B2) & seen_tasks
    valid = np.asarray(batch.groups['valid_B'])
    context, query = rows_BS3[valid, :-1, :2], rows_BS3[valid, -1, :2]
    if part == 'test':
        assert not (pairs(context) | pairs(query)) & train_inputs
    else:
        assert pairs(context) <= train_inputs
        assert not pairs(query) & train_inputs if part == 'mixed' else pairs(query) <= train_inputs


def test_reported_and_selecting_unseen_tasks_are_apart():
    chosen = pairs(rows(SMALL, 'select_test', 200)[1].groups['task_B2'])
    reported = pairs(rows(SMALL, 'ood_test', 200)[1].groups['task_B2'])
    assert chosen and reported and not chosen & reported
    assert len(chosen | reported) == 49 - 20


def test_scored_positions_are_where_z_comes_next():
    _, batch, rows_BS3 = rows(SMALL, 'id_train')
    assert batch.mask_BL.shape == (60, 17) and SMALL.seq_len == 17
    np.testing.assert_array_equal(np.flatnonzero(batch.mask_BL[0]), np.arange(1, 17, 3))
    np.testing.assert_array_equal(batch.targets_BL[:, 1::3], rows_BS3[..., 2])
    later = dataclasses.replace(SMALL, zero_shot=False)
    assert np.asarray(rows(later, 'id_train')[1].mask_BL)[:, 1].max() == 0


def test_pools_are_permutations_and_nested_in_the_number_of_tasks():
    state = draw(SMALL, 3)
    for pool in (state.tasks_T2, state.inputs_T2):
        assert pairs(pool) == set(itertools.product(range(7), range(7)))
    fewer = draw(SMALL, 3, num_tasks=8, alpha=0.2)
    np.testing.assert_array_equal(fewer.tasks_T2, state.tasks_T2)
    assert int(fewer.num_inputs) == 10 and int(state.num_inputs) == 29


@pytest.mark.parametrize('geometry', ['rectangular', 'rectangular_official'])
@pytest.mark.parametrize('p,num_tasks', [(7, 16), (29, 128)])
def test_rectangular_tasks_come_in_rectangles(geometry, p, num_tasks):
    task = Modular(p=p, num_tasks=num_tasks, geometry=geometry)
    tasks = np.asarray(draw(task).tasks_T2)
    assert pairs(tasks) == set(itertools.product(range(p), range(p)))
    count = num_tasks // 4
    for i in range(count):
        if geometry == 'rectangular':
            corners = tasks[4 * i : 4 * i + 4]
        else:
            corners = np.concatenate([tasks[i : i + 1], tasks[count + 3 * i :][:3]])
            (a, b), (_, b2), (a2, _), _ = corners.tolist()
            assert a2 not in (a, b) and b2 not in (a, b, a2)
        assert len(set(corners[:, 0])) == len(set(corners[:, 1])) == 2
        assert len(pairs(corners)) == 4


def test_other_geometries_fill_rows_and_lines():
    rows_T2 = np.asarray(draw(Modular(p=7, num_tasks=14, geometry='rows')).tasks_T2[:14])
    assert len(set(rows_T2[:, 0])) == 2
    task = Modular(p=7, num_tasks=12, geometry='lines')
    direction = np.asarray(jax.jit(task.direction)(draw(task).tasks_T2))
    assert (np.diff(direction) != 0).sum() == 8  # nine groups: eight lines and the origin


def test_balanced_batch_shares_inputs_between_tasks():
    state, batch, rows_BS3 = rows(SMALL, 'train', batch_size=60)
    blocks = rows_BS3[..., :2].reshape(20, 3, 6, 2)
    assert (blocks == blocks[:1]).all() and (blocks[0, 0] != blocks[0, 1]).any()
    tasks, counts = np.unique(np.asarray(batch.groups['task_B2']), axis=0, return_counts=True)
    assert len(tasks) == 20 and (counts == 3).all()
    apart = rows(dataclasses.replace(SMALL, batching='balanced'), 'train', 60)[2][..., :2].reshape(20, 3, 6, 2)
    assert (apart != apart[:1]).any()
    iid = rows(dataclasses.replace(SMALL, batching='iid'), 'train', 61)[1].groups['task_B2']
    assert pairs(iid) <= pairs(state.tasks_T2[:20])


def test_a_cell_of_a_grid_gives_the_batches_of_that_cell_alone():
    alone = dataclasses.replace(SMALL, num_tasks=12, alpha=0.3)
    values = {'num_tasks': jnp.float32(12), 'alpha': jnp.float32(0.3)}
    for split in ('train', 'id_test', 'ood_test'):
        a, b = rows(alone, split, 24)[2], rows(SMALL, split, 24, **values)[2]
        np.testing.assert_array_equal(a, b)


def test_distinct_rows_repeat_no_input():
    task = dataclasses.replace(SMALL, distinct=True, num_examples=16)
    inputs = rows(task, 'id_train', 50)[2][..., :2]
    assert all(len(pairs(row)) == 16 for row in inputs)


def test_inputs_are_uniform_over_their_set():
    inputs = rows(dataclasses.replace(SMALL, batching='balanced'), 'train', 4000)[2][..., :2]
    _, counts = np.unique(inputs.reshape(-1, 2), axis=0, return_counts=True)
    expected = inputs.size / 2 / 29
    assert len(counts) == 29
    assert np.abs(counts - expected).max() < 4.5 * np.sqrt(expected)


def oracle(row, p):
    """copied, covered, solvable of the last example of a row, by enumeration of all tasks."""
    *context, query = [tuple(map(int, example)) for example in row]
    tasks = [(a, b) for a in range(p) for b in range(p) if all((a * x + b * y - z) % p == 0 for x, y, z in context)]
    answers = {(a * query[0] + b * query[1]) % p for a, b in tasks}
    multiples = {(c * x % p, c * y % p) for x, y, _ in context for c in range(p)} | {(0, 0)}
    return query[:2] in [e[:2] for e in context], query[:2] in multiples, len(answers) == 1


def test_coverage_agrees_with_enumeration():
    _, batch, rows_BS3 = rows(FULL, 'id_train', 80)
    for row, index in itertools.product(range(80), range(6)):
        expected = oracle(rows_BS3[row, : index + 1], 7)
        found = tuple(bool(batch.groups[f'{name}_BS'][row, index]) for name in ('copied', 'covered', 'solvable'))
        assert found == expected


@pytest.mark.parametrize('split', ['id_forced', 'ood_forced'])
def test_forced_queries_need_two_examples(split):
    _, batch, _ = rows(FULL, split, 200)
    valid = np.asarray(batch.groups['valid_B'])
    assert valid.mean() > 0.8
    assert not np.asarray(batch.groups['covered_BS'])[valid, -1].any()
    assert np.asarray(batch.groups['solvable_BS'])[valid, -1].all()
    assert np.asarray(batch.mask_BL)[:, :-1].max() == 0 and (np.asarray(batch.mask_BL)[~valid] == 0).all()


def test_empty_sets_are_invalid_rows():
    full = FULL
    _, batch, _ = rows(full, 'id_test')
    assert not np.asarray(batch.groups['valid_B']).any() and float(batch.mask_BL.sum()) == 0
    metrics = jax.jit(full.metrics)(jnp.zeros((60, 17, 7)), batch)
    assert np.isnan(metrics['accuracy']) and np.isnan(metrics['accuracy_last'])


def test_metrics_of_a_perfect_and_a_constant_model():
    task = FULL
    state, batch, rows_BS3 = rows(task, 'ood_train', 300)
    measure = jax.jit(task.metrics)
    perfect = measure(20.0 * jax.nn.one_hot(batch.targets_BL, 7), batch)
    for name in ('accuracy', 'accuracy_last', 'accuracy_last_not_covered', 'accuracy_last_covered'):
        assert perfect[name] == 1
    zero = measure(20.0 * jax.nn.one_hot(jnp.zeros_like(batch.targets_BL), 7), batch)
    np.testing.assert_allclose(zero['accuracy_by_shot'], (rows_BS3[..., 2] == 0).mean(0), rtol=1e-5)
    covered = np.asarray(batch.groups['covered_BS'])[:, -1]
    assert zero['count_last_not_covered'] == (~covered).sum()
    np.testing.assert_allclose(zero['accuracy_last_not_covered'], (rows_BS3[~covered, -1, 2] == 0).mean(), rtol=1e-5)


@pytest.mark.parametrize('split', ['id_train', 'ood_train'])
def test_baselines_agree_with_enumeration(split):
    task = Modular(p=5, num_examples=5, num_tasks=8, alpha=1.0, splits=(split,))
    state, batch, rows_BS3 = rows(task, split, 40)
    found = jax.jit(task.baselines)(state, batch)
    seen = pairs(state.tasks_T2[:8])
    expected = {name: np.zeros((40, 5)) for name in ('copy', 'ratio', 'bayes_uniform', 'bayes_pretraining', 'kernel')}
    for row, k in itertools.product(range(40), range(5)):
        context, (x, y, z) = rows_BS3[row, :k], rows_BS3[row, k]
        copied, covered, solvable = oracle(rows_BS3[row, : k + 1], 5)
        fits = [(a, b) for a, b in sorted(seen) if all((a * u + b * v - w) % 5 == 0 for u, v, w in context)]
        votes = np.bincount([(a * x + b * y) % 5 for a, b in fits], minlength=5)
        kernel = any(w == 0 and (u or v) for u, v, w in context)
        expected['copy'][row, k] = 1 if copied else 1 / 5
        expected['ratio'][row, k] = 1 if covered else 1 / 5
        expected['bayes_uniform'][row, k] = 1 if solvable else 1 / 5
        expected['bayes_pretraining'][row, k] = (votes[z] == votes.max()) / (votes == votes.max()).sum()
        expected['kernel'][row, k] = 1 if covered else ((z != 0) / 4 if kernel else z == 0)
    for name, values in expected.items():
        np.testing.assert_allclose(found[f'accuracy_by_shot/{name}'], values.mean(0), atol=1e-5, err_msg=name)
        np.testing.assert_allclose(found[f'accuracy_last/{name}'], values[:, -1].mean(), atol=1e-5, err_msg=name)


def test_baselines_reproduce_the_known_values_at_p_29():
    """Accuracies by shot of i.i.d. inputs, spec table: derived in closed form there."""
    task = Modular(p=29, num_examples=32, num_tasks=8, alpha=1.0, splits=('id_train',))
    state, batch, _ = rows(task, 'id_train', 2000)
    found = {name: np.asarray(x) for name, x in jax.jit(task.baselines)(state, batch).items()}
    table = {
        'bayes_uniform': {0: 0.035, 1: 0.069, 2: 0.965, 3: 1.0},
        'ratio': {0: 0.036, 1: 0.071, 2: 0.100, 8: 0.249, 16: 0.435, 31: 0.663},
        'bayes_pretraining': {0: 0.206, 1: 0.895, 2: 0.994},
    }
    for name, values in table.items():
        for shot, value in values.items():
            error = 4 * np.sqrt(max(value * (1 - value), 0.002) / 2000) + 0.01 + 0.06 * (name == 'bayes_pretraining')
            assert abs(found[f'accuracy_by_shot/{name}'][shot] - value) < error, (name, shot)


def test_weights_follow_coverage_and_step():
    task = dataclasses.replace(SMALL, weight_unsolvable=0.0, weight_uncovered=4.0, weight_from=10)
    for step, uncovered in ((9, 1.0), (10, 4.0)):
        _, batch, _ = rows(task, 'train', step=step)
        weights, groups = np.asarray(batch.mask_BL)[:, 1::3], batch.groups
        covered, solvable = (np.asarray(groups[f'{name}_BS']) for name in ('covered', 'solvable'))
        np.testing.assert_array_equal(weights, np.where(covered, 1, np.where(solvable, uncovered, 0)))


def test_label_noise_changes_its_share_of_labels():
    task = dataclasses.replace(SMALL, label_noise_train=0.3, label_noise_test=0.5)
    for split, rate, places in (('train', 0.3, slice(None)), ('ood_train', 0.5, slice(-1))):
        _, batch, rows_BS3 = rows(task, split, 2000)
        truth = (rows_BS3[..., :2] * np.asarray(batch.groups['task_B2'])[:, None]).sum(-1) % 7
        wrong = rows_BS3[..., 2] != truth
        assert abs(wrong[:, places].mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / wrong[:, places].size)
        assert split == 'train' or not wrong[:, -1].any()


@pytest.mark.parametrize(
    'change,words',
    [
        ({'p': 9}, 'not a prime'),
        ({'num_tasks': 49}, 'no unseen task'),
        ({'alpha': 0.001}, 'no training input'),
        ({'alpha': 1.0}, 'no unused input for id_test; try a smaller alpha'),
        ({'num_tasks': 46}, 'no unseen task for select_train; allowed: at most 45'),
        ({'num_examples': 1}, 'at least 2'),
        ({'distinct': True, 'num_examples': 32}, 'distinct'),
        ({'splits': ()}, 'splits'),
        ({'geometry': 'circles'}, 'rectangular'),
    ],
)
def test_impossible_settings_end_in_one_line(change, words):
    with pytest.raises(ConfigError, match=words) as error:
        dataclasses.replace(SMALL, **change)
    assert '\n' not in str(error.value)


def test_a_batch_that_no_number_of_tasks_divides_is_refused():
    with pytest.raises(ConfigError, match='multiple of task.num_tasks=20; try 60'):
        SMALL.check_batch(64)
    dataclasses.replace(SMALL, batching='iid').check_batch(64)
