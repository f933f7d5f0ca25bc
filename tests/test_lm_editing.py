"""The rank-one edit of a pretrained model: what it changes, and which edit of a family a budget allows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_lm_truncation import NAMES, TEXTS, hand_made, study

from lingrok import model
from lingrok.config import ConfigError
from lingrok.lm import editing, truncation
from lingrok.lm.prompts import Question

ROWS = np.arange(len(TEXTS)) < 3


def mean_key(asked, layer, rows):
    """What arrives at the last matrix of a layer, by a whole forward pass, mean over the prompts `rows`."""
    loaded, name = asked.pretrained, f'blocks.{layer}.mlp.post'
    fn = jax.jit(lambda p: model.apply(p, asked.prompts.tokens_BL, cfg=loaded.config, capture=name)[1][name])
    x_BLI = np.asarray(fn(loaded.params))
    return np.mean([x_BLI[row, asked.prompts.last_B[row]] for row in np.flatnonzero(rows)], 0)


@pytest.mark.parametrize('name', NAMES)
def test_the_edit_has_rank_one_and_takes_out_one_association(name):
    asked, layer = study(name), 1
    old = asked.pretrained.params
    edits = {strength: editing.without_generic(asked, layer, ROWS, strength) for strength in (0.0, 0.5, 1.0, 2.0)}
    write_D = np.asarray(editing._direction(asked))
    unit_D, key_I = write_D / np.linalg.norm(write_D), mean_key(asked, layer, ROWS)
    before = np.asarray(old['blocks_1']['mlp_out'])
    written = key_I @ before @ unit_D
    assert abs(written) > 0.01
    for strength, new in edits.items():
        same = jax.tree.map(lambda a, b: a is b, new, old)
        assert [path for path, kept in jax.tree.leaves_with_path(same) if not kept] == [
            path for path, _ in jax.tree.leaves_with_path(old) if path[-1].key == 'mlp_out' and '1' in path[0].key]
        after = np.asarray(new['blocks_1']['mlp_out'])
        # Of what the key writes along the direction, a share is gone; across it, nothing changes for any input.
        assert key_I @ after @ unit_D == pytest.approx((1 - strength) * written, abs=2e-4)
        across_DD = np.eye(len(unit_D)) - np.outer(unit_D, unit_D)
        np.testing.assert_allclose((after - before) @ across_DD, 0, atol=1e-4)
        s = np.linalg.svd(after - before, compute_uv=False)
        assert strength == 0 or s[0] > 1e-3 and s[1] < 1e-3 * s[0]


@pytest.mark.parametrize('name', NAMES)
def test_the_direction_is_what_moves_the_logit_of_the_word(name):
    """The gradient of the word's logit over the mean logit, at a stream that the final norm does not turn it along."""
    asked = study(name)
    cfg, params = asked.pretrained.config, asked.pretrained.params
    word = np.bincount(asked.question.words['the']).argmax()
    lead = lambda h_D: (x := model.head(params, h_D, cfg=cfg))[word] - jnp.mean(x)  # noqa: E731
    h_D = np.random.default_rng(0).normal(size=cfg.d_model)
    h_D -= h_D.mean() if cfg.norm == 'layernorm' else 0  # a stream of mean zero
    slope_D, found_D = np.asarray(jax.jit(jax.grad(lead))(jnp.float32(h_D))), np.asarray(editing._direction(asked))
    found_D = found_D - h_D * (h_D @ found_D) / (h_D @ h_D)  # along itself, the norm cancels a change
    assert slope_D @ found_D / np.linalg.norm(slope_D) / np.linalg.norm(found_D) == pytest.approx(1, abs=1e-4)


def test_the_edit_spares_the_text():
    """Of the reads that give the key the same new output, this one changes outputs on the text least."""
    asked, layer = study('llama'), 1
    old, new = (x['blocks_1']['mlp_out'] for x in (asked.pretrained.params,
                                                   editing.without_generic(asked, layer, ROWS, 1.0)))
    text_TI = np.asarray(editing._inputs(asked, layer, asked.text_streams))
    key_I = mean_key(asked, layer, ROWS)
    plain = np.outer(key_I, key_I @ (old - new)) / (key_I @ key_I)  # the same edit, read by the key itself
    np.testing.assert_allclose(key_I @ plain, key_I @ (old - new), rtol=1e-3, atol=1e-5)
    assert np.linalg.norm(text_TI @ (old - new)) < 0.9 * np.linalg.norm(text_TI @ plain)


def test_refused():
    with pytest.raises(ConfigError, match='^the edit is to spare a text, and the study has none; .*$'):
        editing.without_generic(study('llama', with_text=False), 1, ROWS, 1.0)
    with pytest.raises(ConfigError, match='^layer 2; allowed: 0 to 1$'):
        editing.without_generic(study('llama'), 2, ROWS, 1.0)


def test_the_best_within_a_budget_is_chosen_on_one_half():
    asked = Question(['w', 'x', 'y', 'z'], {'io': np.zeros(4, int), 'the': np.ones(4, int)}, 'io', 'the')
    choosing, reporting = truncation.halves(4)
    say = lambda io, the, kl: {**hand_made(io, the, kl), 'p/io': np.broadcast_to(io, 4), 'p/the': np.broadcast_to(  # noqa: E731
        the, 4)}
    whole = say(0.3, 0.4, 0.0)
    families = {
        'a': {'cheap': say(0.35, (0.3, 0.3, 0.2, 0.25), 0.01), 'dear': say(0.1, 0.01, 0.5)},
        'b': {'best where it is not chosen': say(0.9, (0.5, 0.5, 0.01, 0.01), 0.002), 'dear': say(0.2, 0.05, 2.0)},
    }
    found = editing.equal_cost(families, whole, asked, choosing, reporting)
    assert found['budget/nats'].tolist() == [list(editing.BUDGETS)] and editing.BUDGETS == (.003, .01, .03, .1, .3, 1.0)
    np.testing.assert_array_equal(found['budget/a/p/the'], [[0.4, 0.2, 0.2, 0.2, 0.2, 0.01],
                                                            [0.4, 0.25, 0.25, 0.25, 0.25, 0.01]])
    np.testing.assert_array_equal(found['budget/a/p/io'], [[0.3, 0.35, 0.35, 0.35, 0.35, 0.1]] * 2)
    np.testing.assert_array_equal(found['budget/b/p/the'], np.full((2, 6), 0.4))  # nothing better is within a budget
    np.testing.assert_array_equal(found['whole/p/io'], [0.3, 0.3])
    assert {name for name in found if name.startswith('whole')} == {'whole/p/io', 'whole/p/the'}


def test_costs_are_those_of_the_study():
    """An edit of strength 0 costs nothing, and stronger ones cost more."""
    asked = study('llama')
    found = [truncation.measure(asked, editing.without_generic(asked, 1, ROWS, strength), 1) for strength in (0, 1, 8)]
    costs = [x['kl'].mean() for x in found]
    assert costs[0] == pytest.approx(0, abs=1e-5) and 1e-4 < costs[1] < costs[2]
    said = [x['log_p/the'][ROWS].mean() for x in found]
    assert said[0] > said[1] > said[2]
