"""What an edited language model says, against whole forward passes and numpy; which edit is chosen."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lingrok
from lingrok import model
from lingrok.analysis import lowrank
from lingrok.config import ConfigError
from lingrok.lm import truncation
from lingrok.lm.prompts import Question

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
FOLDER = Path(__file__).parent / 'language'
NAMES = ('gpt2', 'llama', 'neox')  # LayerNorm and tied; gated, RMSNorm, grouped heads; parallel
ENTRIES = ('blocks.0.mlp_in@0.3', 'blocks.1.mlp_out@0', 'blocks.1.o@0.2@bottom',
           'blocks.0.k@0.3+blocks.1.mlp_in@0.1+blocks.1.mlp_out@0.1')
TEXTS = ['a little more', 'kin', 'less than kind', 'than kin, and', 'a', 'and more than']


def question(vocab_size: int) -> Question:
    ids = np.random.default_rng(1).integers(0, vocab_size, (len(TEXTS), 5))
    return Question(TEXTS, {'io': ids[:, 0], 'the': ids[:, 1], 'set': ids[:, 2:]}, 'io', 'the')


@functools.cache
def study(name: str, with_text: bool = True) -> truncation.Study:
    loaded = lingrok.load_pretrained(FOLDER / name)
    size = loaded.config.vocab_size
    text_WL = np.random.default_rng(2).integers(0, size, (14, 9)).astype(np.int32)
    return truncation.study(loaded, question(size), text_WL if with_text else None)


def log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@functools.cache
def forward(cfg):
    return quick_jit(lambda params, tokens_BL: model.apply(params, tokens_BL, cfg=cfg)[0])


def said(loaded, params, texts) -> np.ndarray:
    """Log-probabilities (B, V) behind every text, by all blocks; what fills up a row is another token than 0."""
    rows = [loaded.tokenizer.encode(text).ids for text in texts]
    tokens_BL = np.array([np.pad(row, (0, 20 - len(row)), constant_values=7) for row in rows])
    return np.stack([log_LV[len(row) - 1] for row, log_LV in
                     zip(rows, log_softmax(forward(loaded.config)(params, tokens_BL)), strict=True)])


@pytest.mark.parametrize('name', NAMES)
def test_an_edited_model_is_measured_as_a_whole_one(name):
    """From the first edited block on, against forward passes of all blocks; and what is measured, against numpy."""
    asked, loaded = study(name), study(name).pretrained
    text_WL = np.random.default_rng(2).integers(0, loaded.config.vocab_size, (14, 9))
    whole_WLV = log_softmax(forward(loaded.config)(loaded.params, text_WL))
    for entry in ('', *ENTRIES):
        params, start = truncation.edited(loaded, entry), truncation.first_layer(entry, loaded.config.num_layers)
        found = truncation.measure(asked, params, start)
        log_BV = said(loaded, params, TEXTS)
        for word, ids in asked.question.words.items():
            for row, tokens in enumerate(ids.reshape(len(TEXTS), -1)):
                p = np.exp(log_BV[row, tokens]).sum()
                rank = min(1 + (log_BV[row] > log_BV[row, token]).sum() for token in tokens)
                assert found[f'p/{word}'][row] == pytest.approx(p, rel=2e-3)
                assert found[f'log_p/{word}'][row] == pytest.approx(np.log(p), abs=2e-3)
                assert found[f'rank/{word}'][row] == rank
        log_WLV = log_softmax(forward(loaded.config)(params, text_WL))
        kl_W = (np.exp(whole_WLV) * (whole_WLV - log_WLV)).sum(-1).mean(-1)
        np.testing.assert_allclose(found['kl'], kl_W, rtol=2e-3, atol=1e-5)
        assert (kl_W.max() > 0.01) == bool(entry)


def test_without_a_text_nothing_costs():
    asked = study('llama', with_text=False)
    assert 'kl' not in truncation.measure(asked, asked.pretrained.params, 0)
    with_text = truncation.measure(study('llama'), asked.pretrained.params, 1)
    assert with_text['kl'] == pytest.approx(0, abs=1e-5)


def test_compare_and_top_words():
    asked = study('llama')
    found = truncation.compare(asked, ENTRIES[:2])
    assert {name.rsplit('/', 2)[0] for name in found if '/p/' in name} == {'whole', *ENTRIES[:2]}
    params = truncation.edited(asked.pretrained, ENTRIES[1])
    np.testing.assert_array_equal(found[f'{ENTRIES[1]}/p/the'], truncation.measure(asked, params, 1)['p/the'])
    log_V = said(asked.pretrained, params, [TEXTS[3]])[0]
    order = np.argsort(-log_V)[:4]
    words = truncation.top_words(asked, params, 1, 3, count=4)
    assert [word for word, _ in words] == [asked.pretrained.tokenizer.decode([i]) for i in order]
    np.testing.assert_allclose([p for _, p in words], np.exp(log_V[order]), rtol=1e-3)


def test_truncations_are_those_that_their_names_say(monkeypatch):
    loaded, spectra = study('llama').pretrained, []
    spectrum = lowrank.spectrum
    monkeypatch.setattr(lowrank, 'spectrum', lambda *args: (spectra.append(args[2:]), spectrum(*args))[1])
    settings = ((0, 1), ('mlp_in', 'o'), (0.0, 0.3, 1.0, 0.00001), ('top', 'bottom'))
    made = dict(truncation.truncations(loaded, *settings))
    assert sorted(spectra) == [(role, layer) for role in ('mlp_in', 'o') for layer in (0, 1)]  # one each
    assert len(made) == 2 * 2 * 7 and 'blocks.1.o@0.3@bottom' in made  # nothing kept is the same for both
    for name, params in made.items():
        layer, role, fraction, keep = truncation.parse_truncation(name)
        old = loaded.params[f'blocks_{layer}'][role]
        new = params[f'blocks_{layer}'][role]
        u, s, vt = np.linalg.svd(old, full_matrices=False)
        rank = int(fraction * len(s))
        kept = slice(0, rank) if keep == 'top' else slice(len(s) - rank, len(s))
        np.testing.assert_allclose(new, u[:, kept] * s[kept] @ vt[kept], atol=1e-5)
        assert (fraction != 1 or new is old) and (fraction != 0 or not new.any())
        for block, roles in loaded.params.items():  # and nothing else has changed
            parts = roles.items() if block.startswith('blocks_') else ()
            assert all(params[block][x] is value for x, value in parts if (block, x) != (f'blocks_{layer}', role))
        again = truncation.edited(loaded, name)[f'blocks_{layer}'][role]
        np.testing.assert_allclose(again, new, atol=1e-6)

    spectra.clear()
    skip = [name for name in made if not name.startswith('blocks.1.o')] + ['blocks.1.o@1']
    left = [name for name, _ in truncation.truncations(loaded, *settings, skip=skip)]
    assert left == [name for name in made if name not in skip] and len(left) == 6 and len(spectra) == 1
    spectra.clear()
    zeros = [name for name, _ in truncation.truncations(loaded, (0,), ('q', 'k'), (0.0,))]
    assert zeros == ['blocks.0.q@0', 'blocks.0.k@0'] and not spectra


def hand_made(io, the, kl=0.0):
    """What a model says of four prompts, by probabilities of the two words."""
    io, the = np.broadcast_to(io, 4).astype(float), np.broadcast_to(the, 4).astype(float)
    return {'log_p/io': np.log(io), 'log_p/the': np.log(the), 'kl': np.full(2, kl)}


ASKED = Question(['w', 'x', 'y', 'z'], {'io': np.zeros(4, int), 'the': np.ones(4, int)}, 'io', 'the')
FIRST, SECOND = truncation.halves(4)


def test_choose():
    whole = hand_made(0.3, 0.3)
    table = {
        'good': hand_made(0.4, 0.1, kl=0.2),
        'better, dear': hand_made(0.4, 0.05, kl=0.9),
        'best, but the answer is lost': hand_made(0.2, 0.001),
        'best on the half that tests': hand_made((0.3, 0.3, 0.9, 0.9), (0.3, 0.3, 0.001, 0.001)),
        'answer lost on the half that chooses': hand_made((0.2, 0.2, 0.9, 0.9), 0.0001),
    }
    pick = functools.partial(truncation.choose, table, whole, ASKED)
    assert pick(FIRST) == 'better, dear'
    assert pick(FIRST, 0.5) == 'good' and pick(FIRST, 0.2) == 'good'
    assert pick(FIRST, 0.1) == 'best on the half that tests'  # it costs nothing, and loses nothing on its half
    assert pick(SECOND) == 'answer lost on the half that chooses'
    assert truncation.choose({'worse': hand_made(0.29, 0.01)}, whole, ASKED, FIRST) is None
    assert truncation.choose({}, whole, ASKED, FIRST) is None
    # The whole model may be chosen, and what costs as much as is allowed counts.
    assert truncation.choose({'same': whole}, whole, ASKED, FIRST, 0.0) == 'same'
    np.testing.assert_allclose(truncation.lead(table['good'], ASKED), np.log(4))


def test_compose_adds_what_helps_from_the_last_layer_down(monkeypatch):
    asked = study('llama')._replace(question=ASKED)
    names = {key: f'blocks.{key[0]}.{key[1:]}@0.1' for key in ('1a', '1b', '1c', '0a', '0b')}
    alone = {'1a': hand_made(0.2, 0.01), '1b': hand_made(0.4, 0.1), '1c': hand_made(0.5, 0.2),
             '0a': hand_made(0.4, 0.2), '0b': hand_made(0.35, 0.25)}
    together = {**alone, '1b+0a': hand_made(0.4, 0.2), '1b+0b': hand_made(0.4, 0.05, kl=0.3)}
    together = {'+'.join(names[x] for x in key.split('+')): value for key, value in together.items()}
    measured = []

    def measure(_, params, start):
        measured.append((params, start))
        return together[params]

    monkeypatch.setattr(truncation, 'measure', measure)
    monkeypatch.setattr(truncation, 'edited', lambda loaded, name: '+'.join(
        [*([loaded.params] if isinstance(loaded.params, str) else []), name]))
    table = {names[key]: value for key, value in alone.items()}
    best, found = truncation.compose(asked, table, hand_made(0.3, 0.3), FIRST)
    # Of layer 1, the first one tried loses the answer. Of layer 0, the best one alone does not go with it.
    assert best == '+'.join((names['1b'], names['0b'])) and found is together[best]
    assert measured == [(names['1a'], 1), (names['1b'], 1), ('+'.join((names['1b'], names['0a'])), 0), (best, 0)]
    compose = functools.partial(truncation.compose, asked, table, hand_made(0.3, 0.3), FIRST)
    assert compose(max_kl=0.1)[0] == names['1b']
    assert compose(tries=1)[0] == names['0a']
    assert truncation.compose(asked, {}, hand_made(0.3, 0.3), FIRST)[0] == ''


def test_compose_says_what_the_model_of_its_name_says():
    asked = study('gpt2')
    whole = truncation.measure(asked, asked.pretrained.params, 2)
    rows = truncation.halves(len(TEXTS))[0]
    table = {name: truncation.measure(asked, params, truncation.first_layer(name, 2)) for name, params in
             truncation.truncations(asked.pretrained, (0, 1), ('mlp_in', 'mlp_out'), (0.0, 0.2, 0.6))}
    name, found = truncation.compose(asked, table, whole, rows)
    assert [part.split('.')[1] for part in name.split('+')] == ['1', '0']  # both layers help
    again = truncation.measure(asked, truncation.edited(asked.pretrained, name), 0)
    np.testing.assert_allclose(found['log_p/io'], again['log_p/io'], atol=1e-4)
    leads = [truncation.lead(x, asked.question)[rows].mean() for x in (whole, table[name.split('+')[0]], found)]
    assert leads == sorted(leads) and found['log_p/io'][rows].mean() >= whole['log_p/io'][rows].mean()


def test_bootstrap():
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    low, high = truncation.bootstrap(values)
    mean, half = values.mean(), 1.96 * values.std() / 20
    assert low == pytest.approx(mean - half, abs=0.03) and high == pytest.approx(mean + half, abs=0.03)
    assert (low, high) == truncation.bootstrap(values) != truncation.bootstrap(values, seed=1)
    assert truncation.bootstrap(np.full(9, 0.25)) == (0.25, 0.25)


def test_windows():
    tokenizer = study('llama').pretrained.tokenizer
    text = 'a little more than kin, and less than kind. ' * 5
    ids = tokenizer.encode(text).ids
    found = truncation.windows(tokenizer, text, 20, 6)
    assert found.shape == (20, 6) and found.dtype == np.int32
    places = {tuple(ids[start : start + 6]) for start in range(len(ids) - 5)}
    assert {tuple(row) for row in found.tolist()} <= places and len({*map(tuple, found.tolist())}) > 5
    np.testing.assert_array_equal(found, truncation.windows(tokenizer, text, 20, 6))
    assert (found != truncation.windows(tokenizer, text, 20, 6, seed=1)).any()
    assert truncation.windows(tokenizer, text, 2, len(ids)).tolist() == [ids, ids]
    with pytest.raises(ConfigError, match=rf'^the text has {len(ids)} tokens; allowed: at least {len(ids) + 1}, .*$'):
        truncation.windows(tokenizer, text, 1, len(ids) + 1)


def test_halves():
    first, second = truncation.halves(5)
    assert first.tolist() == [True, True, False, False, False] and (first ^ second).all()
    with pytest.raises(ConfigError, match='^3 prompts; allowed: at least 4, .*$'):
        truncation.halves(3)


@pytest.mark.parametrize('entry, message', [
    ('blocks.2.mlp_in@0.1', 'layer 2; allowed: 0 to 1'),
    ('blocks.1.mlpin@0.1', "no role 'mlpin'; did you mean 'mlp_in'"),
    ('blocks.1.mlp_in@1.1', r'blocks.<layer>.<role>@<fraction in \[0, 1\]>'),
    ('blocks.1.mlp_in@0.1@middle', 'or the same with @bottom behind it'),
    ('blocks.1.mlp_in@0.1+', 'allowed: blocks'),
    ('mlp_in', 'allowed: blocks'),
])
def test_entries_that_are_refused(entry, message):
    with pytest.raises(ConfigError, match=message) as caught:
        truncation.edited(study('llama').pretrained, entry)
    assert '\n' not in str(caught.value)


def test_names_of_truncations_are_read_back():
    for layer, role, fraction, keep in ((0, 'mlp_in', 0.01, 'top'), (12, 'q', 0.0, 'bottom'), (3, 'o', 1e-5, 'bottom')):
        name = truncation.entry(layer, role, fraction, keep)
        assert truncation.parse_truncation(name) == (layer, role, fraction, keep)
        assert truncation.first_layer(name, 30) == layer
    assert truncation.first_layer('', 30) == 30
    assert truncation.first_layer('blocks.7.q@0+blocks.3.q@0', 30) == 3
    loaded = study('llama').pretrained
    both = truncation.edited(loaded, 'blocks.0.q@0+blocks.1.mlp_out@0')
    assert not jnp.any(both['blocks_0']['q']) and not jnp.any(both['blocks_1']['mlp_out'])
    assert truncation.edited(loaded, '') is loaded.params
