"""Where repeated triggers look, against loops over queries and keys."""

import functools

import jax
import numpy as np
import pytest
from test_memory import batch_by_hand
from test_truncation import CFG, PARAMS, as_series, quick_jit

from lingrok import model
from lingrok.analysis import attention
from lingrok.config import ConfigError
from lingrok.figures import editing as figures
from lingrok.figures.style import BLUE


def kind_of(batch, row: int, query: int, key: int, noise: int) -> str:
    """The kind of a key up to the query, by the words of the docstring."""
    tokens, answer = np.asarray(batch.tokens_BL)[row], np.asarray(batch.groups['answer_BL'])[row, query]
    if key and tokens[key - 1] == tokens[query]:
        if tokens[key] == answer:
            return 'target'
        if tokens[key] == noise:
            return 'noise'
    return 'trigger' if tokens[key] == tokens[query] else 'rest'


def test_every_earlier_key_has_one_kind():
    batch = batch_by_hand()
    found = {kind: np.asarray(x) for kind, x in attention.key_kinds(batch, 3).items()}
    rows, length = batch.tokens_BL.shape
    assert tuple(found) == attention.KINDS
    for row in range(rows):
        for query in range(length):
            for key in range(length):
                kinds = [kind for kind, keys in found.items() if keys[row, query, key]]
                assert kinds == ([kind_of(batch, row, query, key, 3)] if key <= query else [])
    # Row 0, trigger 0 at position 5: noise at 1, target at 3, itself at 0, 2 and 5.
    assert [key for key in range(8) if found['noise'][0, 5, key]] == [1]
    assert [key for key in range(8) if found['target'][0, 5, key]] == [3]
    assert [key for key in range(8) if found['trigger'][0, 5, key]] == [0, 2, 5]


@functools.cache
def measured():
    @quick_jit
    def run(params, key):
        state = CFG.task.init(jax.random.key(1))
        batch = CFG.task.sample(state, key, split='noisy', batch_size=100)
        acts = model.apply(params, batch.tokens_BL, cfg=CFG.model, capture='blocks.1.attn.pattern')[1]
        return attention.attention(params, state, key, CFG, num_rows=100, head=1), batch, acts['blocks.1.attn.pattern']

    return jax.tree.map(np.asarray, run(PARAMS, jax.random.key(0)))


def test_statistics():
    found, batch, pattern_BHLM = measured()
    pattern_BLM, noise = pattern_BHLM.mean(1), CFG.task.noise_id
    rows = {name: [] for name in ('mass', 'uniform', 'argmax')}
    selective = []
    for row, query in zip(*np.nonzero(batch.groups['occurrence_BL'] >= 2), strict=True):
        kinds = np.array([kind_of(batch, row, query, key, noise) for key in range(query + 1)])
        if not {'target', 'noise'} <= set(kinds):
            continue
        weights = pattern_BLM[row, query, : query + 1]
        rows['mass'].append([weights[kinds == kind].sum() for kind in attention.KINDS])
        rows['uniform'].append([np.mean(kinds == kind) for kind in attention.KINDS])
        rows['argmax'].append([kinds[np.argmax(weights)] == kind for kind in attention.KINDS])
        counts = rows['uniform'][-1]
        target, noise_mass = rows['mass'][-1][:2]
        selective.append([target / (target + noise_mass), counts[0] / (counts[0] + counts[1])])
    assert len(selective) > 10
    for name, values in rows.items():
        for kind, value in zip(attention.KINDS, np.mean(values, 0), strict=True):
            assert found[f'{name}/{kind}'] == pytest.approx(value, rel=1e-4, abs=1e-6)
        assert np.sum(np.mean(values, 0)) == pytest.approx(1, rel=1e-5)
    assert [found['selective'], found['selective/blind']] == pytest.approx(np.mean(selective, 0), rel=1e-4)


def test_the_map_is_of_the_first_sequence():
    found, batch, pattern_BHLM = measured()
    np.testing.assert_allclose(found['map/pattern'], pattern_BHLM[0, 1], rtol=1e-5)
    np.testing.assert_array_equal(found['map/tokens'], batch.tokens_BL[0])
    np.testing.assert_array_equal(found['map/occurrence'], batch.groups['occurrence_BL'][0])
    assert found['map/answer'] in batch.groups['answer_BL'][0]


@pytest.mark.parametrize('options, message', [({'head': 2}, 'head 2; allowed: 0 to 1'), ({'num_rows': 0}, '0 rows')])
def test_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        attention.attention(PARAMS, None, jax.random.key(0), CFG, **options)


def test_figure_marks_triggers():
    found = measured()[0]
    shown, statistics = figures.attention(as_series(found), CFG).axes[:2]
    labels = shown.get_yticklabels()
    assert [label.get_text() for label in labels] == [str(token) for token in found['map/tokens']]
    assert [label.get_color() == BLUE for label in labels] == (found['map/occurrence'] > 0).tolist()
    assert np.isnan(shown.images[0].get_array().filled(np.nan)[0, 1:]).all()  # the future
    assert len(statistics.get_xticklabels()) == len(attention.KINDS)
