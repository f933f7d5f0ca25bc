"""Exchange of activations: what the answers of each algorithm are, and that the exchange does what it says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_heads import random_params, tiny_config

from lingrok import model
from lingrok.analysis import patching

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
CFG = tiny_config()
PARAMS = random_params(CFG.model)
P, S, L = 5, 4, 11


@functools.cache
def state():
    return quick_jit(CFG.task.init)(jax.random.key(3))


@functools.cache
def drawn(condition):
    """The examples (B, S, 3) of base and source, the last z being the right one, and the answers."""
    fn = quick_jit(lambda state, key: patching.pair(state, key, CFG, condition=condition, split='ood_train',
                                                    num_rows=64))
    found = fn(state(), jax.random.key(1))
    rows = [np.concatenate([x.tokens_BL, x.targets_BL[:, -1:]], 1).reshape(64, S, 3) for x in found[:2]]
    return *rows, {name: np.asarray(value) for name, value in found.answers.items()}


def coefficients(context, query):
    """All (c1, c2, c3) that combine the three inputs of a context to the query."""
    triples = np.array(list(np.ndindex(P, P, P)))
    return triples[((triples @ context[:, :2] - query[:2]) % P == 0).all(-1)]


@pytest.mark.parametrize('condition', patching.CONDITIONS)
def test_answers_are_those_of_coefficients_and_labels(condition):
    """Every combination that gives a query, put on the labels of either prompt, gives the answer named so."""
    base, source, answers = drawn(condition)
    checked = 0
    for i in range(64):
        own, others = coefficients(base[i, :3], base[i, 3]), coefficients(source[i, :3], source[i, 3])
        asked = coefficients(base[i, :3], source[i, 3])
        for combination, labels, name in ((own, base, 'base'), (others, source, 'source'),
                                          (others, base, 'coefficients'), (own, source, 'labels'),
                                          (asked, base, 'tokens')):
            values = set((combination @ labels[i, :3, 2] % P).tolist())
            assert values <= {answers[name][i]}, (i, name)
            checked += len(values)
    assert checked > 200


def test_conditions_differ_in_what_they_say():
    for condition in patching.CONDITIONS:
        base, source, _ = drawn(condition)
        same_inputs, same_query = ((base[:, cut, :2] == source[:, cut, :2]).mean() for cut in (slice(3), slice(3, 4)))
        same_labels = (base[:, :3, 2] == source[:, :3, 2]).mean()
        assert (same_inputs == 1) == (condition != 'coordinates')
        assert (same_query == 1) == (condition == 'labels')
        assert (same_labels == 1) == (condition == 'query')


def test_invertible_matrices():
    matrix = np.asarray(patching.invertible(jax.random.key(0), 3000, 3))
    determinant = (matrix[:, 0, 0] * matrix[:, 1, 1] - matrix[:, 0, 1] * matrix[:, 1, 0]) % 3
    assert (determinant != 0).all()
    assert len({tuple(m.ravel()) for m in matrix}) > 30  # of the 48 there are, those with a nonzero corner: 36


def test_groups_are_the_tokens_they_name():
    groups = dict(zip(patching.GROUPS, np.asarray(patching.positions(L)), strict=True))
    where = {name: list(np.flatnonzero(mask)) for name, mask in groups.items()}
    assert where == {'x': [0, 3, 6], 'y': [1, 4, 7], 'z': [2, 5, 8], 'examples': list(range(9)), 'query x': [9],
                     'query y': [10], 'query': [9, 10]}


@quick_jit
def answers_after(base, source, depths, tokens):
    return patching.patched_answers(PARAMS, base, source, depths, tokens, CFG)


@quick_jit
def alone(tokens):
    logits, acts = model.apply(PARAMS, tokens, cfg=CFG.model, capture='*')
    return logits[:, -1].argmax(-1), acts


def test_exchange_with_itself_with_everything_and_with_some_tokens():
    base, source = np.random.default_rng(0).integers(0, P, (2, 64, L))
    base_answer, _ = alone(base)
    source_answer, acts = alone(source)
    assert (base_answer != source_answer).mean() > 0.3
    every, none = np.ones(L, bool), np.zeros(L, bool)
    some = np.arange(L) % 3 == 1
    depths = np.array([0, 1, 2, 0, 1, 2, 1])
    tokens = np.stack([every, every, every, none, none, none, some])
    np.testing.assert_array_equal(answers_after(base, base, depths, tokens), np.tile(base_answer, (7, 1)))
    found = answers_after(base, source, depths, tokens)
    np.testing.assert_array_equal(found[:3], np.tile(source_answer, (3, 1)))
    np.testing.assert_array_equal(found[3:6], np.tile(base_answer, (3, 1)))
    kept = np.asarray(acts['blocks.1.resid_pre'])
    hooks = {'blocks.1.resid_pre': lambda value: value.at[:, 1::3].set(kept[:, 1::3])}
    by_hand = quick_jit(lambda tokens: model.apply(PARAMS, tokens, cfg=CFG.model, hooks=hooks)[0][:, -1].argmax(-1))
    np.testing.assert_array_equal(found[6], by_hand(base))
    assert len({tuple(row) for row in np.asarray(found)}) == 3


def solver(params, base_BL, source_BL, depth_I, tokens_IL, cfg):
    """In place of the model: exchanges tokens at depth 0, nothing later, and answers by the task that fits best.

    It is wrong about every odd row of the source alone, and about every fourth row of the base alone.
    """
    tasks_T2 = jnp.stack(jnp.divmod(jnp.arange(P * P), P), -1)

    def answer(patch):
        depth, tokens_L = patch
        rows_BL = jnp.where((depth == 0) & tokens_L, source_BL, base_BL)
        rows_BS3 = jnp.pad(rows_BL, ((0, 0), (0, 1))).reshape(len(rows_BL), -1, 3)
        z_BST = rows_BS3[..., :2] @ tasks_T2.T % P
        fits_BT = jnp.sum(z_BST[:, :-1] == rows_BS3[:, :-1, 2:], 1)
        right_B = jnp.take_along_axis(z_BST[:, -1], jnp.argmax(fits_BT, -1)[:, None], 1)[:, 0]
        row_B = jnp.arange(len(right_B))
        wrong_B = (jnp.all(tokens_L) & (row_B % 2 == 1)) | (~jnp.any(tokens_L) & (row_B % 4 == 0))
        return (right_B + wrong_B) % P

    return jax.lax.map(answer, (depth_I, tokens_IL))


def test_shares_of_a_perfect_solver_of_the_exchanged_tokens(monkeypatch):
    monkeypatch.setattr(patching, 'patched_answers', solver)
    cfg = tiny_config(num_examples=9)
    fn = quick_jit(lambda state, key: patching.interchange(None, state, key, cfg, num_rows=2000))
    found = {name: np.asarray(value) for name, value in fn(state(), jax.random.key(0)).items()}

    def winner(condition, depth=0):
        shares = np.stack([found[f'{condition}/{name}'][depth] for name in patching.CONDITIONS[condition]])
        return [patching.CONDITIONS[condition][k] if share[k] > 0.999 else '' for share in shares.T
                for k in [share.argmax()]]

    # Groups: x, y, z, examples, query x, query y, query. Mixed-up examples fit no task well.
    assert winner('labels') == ['base', 'base', 'source', 'source', 'base', 'base', 'base']
    assert winner('query')[:4] == ['base'] * 4 and winner('query')[6] == 'source'
    assert winner('both')[:4] == ['base', 'base', 'labels', 'labels'] and winner('both')[6] == 'coefficients'
    coordinates = winner('coordinates')
    assert (coordinates[2], coordinates[6]) == ('labels', 'tokens')
    for condition, told_apart in patching.CONDITIONS.items():
        assert winner(condition, 1) == ['base'] * 7
        chance = np.prod([1 - k / P for k in range(len(told_apart))])
        assert abs(found[f'{condition}/kept'] - chance / 4) < 0.05, condition


def test_too_few_solved_pairs_make_no_share(monkeypatch):
    monkeypatch.setattr(patching, 'patched_answers', solver)
    two = {name: patching.CONDITIONS[name] for name in ('labels', 'coordinates')}
    monkeypatch.setattr(patching, 'CONDITIONS', two)
    cfg = tiny_config(num_examples=9)
    found = quick_jit(lambda state, key: patching.interchange(None, state, key, cfg, num_rows=120))(
        state(), jax.random.key(0))
    for name in ('base', 'tokens', 'tokens_most'):
        assert np.isnan(found[f'coordinates/{name}']).all()
    assert found['coordinates/kept'] * 120 < patching.MIN_PAIRS <= found['labels/kept'] * 120
    assert np.isfinite(found['labels/base']).all()
