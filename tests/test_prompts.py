"""Texts as a batch of tokens, words that are one token, files of the user."""

import types

import jax
import numpy as np
import pytest
import tokenizers
from conftest import ROOT

import lingrok
from lingrok.config import ConfigError
from lingrok.lm import prompts

FOLDER = ROOT / 'tests' / 'language'
WORDS = ('[UNK]', 'Madrid', 'is', 'located', 'in', 'Spain', 'the')


def words(vocabulary=WORDS):
    """A tokenizer whose tokens are whole words."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(vocabulary)},
                                                                 unk_token='[UNK]'))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def model(tokenizer=None, max_len=6):
    return types.SimpleNamespace(tokenizer=tokenizer or words(), config=types.SimpleNamespace(max_len=max_len))


def test_shorter_texts_are_filled_up_on_the_right():
    tokens_BL, last_B = prompts.batch(model(), ['Madrid is located in', 'the', 'in Spain'])
    assert tokens_BL.tolist() == [[1, 2, 3, 4], [6, 0, 0, 0], [4, 5, 0, 0]]
    assert last_B.tolist() == [3, 0, 1]
    assert tokens_BL.dtype == last_B.dtype == np.int32


def test_the_prescribed_first_token_is_there():
    tokenizer = words((*WORDS, '<s>'))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 7)])
    tokens_BL, last_B = prompts.batch(model(tokenizer), ['in Spain', 'in'])
    assert tokens_BL.tolist() == [[7, 4, 5], [7, 4, 0]] and last_B.tolist() == [2, 1]
    assert prompts.next_token(tokenizer, 'in', 'Spain') == 5
    with pytest.raises(ConfigError, match='text 1'):
        prompts.batch(model(tokenizer), ['in', ''])


def test_logits_of_a_batch_are_those_of_each_text():
    loaded = lingrok.load_pretrained(FOLDER / 'llama')
    apply = jax.jit(lambda tokens_BL: lingrok.apply(loaded.params, tokens_BL, cfg=loaded.config)[0])
    tokens_BL, last_B = prompts.batch(loaded, ['some longer text', 'in'])
    alone, _ = prompts.batch(loaded, ['in'])
    assert alone.shape[1] < tokens_BL.shape[1]
    np.testing.assert_allclose(apply(tokens_BL)[1, last_B[1]], apply(alone)[0, -1], atol=1e-4)


@pytest.mark.parametrize('texts, error', [
    ([], 'at least one text'), ('Madrid', 'a list of'), (['in', ''], 'text 1, .* has 0 tokens; allowed: 1 to 6'),
    (['  '], 'has 0 tokens'), (['in ' * 7], 'text 0, .* has 7 tokens; allowed: 1 to 6, the context'),
])
def test_bad_texts(texts, error):
    with pytest.raises(ConfigError, match=error) as caught:
        prompts.batch(model(), texts)
    assert '\n' not in str(caught.value)


def test_one_token_after_a_text():
    assert prompts.next_token(words(), 'Madrid is located in', 'Spain') == 5
    assert prompts.next_token(words(), 'in', 'Portugal') is None  # the unknown token is one token, too
    assert prompts.next_token(words(), 'in', 'the Spain') is None
    assert prompts.next_token(words(), 'in', '') is None


def test_one_token_where_the_beginning_of_a_text_is_marked():
    """As Llama 2 and Phi-3 do: ' b' alone would be two words."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(
        {'<u>': 0, '▁': 1, 'a': 2, 'b': 3, '▁a': 4, '▁b': 5}, [('▁', 'a'), ('▁', 'b')], unk_token='<u>'))
    tokenizer.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend('▁'),
                                                            tokenizers.normalizers.Replace(' ', '▁')])
    tokenizer.decoder = tokenizers.decoders.Replace('▁', ' ')
    assert tokenizer.encode(' b').tokens == ['▁', '▁b']
    assert prompts.next_token(tokenizer, 'a', 'b') == 5
    assert prompts.next_token(tokenizer, 'a', 'ba') is None


def test_read_text(tmp_path):
    file = tmp_path / 'file'
    file.write_bytes(b'\xef\xbb\xbfa\nb')
    assert prompts.read_text(file, 'x') == 'a\nb'
    for content, error in ((b'a\nb\xff', 'line 2, is not UTF-8; try: iconv'), (b' \n', 'is empty; allowed: a CSV')):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=error):
            prompts.read_text(file, 'a CSV')
    for path in (tmp_path, tmp_path / 'none', 'a\0b'):
        with pytest.raises(ConfigError, match='cannot be read .*allowed: a CSV'):
            prompts.read_text(path, 'a CSV')
