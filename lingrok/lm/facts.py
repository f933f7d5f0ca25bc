"""Facts that a language model may know, against the generic word that also continues the prompt.

After "Madrid is located in" both " Spain" and " the" are English; the recall paper (arXiv 2406.03068, section 4) asks
how the feed-forwards divide the probability between the two. Its further prompts are not known to us; these are ours.
"""

import csv
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lingrok.config import ConfigError, require
from lingrok.lm.prompts import Question, next_token, read_text

FILE = 'a CSV in UTF-8 with the columns prompt, answer and, if you like, generic'
COLUMNS = ('prompt', 'answer', 'generic')


class Fact(NamedTuple):
    """A prompt without a space at its end, and two words without one before them: what is true, what is generic."""

    prompt: str
    answer: str
    generic: str = 'the'


MADRID = Fact('Madrid is located in', 'Spain')
_PLACES = {
    'Paris': 'France', 'Rome': 'Italy', 'Berlin': 'Germany', 'Tokyo': 'Japan', 'Moscow': 'Russia', 'Cairo': 'Egypt',
    'Athens': 'Greece', 'Dublin': 'Ireland', 'Vienna': 'Austria', 'Warsaw': 'Poland', 'Lisbon': 'Portugal',
    'Oslo': 'Norway', 'Stockholm': 'Sweden', 'Toronto': 'Canada', 'Sydney': 'Australia', 'Mumbai': 'India',
    'Beijing': 'China', 'Bangkok': 'Thailand', 'Munich': 'Germany', 'Barcelona': 'Spain', 'Nairobi': 'Kenya',
    'Havana': 'Cuba', 'Lima': 'Peru', 'Istanbul': 'Turkey', 'The Eiffel Tower': 'Paris', 'The Colosseum': 'Rome',
    'The Parthenon': 'Athens', 'The Brandenburg Gate': 'Berlin',
}
FACTS = (
    MADRID,
    *(Fact(f'{place} is located in', where) for place, where in _PLACES.items()),
    Fact('The Amazon River flows mainly through', 'Brazil'),
    Fact('The pyramids of Giza were built in', 'Egypt'),
    Fact('Mount Fuji is the highest mountain in', 'Japan'),
    Fact('The Taj Mahal was built in', 'India'),
    Fact('Wild kangaroos are found only in', 'Australia'),
    Fact('The Great Wall was built in', 'China'),
    Fact('Wolfgang Amadeus Mozart was born in', 'Austria'),
    Fact('Albert Einstein was born in', 'Germany'),
    Fact('Honey is made by', 'bees'),
    Fact('Wool is mostly taken from', 'sheep'),
    Fact('Wine is made from', 'grapes'),
)


def load(path) -> tuple[Fact, ...]:
    """The facts of a user's CSV with the columns prompt, answer and, where 'the' is not meant, generic.

    Spaces around a cell are dropped. Raises ConfigError, naming the line, for a missing or unknown column, a row of
    another length, an empty cell, a prompt that occurs twice, and a file that is empty or not UTF-8.
    """
    rows = csv.reader(io.StringIO(read_text(path, FILE), newline=''), strict=True)
    facts: dict[str, Fact] = {}
    try:
        header = [name.strip() for name in next(rows)]
        require(sorted(header) in (sorted(COLUMNS), sorted(COLUMNS[:2])), f'{path} has the columns '
                f'{", ".join(header)!r:.80}; allowed: {FILE}')
        for row in filter(None, rows):
            where = f'{path}, line {rows.line_num},'
            require(len(row) == len(header), f'{where} has {len(row)} cells; allowed: {len(header)}, as the columns; '
                    'put a text that holds a comma between double quotes')
            fact = Fact(**{name: cell.strip() for name, cell in zip(header, row, strict=True)})
            require(all(fact), f'{where} has an empty cell; allowed: a text in every column')
            require(fact.prompt not in facts, f'{where} has the prompt {fact.prompt!r:.80} a second time; drop one')
            facts[fact.prompt] = fact
    except csv.Error as error:
        raise ConfigError(f'{path}, line {rows.line_num}, is no CSV: {error}; allowed: {FILE}') from None
    require(bool(facts), f'{path} has no rows; allowed: {FILE}')
    return tuple(facts.values())


def single_token(facts: Sequence[Fact], tokenizer) -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """(kept, dropped): kept are the facts whose answer and generic word both are one token after their prompt."""
    kept = tuple(fact for fact in facts if None not in tokens(fact, tokenizer))
    return kept, tuple(fact for fact in facts if fact not in kept)


def question(tokenizer, facts: Sequence[Fact] = FACTS, *, start: str = '') -> Question:
    """The prompts of the facts that are one token, behind a text `start`; words: answer, and generic, that of each."""
    kept, dropped = single_token(facts, tokenizer)
    require(len(kept) > 0, f'none of {len(dropped)} facts has one token for its answer and for its generic word; try '
            'other facts, or a model with a larger vocabulary')
    answer_B, generic_B = np.array([tokens(fact, tokenizer) for fact in kept]).T
    return Question([start + fact.prompt for fact in kept], {'answer': answer_B, 'generic': generic_B}, 'answer',
                    'generic')


def tokens(fact: Fact, tokenizer) -> tuple[int | None, int | None]:
    """The ids of the answer and of the generic word after the prompt and a space; None where it is not one token."""
    return tuple(next_token(tokenizer, fact.prompt, word) for word in (fact.answer, fact.generic))
