import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

import lingrok
from lingrok import model
from lingrok.config import ConfigError
from lingrok.lm import generate

FOLDER = Path(__file__).parent / 'language'
MODELS = {'gpt2': FOLDER / 'gpt2', 'llama': FOLDER / 'llama', 'neox': FOLDER / 'neox',
          'gguf': FOLDER / 'gguf' / 'tiny.gguf'}


@functools.cache
def load(name):
    # Without end tokens: a random model would say one early.
    return lingrok.load_pretrained(MODELS[name])._replace(end_ids=())


@functools.cache
def forward(name):
    return jax.jit(lambda p, t: model.apply(p, t, cfg=load(name).config)[0][0])


def logits_of(name, ids, length=32):
    """Logits behind the last of some tokens, by a forward pass over all of them; what pads them changes nothing."""
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(forward(name)(load(name).params, padded)[len(ids) - 1])


def uncached(name, text, count):
    """The most likely continuation of a text, by a forward pass over the whole of it for every token."""
    ids = load(name).tokenizer.encode(text).ids
    start = len(ids)
    for _ in range(count):
        ids.append(int(np.argmax(logits_of(name, ids))))
    return ids[start:]


@pytest.mark.parametrize('name', MODELS)
def test_a_cache_changes_nothing(name):
    loaded = load(name)
    cfg = loaded.config
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, cfg.vocab_size, size) for size in (1, 4, 7)]
    tokens_BL = np.stack([np.pad(row, (9 - len(row), 0), constant_values=5) for row in rows]).astype(np.int32)
    cache = model.empty_cache(cfg, np.array([9 - len(row) for row in rows], np.int32), 16)
    step = jax.jit(functools.partial(model.step, cfg=cfg))
    logits_BV, cache = step(loaded.params, tokens_BL, cache)
    for extra in range(4):
        for row, logits_V in zip(rows, logits_BV, strict=True):
            np.testing.assert_allclose(logits_V, logits_of(name, row), atol=1e-4)
        new = rng.integers(0, cfg.vocab_size, (3, 1))
        rows = [np.append(row, token) for row, token in zip(rows, new, strict=True)]
        logits_BV, cache = step(loaded.params, new.astype(np.int32), cache)
        assert cache.filled == 10 + extra


@pytest.mark.parametrize('name', MODELS)
def test_greedy_text_is_that_of_whole_forward_passes(name):
    loaded = load(name)
    texts = ['a', 'the dog and', 'of it']
    found = generate.continued(loaded, texts, max_new_tokens=18)
    for text, tokens in zip(texts, found, strict=True):
        assert tokens == uncached(name, text, 18)
    assert generate.continued(loaded, texts, max_new_tokens=5) == [tokens[:5] for tokens in found]
    decoded = generate.generate(loaded, texts, max_new_tokens=18)
    assert decoded == [loaded.tokenizer.decode(tokens) for tokens in found]


def test_the_second_copy_of_the_matrices_is_that_of_the_last_parameters_and_goes_with_them():
    loaded = load('gpt2')
    first = generate.continued(loaded, ['a'], max_new_tokens=8)
    kept = generate._kept[0][1]
    assert generate.continued(loaded, ['a'], max_new_tokens=8) == first and generate._kept[0][1] is kept
    assert kept['embed'] is loaded.params['embed']  # what is no such matrix is not copied
    block = loaded.params['blocks_1']
    other = loaded._replace(params={**loaded.params, 'blocks_1': {**block, 'o': block['o'] * -9}})
    changed = generate.continued(other, ['a'], max_new_tokens=8)
    assert changed != first
    np.testing.assert_array_equal(generate._kept[0][1]['blocks_1']['o'], block['o'].T * -9)
    del other
    assert not generate._kept
    assert generate.continued(loaded, ['a'], max_new_tokens=8) == first
    mutable = loaded._replace(params=jax.tree.map(np.array, loaded.params))
    assert generate.continued(mutable, ['a'], max_new_tokens=8) == first
    mutable.params['blocks_1']['o'] *= -9
    assert generate.continued(mutable, ['a'], max_new_tokens=8) == changed


def test_threads_with_different_models_write_their_own_texts():
    loaded = load('gpt2')
    block = loaded.params['blocks_1']
    other = loaded._replace(params={**loaded.params, 'blocks_1': {**block, 'o': block['o'] * -9}})
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            turned = list(pool.map(lambda i: generate._by_output((loaded, other)[i % 2].params), range(2000)))
    finally:
        sys.setswitchinterval(before)
    for i, wanted in enumerate((block['o'].T, block['o'].T * -9)):
        for found in {id(x): x for x in turned[i::2]}.values():
            np.testing.assert_array_equal(found['blocks_1']['o'], wanted)


