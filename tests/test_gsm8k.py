"""Word problems: examples and problems whose sums are right, numbers of answers, the test of two models."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lingrok.config import ConfigError
from lingrok.lm import gsm8k
from lingrok.lm.gsm8k import Problem


def sums(text: str) -> int:
    """How many equations a text holds; each is right."""
    found = re.findall(r'([0-9]+(?: [-+*/] [0-9]+)+) = ([0-9]+)', re.sub('<<.*?>>', '', text))
    for left, right in found:
        assert eval(left) == int(right), (left, right)
    return len(found)


def test_the_examples():
    assert len(gsm8k.EXAMPLES) == 8 and len({x.question for x in gsm8k.EXAMPLES}) == 8
    for question, answer in gsm8k.EXAMPLES:
        assert question.endswith('?') and sums(answer)
        value = gsm8k.strict(answer)
        assert answer.endswith(f' The answer is {value:.0f}.')
        assert value == gsm8k.flexible(answer) == gsm8k.flexible(answer[:answer.index(' The answer')])


def test_the_problems():
    problems = gsm8k.load()
    assert len(problems) == len({x.question for x in problems}) == 10
    assert not {x.question for x in problems} & {x.question for x in gsm8k.EXAMPLES}
    for question, answer in problems:
        assert question.endswith('?') and sums(answer)
        steps = re.findall(r'<<(.*?)=(.*?)>>', answer)
        assert all(eval(left) == int(right) for left, right in steps)
        assert gsm8k.gold(answer) == int(steps[-1][1])


def test_prompt():
    text = gsm8k.prompt(' How many? ', 2)
    blocks = text.split('\n\n')
    assert blocks == [f'Q: {q}\nA: {a}' for q, a in gsm8k.EXAMPLES[:2]] + ['Q: How many?\nA:']
    assert gsm8k.prompt('How many?', 0) == 'Q: How many?\nA:'
    assert gsm8k.prompt('x', 1, examples=[Problem('q', 'a')]) == 'Q: q\nA: a\n\nQ: x\nA:'
    assert not any(stop in block for block in blocks for stop in gsm8k.STOP)  # an answer is not cut short


def test_random_subsets():
    texts = [gsm8k.prompt('x', 4, subset_seed=seed) for seed in range(5)]
    assert len(set(texts)) == 5 and texts[0] == gsm8k.prompt('x', 4, subset_seed=0)
    for text in texts:
        questions = [block.splitlines()[0][3:] for block in text.split('\n\n')[:-1]]
        assert len(questions) == len(set(questions)) == 4 and set(questions) <= {x.question for x in gsm8k.EXAMPLES}


@pytest.mark.parametrize('options, error', [
    ({'shots': 9}, 'shots=9; allowed: 0 to 8'), ({'shots': -1}, 'shots=-1'),
    ({'shots': 1, 'subset_seed': -1}, 'subset_seed=-1'),
])
def test_bad_prompts(options, error):
    with pytest.raises(ConfigError, match=error):
        gsm8k.prompt('x', **options)


@pytest.mark.parametrize('text, value', [
    ('5', 5), ('5.0', 5), ('$5.', 5), ('1,234', 1234), ('$1,234.50!', 1234.5), ('-3', -3), ('-$3', -3), ('$-3', -3),
    ('\u22123', -3), ('40%', 40), ('.5', 0.5), ('1/2', 0.5), ('5/0', 0), ('12,34', 34), ('1234,567', 567), ('7-3', 3),
    ('(-2)', -2), ('x = -2', -2), ('2 and 3.', 3), ('1,000,000 dollars', 1e6), ('007', 7), ('**18**', 18),
    ('1...10', 10), ('\\boxed{9}', 9), ('9' * 400, np.inf), ('none', None), ('', None), ('-', None), ('$.', None),
])
def test_last_number(text, value):
    assert gsm8k.flexible(text) == value
    assert gsm8k.flexible(f'First 77, then\n{text}') == (77 if value is None else value)


@pytest.mark.parametrize('text, value', [
    ('So 2 + 3 = 5. The answer is 5.', 5), ('The answer is $1,200 now, of 7.', 1200), ('the answer is: -4', -4),
    ('The answer is 3. No, the answer is 4.', 4), ('The answer is 3. The answer is unknown, 4.', None),
    ('The answer is about 5.', None), ('It is 5.', None), ('', None), ('The answer is 5.0 %', 5),
    ('The answer is\n6', 6), ('The answer is 8.\n\nQ: And now?\nA: The answer is 9.', 8),
    ('Hm.\nQ: And now?\nA: The answer is 9.', None),
])
def test_strict(text, value):
    assert gsm8k.strict(text) == value


def test_flexible_reads_no_further_question():
    assert gsm8k.flexible('It is 8.\n\nQ: And 9?\nA: 10') == 8
    assert gsm8k.flexible('Q: And 9?') == 9  # not a new question: nothing is before it


@given(st.integers(-10**12, 10**12))
def test_any_integer_is_read_back(n):
    for form in (f'{n}', f'{n:,}', f'{n}.0', f'{n:,}.'):
        assert gsm8k.strict(f'The answer is {form}') == gsm8k.flexible(f'is {form}') == n
    assert gsm8k.gold(f'some 3 steps\n#### {n:,}') == n


@given(st.text(alphabet='0123456789,.$-%/ #', max_size=30))
def test_no_text_is_too_odd(text):
    for value in (gsm8k.flexible(text), gsm8k.strict(f'The answer is {text}')):
        assert value is None or np.isfinite(value)


@pytest.mark.parametrize('answer', ['5', '#### ', '#### five', '#### 5 or 6', '5 ####', '### 5'])
def test_an_answer_without_its_number(answer):
    with pytest.raises(ConfigError, match='has no "#### N" at its end'):
        gsm8k.gold(answer)


def test_load_a_file(tmp_path):
    file = tmp_path / 'problems.jsonl'
    lines = [json.dumps({'question': 'a\u2028b', 'answer': '#### 1', 'id': 7}, ensure_ascii=False), '',
             json.dumps({'answer': '2 <<1+1=2>>\n#### 2', 'question': 'c'})]
    file.write_text('\r\n'.join(lines) + '\n', encoding='utf-8-sig', newline='')
    assert gsm8k.load(file) == (Problem('a\u2028b', '#### 1'), Problem('c', '2 <<1+1=2>>\n#### 2'))


GOOD = b'{"question": "a", "answer": "#### 1"}\n'


@pytest.mark.parametrize('content, error', [
    (b'', 'is empty; allowed: a JSONL'), (GOOD + b'{"question"', 'line 2, is no JSON'),
    (GOOD + b'[' * 10**5, 'line 2, is no'), (GOOD + b'["question", "answer"]', 'line 2, is no object'),
    (GOOD + b'\n{"question": "a"}', 'line 3, is no object with the texts question and answer'),
    (b'{"question": "a", "answer": 5}', 'line 1, is no object'),
    (b'{"question": " ", "answer": "#### 5"}', 'line 1, is no object'),
    (GOOD + b'{"question": "a", "answer": "5"}', 'line 2, the answer \'5\' has no "#### N"'),
    (GOOD + b'{"question": "\xe9"}', 'line 2, is not UTF-8'),
])
def test_bad_files(tmp_path, content, error):
    file = tmp_path / 'problems.jsonl'
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=error) as caught:
        gsm8k.load(file)
    assert '\n' not in str(caught.value) and len(str(caught.value)) < 400


def test_mcnemar_by_hand():
    first, second = [1] * 5 + [0] + [1] * 3 + [0], [0] * 5 + [1] + [1] * 3 + [0]
    # Six differ, five one way: 2 (C(6, 0) + C(6, 1)) / 2^6.
    assert gsm8k.mcnemar(first, second) == (5, 1, 14 / 64)
    assert gsm8k.mcnemar([1, 0], [1, 0]) == (0, 0, 1)
    assert gsm8k.mcnemar([1, 0], [0, 1]) == (1, 1, 1)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_mcnemar_is_the_binomial_test(pairs):
    first, second = np.array(pairs, bool).reshape(-1, 2).T
    wins, losses, p = gsm8k.mcnemar(first, second)
    assert gsm8k.mcnemar(second, first) == (losses, wins, p)
    assert (wins, losses) == (sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs))
    if wins + losses:
        np.testing.assert_allclose(p, stats.binomtest(wins, wins + losses).pvalue, rtol=1e-9)


def test_mcnemar_of_thousands():
    first = np.arange(5000) < 2600
    np.testing.assert_allclose(gsm8k.mcnemar(first, ~first).p, stats.binomtest(2600, 5000).pvalue, rtol=1e-9)


def test_mcnemar_needs_pairs():
    with pytest.raises(ConfigError, match=r'shapes \(2,\) and \(3,\)'):
        gsm8k.mcnemar([1, 0], [1, 0, 1])


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson(counts):
    low, high = gsm8k.wilson(*counts)
    wanted = stats.binomtest(*counts).proportion_ci(method='wilson')
    np.testing.assert_allclose((low, high), (wanted.low, wanted.high), atol=1e-4)  # 1.96 is rounded
    assert 0 <= low <= counts[0] / counts[1] <= high <= 1


def test_wilson_needs_a_problem():
    with pytest.raises(ConfigError, match='0 of 0'):
        gsm8k.wilson(0, 0)
