"""Word problems by chain of thought: prompts with worked examples, the numbers in answers, a test of two models.

GSM8K (arXiv 2110.14168) is the user's to bring: a JSONL file with the fields question and answer, whose answer ends
with "#### N". The worked examples (chain of thought: arXiv 2201.11903) and the ten problems that come along are ours.
A prompt has n of the examples ("shots") and the question, with a blank line between any two:

    Q: A bus holds 40 people. ... How many buses are needed?
    A: One bus ... The answer is 3.

    Q: ...
    A:

Numbers are floats, so those beyond 2**53 are rounded.
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lingrok.config import ConfigError, require
from lingrok.lm.prompts import read_text

PROBLEMS = Path(__file__).with_name('problems.jsonl')
FILE = 'a JSONL file in UTF-8 with the fields question and answer, an answer ending with "#### N"'
STOP = ('\nQ:',)  # a model that goes on writes the next question
# A sign counts unless something stands directly before it: "7-3" holds 7 and 3.
NUMBER = re.compile(r'''(?P<sign>(?<![\w)%.])[-\u2212])?\$?
    (?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)? | [0-9]+(?:\.[0-9]+)? | (?<![\w.])\.[0-9]+)
    (?:/(?P<divisor>[1-9][0-9]*))?''', re.VERBOSE)
PHRASE = re.compile(r'the answer is:?\s*', re.IGNORECASE)


class Problem(NamedTuple):
    question: str
    answer: str


EXAMPLES = tuple(Problem(*pair) for pair in (
    ('Lena had 9 marbles. Her brother gave her 6 more. How many marbles does Lena have now?',
     'Lena had 9 marbles at first. With 6 more she has 9 + 6 = 15 marbles. The answer is 15.'),
    ('A baker puts 6 rolls into each bag and fills 7 bags. She then eats 2 of the rolls. How many rolls are left?',
     'The bags hold 6 * 7 = 42 rolls. After she eats 2 of them, 42 - 2 = 40 rolls are left. The answer is 40.'),
    ('Three friends share the cost of a tent equally. The tent costs $96 and they have a coupon for $15. How many '
     'dollars does each friend pay?',
     'With the coupon the tent costs 96 - 15 = 81 dollars. Each of the 3 friends pays 81 / 3 = 27 dollars. The answer '
     'is 27.'),
    ('A train leaves with 120 passengers. At the first stop 35 get off and 18 get on. At the second stop 40 get off. '
     'How many passengers are on the train then?',
     'After 35 get off there are 120 - 35 = 85 passengers. After 18 get on there are 85 + 18 = 103. At the second stop '
     '40 get off, which leaves 103 - 40 = 63. The answer is 63.'),
    ('Omar reads 12 pages on each weekday and 25 pages on each day of the weekend. How many pages does he read in a '
     'week?',
     'A week has 5 weekdays, on which he reads 12 * 5 = 60 pages. On the 2 days of the weekend he reads 25 * 2 = 50 '
     'pages. Together that is 60 + 50 = 110 pages. The answer is 110.'),
    ('A rope is 48 meters long. Dana cuts off a quarter of it, and then cuts the rest into pieces of 4 meters. How '
     'many of these pieces does she get?',
     'A quarter of the rope is 48 / 4 = 12 meters. The rest is 48 - 12 = 36 meters long. That makes 36 / 4 = 9 pieces. '
     'The answer is 9.'),
    ('Noor earns $14 an hour. Last week she worked 20 hours, and this week she worked half as many. How many dollars '
     'did she earn in the two weeks?',
     'Half of 20 hours is 20 / 2 = 10 hours. In the two weeks she worked 20 + 10 = 30 hours. For these she earned '
     '30 * 14 = 420 dollars. The answer is 420.'),
    ('A farm has twice as many hens as ducks, and 5 more geese than ducks. There are 16 hens. How many birds are on '
     'the farm?',
     'There are half as many ducks as hens, 16 / 2 = 8 ducks. There are 8 + 5 = 13 geese. Hens and ducks are '
     '16 + 8 = 24 birds, and with the geese there are 24 + 13 = 37. The answer is 37.'),
))


def load(path=PROBLEMS) -> tuple[Problem, ...]:
    """The problems of a JSONL file, in its order; further fields are left aside.

    Raises ConfigError, naming the line, for what is no JSON object, a field that is missing, empty or no text, and an
    answer that does not end with "#### N"; also for a file that is missing, empty or not UTF-8.
    """
    problems = []
    for number, line in enumerate(read_text(path, FILE).split('\n'), 1):
        if not line.strip():
            continue
        where = f'{path}, line {number},'
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f'{where} is no JSON ({error}); allowed: {FILE}') from None
        texts = [entry.get(name) for name in Problem._fields] if isinstance(entry, dict) else [None]
        require(all(isinstance(x, str) and x.strip() for x in texts), f'{where} is no object with the texts question '
                f'and answer: {line!r:.80}; allowed: {FILE}')
        problems.append(Problem(*texts))
        try:
            gold(problems[-1].answer)
        except ConfigError as error:
            raise ConfigError(f'{where} {error}') from None
    return tuple(problems)


def prompt(question: str, shots: int, *, subset_seed: int | None = None,
           examples: Sequence[Problem] = EXAMPLES) -> str:
    """The prompt of a question after the first `shots` examples, or after as many drawn by `subset_seed`.

    `examples` may be the user's own, the published ones for instance; their answers should end "The answer is N."
    """
    require(0 <= shots <= len(examples), f'shots={shots}; allowed: 0 to {len(examples)}, the number of examples')
    order = range(len(examples))
    if subset_seed is not None:
        require(subset_seed >= 0, f'subset_seed={subset_seed}; allowed: 0 or more')
        order = np.random.Generator(np.random.Philox(subset_seed)).permutation(len(examples))
    shown = [f'Q: {examples[i].question}\nA: {examples[i].answer}\n\n' for i in order[:shots]]
    return ''.join(shown) + f'Q: {question.strip()}\nA:'


def gold(answer: str) -> float:
    """The number after "####" at the end of an answer in the format of GSM8K; ConfigError if there is none."""
    reasoning, mark, end = answer.rpartition('####')
    found = NUMBER.fullmatch(end.strip().rstrip('.'))
    require(bool(mark) and found is not None, f'the answer {answer[-40:]!r} has no "#### N" at its end; allowed: a '
            'number N, as in "#### 1,234"')
    return _value(found)


def strict(text: str) -> float | None:
    """The number directly after the last "The answer is" of what a model wrote up to the next question, if any."""
    text = first_answer(text)
    phrases = list(PHRASE.finditer(text))
    found = NUMBER.match(text, phrases[-1].end()) if phrases else None
    return None if found is None else _value(found)


def flexible(text: str) -> float | None:
    """The last number of what a model wrote up to the next question, if any."""
    found = list(NUMBER.finditer(first_answer(text)))
    return _value(found[-1]) if found else None


def first_answer(text: str) -> str:
    """What a model wrote before the first of STOP."""
    return text[:min([place for stop in STOP if (place := text.find(stop)) >= 0], default=len(text))]


def _value(found: re.Match) -> float:
    value = float(found['number'].replace(',', '')) / float(found['divisor'] or 1)
    return -value if found['sign'] else value


class McNemar(NamedTuple):
    """Problems that only the first or only the second model solves, and the p-value that this is chance."""

    only_first: int
    only_second: int
    p: float


def mcnemar(first, second) -> McNemar:
    """The exact two-sided test of two models on the same problems; `first`, `second`: whether each is solved (N,).

    If they were equally good, either would win a problem on which they differ with probability 1/2.
    """
    first_N, second_N = np.asarray(first, bool), np.asarray(second, bool)
    require(first_N.ndim == 1 and first_N.shape == second_N.shape, f'results of the shapes {first_N.shape} and '
            f'{second_N.shape}; allowed: one result a problem, for the same problems')
    wins, losses = int((first_N & ~second_N).sum()), int((second_N & ~first_N).sum())
    differ = wins + losses
    tail = sum(math.comb(differ, k) for k in range(min(wins, losses) + 1))
    return McNemar(wins, losses, min(1.0, 2 * tail / 2**differ))


def wilson(solved: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of Wilson (1927) of an accuracy, 95 % by default; it stays within 0 to 1 for few problems, too."""
    require(0 <= solved <= total and total > 0, f'{solved} of {total} problems solved; allowed: at least one problem')
    centre = (solved + z**2 / 2) / (total + z**2)
    half = z / (total + z**2) * math.sqrt(solved * (total - solved) / total + z**2 / 4)
    share = solved / total  # at 0 and 1 a bound, which rounding would miss: error bars have no negative length
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))
