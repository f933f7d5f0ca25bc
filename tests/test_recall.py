"""The law of the recall task is tested on large batches, to four standard errors, for fixed keys."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lingrok.tasks import bigrams, recall
from lingrok.tasks.recall import Recall

# What is compiled here runs once or twice: XLA's optimisations would take longer than they save.
quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})

BATCH, LENGTH = 4096, 32
LAWS = {
    'defaults': {'length': LENGTH},
    'fixed, bigram targets': {'table': 'synthetic', 'table_size': 8, 'noise_token': '5', 'num_triggers': 3,
                              'target_law': 'bigram', 'noise_prob': 0.3, 'length': LENGTH},
    'offset, trigger may be target': {'table': 'uniform', 'table_size': 6, 'noise_token': '0', 'trigger_offset': 2,
                                      'targets_exclude': ('noise',), 'length': LENGTH},
    'random, extra noise': {'table': 'uniform', 'table_size': 8, 'noise_token': 'extra', 'trigger_mode': 'random',
                            'num_triggers': 3, 'targets_exclude': ('own_trigger',), 'loss_on': 'visible',
                            'length': LENGTH},
    'random, any target': {'trigger_mode': 'random', 'num_triggers': 3, 'targets_exclude': (), 'noise_prob': 0.7,
                           'loss_on': 'all', 'length': LENGTH},
}
PREVIOUS = {'noise by the token before': {'noise_law': 'previous', 'length': LENGTH}}
FIXED = [name for name in LAWS if name.startswith(('defaults', 'fixed', 'offset'))]


@functools.cache
def sampler(law: str):
    """(key, noise_prob) -> state and noisy batch of a law, compiled once."""
    task = Recall(**(LAWS | PREVIOUS)[law])

    @quick_jit
    def draw(key, noise_prob):
        state = task.init(key, noise_prob=noise_prob)
        return state, task.sample(state, key, split='noisy', batch_size=BATCH)

    return task, lambda *args: jax.tree.map(np.asarray, draw(*args))


@functools.cache
def drawn(law: str):
    """(task, state, noisy batch, clean batch) of a law, as numpy arrays; both batches from the same key.

    The clean batch is one of noise probability 0, which spares a compilation; see `test_splits`.
    """
    task, draw = sampler(law)
    state, noisy = draw(jax.random.key(1), task.noise_prob)
    return task, state, noisy, draw(jax.random.key(1), 0.0)[1]


def target_law(task: Recall, bigram_VV, triggers, own: int) -> np.ndarray:
    """Law of the target of the trigger `own`, from the words of the documentation."""
    tokens = np.arange(task.vocab_size)
    barred = tokens >= task.table_vocab
    if 'noise' in task.targets_exclude:
        barred = barred | (tokens == task.noise_id)
    if 'triggers' in task.targets_exclude:
        barred = barred | np.isin(tokens, triggers)
    if 'own_trigger' in task.targets_exclude:
        barred = barred | (tokens == own)
    weights = np.where(barred, 0, 1 if task.target_law == 'uniform' else bigram_VV[own])
    return weights / weights.sum()


def chain(task: Recall, state, targets: dict) -> np.ndarray:
    """Transition matrix (V, V) of the tokens of a sequence whose triggers have these targets."""
    matrix = np.array(state.bigram_VV, float)
    for trigger, target in targets.items():
        matrix[trigger] = 0
        matrix[trigger, target] += 1 - task.noise_prob
        matrix[trigger, task.noise_id] += task.noise_prob
    return matrix


def all_targets(task: Recall, state):
    """(probability, {trigger: target}) of everything that the fixed triggers may have as targets."""
    laws = [target_law(task, state.bigram_VV, task.fixed_triggers, trigger) for trigger in task.fixed_triggers]
    for targets in itertools.product(range(task.vocab_size), repeat=task.num_triggers):
        probability = math.prod(law[target] for law, target in zip(laws, targets, strict=True))
        if probability:
            yield probability, dict(zip(task.fixed_triggers, targets, strict=True))


def assert_drawn_from(counts, probabilities) -> None:
    """Pearson's chi-square of rows of counts against their laws lies within 4 standard errors of its mean."""
    counts, probabilities = np.atleast_2d(counts), np.atleast_2d(probabilities)
    assert counts[probabilities == 0].sum() == 0
    expected = counts.sum(1, keepdims=True) * probabilities
    used = expected >= 5
    statistic = np.sum(((counts - expected) ** 2)[used] / expected[used])
    # Cells are Poisson to leading order; a row that is used whole has one degree of freedom less.
    freedom = np.sum(used * (1 - probabilities))
    assert freedom > 0
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom), (statistic, freedom)


