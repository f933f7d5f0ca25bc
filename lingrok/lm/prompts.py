"""What every experiment on prompts needs: texts as one batch of tokens, words that are one token, files of the user.

Axes: B prompts, L positions. A word is "one token after a text" if the tokens of the text, a space and the word are
those of the text and one more; only then is the model's probability of the word one number.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lingrok.config import ConfigError, require
from lingrok.pretrained.language import Pretrained


class Prompts(NamedTuple):
    """Prompts of different lengths in one array: tokens (B, L) int32, filled up with 0 on the right, and the position
    (B,) int32 of the last token of each."""

    tokens_BL: np.ndarray
    last_B: np.ndarray


class Question(NamedTuple):
    """Prompts that ask the same thing, and the words that may follow, of which two are set against each other.

    words: name -> token id (B,), or (B, K) for a set of words; answer, generic: names of the word that the context or a
    fact asks for, and of the one that follows such a text most often.
    """

    texts: list[str]
    words: dict[str, np.ndarray]
    answer: str
    generic: str


def batch(pretrained: Pretrained, texts: Sequence[str]) -> Prompts:
    """The tokens of `texts`, each with the first token that the tokenizer prescribes, if any.

    Attention is causal, so nothing up to `last_B` sees what is filled up on the right: logits there are exact. To put a
    start token before a text whose tokenizer prescribes none, write it into the text: '<|endoftext|>Madrid is'.
    """
    require(not isinstance(texts, str) and len(texts) > 0, f'texts={texts!r:.80}; allowed: a list of at least one text')
    ids = [encoding.ids for encoding in pretrained.tokenizer.encode_batch(list(texts))]
    longest = pretrained.config.max_len
    for place, (text, row) in enumerate(zip(texts, ids, strict=True)):
        require(bool(text) and 0 < len(row) <= longest, f'text {place}, {text!r:.80}, has {len(row) if text else 0:,} '
                f'tokens; allowed: 1 to {longest:,}, the context of the model')
    tokens_BL = np.zeros((len(ids), max(map(len, ids))), np.int32)
    for row_L, row in zip(tokens_BL, ids, strict=True):
        row_L[:len(row)] = row
    return Prompts(tokens_BL, np.array([len(row) - 1 for row in ids], np.int32))


def next_token(tokenizer, text: str, word: str) -> int | None:
    """The id of `word` where it follows `text` and a space, or None unless it is one token there.

    Some tokenizers treat the beginning of a text as a word of its own, so ' word' alone would not tell.
    """
    before, after = (tokenizer.encode(x, add_special_tokens=False).ids for x in (text, f'{text} {word}'))
    one = after[:-1] == before and tokenizer.decode(after[-1:]).strip() == word  # else it is the unknown token
    return after[-1] if one else None


def read_text(path, what: str) -> str:
    """The text of a UTF-8 file with or without a byte order mark; `what` says in errors what the file should be."""
    try:
        raw = Path(path).read_bytes()
        text = raw.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        line = raw[:error.start].count(b'\n') + 1
        raise ConfigError(f'{path}, line {line}, is not UTF-8; try: iconv -f latin1 -t utf-8 {path}') from None
    except (OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise ConfigError(f'{path} cannot be read ({reason}); allowed: {what}') from None
    require(bool(text.strip()), f'{path} is empty; allowed: {what}')
    return text
