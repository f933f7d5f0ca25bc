"""Chains of thought of a model on word problems, kept line by line: a killed program goes on at the problem it reached.

A line of the file is one problem under one setting: the text that the model wrote, and how likely it finds each token
of the worked solution behind the same prompt, numbers and words apart.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from lingrok.config import require
from lingrok.lm import forward, gsm8k
from lingrok.lm.generate import generate, rounded
from lingrok.lm.gsm8k import Problem
from lingrok.log import write_atomically
from lingrok.pretrained.language import Pretrained

KINDS = ('numbers', 'words')


class Kept:
    """Rows of a JSONL file by their key; what a kill or a crash of the machine has damaged is dropped."""

    def __init__(self, path: Path):
        self.rows = {}
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            try:
                row = json.loads(line) if line.endswith(b'\n') else None
            except ValueError:
                row = None
            if isinstance(row, dict) and {'key', 'text', *KINDS} <= {*row}:
                self.rows[row['key']] = row
        write_atomically(path, b''.join(map(_line, self.rows.values())))
        self._file = path.open('ab')

    def add(self, row: dict) -> None:
        if row['key'] not in self.rows:
            self.rows[row['key']] = row
            self._file.write(_line(row))
            self._file.flush()


def _line(row: dict) -> bytes:
    return (json.dumps(row) + '\n').encode()


def solve(model: Pretrained, problems: Sequence[Problem], kept: Kept, *, entry: str, params: Callable[[], dict],
          shots: int, subset_seed: int | None = None, batch: int = 8, max_new_tokens: int = 256) -> Iterator[dict]:
    """The row of every problem, in order: what an edited model writes, and its log-probabilities of the solution.

    entry: the edit, see `truncation.edited`; params: makes the edited parameters, and is called only if a row is
    missing. Batches are the same whatever is kept already, so that an interruption does not even change the rounding.
    """
    texts = [gsm8k.prompt(problem.question, shots, subset_seed=subset_seed) for problem in problems]
    solutions = [solution(problem) for problem in problems]
    setting = (fingerprint(model), entry, max_new_tokens)
    keys = [hashlib.sha256(repr((*setting, *pair)).encode()).hexdigest()[:16]
            for pair in zip(texts, solutions, strict=True)]
    batch = min(batch, len(texts))
    for start in range(0, len(texts), batch):
        places = range(start, min(start + batch, len(texts)))
        if any(keys[i] not in kept.rows for i in places):
            edited = model._replace(params=params())
            # The last batch is filled up: another size would be compiled anew.
            asked = [texts[i] for i in places] + [texts[start]] * (batch - len(places))
            written = generate(edited, asked, max_new_tokens=max_new_tokens, stop=gsm8k.STOP)
            for i, text in zip(places, written, strict=False):
                kept.add({'model': entry, 'shots': shots, 'subset': subset_seed, 'problem': i, 'key': keys[i],
                          'text': text, **solution_log_probs(edited, texts[i], solutions[i])})
        yield from (kept.rows[keys[i]] for i in places)


def fingerprint(model: Pretrained) -> str:
    """Tells models apart: a hash of the config, the end tokens, and one row of every array."""
    rows = [np.asarray(x[(0,) * (x.ndim - 1)]).tobytes() for x in jax.tree.leaves(model.params)]
    return hashlib.sha256(repr((model.config, model.end_ids)).encode() + b''.join(rows)).hexdigest()


def solution(problem: Problem) -> str:
    """The worked answer of a problem as the examples of the prompt have theirs, with the space before it.

    >>> solution(Problem('How many?', 'He has 2 * 3 = <<2*3=6>>6.\\n#### 6'))
    ' He has 2 * 3 = 6. The answer is 6.'
    """
    reasoning, _, end = re.sub('<<.*?>>', '', problem.answer).rpartition('####')
    return f' {" ".join(reasoning.split())} The answer is {end.strip().rstrip(".")}.'


def solution_log_probs(model: Pretrained, text: str, solution: str) -> dict[str, float | None]:
    """Mean log-probability a token of the numbers and of the words of a solution behind a prompt; None without any."""
    cfg, whole = model.config, text + solution
    encoding = model.tokenizer.encode(whole)
    ids = np.array(encoding.ids, np.int32)
    # Filled up on the right, which nothing before it sees: prompts of similar length share their programs.
    h_1LD = forward.embed(model.params, _padded(ids, cfg.max_len)[None], cfg=cfg)
    h_LD = forward.resume(model.params, h_1LD, cfg=cfg, start=0)[0]
    places = np.array([i for i, (begin, _) in enumerate(encoding.offsets) if begin >= len(text)], np.int32)
    log_CV = forward.log_probs(model.params, h_LD[_padded(places - 1, cfg.max_len)], cfg=cfg)
    log_C = np.asarray(log_CV[np.arange(len(places)), ids[places]], float)
    parts = [whole[slice(*encoding.offsets[i])] for i in places]
    chosen = {'numbers': [any(map(str.isdigit, part)) for part in parts],
              'words': [any(map(str.isalpha, part)) for part in parts]}
    return {kind: float(np.mean(log_C[mask])) if any(mask) else None for kind, mask in chosen.items()}


def _padded(values: np.ndarray, most: int) -> np.ndarray:
    return np.pad(values, (0, min(rounded(len(values), 32), most) - len(values)))


def require_context(model: Pretrained, problems: Sequence[Problem], shots: int, max_new_tokens: int, *,
                    subset_seed: int | None = None) -> None:
    """Raises unless every prompt of so many examples leaves room in the context for an answer and the solution."""
    texts = [gsm8k.prompt(problem.question, shots, subset_seed=subset_seed) for problem in problems]
    for number, (text, problem) in enumerate(zip(texts, problems, strict=True)):
        prompt, whole = (len(model.tokenizer.encode(x).ids) for x in (text, text + solution(problem)))
        needed = max(prompt + max_new_tokens, whole)
        require(needed <= model.config.max_len, f'problem {number} needs {needed:,} tokens at {shots} shots; allowed: '
                f'{model.config.max_len:,}, the context of the model; try fewer shots or a smaller max_new_tokens')