# The law --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('law', LAWS)
def test_text_follows_the_table(law):
    task, state, batch, _ = drawn(law)
    size = task.vocab_size
    np.testing.assert_allclose(state.unigram_V.sum(), 1, atol=1e-6)
    np.testing.assert_allclose(state.bigram_VV.sum(1), 1, atol=1e-6)
    assert_drawn_from(np.bincount(batch.tokens_BL[:, 0], minlength=size), state.unigram_V)
    text = ~(batch.tokens_BL[..., None] == batch.groups['triggers_Bk'][:, None]).any(-1)
    pairs = np.zeros((size, size))
    np.add.at(pairs, (batch.tokens_BL[text], batch.targets_BL[text]), 1)
    rows = pairs.sum(1) > 0
    assert rows.sum() >= size - 1 - task.num_triggers
    assert_drawn_from(pairs[rows], state.bigram_VV[rows])
    np.testing.assert_array_equal(batch.tokens_BL[:, 1:], batch.targets_BL[:, :-1])


def test_tables():
    shakespeare = drawn('defaults')[1]
    unigram_V, bigram_VV = bigrams.load_table('shakespeare').probabilities()
    np.testing.assert_allclose(shakespeare.unigram_V, unigram_V, rtol=1e-6)
    np.testing.assert_allclose(shakespeare.bigram_VV, bigram_VV, rtol=1e-6)
    uniform = drawn('random, extra noise')[1]
    np.testing.assert_allclose(uniform.unigram_V, [1 / 8] * 8 + [0])
    np.testing.assert_allclose(uniform.bigram_VV, [[1 / 8] * 8 + [0]] * 9)
    zipf = drawn('fixed, bigram targets')[1]
    np.testing.assert_allclose(zipf.unigram_V, (1 / np.arange(1, 9)) / (1 / np.arange(1, 9)).sum(), rtol=1e-6)
    assert len(np.unique(zipf.bigram_VV)) > 50


def test_synthetic_rows_are_dirichlet_draws_around_the_unigram_law():
    # A Dirichlet law with parameters c p has mean p and variance p (1 - p) / (c + 1); c = concentration * size.
    task = Recall(table='synthetic', table_size=64, noise_token='extra', concentration=0.5, zipf_exponent=0.5)
    state = quick_jit(task.init)(jax.random.key(0))
    rows, mean = np.asarray(state.bigram_VV)[:64, :64], np.asarray(state.unigram_V)[:64]
    variance = mean * (1 - mean) / (0.5 * 64 + 1)
    assert np.all(abs(rows.mean(0) - mean) < 4 * np.sqrt(variance / 64))
    # The sum over tokens of the squared deviations has mean sum(variance); its spread is estimated from the rows.
    squares = ((rows - mean) ** 2).sum(1)
    assert abs(squares.mean() - variance.sum()) < 4 * squares.std() / 8
    np.testing.assert_allclose(state.bigram_VV[64], state.unigram_V)  # what follows the extra symbol is a fresh start


@pytest.mark.parametrize('law', LAWS)
def test_noise_rate(law):
    task, _, noisy, clean = drawn(law)
    at_trigger = noisy.groups['occurrence_BL'] > 0
    noise = noisy.groups['is_noise_BL']
    count = at_trigger.sum()
    assert not noise[~at_trigger].any() and not clean.groups['is_noise_BL'].any()
    error = math.sqrt(task.noise_prob * (1 - task.noise_prob) / count)
    assert abs(noise[at_trigger].mean() - task.noise_prob) < 4 * error
    np.testing.assert_array_equal(noisy.targets_BL[noise], task.noise_id)
    for batch in (noisy, clean):
        target = (batch.groups['occurrence_BL'] > 0) & ~batch.groups['is_noise_BL']
        np.testing.assert_array_equal(batch.targets_BL[target], batch.groups['answer_BL'][target])


