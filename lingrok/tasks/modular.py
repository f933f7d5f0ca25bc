"""In-context modular arithmetic: rows of examples of one task z = a x + b y mod p, the task to be inferred.

Source: arXiv 2406.02550 and its official code. A row is S examples of one task, flat, without separators; the model
reads the row but for its last token and is scored where z comes next, so that example k is a k-shot query:

    task (2, 3), p = 5      x y z   x y z   x y ?       tokens  1 2 3 4 0 3 0 4
    examples                1 2 3   4 0 3   0 4         targets . 3 . . 3 . . 2   (only these are scored)

A task vector is a pre-training task or not, an input (x, y) is a training input or not: four sets, `id` or `ood` times
`train` or `test`. Training sees id_train alone. The number of pre-training tasks and the share alpha of training
inputs are values of the state: both order a fixed list, of which they take the first so many.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from lingrok.config import check_fields, key, register_task, require
from lingrok.tasks.base import Batch, label_log_probs, masked_mean

SPLITS = ('id_train', 'id_test', 'ood_train', 'ood_test', 'id_mixed', 'ood_mixed', 'id_forced', 'ood_forced',
          'select_train', 'select_test')


class ModularState(NamedTuple):
    """Pools of one replica: tasks_T2 and inputs_T2 list all p^2 pairs; the first num_tasks and num_inputs train."""

    tasks_T2: jax.Array
    inputs_T2: jax.Array
    num_tasks: jax.Array
    num_inputs: jax.Array


@register_task('modular')
@dataclasses.dataclass(frozen=True)
class Modular:
    """The task family of arXiv 2406.02550; its official sampler and the fixes of its quirks are options."""

    SECTION: ClassVar[str] = 'task'
    VARIABLE: ClassVar[tuple[str, ...]] = ('num_tasks', 'alpha')
    FILES: ClassVar[tuple[str, ...]] = ()
    scored: ClassVar[slice] = slice(1, None, 3)  # where z comes next

    p: int = key(29, 'the modulus, a prime', low=2, high=997)
    num_examples: int = key(32, 'examples S of a row; the last one is an (S - 1)-shot query', low=2)
    num_tasks: int = key(512, 'pre-training tasks', low=1)
    alpha: float = key(0.6, 'share of the p^2 inputs that are training inputs', low=0.0, high=1.0)
    geometry: str = key('rectangular', 'which tasks are pre-training tasks: corners of disjoint rectangles of the (a, '
                        'b) plane, the same as the official code draws them, any, whole rows (a fixed), whole lines '
                        'through 0', choices=('rectangular', 'rectangular_official', 'random', 'rows', 'lines'))
    batching: str = key('shared', 'rows of a batch: equally many of every task with the same inputs for all tasks, '
                        'equally many, or a random task each', choices=('shared', 'balanced', 'iid'))
    distinct: bool = key(False, 'no input occurs twice in a row')
    zero_shot: bool = key(True, 'score the first example, which cannot be predicted')
    weight_unsolvable: float = key(1.0, 'weight in the training loss of queries outside the span of their context',
                                   low=0.0)
    weight_uncovered: float = key(1.0, 'weight in the training loss of queries inside the span, but no multiple of one '
                                  'example, from step weight_from on', low=0.0)
    weight_from: int = key(0, 'first step of weight_uncovered', low=0)
    splits: tuple[str, ...] = key(('id_train', 'id_test', 'ood_train', 'ood_test'), 'sets of an evaluation',
                                  choices=SPLITS)
    label_noise_train: float = key(0.0, 'share of wrong z in training rows', low=0.0, high=1.0)
    label_noise_test: float = key(0.0, 'share of wrong z in the contexts of the other sets', low=0.0, high=1.0)

    def __post_init__(self):
        check_fields(self)
        p, total = self.p, self.p**2
        require(all(p % d for d in range(2, int(p**0.5) + 1)), f'task.p={p} is not a prime; allowed: primes from 2 to '
                f'997; try {_next_prime(p)}')
        require(self.num_tasks < total, f'task.num_tasks={self.num_tasks} leaves no unseen task of the {total} modulo '
                f'{p}; allowed: 1 to {total - 1}')
        require(bool(self.splits), f'task.splits is empty; allowed: some of {", ".join(SPLITS)}')
        train = round(self.alpha * total)
        require(train >= 1, f'task.alpha={self.alpha} leaves no training input of the {total} modulo {p}; allowed: at '
                f'least {1 / total:.4f}')
        unused = [split for split in self.splits if split.endswith(('_test', '_mixed'))]
        require(train < total or not unused, f'task.alpha={self.alpha} leaves no unused input for '
                f'{unused and unused[0]}; try a smaller alpha, or drop {", ".join(unused)} from task.splits')
        select = [split for split in self.splits if split.startswith('select_')]
        require(total - self.num_tasks >= 4 or not select, f'task.num_tasks={self.num_tasks} leaves no unseen task for '
                f'{select and select[0]}; allowed: at most {total - 4} with it')
        fewest = min(train, total - train) if train < total else train
        require(not self.distinct or self.num_examples <= fewest, f'task.distinct with num_examples='
                f'{self.num_examples}, but a set has {fewest} inputs only; try a smaller num_examples')

    @property
    def vocab_size(self) -> int:
        return self.p

    @property
    def seq_len(self) -> int:
        return 3 * self.num_examples - 1

    @property
    def headline(self) -> tuple[str, ...]:
        return tuple(f'{split}/accuracy_last' for split in self.splits if split not in ('id_mixed', 'ood_mixed'))

    def check_batch(self, batch_size: int) -> None:
        """Raises if a balanced batch cannot hold equally many rows of every task."""
        nearest = self.num_tasks * max(1, batch_size // self.num_tasks)
        require(self.batching == 'iid' or batch_size % self.num_tasks == 0, f'train.batch_size={batch_size} is no '
                f'multiple of task.num_tasks={self.num_tasks}; try {nearest} or task.batching=iid')

    def init(self, key: jax.Array, **variable) -> ModularState:
        """Task list and input split, drawn from `key`; `variable`: num_tasks and alpha, which may be traced."""
        task_key, input_key = jax.random.split(key)
        num_tasks = jnp.asarray(variable.get('num_tasks', self.num_tasks)).astype(jnp.int32)
        alpha = jnp.asarray(variable.get('alpha', self.alpha), jnp.float32)
        pairs_T2 = jnp.stack(jnp.divmod(jnp.arange(self.p**2), self.p), -1)
        order = {
            'random': lambda: jax.random.permutation(task_key, self.p**2),
            'rectangular': lambda: self._rectangles(task_key),
            'rectangular_official': lambda: self._official_rectangles(task_key, num_tasks),
            'rows': lambda: self._by_group(task_key, pairs_T2[:, 0]),
            'lines': lambda: self._by_group(task_key, self.direction(pairs_T2)),
        }[self.geometry]()
        inputs_T2 = pairs_T2[jax.random.permutation(input_key, self.p**2)]
        num_inputs = jnp.round(alpha * self.p**2).astype(jnp.int32)
        return ModularState(pairs_T2[order], inputs_T2, num_tasks, num_inputs)

    def _by_group(self, key, group_T):
        """An order that goes through the groups in random order, and at random within each."""
        rank = jax.random.permutation(key, self.p + 2)[group_T + 1]
        return jnp.argsort(rank + jax.random.uniform(jax.random.fold_in(key, 1), group_T.shape) * 0.5)

    def _rectangles(self, key):
        """An order of the p^2 tasks in fours, each the corners of a rectangle drawn uniformly from those still free.

        Where no free rectangle is left, the other tasks follow in random order.
        """
        p = self.p
        pair = jnp.triu(jnp.ones((p, p), bool), 1)

        def draw(i, carry):
            free_pp, order = carry
            rows_key, columns_key = jax.random.split(jax.random.fold_in(key, i))
            common = (free_pp.astype(jnp.int32) @ free_pp.T.astype(jnp.int32)) * pair
            weight = jnp.where(pair, common * (common - 1) / 2, 0).reshape(-1)
            any_left = jnp.sum(weight) > 0
            rows = jnp.stack(jnp.divmod(_pick(rows_key, weight), p))
            both = free_pp[rows[0]] & free_pp[rows[1]]
            scores = jnp.where(both, jax.random.uniform(columns_key, (p,)), -1)
            columns = jax.lax.top_k(scores, 2)[1]
            corners = (rows[:, None] * p + columns).reshape(-1)
            taken = free_pp.reshape(-1).at[corners].set(False).reshape(p, p)
            place = jnp.where(any_left, 4 * i + jnp.arange(4), p * p)
            return jnp.where(any_left, taken, free_pp), order.at[place].set(corners, mode='drop')

        start = jnp.ones((p, p), bool), jnp.full(p * p, -1)
        free_pp, order = jax.lax.fori_loop(0, p * p // 4, draw, start)
        return _fill(jax.random.fold_in(key, p * p), order, free_pp.reshape(-1))

    def _official_rectangles(self, key, num_tasks):
        """As the official code: num_tasks / 4 base tasks, then for each the three corners with a random (a', b').

        a' differs from a and b, b' from a, b and a'. Bases come first in the list, then three corners a base.
        """
        p, count = self.p, num_tasks // 4
        bases = jax.random.permutation(jax.random.fold_in(key, 0), p * p)
        position = jnp.arange(p * p)
        free = jnp.zeros(p * p, bool).at[bases].set(position >= count)
        order = jnp.where(position < count, bases, -1)
        value = jnp.arange(p)

        def draw(i, carry):
            free, order = carry
            a, b = jnp.divmod(bases[i], p)
            a2, b2 = value[:, None], value[None]
            square = free.reshape(p, p)
            allowed = (a2 != a) & (a2 != b) & (b2 != a) & (b2 != b) & (b2 != a2)
            allowed &= square[a][None, :] & square[:, b][:, None] & square
            weight = allowed.reshape(-1).astype(jnp.float32)
            any_left = jnp.sum(weight) > 0
            new_a, new_b = jnp.divmod(_pick(jax.random.fold_in(key, i + 1), weight), p)
            corners = jnp.stack([a * p + new_b, new_a * p + b, new_a * p + new_b])
            place = jnp.where(any_left, count + 3 * i + jnp.arange(3), p * p)
            taken = jnp.where(any_left, free.at[corners].set(False), free)
            return taken, order.at[place].set(corners, mode='drop')

        free, order = jax.lax.fori_loop(0, count, draw, (free, order))
        return _fill(jax.random.fold_in(key, p * p + 1), order, free)

    def direction(self, pairs):
        """Line through 0 of each pair (..., 2): y / x mod p, p where x = 0, -1 for the pair (0, 0)."""
        inverse = jnp.array([pow(x, -1, self.p) if x else 0 for x in range(self.p)])
        x, y = pairs[..., 0], pairs[..., 1]
        return jnp.where(x > 0, y * inverse[x] % self.p, jnp.where(y > 0, self.p, -1))

    def sample(self, state: ModularState, key: jax.Array, *, split: str, batch_size: int, step=0) -> Batch:
        """Rows of a set, or of the training law ('train': id_train with the batching, weights and noise of training).

        `mixed` rows have training inputs as context and a test input as query (the last example);
        `forced` rows have training inputs, the query in a direction that no example of the context has.

        groups: task_B2, and for every scored position, numbered by shot: copied_BS (the query occurs in the context),
        covered_BS (it is a multiple of one example), solvable_BS (it is in the span), valid_B (a forced query exists).
        """
        B, S, p = batch_size, self.num_examples, self.p
        training = split == 'train'
        which, part = ('id', 'train') if training else split.split('_')
        task_key, input_key, query_key, noise_key = jax.random.split(key, 4)
        row_B = jnp.arange(B)
        # Of the unseen tasks every fourth is kept for choosing a step; the others are reported.
        unseen = p * p - state.num_tasks
        kept = unseen // 4
        first, num = {
            'id': (0, state.num_tasks),
            'select': (state.num_tasks, kept),
            'ood': (state.num_tasks + kept, unseen - kept),
        }[which]
        if training and self.batching == 'iid':
            task_B = jax.random.randint(task_key, (B,), 0, num)
        elif training:
            task_B = row_B * num // B  # task-major, so that row r of every task can have the same inputs
        else:
            task_B = row_B % jnp.maximum(num, 1)
        task_B2 = state.tasks_T2[first + task_B]

        tests = p * p - state.num_inputs
        size = tests if part == 'test' else state.num_inputs
        start = state.num_inputs if part == 'test' else 0
        index_BS = self._draw_inputs(input_key, (B, S), size)
        if training and self.batching == 'shared':
            index_BS = index_BS[row_B % (B // num)]
        index_BS = start + index_BS
        valid_B = jnp.broadcast_to((num > 0) & ((tests > 0) | (part not in ('test', 'mixed'))), (B,))
        if part == 'mixed':
            query_B = state.num_inputs + self._draw_inputs(query_key, (B, 1), tests)[:, 0]
            index_BS = index_BS.at[:, -1].set(query_B)
        elif part == 'forced':
            query_B, has_query_B = self._forced_query(query_key, state, index_BS[:, :-1])
            index_BS, valid_B = index_BS.at[:, -1].set(query_B), valid_B & has_query_B
        inputs_BS2 = state.inputs_T2[index_BS]

        shift_BS = None
        rate = self.label_noise_train if training else self.label_noise_test
        if rate:
            wrong_BS, size_BS = jax.random.uniform(noise_key, (2, B, S))
            wrong_BS = (wrong_BS < rate) & (training | (jnp.arange(S) < S - 1))
            shift_BS = wrong_BS * (1 + jnp.floor(size_BS * (p - 1)).astype(jnp.int32))
        batch = self.rows(task_B2, inputs_BS2, shift_BS)
        groups = batch.groups | {'valid_B': valid_B}
        weights_BS = jnp.ones((B, S)) * valid_B[:, None]
        if not self.zero_shot:
            weights_BS = weights_BS.at[:, 0].set(0)
        if training and (self.weight_unsolvable, self.weight_uncovered) != (1.0, 1.0):
            uncovered = jnp.where(step >= self.weight_from, self.weight_uncovered, 1.0)
            weights_BS *= jnp.where(groups['covered_BS'], 1, jnp.where(groups['solvable_BS'], uncovered,
                                                                       self.weight_unsolvable))
        if part in ('mixed', 'forced'):
            weights_BS = weights_BS.at[:, :-1].set(0)
        return batch._replace(mask_BL=jnp.zeros((B, 3 * S - 1)).at[:, 1::3].set(weights_BS), groups=groups)

    def rows(self, task_B2: jax.Array, inputs_BS2: jax.Array, shift_BS: jax.Array | None = None) -> Batch:
        """Rows of given examples, every one scored: tasks (B, 2), inputs (B, S, 2) with any number S of examples.

        shift_BS: added to z modulo p (label noise). groups: see `sample`; every row is valid.

        >>> rows = jax.jit(Modular(p=5, num_tasks=8).rows)
        >>> batch = rows(jnp.array([[1, 2]]), jnp.array([[[1, 1], [3, 4]]]))  # z = x + 2 y modulo 5
        >>> batch.tokens_BL.tolist(), batch.targets_BL.tolist(), batch.mask_BL.tolist()
        ([[1, 1, 3, 3, 4]], [[1, 3, 3, 4, 1]], [[0.0, 1.0, 0.0, 0.0, 1.0]])
        """
        B, S = inputs_BS2.shape[:2]
        z_BS = jnp.sum(task_B2[:, None] * inputs_BS2, -1) % self.p
        if shift_BS is not None:
            z_BS = (z_BS + shift_BS) % self.p
        flat = jnp.concatenate([inputs_BS2, z_BS[..., None]], -1).reshape(B, 3 * S)
        groups = {'task_B2': task_B2, 'valid_B': jnp.ones(B, bool), **self.coverage(inputs_BS2)}
        mask_BL = jnp.broadcast_to((jnp.arange(3 * S - 1) % 3 == 1).astype(jnp.float32), (B, 3 * S - 1))
        return Batch(flat[:, :-1], flat[:, 1:], mask_BL, groups)

    def _draw_inputs(self, key, shape, size):
        """Indices below `size`, with replacement or, where asked for, distinct within a row."""
        if not self.distinct:
            draw = jnp.floor(jax.random.uniform(key, shape) * size).astype(jnp.int32)
            return jnp.clip(draw, 0, jnp.maximum(size - 1, 0))
        scores = jax.random.uniform(key, (shape[0], self.p**2))
        return jax.lax.top_k(jnp.where(jnp.arange(self.p**2) < size, scores, -1), shape[1])[1]

    def _forced_query(self, key, state, context_BK):
        """A training input in a direction that no context example has, drawn uniformly; and whether there is one."""
        all_T = self.direction(state.inputs_T2)
        seen_BK = all_T[context_BK]
        rows = jnp.arange(context_BK.shape[0])[:, None]
        seen_BD = jnp.zeros((context_BK.shape[0], self.p + 2), bool).at[rows, seen_BK + 1].set(True)
        free_BT = ~seen_BD[:, all_T + 1] & (all_T >= 0) & (jnp.arange(all_T.size) < state.num_inputs)
        # Two directions in the context make the query solvable.
        valid_B = jnp.any(free_BT, -1) & (jnp.sum(seen_BD[:, 1:], -1) >= 2)
        scores = jnp.where(free_BT, jax.random.uniform(key, free_BT.shape), -1)
        return jnp.argmax(scores, -1), valid_B

    def coverage(self, inputs_BS2) -> dict[str, jax.Array]:
        """How the examples before it determine each query of rows of inputs (B, S, 2); see `sample`."""
        S = inputs_BS2.shape[1]
        before = jnp.tril(jnp.ones((S, S), bool), -1)
        direction_BS = self.direction(inputs_BS2)
        number_BS = inputs_BS2[..., 0] * self.p + inputs_BS2[..., 1]
        same_BSS = (direction_BS[:, :, None] == direction_BS[:, None]) & before
        covered_BS = (direction_BS < 0) | jnp.any(same_BSS, -1)
        return {
            'copied_BS': jnp.any((number_BS[:, :, None] == number_BS[:, None]) & before, -1),
            'covered_BS': covered_BS,
            'solvable_BS': covered_BS | (self._rank(direction_BS, before) >= 2),
        }

    def _rank(self, direction_BS, before):
        """Rank (0, 1, 2) of the examples before each position."""
        nonzero_BSS = (direction_BS >= 0)[:, None] & before
        some_BS = jnp.any(nonzero_BSS, -1)
        highest_BS = jnp.max(jnp.where(nonzero_BSS, direction_BS[:, None], -1), -1)
        lowest_BS = jnp.min(jnp.where(nonzero_BSS, direction_BS[:, None], self.p + 1), -1)
        return some_BS.astype(jnp.int32) + (some_BS & (lowest_BS < highest_BS))

    def metrics(self, logits_BLV: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Loss and accuracy over all scored queries, by shot, and at the last one; the last one also by coverage.

        accuracy_last_se: its standard error over rows, of one replica. saturated: share of scored queries whose float32
        softmax loss is exactly 0, which teach nothing any more and which the official mean over positive losses leaves
        out.
        """
        log_probs_BS = label_log_probs(logits_BLV[:, 1::3], batch.targets_BL[:, 1::3])
        hit_BS = (jnp.argmax(logits_BLV[:, 1::3], -1) == batch.targets_BL[:, 1::3]).astype(jnp.float32)
        scored_BS = (batch.mask_BL[:, 1::3] > 0).astype(jnp.float32)
        last = {name: batch.groups[f'{name}_BS'][:, -1] for name in ('copied', 'covered', 'solvable')}
        valid_B, hit_B = batch.groups['valid_B'], hit_BS[:, -1]
        by_shot, accuracy_last = jax.vmap(masked_mean, 1), masked_mean(hit_B, valid_B)
        return {
            'loss': -masked_mean(log_probs_BS, scored_BS),
            'loss_last': -masked_mean(log_probs_BS[:, -1], valid_B),
            'accuracy': masked_mean(hit_BS, scored_BS),
            'accuracy_last': accuracy_last,
            'accuracy_last_se': jnp.sqrt(accuracy_last * (1 - accuracy_last) / jnp.maximum(jnp.sum(valid_B), 1)),
            'saturated': masked_mean((log_probs_BS == 0).astype(jnp.float32), scored_BS),
            'accuracy_last_not_copied': masked_mean(hit_B, valid_B & ~last['copied']),
            'accuracy_last_covered': masked_mean(hit_B, valid_B & last['covered'] & ~last['copied']),
            'accuracy_last_not_covered': masked_mean(hit_B, valid_B & ~last['covered']),
            'count_last_not_covered': jnp.sum(valid_B & ~last['covered']).astype(jnp.float32),
            'accuracy_by_shot': by_shot(hit_BS, scored_BS),
            'loss_by_shot': -by_shot(log_probs_BS, scored_BS),
        }

    def baselines(self, state: ModularState, batch: Batch) -> dict[str, jax.Array]:
        """Exact accuracies of reference predictors on the batch, by shot and at the last shot.

        bayes_uniform knows that all p^2 tasks are equally likely; bayes_pretraining that the task is one of the
        pre-training tasks (a uniform guess once none fits). copy and ratio answer what is copied or a multiple of one
        example and guess otherwise; kernel adds to ratio that every task but (0, 0) has one direction with z = 0.
        """
        p, groups = self.p, batch.groups
        tokens = jnp.concatenate([batch.tokens_BL, batch.targets_BL[:, -1:]], -1)
        rows_BS3 = tokens.reshape(tokens.shape[0], -1, 3)
        z_BS, chance = rows_BS3[..., 2], 1 / p
        covered_BS = groups['covered_BS']
        accuracy = {
            'copy': jnp.where(groups['copied_BS'], 1, chance),
            'ratio': jnp.where(covered_BS, 1, chance),
            'kernel': jnp.where(covered_BS, 1, self._kernel_guess(rows_BS3)),
            'bayes_uniform': jnp.where(groups['solvable_BS'], 1, chance),
            'bayes_pretraining': self._posterior_accuracy(state, rows_BS3, z_BS),
        }
        scored_BS = (batch.mask_BL[:, 1::3] > 0).astype(jnp.float32)
        found = {}
        for name, values_BS in accuracy.items():
            found[f'accuracy_by_shot/{name}'] = jax.vmap(masked_mean, 1)(values_BS, scored_BS)
            found[f'accuracy/{name}'] = masked_mean(values_BS, scored_BS)
            found[f'accuracy_last/{name}'] = masked_mean(values_BS[:, -1], groups['valid_B'])
        uncovered_B = groups['valid_B'] & ~covered_BS[:, -1]
        found['accuracy_last_not_covered/kernel'] = masked_mean(accuracy['kernel'][:, -1], uncovered_B)
        return found | {'accuracy_last/chance': jnp.asarray(chance)}

    def _kernel_guess(self, rows_BS3):
        """Accuracy of guessing 0 until a direction with z = 0 was seen, and a random non-zero value after that."""
        S = rows_BS3.shape[1]
        before = jnp.tril(jnp.ones((S, S), bool), -1)
        kernel_BS = (self.direction(rows_BS3[..., :2]) >= 0) & (rows_BS3[..., 2] == 0)
        seen_BS = jnp.any(kernel_BS[:, None] & before, -1)
        zero_BS = rows_BS3[..., 2] == 0
        return jnp.where(seen_BS, ~zero_BS / (self.p - 1), zero_BS)

    def _posterior_accuracy(self, state, rows_BS3, z_BS):
        """Expected accuracy of the most likely z under the posterior over pre-training tasks, ties broken at random."""
        p = self.p
        is_task_T = jnp.arange(p * p) < state.num_tasks

        def shot(fits_BT, example_B3):
            z_BT = (example_B3[:, None, 0] * state.tasks_T2[:, 0] + example_B3[:, None, 1] * state.tasks_T2[:, 1]) % p
            rows = jnp.arange(fits_BT.shape[0])[:, None]
            votes_BV = jnp.zeros((fits_BT.shape[0], p)).at[rows, z_BT].add(fits_BT)
            best_BV = votes_BV == jnp.max(votes_BV, -1, keepdims=True)
            right_B = jnp.take_along_axis(best_BV, example_B3[:, 2:], 1)[:, 0] / jnp.sum(best_BV, -1)
            return fits_BT * (z_BT == example_B3[:, 2:]), right_B

        start = jnp.broadcast_to(is_task_T.astype(jnp.float32), (rows_BS3.shape[0], p * p))
        return jax.lax.scan(shot, start, rows_BS3.transpose(1, 0, 2))[1].T


def _pick(key, weights):
    """An index drawn with probability proportional to the weights."""
    return jnp.argmax(jnp.where(weights > 0, jnp.log(weights) + jax.random.gumbel(key, weights.shape), -jnp.inf))


def _fill(key, order, free):
    """`order` with its places that still hold -1 filled by the free indices, in random order."""
    rest = jnp.argsort(jnp.where(free, jax.random.uniform(key, free.shape), 2.0))
    hole = order < 0
    return jnp.where(hole, rest[jnp.cumsum(hole) - 1], order)


def _next_prime(number: int) -> int:
    return next(n for n in range(max(number, 2), 2 * number + 2) if all(n % d for d in range(2, int(n**0.5) + 1)))

