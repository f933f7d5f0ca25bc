"""Behaviour of models on the modular task, against brute force and models whose behaviour is known."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.text import Text

from lingrok import model
from lingrok.analysis import skills
from lingrok.config import ConfigError, defaults, from_config_dict
from lingrok.figures import skills as figures
from lingrok.log import Series
from lingrok.tasks.modular import Modular

P, S = 5, 5
quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})


@functools.cache
def config():
    tree = defaults('modular')
    tree.task.p, tree.task.num_examples, tree.task.num_tasks = P, S, 17
    tree.model.num_layers, tree.model.d_model, tree.model.num_heads, tree.model.d_mlp = 1, 8, 2, 8
    tree.train.batch_size = 17
    return from_config_dict(tree)


@functools.cache
def state(**variable):
    return jax.jit(lambda key: config().task.init(key, **variable))(jax.random.key(3))


def measure(fn, *, params=None, seed=0, task_state=None, **options):
    """Values of an analysis as numpy arrays."""
    run = quick_jit(lambda params, state, key: fn(params, state, key, config(), **options))
    found = run(params, state() if task_state is None else task_state, jax.random.key(seed))
    return {name: np.asarray(value) for name, value in found.items()}


def behave(monkeypatch, answer, logit=20):
    """Puts in the place of the model one whose answer to every query is answer(examples (n, 3), query (2,))."""

    def logits(tokens_BL):
        out = np.zeros((*tokens_BL.shape, P), np.float32)
        rows = np.pad(tokens_BL, ((0, 0), (0, -tokens_BL.shape[1] % 3))).reshape(len(tokens_BL), -1, 3)
        for b, row in enumerate(rows):
            for s in range(len(row)):
                out[b, 3 * s + 1, answer(row[:s], row[s, :2])] = logit
        return out

    def apply(params, tokens_BL, *, cfg):
        return jax.pure_callback(logits, jax.ShapeDtypeStruct((*tokens_BL.shape, P), jnp.float32), tokens_BL), {}

    monkeypatch.setattr(model, 'apply', apply)


def multiples(pair):
    return {(c * pair[0] % P, c * pair[1] % P) for c in range(P)}


@functools.cache
def weights_of(x1, y1, x2, y2, x, y):
    """c1 and c2 with c1 (x1, y1) + c2 (x2, y2) = (x, y), None for parallel examples."""
    found = [(c1, c2) for c1, c2 in itertools.product(range(P), repeat=2)
             if (c1 * x1 + c2 * x2 - x) % P == 0 == (c1 * y1 + c2 * y2 - y) % P]
    return found[0] if len(found) == 1 else None


def two_examples(examples, query):
    """The answer of the first two examples that span the plane; 0 where there are none."""
    for (x1, y1, z1), (x2, y2, z2) in itertools.combinations(examples.tolist(), 2):
        if c := weights_of(x1, y1, x2, y2, *query.tolist()):
            return (c[0] * z1 + c[1] * z2) % P
    return 0


@functools.cache
def grid():
    params = jax.jit(lambda key: model.init(key, config().model))(jax.random.key(5))
    return params, measure(skills.kshot_grid, params=params, shots=(1, 3), num_tasks=8)


def reported_tasks():
    tasks, count = np.asarray(state().tasks_T2), int(state().num_tasks)
    return {'id': tasks[:count], 'ood': tasks[count + (P * P - count) // 4:]}


apply = jax.jit(lambda params, tokens: model.apply(params, tokens, cfg=config().model)[0])


def right(params, task, context, k):
    """Which queries [x, y] the model gets right behind the first k inputs of a context."""
    queries = list(itertools.product(range(P), repeat=2))
    rows = [[v for x, y in context[:k] for v in (x, y, (task[0] * x + task[1] * y) % P)] + list(q) for q in queries]
    logits = np.asarray(apply(params, jnp.array(rows)))
    return (logits[:, -1].argmax(-1) == [(task[0] * x + task[1] * y) % P for x, y in queries]).reshape(P, P)


def test_grid_of_one_task_by_hand():
    params, found = grid()
    context, task = found['grid/context'], tuple(found['grid/task'])
    assert len({tuple(e[:2]) for e in context}) == 3 and (context[:, :2].sum(-1) > 0).all()
    assert (context[:, 2] == (context[:, :2] @ task) % P).all()
    assert task in map(tuple, reported_tasks()['ood']) and 0 not in task and not found['grid/is_training_task']
    for k in (1, 3):
        shown = right(params, task, context[:, :2], k)
        covered = np.zeros((P, P), bool)
        for x, y in set().union(*(multiples(e[:2]) for e in context[:k])):
            covered[x, y] = True
        np.testing.assert_array_equal(found[f'grid/model/{k}_shots'], shown)
        np.testing.assert_array_equal(found[f'grid/ratio/{k}_shots'], covered)
        counts = [found[f'grid/{name}_of_25/{k}_shots'] for name in ('model', 'ratio', 'gained', 'lost')]
        assert counts == [shown.sum(), covered.sum(), (shown & ~covered).sum(), (covered & ~shown).sum()]


def test_grid_means_count_every_reported_task_once():
    params, found = grid()
    context, covered = found['grid/context'][:, :2], found['grid/ratio/3_shots']
    tasks = reported_tasks()
    assert len(tasks['ood']) == 6 and len(tasks['id']) == 17
    for which, chosen in (('ood', tasks['ood']), ('id', tasks['id'][:8])):  # six of eight rows; eight of 17 tasks
        shown = np.stack([right(params, task, context, 3) for task in chosen])
        np.testing.assert_allclose(found[f'{which}/accuracy/3_shots'], shown.mean(), atol=1e-6)
        np.testing.assert_allclose(found[f'{which}/accuracy_covered/3_shots'], shown[:, covered].mean(), atol=1e-6)
        np.testing.assert_allclose(found[f'{which}/accuracy_uncovered/3_shots'], shown[:, ~covered].mean(), atol=1e-6)
        kernel = []
        for a, b in chosen:
            zero = any((a * x + b * y) % P == 0 for x, y in context)
            answers = [(a * x + b * y) % P for x, y in zip(*np.nonzero(~covered), strict=True)]
            kernel.append(np.mean([(z != 0) / (P - 1) if zero else z == 0 for z in answers]))
        np.testing.assert_allclose(found[f'{which}/accuracy_uncovered/kernel/3_shots'], np.mean(kernel), atol=1e-6)
    both = [found[f'ood/accuracy_uncovered/{k}_shots'] for k in (1, 3)]
    np.testing.assert_allclose(found['ood/accuracy_uncovered'], np.mean(both), atol=1e-6)


def test_grid_of_a_given_task_and_what_it_refuses(monkeypatch):
    behave(monkeypatch, two_examples)
    task = tuple(map(int, state().tasks_T2[0]))
    found = measure(skills.kshot_grid, shots=(4,), task=task, num_tasks=1)
    assert tuple(found['grid/task']) == task and found['grid/is_training_task']
    assert found['ood/accuracy'] == found['id/accuracy'] == 1  # four distinct inputs, not all on one line here
    for wrong in ({'shots': ()}, {'shots': (5,)}, {'shots': (0,)}, {'shots': (1,), 'task': (1, 5)},
                  {'shots': (1,), 'task': (1,)}):
        with pytest.raises(ConfigError, match='allowed: '):
            skills.kshot_grid(None, state(), jax.random.key(0), config(), **wrong)
    assert skills.default_shots(Modular(p=29, num_examples=32)) == (1, 2, 13, 31)  # those of Fig 5
    assert skills.default_shots(Modular(p=7, num_examples=3, num_tasks=8)) == (1, 2)


def known_task(answer):
    """A model that knows the one training task: it is right where answer(which examples are wrong) says so."""
    a, b = map(int, state().tasks_T2[0])

    def of_row(examples, query):
        wrong = [(a * x + b * y - z) % P != 0 for x, y, z in examples]
        return (a * query[0] + b * query[1] + (not answer(wrong))) % P

    return of_row


def test_label_noise_of_a_model_that_knows_which_labels_are_wrong(monkeypatch):
    """It is right unless example 1 is wrong or three examples are."""
    behave(monkeypatch, known_task(lambda wrong: sum(wrong) < 3 and not any(wrong[1:2])))
    found = measure(skills.label_noise, task_state=state(num_tasks=1), splits=('id_train',), num_rows=200,
                    num_batches=3)
    for i, j in itertools.product(range(S), repeat=2):
        accuracy, loss = (found[f'id_train/noise_{name}'][i, j] for name in ('accuracy', 'loss'))
        single = found['id_train/one_wrong_accuracy'][i, j]
        assert np.isnan(accuracy) == (j > i) and np.isnan(loss) == (j > i) and np.isnan(single) == (j >= i)
        if j <= i:
            share = (j < 3) * (1 - j / i if i > 1 else 1)
            # 600 / (i + 1) rows: four standard errors; what is certain is met exactly.
            assert abs(accuracy - share) <= 4 * np.sqrt(share * (1 - share) * (i + 1) / 600)
            np.testing.assert_allclose(loss, 20 * (1 - accuracy), atol=1e-4)
        if j < i:
            assert single == (j != 1)
    np.testing.assert_array_equal(found['id_train/clean_accuracy'], 1)
    assert found['id_train/accuracy_one_wrong'] == (S - 2) / (S - 1)
    assert found['id_train/accuracy_quarter_wrong'] == found['id_train/noise_accuracy'][-1, 1]
    plurality = found['id_train/noise_accuracy/plurality']
    assert plurality[0, 0] < 0.3 and plurality[4, 0] > 0.95 and plurality[4, 4] < 0.3  # the model does not enter


def posterior(tasks, examples, query):
    """Mean over the tasks that misfit fewest examples of their answers, as a distribution."""
    misfits = [sum((a * x + b * y - z) % P != 0 for x, y, z in examples) for a, b in tasks]
    best = [(a * query[0] + b * query[1]) % P for (a, b), m in zip(tasks, misfits, strict=True) if m == min(misfits)]
    return np.bincount(best, minlength=P) / len(best)


def test_plurality_and_predictors_by_enumeration():
    task = config().task
    batch = quick_jit(lambda s, key: task.sample(s, key, split='ood_train', batch_size=12))(state(), jax.random.key(1))
    rows = np.concatenate([batch.tokens_BL, batch.targets_BL[:, -1:]], 1).reshape(12, S, 3)
    everything, trained = list(itertools.product(range(P), repeat=2)), list(map(tuple, reported_tasks()['id']))
    found = quick_jit(lambda state, batch: skills.predictors(state, batch, config()))(state(), batch)
    shift = np.random.default_rng(0).integers(0, P, (12, S)) * np.array([1, 0, 1, 0, 0])
    votes = quick_jit(lambda rows, shift: skills.fewest_misfits(
        jnp.array(everything), jnp.ones(25, bool), task.rows(batch.groups['task_B2'], rows[..., :2], shift), config()))(
        rows, shift)
    for b, s in itertools.product(range(12), range(S)):
        examples, query = rows[b, :s], rows[b, s, :2]
        covered = tuple(query) in {(0, 0)}.union(*(multiples(e[:2]) for e in examples))
        ratio = np.eye(P)[rows[b, s, 2]] if covered else np.full(P, 1 / P)
        bayes = [posterior(tasks, examples, query) for tasks in (trained, everything)]
        expected = [*bayes, ratio, np.full(P, 1 / P)]
        np.testing.assert_allclose(found[:, b, s], expected, atol=1e-6)
        wrong = rows[b, :s] + np.stack([0 * shift[b, :s], 0 * shift[b, :s], shift[b, :s]], -1)
        np.testing.assert_allclose(votes[b, s] / votes[b, s].sum(), posterior(everything, wrong % P, query), atol=1e-6)


def test_a_known_mixture_is_found_and_no_other_is_nearer():
    rng = np.random.default_rng(0)
    components = rng.dirichlet(np.full(P, 0.3), (3, 200, 2))
    weights = np.array([[0.6, 0.3, 0.1], [0.0, 0.25, 0.75]])
    target = np.einsum('sc,cbsv->bsv', weights, components) / 200
    fit = jax.jit(functools.partial(skills.fit_mixture, num_iterations=2000))
    found, mixture = fit(jnp.asarray(target), jnp.asarray(components))
    np.testing.assert_allclose(found, weights, atol=0.01)
    np.testing.assert_allclose(mixture, np.einsum('sc,cbsv->bsv', found, components), atol=1e-5)
    other = rng.dirichlet(np.full(P, 0.3), (200, 2)) / 200  # in no mixture
    found, mixture = fit(jnp.asarray(other), jnp.asarray(components))
    for candidate in np.concatenate([np.eye(3), rng.dirichlet(np.ones(3), 200)]):
        rival = np.einsum('c,cbsv->bsv', candidate, components)
        assert ((other * np.log(rival)).sum((0, 2)) <= (other * np.log(mixture)).sum((0, 2)) + 1e-4).all()


def test_the_mixture_of_a_model_that_regresses(monkeypatch):
    behave(monkeypatch, two_examples, logit=2)
    top = np.exp(2) / (np.exp(2) + P - 1)
    sure = top - (1 - top) / (P - 1)  # a certain answer and a uniform guess, mixed
    # Few training tasks, so that memorising differs; shots from 2 on are solvable but for parallel examples.
    found = measure(skills.bayes_mixture, task_state=state(num_tasks=4), splits=('ood_train',), num_rows=200)
    weights = {name: found[f'ood_train/weight_by_shot/{name}'] for name in skills.COMPONENTS}
    np.testing.assert_allclose(sum(weights.values()), 1, atol=1e-5)
    assert abs(weights['regression'][4] - sure) < 0.04 and abs(weights['guess'][4] - 1 + sure) < 0.04
    assert -1e-6 < found['ood_train/kl_by_shot'][4] < 0.02
    entropy = -top * np.log(top) - (1 - top) * np.log((1 - top) / (P - 1))
    np.testing.assert_allclose(found['ood_train/kl_by_shot/guess'], np.log(P) - entropy, atol=1e-5)
    np.testing.assert_allclose(found['ood_train/weight/ratio'], weights['ratio'][2:].mean(), atol=1e-6)
    np.testing.assert_allclose(found['ood_train/kl'], found['ood_train/kl_by_shot'][2:].mean(), atol=1e-6)
    np.testing.assert_allclose(weights['regression'][1], weights['ratio'][1], atol=1e-5)  # the same predictor there


def test_pooling_of_a_model_that_combines_two_of_at_least_three_examples(monkeypatch):
    def answer(examples, query):
        """The right one, except for fewer than three distinct inputs and for queries that one example determines."""
        enough = len({tuple(e) for e in examples[:, :2].tolist()}) >= 3
        covered = any(tuple(query) in multiples(e[:2]) for e in examples)
        return (two_examples(examples, query) + (covered or not enough)) % P

    behave(monkeypatch, answer)
    found = {name.removeprefix('ood_forced/'): x for name, x in measure(skills.pooling, num_rows=200).items()}
    np.testing.assert_array_equal(found['accuracy_by_distinct'], [np.nan, np.nan, 0, 1, 1])
    examples = found['accuracy_by_examples']
    assert np.isnan(examples[:2]).all() and examples[2] == 0 and 0.7 < examples[3] < examples[4] <= 1
    # A wrong label among the two that are combined always changes the answer.
    reference = found['drop_by_examples/two_examples']
    np.testing.assert_allclose(reference[2:], [0, *(examples[3:] - 1 / P) / (1 - 1 / P) * [2 / 3, 2 / 4]], atol=1e-6)
    assert np.abs(found['drop_by_examples'] - reference)[3:].max() < 4 * np.sqrt(0.25 / 100)
    assert found['drop_by_examples'][3] > 0.4 and abs(found['examples_relied_on'] - 2) < 0.4
    assert (found['accuracy_two_distinct'], found['accuracy_all_examples']) == (0, examples[4])


def test_pooling_beside_the_kernel_trick(monkeypatch):
    behave(monkeypatch, lambda examples, query: int(any(z == 0 and (x or y) for x, y, z in examples)))
    found = measure(skills.pooling, num_rows=200)
    for name in ('accuracy_by_examples', 'accuracy_by_distinct'):
        exact = found[f'ood_forced/{name}/kernel']
        assert np.abs(found[f'ood_forced/{name}'] - exact)[2:].max() < 4 * np.sqrt(0.25 / 100)

    def on_same_rows(state, key):
        batch = config().task.sample(state, key, split='ood_forced', batch_size=200)
        return config().task.baselines(state, batch)['accuracy_last_not_covered/kernel']

    same = quick_jit(on_same_rows)(state(), jax.random.key(0))
    np.testing.assert_allclose(found['ood_forced/accuracy_by_examples/kernel'][-1], same, atol=1e-6)


@pytest.mark.parametrize('name, options', [
    ('kshot_grid', {'shots': (1, 3, 4)}), ('label_noise', {'splits': ('id_train', 'ood_train')}),
    ('bayes_mixture', {'splits': ('id_train', 'ood_train')}), ('pooling', {}),
])
def test_figures_draw_every_setting_and_say_how_many_seeds(name, options):
    fn = functools.partial(getattr(skills, name), cfg=config(), **options)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), config().model))
    shapes = jax.eval_shape(fn, params, state(), jax.random.key(0))
    rng = np.random.default_rng(0)
    series = {k: Series(np.array([7]), rng.uniform(size=(1, 4, *x.shape)).round(0 if 'grid' in k else 9))
              for k, x in shapes.items()}
    drawn = getattr(figures, name)(series, cfg_of_settings())
    texts = [text.get_text() for text in drawn.findobj(Text)]
    assert any('mean of 2 seeds' in text for text in texts)
    assert {'num_tasks=8', 'num_tasks=17'} <= {text[:12].rstrip(':') for text in texts}
    assert all(axis.get_xlabel() or axis.get_title() or axis.get_ylabel() for axis in drawn.axes)


def cfg_of_settings():
    return dataclasses.replace(config(), vary={'seed': (0, 0, 1, 1), 'task.num_tasks': (17, 8, 17, 8)})