@pytest.mark.parametrize('law', LAWS)
def test_target_law(law):
    task, state, batch, _ = drawn(law)
    # At the first occurrence of a trigger nothing of its target has shown: these targets are a fair sample.
    rows, positions = np.nonzero(batch.groups['occurrence_BL'] == 1)
    own, answers = batch.tokens_BL[rows, positions], batch.groups['answer_BL'][rows, positions]
    laws = np.stack([target_law(task, state.bigram_VV, batch.groups['triggers_Bk'][row], trigger)
                     for row, trigger in zip(rows, own, strict=True)])
    assert np.all(laws[np.arange(len(rows)), answers] > 0)
    for trigger in np.unique(own) if law in FIXED else [None]:
        chosen = own == trigger if trigger is not None else np.ones_like(own, bool)
        counts = np.bincount(answers[chosen], minlength=task.vocab_size)
        mean, variance = laws[chosen].sum(0), (laws[chosen] * (1 - laws[chosen])).sum(0)
        assert np.all(abs(counts - mean) <= 4 * np.sqrt(variance))
    # The prior that the baselines use is the same law.
    prior_kV = np.asarray(quick_jit(task.target_prior)(state, batch.groups['triggers_Bk'][:1]))[0]
    for trigger, prior_V in zip(batch.groups['triggers_Bk'][0], prior_kV, strict=True):
        expected = target_law(task, state.bigram_VV, batch.groups['triggers_Bk'][0], trigger)
        np.testing.assert_allclose(prior_V, expected, rtol=1e-6)


def test_a_trigger_without_an_allowed_successor_draws_uniformly(tmp_path):
    # 'a' is only followed by 'b', which is a trigger, too.
    path = str(tmp_path / 'table.json')
    bigrams.save_table(bigrams.count('abababcbdb'), path)
    task = Recall(table=path, num_triggers=2, noise_token='extra', target_law='bigram')
    assert [task.symbols[i] for i in task.fixed_triggers] == ['b', 'a']
    state = quick_jit(task.init)(jax.random.key(0))
    prior = np.asarray(quick_jit(task.target_prior)(state, jnp.array([task.fixed_triggers])))[0]
    np.testing.assert_allclose(prior[1], [0, 0, 0.5, 0.5, 0])
    np.testing.assert_allclose(prior[0], [0, 0, 0.5, 0.5, 0])


@pytest.mark.parametrize('law', FIXED)
def test_fixed_triggers_are_the_most_frequent_tokens(law):
    task, state, batch, _ = drawn(law)
    order = sorted(range(task.vocab_size), key=lambda token: (-state.unigram_V[token], token))
    expected = order[task.trigger_offset : task.trigger_offset + task.num_triggers]
    np.testing.assert_array_equal(batch.groups['triggers_Bk'], [expected] * BATCH)


@pytest.mark.parametrize('law', [law for law in LAWS if law not in FIXED])
def test_random_triggers_are_drawn_by_frequency_without_replacement(law):
    task, state, batch, _ = drawn(law)
    triggers = batch.groups['triggers_Bk']
    p = np.array(state.unigram_V, float)
    p[task.noise_id] = 0
    p /= p.sum()
    size = len(p)
    i, j, k = np.ogrid[:size, :size, :size]
    with np.errstate(divide='ignore', invalid='ignore'):
        law_of_three = p[i] * p[j] / (1 - p[i]) * p[k] / (1 - p[i] - p[j])
    law_of_three = np.where((i == j) | (i == k) | (j == k), 0, law_of_three)
    np.testing.assert_allclose(law_of_three.sum(), 1)
    assert np.all(np.sort(triggers, 1)[:, 1:] != np.sort(triggers, 1)[:, :-1])
    for place in range(3):
        others = tuple(axis for axis in range(3) if axis != place)
        assert_drawn_from(np.bincount(triggers[:, place], minlength=size), law_of_three.sum(others))