def test_a_text_ends_at_an_end_token_or_a_stop_string():
    loaded = load('gpt2')
    texts = ['a', 'the dog and']
    whole = generate.continued(loaded, texts, max_new_tokens=16)
    end = whole[0][6]
    first = whole[0].index(end)
    ended = generate.continued(loaded._replace(end_ids=(end,)), texts, max_new_tokens=16)
    assert ended[0] == whole[0][:first]
    assert ended[1] == (whole[1][: whole[1].index(end)] if end in whole[1] else whole[1])
    text = loaded.tokenizer.decode(whole[1])
    stop = text[5:8]
    found = generate.generate(loaded, texts, max_new_tokens=16, stop=[stop, 'never said'])
    assert found[1] == text[: text.find(stop)]
    assert all(stop not in x for x in found)


def test_all_rows_done_ends_the_work(monkeypatch):
    loaded, calls = load('gpt2'), []
    write = generate._write
    monkeypatch.setattr(generate, '_write', lambda *args, **kwargs: (calls.append(1), write(*args, **kwargs))[1])
    generate.continued(loaded, ['a'], max_new_tokens=20)
    assert len(calls) == 2
    calls.clear()
    first, second = generate.continued(loaded, ['a'], max_new_tokens=2)[0]
    assert first != second
    for end, wanted in ((first, []), (second, [first])):
        calls.clear()
        assert generate.continued(loaded._replace(end_ids=(end,)), ['a'], max_new_tokens=40) == [wanted]
        assert len(calls) == len(wanted)


def test_samples_follow_the_law_of_the_model():
    loaded = load('gpt2')
    rows = 400
    found = np.array(generate.continued(loaded, ['the dog'] * rows, max_new_tokens=1, temperature=0.7))[:, 0]
    law_V = np.asarray(jax.nn.softmax(logits_of('gpt2', loaded.tokenizer.encode('the dog').ids) / 0.7))
    likely = np.argsort(-law_V)[:4]
    for token in likely:
        share, p = np.mean(found == token), law_V[token]
        assert abs(share - p) < 4.5 * (p * (1 - p) / rows) ** 0.5
    again = np.array(generate.continued(loaded, ['the dog'] * rows, max_new_tokens=1, temperature=0.7))[:, 0]
    other = np.array(generate.continued(loaded, ['the dog'] * rows, max_new_tokens=1, temperature=0.7, seed=1))[:, 0]
    assert (found == again).all() and (found != other).any()
    few = generate.continued(loaded, ['the dog'] * 50, max_new_tokens=1, temperature=3.0, top_k=2)
    assert {row[0] for row in few} == set(likely[:2].tolist())


def test_samples_of_a_row_do_not_hang_on_the_others():
    loaded = load('llama')
    alone = generate.continued(loaded, ['a'], max_new_tokens=8, temperature=1.0)
    together = generate.continued(loaded, ['a', 'the dog and it'], max_new_tokens=8, temperature=1.0)
    assert together[0] == alone[0]


def test_lengths_are_rounded_by_an_eighth_at_most():
    for length in range(1, 3000):
        assert length <= generate.rounded(length) < length + max(8, length / 8)
    assert len({generate.rounded(length) for length in range(513, 1025)}) == 8
    assert {generate.rounded(length, 32) for length in range(1, 257)} == {*range(32, 257, 32)}


@pytest.mark.parametrize('changes, message', [
    ({'texts': []}, 'no texts'),
    ({'texts': 'a'}, 'no texts'),
    ({'texts': ['a', '']}, 'without tokens'),
    ({'max_new_tokens': 0}, 'max_new_tokens=0'),
    ({'max_new_tokens': 10_000}, 'context of the model'),
    ({'temperature': -1.0}, 'temperature=-1.0'),
    ({'top_k': 0}, 'top_k=0'),
    ({'stop': ['']}, 'stop strings'),
])
def test_wrong_arguments_end_in_one_line(changes, message):
    arguments = {'texts': ['a'], 'max_new_tokens': 4} | changes
    with pytest.raises(ConfigError, match=message):
        generate.continued(load('gpt2'), arguments.pop('texts'), **arguments)


def test_a_model_with_a_convolution_is_refused():
    cfg = lingrok.ModelConfig(vocab_size=11, d_model=8, d_mlp=16, num_layers=1, num_heads=2, max_len=6, conv_width=3)
    with pytest.raises(ConfigError, match='whole sequences'):
        model.empty_cache(cfg, np.zeros(1, np.int32), 4)
