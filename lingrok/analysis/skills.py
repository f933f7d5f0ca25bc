"""What a model of the modular task can do, from the outside: accuracy by shot, by query, under label noise.

Source: arXiv 2406.02550. Every function measures one replica, (params, task_state, key, cfg) -> {quantity: array}; see
`Run.measure`. Rows are drawn afresh, from the pools of the run. Axes beyond `names.AXES`: S examples of a row (place or
shot), T tasks, Q the p^2 queries, C components.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lingrok import model
from lingrok.config import Config, require
from lingrok.tasks.base import Batch, label_log_probs, masked_mean

BY_SHOT = ('accuracy_by_shot', 'loss_by_shot')
COMPONENTS = ('pretraining', 'regression', 'ratio', 'guess')


def by_shot(params, task_state, key, cfg: Config, *, splits: tuple[str, ...], num_rows: int = 512) -> dict:
    """Accuracy and loss of every shot on rows of each split, and exact baselines on the same rows (Fig 1c, 3c)."""
    found = {}
    for split in splits:
        batch = cfg.task.sample(task_state, key, split=split, batch_size=num_rows)
        logits_BLV, _ = model.apply(params, batch.tokens_BL, cfg=cfg.model)
        values = cfg.task.metrics(logits_BLV, batch)
        found |= {f'{split}/{name}': values[name] for name in BY_SHOT}
        baselines = cfg.task.baselines(task_state, batch)
        found |= {f'{split}/{name}': value for name, value in baselines.items() if name.startswith(BY_SHOT)}
    return found


def default_shots(task) -> tuple[int, ...]:
    """Context lengths of a grid: those of Fig 5 at p = 29 (1, 2, 13, 31), and alike at another p or row length."""
    longest = min(task.num_examples - 1, task.p**2 - 1)
    return tuple(sorted({min(k, longest) for k in (1, 2, max(3, task.p // 2 - 1), longest)}))


def kshot_grid(params, task_state, key, cfg: Config, *, shots: Sequence[int], task: tuple[int, int] | None = None,
               num_tasks: int = 32) -> dict:
    """Which of all p^2 queries are right after k examples, and which of them are multiples of one example (Fig 5).

    One list of distinct inputs other than (0, 0) is the context of all tasks; shot k reads its first k. Pictures are
    (p, p), indexed [x, y], of `task`, by default the first unseen one without a zero; accuracies are means over up to
    `num_tasks` unseen ('ood') and pre-training ('id') tasks. covered: queries that ratio matching answers; kernel: what
    the guess of 0 is worth on the others, before and after a direction with z = 0 was seen.
    """
    spec, p, longest = cfg.task, cfg.task.p, min(cfg.task.num_examples - 1, cfg.task.p**2 - 1)
    require(bool(shots) and all(1 <= k <= longest for k in shots), f'shots={tuple(shots)}; allowed: some of 1 to '
            f'{longest}, the examples before the last one of a row')
    require(task is None or (len(task) == 2 and all(0 <= c < p for c in task)), f'task={task}; allowed: two residues '
            f'modulo {p}, such as 1,2')
    tasks = {which: spec.sample(task_state, key, split=f'{which}_train', batch_size=num_tasks).groups['task_B2']
             for which in ('ood', 'id')}
    proper_T = jnp.all(tasks['ood'] > 0, -1)
    task_2 = tasks['ood'][jnp.argmax(proper_T)] if task is None else jnp.asarray(task)
    all_T2 = jnp.concatenate([task_2[None], *tasks.values()])
    queries_Q2 = jnp.stack(jnp.divmod(jnp.arange(p * p), p), -1)
    context_S2 = queries_Q2[1 + jax.random.permutation(key, p * p - 1)[:max(shots)]]
    trained_T = jnp.all(task_state.tasks_T2 == task_2, -1) & (jnp.arange(p * p) < task_state.num_tasks)
    found = {'grid/task': task_2, 'grid/is_training_task': jnp.any(trained_T),
             'grid/context': jnp.concatenate([context_S2, (context_S2 @ task_2 % p)[:, None]], -1)}
    pooled = {}
    for k in shots:
        context_QS2 = jnp.broadcast_to(context_S2[:k], (p * p, k, 2))
        inputs_QS2 = jnp.concatenate([context_QS2, queries_Q2[:, None]], 1)
        covered_Q = spec.coverage(inputs_QS2)['covered_BS'][:, -1]

        def of_task(task_2, inputs_QS2=inputs_QS2):
            batch = spec.rows(jnp.broadcast_to(task_2, (p * p, 2)), inputs_QS2)
            logits_QLV, _ = model.apply(params, batch.tokens_BL, cfg=cfg.model)
            kernel = spec.baselines(task_state, batch)['accuracy_last_not_covered/kernel']
            return jnp.argmax(logits_QLV[:, -1], -1) == batch.targets_BL[:, -1], kernel

        right_TQ, kernel_T = jax.lax.map(of_task, all_T2)
        one_Q, suffix = right_TQ[0], f'{k}_shots'
        found |= {f'grid/model/{suffix}': one_Q.reshape(p, p), f'grid/ratio/{suffix}': covered_Q.reshape(p, p)}
        counted = {'model': one_Q, 'ratio': covered_Q, 'gained': one_Q & ~covered_Q, 'lost': ~one_Q & covered_Q}
        found |= {f'grid/{name}_of_{p * p}/{suffix}': jnp.sum(chosen_Q) for name, chosen_Q in counted.items()}
        start = 1
        for which, tasks_T2 in tasks.items():
            own = slice(start, start + num_tasks)
            start += num_tasks
            # A pool with fewer tasks is gone through again: each counts once.
            same_TT = jnp.all(tasks_T2[:, None] == tasks_T2[None], -1)
            once_TQ = (jnp.argmax(same_TT, -1) == jnp.arange(num_tasks))[:, None] * jnp.ones((1, p * p))
            values = {
                'accuracy': masked_mean(right_TQ[own], once_TQ),
                'accuracy_covered': masked_mean(right_TQ[own], once_TQ * covered_Q),
                'accuracy_uncovered': masked_mean(right_TQ[own], once_TQ * ~covered_Q),
                'accuracy_uncovered/kernel': masked_mean(kernel_T[own], once_TQ[:, 0]),
            }
            for name, value in values.items():
                found[f'{which}/{name}/{suffix}'] = value
                pooled.setdefault(f'{which}/{name}', []).append(value)
    return found | {name: jnp.nanmean(jnp.stack(values)) for name, values in pooled.items()}


def label_noise(params, task_state, key, cfg: Config, *, splits: tuple[str, ...], num_rows: int = 512,
                num_batches: int = 8) -> dict:
    """Accuracy and loss with wrong labels in the context, at random places and at one place (appendix of the paper).

    Random places, (S, S) indexed [shot i, wrong labels j among the i examples]: each row has a share of wrong labels
    of its own, drawn uniformly, so that every j of 0 to i is equally frequent at shot i, in any i of j places, and one
    pass serves all shots. NaN where j > i. plurality: expected accuracy, on the same rows, of the answer of the tasks,
    among all p^2, that misfit fewest examples. One place, (S, S) indexed [shot i, wrong place j < i], NaN elsewhere;
    `clean` (S,) is the accuracy of the same rows. A wrong label is off by a uniform non-zero residue; the query's own
    answer is the true one. Pools with fewer tasks than rows are gone through again, so all tasks take part.
    """
    S, p = cfg.task.num_examples, cfg.task.p
    all_T2 = jnp.stack(jnp.divmod(jnp.arange(p * p), p), -1)

    def answered(batch, shift_BS):
        """Hit and loss (B, S) where labels are shifted but answers are not, and the rows that the model saw."""
        noisy = cfg.task.rows(batch.groups['task_B2'], _inputs(batch), shift_BS)
        logits_BSV = model.apply(params, noisy.tokens_BL, cfg=cfg.model)[0][:, 1::3]
        z_BS = batch.targets_BL[:, 1::3]
        return jnp.argmax(logits_BSV, -1) == z_BS, -label_log_probs(logits_BSV, z_BS), noisy

    def of_split(split):
        def some_wrong(key):
            rows_key, share_key, wrong_key, size_key = jax.random.split(key, 4)
            batch, valid_B = _clean_rows(task_state, rows_key, cfg, split, num_rows)
            wrong_BS = jax.random.uniform(wrong_key, (num_rows, S)) < jax.random.uniform(share_key, (num_rows, 1))
            shift_BS = wrong_BS * jax.random.randint(size_key, (num_rows, S), 1, p)
            hit_BS, loss_BS, noisy = answered(batch, shift_BS)
            votes_BSV = fewest_misfits(all_T2, jnp.ones(p * p, bool), noisy, cfg)
            best_BSV = votes_BSV == jnp.max(votes_BSV, -1, keepdims=True)
            right_BSV = best_BSV * jax.nn.one_hot(batch.targets_BL[:, 1::3], p)
            plurality_BS = jnp.sum(right_BSV, -1) / jnp.sum(best_BSV, -1)
            # Wrong labels before each query, as one-hot vectors.
            cell_BSJ = jax.nn.one_hot(jnp.cumsum(wrong_BS, -1) - wrong_BS, S) * valid_B[:, None, None]
            values = jnp.stack([hit_BS, loss_BS, plurality_BS, jnp.ones((num_rows, S))])
            return jnp.einsum('nbs,bsj->nsj', values, cell_BSJ)

        sums = jnp.sum(jax.lax.map(some_wrong, jax.random.split(key, num_batches)), 0)
        accuracy_SJ, loss_SJ, plurality_SJ = jnp.where(sums[3] > 0, sums[:3] / jnp.maximum(sums[3], 1), jnp.nan)
        batch, valid_B = _clean_rows(task_state, key, cfg, split, num_rows)
        size_B = jax.random.randint(jax.random.fold_in(key, 1), (num_rows,), 1, p)

        def one_wrong(place):
            hit_BS = answered(batch, (jnp.arange(S) == place) * size_B[:, None])[0]
            return jax.vmap(masked_mean, (1, None))(hit_BS, valid_B)

        # No shot reads the label of the last place.
        by_place_JS = jax.lax.map(one_wrong, jnp.arange(S))
        one_SJ = jnp.where(jnp.arange(S)[:, None] > jnp.arange(S), by_place_JS.T, jnp.nan)
        return {'noise_accuracy': accuracy_SJ, 'noise_loss': loss_SJ, 'noise_accuracy/plurality': plurality_SJ,
                'one_wrong_accuracy': one_SJ, 'clean_accuracy': by_place_JS[-1],
                'accuracy_clean': by_place_JS[-1, -1], 'accuracy_one_wrong': jnp.nanmean(one_SJ[-1]),
                'accuracy_quarter_wrong': accuracy_SJ[-1, (S - 1) // 4] if S > 4 else jnp.nan}

    return _by_split(splits, of_split)


def bayes_mixture(params, task_state, key, cfg: Config, *, splits: tuple[str, ...], num_rows: int = 512,
                  num_iterations: int = 300) -> dict:
    """The mixture of reference predictors that is nearest to the model: shares by shot of what it seems to do.

    Minimises over the weights of `predictors` the divergence KL(model || mixture), in nats, mean over rows, for every
    shot apart, by expectation-maximisation from equal weights. Where two predictors say the same on all rows they share
    their weight equally: so at shot 0, and ratio and regression at shot 1. weight/NAME and kl are means over shots
    from 2 on; kl_by_shot/guess is the divergence from the uniform distribution, what there is to explain.
    """
    late = slice(min(2, cfg.task.num_examples - 1), None)

    def of_split(split):
        batch, valid_B = _clean_rows(task_state, key, cfg, split, num_rows)
        logits_BSV = model.apply(params, batch.tokens_BL, cfg=cfg.model)[0][:, 1::3]
        log_probs_BSV = jax.nn.log_softmax(logits_BSV[..., : cfg.task.p])  # a vocabulary may be longer than p
        target_BSV = jnp.exp(log_probs_BSV) * valid_B[:, None, None] / jnp.sum(valid_B)
        weight_SC, mixture_BSV = fit_mixture(target_BSV, predictors(task_state, batch, cfg), num_iterations)
        entropy_S = -jnp.sum(target_BSV * log_probs_BSV, (0, 2))
        kl_S = -jnp.sum(target_BSV * jnp.log(mixture_BSV), (0, 2)) - entropy_S
        return {
            'kl_by_shot': kl_S, 'kl_by_shot/guess': jnp.log(cfg.task.p) - entropy_S, 'kl': jnp.mean(kl_S[late]),
            **{f'weight_by_shot/{name}': weight_SC[:, c] for c, name in enumerate(COMPONENTS)},
            **{f'weight/{name}': jnp.mean(weight_SC[late, c]) for c, name in enumerate(COMPONENTS)},
        }

    return _by_split(splits, of_split)


def predictors(task_state, batch: Batch, cfg: Config) -> jax.Array:
    """Predictive distributions (C, B, S, V) of the reference predictors `COMPONENTS` on rows without noise.

    pretraining: Bayes, the task is one of the pre-training tasks, in the limit of rare wrong labels: the tasks that
    misfit fewest examples, which are the fitting ones where there are any. regression: Bayes, all p^2 tasks equally
    likely: sure inside the span of the context, uniform outside. ratio: sure of the multiples of one example. guess:
    uniform.
    """
    p = cfg.task.p
    known_T = jnp.arange(p * p) < task_state.num_tasks
    votes_BSV = fewest_misfits(task_state.tasks_T2, known_T, batch, cfg)
    answer_BSV = jax.nn.one_hot(batch.targets_BL[:, 1::3], p)
    sure = [jnp.where(batch.groups[name][..., None], answer_BSV, 1 / p) for name in ('solvable_BS', 'covered_BS')]
    return jnp.stack([votes_BSV / jnp.sum(votes_BSV, -1, keepdims=True), *sure, jnp.full_like(answer_BSV, 1 / p)])


def fewest_misfits(tasks_T2, among_T, batch: Batch, cfg: Config) -> jax.Array:
    """Votes (B, S, V) for every answer: one of each task, among those of `among_T`, that misfits fewest examples."""
    p, inputs_BS2, z_BS = cfg.task.p, _inputs(batch), batch.targets_BL[:, 1::3]

    def shot(misfits_BT, example):
        input_B2, z_B = example
        z_BT = input_B2 @ tasks_T2.T % p
        fewest_BT = misfits_BT == jnp.min(misfits_BT, -1, keepdims=True)
        votes_BV = jnp.zeros((z_B.size, p)).at[jnp.arange(z_B.size)[:, None], z_BT].add(fewest_BT)
        return misfits_BT + (z_BT != z_B[:, None]), votes_BV

    start_BT = jnp.broadcast_to(jnp.where(among_T, 0, 2 * z_BS.shape[1]), (z_BS.shape[0], p * p))
    return jax.lax.scan(shot, start_BT, (inputs_BS2.swapaxes(0, 1), z_BS.T))[1].swapaxes(0, 1)


def fit_mixture(target_BSV, components_CBSV, num_iterations: int) -> tuple[jax.Array, jax.Array]:
    """Weights (S, C) that maximise sum of target * log(mixture) over rows and values, for each shot; the mixture."""
    C, _, S, _ = components_CBSV.shape

    def mixed(weight_SC):
        return jnp.einsum('sc,cbsv->bsv', weight_SC, components_CBSV)

    def iteration(_, weight_SC):
        # Where the mixture is 0, no component has any share.
        ratio_BSV = target_BSV / jnp.maximum(mixed(weight_SC), 1e-30)
        weight_SC = weight_SC * jnp.einsum('bsv,cbsv->sc', ratio_BSV, components_CBSV)
        return weight_SC / jnp.sum(weight_SC, -1, keepdims=True)

    weight_SC = jax.lax.fori_loop(0, num_iterations, iteration, jnp.full((S, C), 1 / C))
    return weight_SC, mixed(weight_SC)


def pooling(params, task_state, key, cfg: Config, *, splits: tuple[str, ...] = ('ood_forced',),
            num_rows: int = 512) -> dict:
    """Does the model combine two examples, or does it need many? Accuracy on queries that no one example determines.

    The query is forced out of the directions of the whole context; contexts that do not span the plane are left out.
    All (S,), NaN where there is no row: accuracy_by_examples[k] with the query behind the first k examples;
    accuracy_by_distinct[m] with a full context that repeats its first m distinct examples in turn;
    drop_by_examples[k], what a wrong label at one random place of the k costs. One who combines two examples, whichever
    they are, and guesses where he cannot, loses two_examples = 2 / k of what he solves, since both labels enter the
    answer; the share solved is the accuracy above chance over that of a perfect model. examples_relied_on: how many
    labels a solved answer changes with, pooled over k, 2 for him; NaN where next to nothing is solved. kernel: exact
    accuracy of the guess of 0 on the same rows.
    """
    spec, S = cfg.task, cfg.task.num_examples
    number, last, row_B = jnp.arange(S), jnp.full(S, S - 1), jnp.arange(num_rows)[:, None]

    def of_split(split):
        batch = spec.sample(task_state, key, split=split, batch_size=num_rows)
        task_B2, valid_B, inputs_BS2 = batch.groups['task_B2'], batch.groups['valid_B'], _inputs(batch)
        copied_BS = batch.groups['copied_BS'][:, :-1]
        distinct_BS = jnp.argsort(copied_BS, -1, stable=True)  # places of distinct examples in order, then of copies

        def query_at(k):
            return inputs_BS2.at[:, k].set(inputs_BS2[:, -1])

        def repeated(m):
            return inputs_BS2.at[:, :-1].set(inputs_BS2[row_B, distinct_BS[:, jnp.arange(S - 1) % jnp.maximum(m, 1)]])

        def one_wrong(k):
            place_B, size_B = jax.random.uniform(jax.random.fold_in(key, 1), (2, num_rows))
            return (jnp.floor(place_B * k)[:, None] == number) * (1 + jnp.floor(size_B * (spec.p - 1)))[:, None]

        def accuracy(case):
            inputs_BS2, place, valid_B, shift_BS = case
            batch = spec.rows(task_B2, inputs_BS2, (shift_BS * (number < place)).astype(jnp.int32))
            scored_BS = (number == place) & valid_B[:, None] & batch.groups['solvable_BS']
            batch = batch._replace(mask_BL=jnp.zeros(batch.tokens_BL.shape).at[:, 1::3].set(scored_BS))
            logits_BLV, _ = model.apply(params, batch.tokens_BL, cfg=cfg.model)
            kernel = spec.baselines(task_state, batch)['accuracy_by_shot/kernel']
            return spec.metrics(logits_BLV, batch)['accuracy_by_shot'][place], kernel[place]

        # The three questions in one loop: one forward pass is compiled.
        inputs = [jax.vmap(fn)(number) for fn in (query_at, repeated, query_at)]
        all_SB, enough_SB = (valid_B & x for x in (number[:, None] >= 0, jnp.sum(~copied_BS, -1) >= number[:, None]))
        shifts = [jnp.zeros((2 * S, num_rows, S)), jax.vmap(one_wrong)(number)]
        cases = [jnp.concatenate(x) for x in (inputs, (number, last, number), (all_SB, enough_SB, all_SB), shifts)]
        (examples_S, distinct_S, wrong_S), kernel = (x.reshape(3, S) for x in jax.lax.map(accuracy, tuple(cases)))
        drop_S = examples_S - wrong_S
        solved_S = jnp.maximum(examples_S - 1 / spec.p, 0) / (1 - 1 / spec.p)
        relied_on = jnp.nansum(number * drop_S) / jnp.maximum(jnp.nansum(solved_S), 1e-9)
        return {
            'accuracy_by_examples': examples_S, 'accuracy_by_examples/kernel': kernel[0],
            'accuracy_by_distinct': distinct_S, 'accuracy_by_distinct/kernel': kernel[1],
            'drop_by_examples': drop_S,
            'drop_by_examples/two_examples': solved_S * 2 / jnp.maximum(number, 1),
            'accuracy_all_examples': examples_S[-1], 'accuracy_two_distinct': distinct_S[min(2, S - 1)],
            'examples_relied_on': jnp.where(jnp.nanmean(solved_S) > 0.05, relied_on, jnp.nan),
        }

    return _by_split(splits, of_split)


def _by_split(splits: Sequence[str], measure) -> dict:
    return {f'{split}/{name}': value for split in splits for name, value in measure(split).items()}


def _inputs(batch: Batch) -> jax.Array:
    """Inputs (B, S, 2) of the examples of rows."""
    return jnp.stack([batch.tokens_BL[:, 0::3], batch.tokens_BL[:, 1::3]], -1)


def _clean_rows(task_state, key, cfg: Config, split: str, num_rows: int) -> tuple[Batch, jax.Array]:
    """Rows of a split with the true z everywhere, whatever the label noise of the run; and which rows are valid."""
    batch = cfg.task.sample(task_state, key, split=split, batch_size=num_rows)
    return cfg.task.rows(batch.groups['task_B2'], _inputs(batch)), batch.groups['valid_B']