@pytest.mark.parametrize('law', FIXED)
def test_tokens_follow_the_exact_chain(law):
    task, state, batch, _ = drawn(law)
    expected = 0  # mean number of every token in a sequence
    stationary = 0
    for probability, targets in all_targets(task, state):
        matrix, at = chain(task, state, targets), np.array(state.unigram_V, float)
        total = at.copy()
        for _ in range(LENGTH - 1):
            at = at @ matrix
            total += at
        expected = expected + probability * total
        stationary = stationary + probability * (state.unigram_V @ np.linalg.matrix_power(matrix, 1000))
    counts = (batch.tokens_BL[..., None] == np.arange(task.vocab_size)).sum(1)
    # Sequences are independent: the standard error of a mean count comes from their spread.
    error = counts.std(0) / math.sqrt(BATCH)
    assert np.all(abs(counts.mean(0) - expected) <= 4 * error)
    assert np.sum(error > 0) >= task.vocab_size - 1
    if task.trigger_offset == 0:  # else a trigger may be its own target, and stays for long
        triggers = list(task.fixed_triggers)
        late = np.isin(batch.tokens_BL[:, LENGTH // 2 :], triggers).mean(1)
        assert abs(late.mean() - stationary[triggers].sum()) < 4 * late.std() / math.sqrt(BATCH)


# Keys and splits ------------------------------------------------------------------------------------------------------


def test_keys_decide():
    law = 'offset, trigger may be target'
    task, _, noisy, _ = drawn(law)
    (_, again), (_, other) = (sampler(law)[1](jax.random.key(seed), task.noise_prob) for seed in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, again, noisy)
    for name in ('tokens_BL', 'targets_BL'):
        assert np.mean(getattr(noisy, name) == getattr(other, name)) < 0.5
    # Rows do not repeat each other either.
    assert len(np.unique(noisy.tokens_BL, axis=0)) > 0.95 * BATCH


def test_a_state_read_from_disk_serves():
    task, state, noisy, _ = drawn('defaults')
    assert isinstance(state.bigram_VV, np.ndarray)
    batch = jax.eval_shape(lambda: task.sample(state, jax.random.key(1), split='noisy', batch_size=BATCH))
    assert jax.tree.map(np.shape, batch) == jax.tree.map(np.shape, noisy)
    assert set(jax.eval_shape(lambda: task.baselines(state, noisy))) == {'loss/bayes', 'loss/distribution_only',
                                                                         'loss_bigram/bayes', 'loss_recall/bayes'}


@pytest.mark.parametrize('law', LAWS)
def test_noisy_and_clean_share_every_other_draw(law):
    _, _, noisy, clean = drawn(law)
    np.testing.assert_array_equal(noisy.tokens_BL[:, 0], clean.tokens_BL[:, 0])
    np.testing.assert_array_equal(noisy.groups['triggers_Bk'], clean.groups['triggers_Bk'])
    # Wherever both read the same token, they answer and go on alike but for the noise.
    same = noisy.tokens_BL == clean.tokens_BL
    assert 0.1 < same.mean() < 1
    np.testing.assert_array_equal(noisy.groups['answer_BL'][same], clean.groups['answer_BL'][same])
    same &= ~noisy.groups['is_noise_BL']
    np.testing.assert_array_equal(noisy.targets_BL[same], clean.targets_BL[same])


def test_splits():
    task = Recall(table='uniform', table_size=6, noise_token='extra', length=6)

    @quick_jit
    def both(key, noise_prob):
        state = task.init(key, noise_prob=noise_prob)
        return [task.sample(state, key, split=split, batch_size=8) for split in ('train', 'noisy', 'clean')]

    _, noisy, clean = both(jax.random.key(0), 0.0)
    jax.tree.map(np.testing.assert_array_equal, noisy, clean)
    train, noisy, clean = both(jax.random.key(0), 1.0)
    jax.tree.map(np.testing.assert_array_equal, train, noisy)
    at_trigger = np.asarray(noisy.groups['occurrence_BL']) > 0
    assert at_trigger.any()
    np.testing.assert_array_equal(np.asarray(noisy.targets_BL)[at_trigger], task.noise_id)
    assert not np.array_equal(noisy.targets_BL, clean.targets_BL)


@pytest.mark.parametrize('law', LAWS)
def test_impossible_tokens_have_no_share_of_the_cumulative_law(law):
    _, state, _, _ = drawn(law)
    for weights, cdf in ((state.unigram_V, state.unigram_cdf_V), (state.bigram_VV, state.bigram_cdf_VV)):
        steps = np.diff(cdf, axis=-1, prepend=0)
        assert np.all(steps >= 0)
        assert np.all((steps > 0) == (weights > 1e-7)) or np.all(steps[weights == 0] == 0)
    largest = jnp.float32(1 - 2**-24)
    ends = recall.inverse_cdf(state.bigram_cdf_VV, jnp.full(len(state.bigram_VV), largest))
    assert np.all(state.bigram_VV[np.arange(len(ends)), ends] > 0)


# Groups ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('law', LAWS)
def test_groups_and_mask_against_a_plain_loop(law):
    task, _, noisy, clean = drawn(law)
    for batch in (noisy, clean):
        for row in range(100):
            tokens, labels = batch.tokens_BL[row].tolist(), batch.targets_BL[row].tolist()
            triggers = batch.groups['triggers_Bk'][row].tolist()
            noise = batch.groups['is_noise_BL'][row].tolist()
            counts, shown, answers = dict.fromkeys(triggers, 0), dict.fromkeys(triggers, False), {}
            for t, (token, label) in enumerate(zip(tokens, labels, strict=True)):
                found = {name: values[row, t] for name, values in batch.groups.items() if name != 'triggers_Bk'}
                if token not in triggers:
                    assert found == {'occurrence_BL': 0, 'visible_BL': False, 'is_noise_BL': False, 'answer_BL': -1}
                    scored = False
                else:
                    counts[token] += 1
                    answers.setdefault(token, found['answer_BL'])
                    assert found['answer_BL'] == answers[token]
                    assert found['occurrence_BL'] == counts[token]
                    assert found['visible_BL'] == shown[token]
                    assert label == (task.noise_id if noise[t] else answers[token])
                    scored = {'repeated': counts[token] >= 2, 'visible': shown[token], 'all': True}[task.loss_on]
                    shown[token] |= not noise[t]
                assert batch.mask_BL[row, t] == (1 if task.loss_on == 'all' else scored)
    assert batch.mask_BL.dtype == np.float32 and batch.tokens_BL.dtype == batch.targets_BL.dtype == np.int32


def test_worked_example_of_the_documentation():
    """t h a x e a ! o a x: what the module says about occurrence and visible."""
    task = Recall(length=9)
    ids = [task.symbols.index(c) for c in 'thaxea!oax']
    a, x = ids[2], ids[3]
    batch = recall.Batch(jnp.array([ids[:-1]]), jnp.array([ids[1:]]), jnp.ones((1, 9)), {
        'occurrence_BL': jnp.array([[0, 0, 1, 0, 0, 2, 0, 0, 3]]),
        'answer_BL': jnp.array([[-1, -1, x, -1, -1, x, -1, -1, x]]),
        'triggers_Bk': jnp.array([[a]]),
    })
    bayes, distribution = (np.asarray(p)[0] for p in quick_jit(task.reference_probs)(drawn('defaults')[1], batch))
    allowed = 62 - 2
    np.testing.assert_allclose(bayes[[2, 5, 8]], [0.5 / allowed, 0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(distribution[[2, 5, 8]], [0.5 / allowed, 0.5, 0.5 / allowed], rtol=1e-6)


# Exact predictors -----------------------------------------------------------------------------------------------------

SMALL = {'table': 'uniform', 'table_size': 5, 'length': 10, 'num_triggers': 2, 'noise_prob': 0.6}
BAYES = {
    'noise may be a target': SMALL | {'noise_token': '3', 'targets_exclude': ()},
    'noise may be a target by bigrams': SMALL | {'noise_token': '4', 'targets_exclude': (), 'target_law': 'bigram',
                                                 'trigger_mode': 'random'},
    'noise is no target': SMALL | {'noise_token': '4', 'trigger_mode': 'random'},
    'extra noise': SMALL | {'noise_token': 'extra', 'targets_exclude': ('own_trigger',)},
    'no noise': SMALL | {'noise_token': '3', 'targets_exclude': (), 'noise_prob': 0.0},
    'noise by the token before': SMALL | {'noise_token': '3', 'targets_exclude': (), 'noise_prob': 0.35,
                                          'noise_law': 'previous', 'trigger_mode': 'random'},
}


def noise_rate(task, tokens) -> float:
    """Probability of noise behind the last of these tokens, from the words of the documentation."""
    if task.noise_law == 'independent':
        return task.noise_prob
    even = len(tokens) > 1 and tokens[-2] % 2 == 0
    return min(1, 2 * task.noise_prob) if even else max(0, 2 * task.noise_prob - 1)


def simulate(task, bigram_VV, num, rng):
    """(tokens, labels, answers, triggers) of `num` sequences, drawn one token after the other."""
    rows = []
    for _ in range(num):
        others = [token for token in range(task.table_vocab) if token != task.noise_id]
        triggers = rng.choice(others, task.num_triggers, replace=False).tolist()
        targets = {t: rng.choice(task.vocab_size, p=target_law(task, bigram_VV, triggers, t)) for t in triggers}
        tokens = [rng.choice(task.table_vocab)]
        for _ in range(task.length):
            if tokens[-1] in triggers:
                tokens.append(task.noise_id if rng.random() < noise_rate(task, tokens) else targets[tokens[-1]])
            else:
                tokens.append(rng.choice(task.vocab_size, p=bigram_VV[tokens[-1]]))
        rows.append((tokens[:-1], tokens[1:], [targets.get(token, -1) for token in tokens[:-1]], triggers))
    return [np.array(column, np.int32) for column in zip(*rows, strict=True)]


def brute_force(task, bigram_VV, tokens, labels, triggers):
    """Law of the label (L, V) at every position given all before it, by going through all targets; and without them."""
    size = task.vocab_size
    laws = [target_law(task, bigram_VV, triggers, trigger) for trigger in triggers]
    noise_V = np.eye(size)[task.noise_id]
    candidates = [(dict(zip(triggers, targets, strict=True)), math.prod(w[t] for w, t in zip(laws, targets,
                   strict=True))) for targets in itertools.product(range(size), repeat=len(triggers))]
    weights = np.array([weight for _, weight in candidates])
    bayes, distribution = [], []
    for place, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        if token in triggers:
            alpha = noise_rate(task, tokens[: place + 1])
            given = np.stack([alpha * noise_V + (1 - alpha) * np.eye(size)[targets[token]]
                              for targets, _ in candidates])
            alone = alpha * noise_V + (1 - alpha) * laws[triggers.index(token)]
        else:
            given = np.broadcast_to(bigram_VV[token], (len(candidates), size))
            alone = bigram_VV[token]
        bayes.append(weights @ given / weights.sum())
        distribution.append(alone)
        weights = weights * given[:, label]
    return np.stack(bayes), np.stack(distribution)


@pytest.mark.parametrize('case', BAYES)
def test_reference_predictors_against_all_targets(case):
    task, rng = Recall(**BAYES[case]), np.random.default_rng(0)
    size, num = task.vocab_size, 24
    # Random rows; a symbol that is not in the table does not occur in the text.
    bigram_VV = np.zeros((size, size))
    bigram_VV[:, :5] = rng.dirichlet(np.ones(5), size)
    tokens, labels, answers, triggers = simulate(task, bigram_VV, num, rng)
    assert (answers >= 0).sum() > 50
    laws = jnp.asarray(bigram_VV, jnp.float32)
    state = recall.RecallState(None, laws, None, None, jnp.float32(task.noise_prob))

    @quick_jit
    def predictions(tokens, labels, answers, triggers):
        """For every position the probability of every label there, (B, L, V)."""

        def of(t, label):
            groups = {'answer_BL': answers, 'triggers_Bk': triggers}
            batch = recall.Batch(tokens, labels.at[:, t].set(label), jnp.ones(tokens.shape), groups)
            return jnp.stack(task.reference_probs(state, batch))[..., t]

        over_labels = jax.vmap(of, (None, 0), -1)
        return jax.vmap(over_labels, (0, None), -2)(jnp.arange(task.length), jnp.arange(size))

    bayes_BLV, distribution_BLV = np.asarray(predictions(*map(jnp.asarray, (tokens, labels, answers, triggers))))
    # Rounding of a few products in float32.
    np.testing.assert_allclose(bayes_BLV.sum(-1), 1, atol=3e-6)
    np.testing.assert_allclose(distribution_BLV.sum(-1), 1, atol=3e-6)
    for row in range(num):
        bayes, distribution = brute_force(task, bigram_VV, tokens[row], labels[row], triggers[row].tolist())
        np.testing.assert_allclose(bayes_BLV[row], bayes, atol=3e-6)
        np.testing.assert_allclose(distribution_BLV[row], distribution, atol=3e-6)


@pytest.mark.parametrize('noise_prob, even, odd', [(0.3, 0.6, 0.0), (0.7, 1.0, 0.4)])
def test_noise_that_depends_on_the_token_before(noise_prob, even, odd):
    task, _ = sampler('noise by the token before')
    batch = sampler('noise by the token before')[1](jax.random.key(1), noise_prob)[1]
    before = np.pad(batch.tokens_BL, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    at_trigger = batch.groups['occurrence_BL'] > 0
    for parity, rate in ((0, even), (1, odd)):
        noise = batch.groups['is_noise_BL'][at_trigger & (before % 2 == parity)]
        assert len(noise) > 1000 and abs(noise.mean() - rate) <= 4 * math.sqrt(rate * (1 - rate) / len(noise))
    logits = jnp.zeros((*batch.tokens_BL.shape, task.vocab_size)).at[..., task.noise_id].set(
        jnp.where(before % 2 == 0, 50.0, -50.0))
    found = quick_jit(task.metrics)(logits, jax.tree.map(jnp.asarray, batch))
    assert found['p_noise_even'] > 0.99 and found['p_noise_odd'] < 0.01


def test_distribution_only_plateau():
    task, state, noisy, _ = drawn('defaults')
    found = quick_jit(task.baselines)(state, noisy)
    alpha, allowed = task.noise_prob, task.vocab_size - 2
    plateau = -alpha * math.log(alpha) - (1 - alpha) * math.log((1 - alpha) / allowed)
    spread = abs(math.log(alpha) - math.log((1 - alpha) / allowed)) * math.sqrt(alpha * (1 - alpha))
    assert abs(found['loss/distribution_only'] - plateau) < 4 * spread / math.sqrt(noisy.mask_BL.sum())
    # Where the target is known, only the noise is uncertain; elsewhere Bayes knows what `distribution only` does.
    visible = noisy.groups['visible_BL'][noisy.mask_BL > 0].mean()
    entropy = -alpha * math.log(alpha) - (1 - alpha) * math.log(1 - alpha)
    expected = visible * entropy + (1 - visible) * plateau
    assert abs(found['loss/bayes'] - expected) < 4 * spread / math.sqrt(noisy.mask_BL.sum())
    # Text: the conditional entropy of the table, weighted by how often each token is read.
    unigram, rows = bigrams.load_table('shakespeare').probabilities()
    entropy_V = -(rows * np.log(np.where(rows > 0, rows, 1))).sum(1)
    text = noisy.groups['occurrence_BL'] == 0
    read = entropy_V[noisy.tokens_BL[text]]
    spread_V = np.sqrt((rows * (np.log(np.where(rows > 0, rows, 1)) + entropy_V[:, None]) ** 2).sum(1))
    error = math.sqrt((spread_V[noisy.tokens_BL[text]] ** 2).sum()) / text.sum()
    assert abs(found['loss_bigram/bayes'] - read.mean()) < 4 * error


def test_metrics_by_hand():
    task = Recall(table='uniform', table_size=3, noise_token='2', length=4, loss_on='all')
    # Trigger 0, target 1, noise 2; positions 1 and 3 are repeated triggers, the second with noise behind it.
    batch = recall.Batch(
        jnp.array([[0, 0, 1, 0]]), jnp.array([[1, 1, 0, 2]]), jnp.array([[0.0, 1.0, 0.0, 1.0]]),
        {'occurrence_BL': jnp.array([[1, 2, 0, 3]]), 'answer_BL': jnp.array([[1, 1, -1, 1]])},
    )
    p = np.array([[[0.2, 0.5, 0.3], [0.1, 0.7, 0.2], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3]]])
    metrics = quick_jit(task.metrics)
    found = metrics(jnp.log(p) + 3, batch)
    assert found['loss'] == pytest.approx(-(math.log(0.7) + math.log(0.3)) / 2, rel=1e-5)
    assert found['loss_bigram'] == pytest.approx(-math.log(0.6), rel=1e-5)
    assert found['loss_recall'] == found['loss']  # the scored positions are the repeated triggers
    assert found['accuracy'] == 0.5
    assert found['accuracy_triggers'] == pytest.approx(2 / 3) and found['accuracy_start'] == 0.75
    np.testing.assert_array_equal(found['joint_noise'], [[0.5, 0.5], [0, 0]])  # both predictions are the target
    assert found['p_noise'] == pytest.approx((0.2 + 0.3) / 2, rel=1e-5)
    assert found['p_correct'] == pytest.approx((0.7 + 0.5) / 2, rel=1e-5)
    np.testing.assert_array_equal(found['accuracy_by_occurrence'][:3], [1, 1, 0])
    assert np.isnan(found['accuracy_by_occurrence'][3:]).all()
    late = batch._replace(groups={**batch.groups, 'occurrence_BL': jnp.array([[8, 9, 0, 30]])})
    np.testing.assert_allclose(metrics(jnp.log(p), late)['accuracy_by_occurrence'][-1], 2 / 3, rtol=1e-6)
