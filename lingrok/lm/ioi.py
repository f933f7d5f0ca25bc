"""Sentences in which a language model has to name the indirect object (arXiv 2211.00593), from templates of our own.

    When Mary and John went to the park, John gave a book to      -> " Mary"

Two names come in, one of them, the subject S, comes back, and the sentence ends in " to": what follows is the other
one, the indirect object IO. In the order ABBA the sentence reads IO, S, S, IO, in BABA it reads S, IO, S, IO; both use
the same templates.
"""

from typing import NamedTuple

import numpy as np

from lingrok.config import require
from lingrok.lm.prompts import Question, next_token

GENERIC = ('the', 'a', 'his', 'her', 'them', 'him')
ORDERS = ('ABBA', 'BABA')
MIN_NAMES = 20
MAX_COUNT = 10_000  # far below the number of different sentences, so that drawing again soon finds a new one

NAMES = tuple('''
    Mary John Tom James Robert Michael David William Richard Joseph Thomas Charles Daniel Matthew Anthony Mark Paul
    Steven Andrew Kenneth George Kevin Brian Edward Jason Jeff Ryan Jacob Gary Eric Stephen Larry Justin Scott Frank
    Gregory Samuel Patrick Jack Alexander Henry Peter Adam Nathan Walter Harold Carl Arthur Roger Keith Albert Jesse
    Bruce Simon Martin Victor Oliver Sean Philip Louis Oscar Felix Hugo Leo Max Ivan Luke Alan Dennis Ben Sam Joe Tim
    Anna Emma Alice Sarah Laura Susan Linda Karen Nancy Lisa Betty Helen Sandra Carol Ruth Sharon Michelle Amanda
    Melissa Rebecca Rachel Catherine Maria Julia Elizabeth Jennifer Jessica Patricia Barbara Margaret Emily Kate Jane
    Claire Lucy Sophie Amy Angela Diana Grace Martha Julie Andrea Christine Victoria Charlotte Hannah Olivia Eva Nina
    Clara Ellen Judith Rosa Alex'''.split())
PLACES = ('park', 'school', 'station', 'library', 'market', 'museum', 'office', 'hospital', 'restaurant', 'beach',
          'garden', 'church', 'theater', 'farm', 'harbor', 'hotel')
OBJECTS = ('a book', 'a letter', 'a ring', 'a key', 'a ticket', 'a drink', 'a basket', 'a camera', 'a flower',
           'a computer', 'a map', 'a bottle of water', 'a necklace', 'a guitar', 'some money', 'some bread')
# Only S comes back; the verbs leave little but a person after "to"; and every name has a space before it, for at the
# beginning of a text it is another token.
TEMPLATES = (
    'When {first} and {second} went to the {place}, {subject} gave {object} to',
    'After {first} and {second} arrived at the {place}, {subject} handed {object} to',
    'While {first} and {second} were working at the {place}, {subject} passed {object} to',
    'Then, {first} and {second} had a long talk at the {place}, and {subject} offered {object} to',
    'Yesterday {first} met {second} near the {place}, and {subject} sold {object} to',
    'Because {first} and {second} were old friends, at the {place} {subject} lent {object} to',
    'Once {first} and {second} had found the {place}, {subject} gave {object} to',
    'On the way to the {place}, {first} and {second} stopped, and {subject} showed {object} to',
    'As soon as {first} and {second} left the {place}, {subject} passed {object} to',
    'At the {place}, {first} sat down beside {second}, and {subject} gave {object} to',
    'In the morning {first} and {second} walked around the {place}, before {subject} decided to give {object} to',
    'The day that {first} and {second} visited the {place}, {subject} handed {object} to',
    'Since {first} and {second} were both late for the {place}, {subject} quickly tossed {object} to',
    'Last week {first} had an argument with {second} at the {place}, and later {subject} sent {object} to',
    'During a break at the {place}, {first} and {second} laughed, and {subject} served {object} to',
    'Long after {first} and {second} had closed the {place}, {subject} mailed {object} to',
)


class Sentence(NamedTuple):
    """A prompt that ends in " to", its two names, their tokens after it, its order and the index of its template."""

    text: str
    io: str
    subject: str
    io_token: int
    subject_token: int
    order: str
    template: int


def names(tokenizer) -> dict[str, int]:
    """Name -> token, of the names that are one token after a space; raises ConfigError if there are too few."""
    found = {name: next_token(tokenizer, 'to', name) for name in NAMES}
    found = {name: token for name, token in found.items() if token is not None}
    require(len(found) >= MIN_NAMES, f'{len(found)} of {len(NAMES)} names are one token of this tokenizer; allowed: '
            f'{MIN_NAMES} or more, or P(IO) is not one number; try a model with a larger vocabulary')
    return found


def sentences(tokenizer, *, count: int = 100, seed: int = 0) -> list[Sentence]:
    """`count` different sentences, the same ones for the same names and seed on every machine.

    Orders, templates and their pairs are balanced: how often two of them occur differs by one at most, in every prefix
    of the list too, so that the first half can choose what the second half tests.
    """
    require(1 <= count <= MAX_COUNT, f'count={count}; allowed: 1 to {MAX_COUNT:,}')
    require(seed >= 0, f'seed={seed}; allowed: 0 or more')
    tokens = names(tokenizer)
    known = list(tokens)
    rng = np.random.Generator(np.random.Philox(seed))
    templates = rng.permutation(len(TEMPLATES))
    made: dict[str, Sentence] = {}
    while len(made) < count:
        lap, place = divmod(len(made), len(TEMPLATES))
        template, order = int(templates[place]), ORDERS[(lap + place) % 2]
        io, subject = (known[i] for i in rng.permutation(len(known))[:2])
        first, second = (io, subject) if order == 'ABBA' else (subject, io)
        text = TEMPLATES[template].format(first=first, second=second, subject=subject, place=_one(rng, PLACES),
                                          object=_one(rng, OBJECTS))
        made.setdefault(text, Sentence(text, io, subject, tokens[io], tokens[subject], order, template))
    return list(made.values())


def generic_tokens(tokenizer) -> dict[str, int]:
    """Word -> token after a sentence, of the generic words that are one token."""
    found = {word: next_token(tokenizer, 'to', word) for word in GENERIC}
    return {word: token for word, token in found.items() if token is not None}


def question(tokenizer, *, count: int = 100, seed: int = 0, start: str = '') -> Question:
    """`sentences` behind a text `start`; words: io, subject, the, and generic, all generic words together."""
    made, generic = sentences(tokenizer, count=count, seed=seed), generic_tokens(tokenizer)
    require('the' in generic, "' the' is not one token of this tokenizer, so that P(the) is not one number")
    words = {'io': np.array([one.io_token for one in made]), 'subject': np.array([one.subject_token for one in made]),
             'the': np.full(count, generic['the']), 'generic': np.tile(list(generic.values()), (count, 1))}
    return Question([start + one.text for one in made], words, 'io', 'the')


def _one(rng, things):
    return things[rng.integers(len(things))]
