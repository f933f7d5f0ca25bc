"""Text that a model writes: greedy or sampled, many prompts at once, with a cache of keys and values.

Prompts are padded on the left, so that all rows end in the same slot. One compiled program reads the prompts and says
the first token, a second one writes up to CHUNK more a call; between calls the texts are decoded, to look for stop
strings, which need not be whole tokens.
"""

import functools
import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lingrok import model
from lingrok.config import ModelConfig, require
from lingrok.pretrained.language import Pretrained

CHUNK = 16


def generate(pretrained: Pretrained, texts: Sequence[str], *, max_new_tokens: int = 64, stop: Sequence[str] = (),
             temperature: float = 0.0, top_k: int | None = None, seed: int = 0) -> list[str]:
    """What the model writes behind each text, up to a stop string, an end token or `max_new_tokens`.

    temperature: 0 takes the most likely token, greater values sample; top_k: from this many likely tokens. A row's
    result does not depend on the other rows, up to rounding. Stop strings and what follows are not part of the result.
    On a CPU a second copy of the matrices is kept until other parameters come or these are dropped; of numpy arrays,
    which can change, it is made anew by every call.
    """
    rows = continued(pretrained, texts, max_new_tokens=max_new_tokens, stop=stop, temperature=temperature, top_k=top_k,
                     seed=seed)
    return [_cut(pretrained.tokenizer.decode(row), stop)[0] for row in rows]


def continued(pretrained: Pretrained, texts: Sequence[str], *, max_new_tokens: int, stop: Sequence[str] = (),
              temperature: float = 0.0, top_k: int | None = None, seed: int = 0) -> list[list[int]]:
    """The new tokens of each text, see `generate`, with those of a stop string and without an end token."""
    cfg, params, tokenizer = pretrained.config, pretrained.params, pretrained.tokenizer
    require(bool(texts) and not isinstance(texts, str), 'no texts; allowed: a list of one text or more')
    require(max_new_tokens > 0, f'max_new_tokens={max_new_tokens}; allowed: positive')
    require(temperature >= 0, f'temperature={temperature}; allowed: 0 (the most likely token) or greater')
    require(top_k is None or 0 < top_k <= cfg.vocab_size, f'top_k={top_k}; allowed: 1 to {cfg.vocab_size:,}')
    require(all(stop), "stop strings may not be empty; try ('\\n',)")
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    require(all(prompts), 'a text without tokens; allowed: at least one token each')
    longest = max(map(len, prompts))
    require(longest + max_new_tokens <= cfg.max_len, f'{longest:,} tokens and max_new_tokens={max_new_tokens:,} are '
            f'more than the context of the model, {cfg.max_len:,}')
    length = min(rounded(longest), cfg.max_len - max_new_tokens)
    slots = min(length + -(-max_new_tokens // CHUNK) * CHUNK, cfg.max_len)
    tokens_BL = np.zeros((len(prompts), length), np.int32)
    for row, ids in zip(tokens_BL, prompts, strict=True):
        row[length - len(ids) :] = ids
    first_B = length - np.array([len(ids) for ids in prompts], np.int32)
    by_output = jax.default_backend() == 'cpu'
    if by_output:
        params = _by_output(params)
    law = (jax.random.key(seed), temperature or 1.0)
    static = {'cfg': cfg, 'by_output': by_output, 'greedy': temperature == 0, 'top_k': top_k}
    new_BC, cache = _read(params, tokens_BL, first_B, *law, slots=slots, **static)
    written, count, place = [[] for _ in texts], 1, 0
    done_B = np.zeros(len(texts), bool)
    while True:
        new_BC = np.asarray(new_BC)[:, :count]
        for row, new in enumerate(new_BC.tolist()):
            if not done_B[row]:
                ends = [i for i, token in enumerate(new) if token in pretrained.end_ids]
                written[row] += new[: ends[0]] if ends else new
                done_B[row] = bool(ends) or _cut(tokenizer.decode(written[row]), stop)[1]
        place += count
        count = min(CHUNK, max_new_tokens - place)
        if done_B.all() or count == 0:
            return written
        new_BC, cache = _write(params, new_BC[:, -1], cache, done_B, place, count, *law, end=pretrained.end_ids,
                               **static)


def rounded(length: int, unit: int = 8) -> int:
    """A length rounded up to a multiple of `unit`, or by an eighth at most: similar lengths share their programs."""
    unit = max(unit, 2 ** (length.bit_length() - 4))
    return -(-length // unit) * unit


def _cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """A text up to the first stop string, and whether there is one."""
    places = [place for place in map(text.find, stop) if place >= 0]
    return (text[: min(places)], True) if places else (text, False)


_kept: list = []  # of the last parameters: weak references to the leaves, and these stored by output


def _by_output(params) -> dict:
    """`model.by_output`, kept in memory beside the parameters until others come or these are dropped."""
    leaves = jax.tree.leaves(params)
    for references, turned in tuple(_kept):  # another thread may change the list
        if len(references) == len(leaves) and all(a() is b for a, b in zip(references, leaves, strict=True)):
            return turned
    _kept.clear()  # before there is a third model
    turned = model.by_output(params)
    if all(isinstance(leaf, jax.Array) for leaf in leaves):  # the entries of numpy arrays can change
        _kept[:] = [([weakref.ref(leaf, lambda _: _kept.clear()) for leaf in leaves], turned)]
    return turned


@functools.partial(jax.jit, static_argnames=('cfg', 'slots', 'by_output', 'greedy', 'top_k'))
def _read(params, tokens_BL, first_B, key, temperature, *, cfg: ModelConfig, slots: int, by_output: bool,
          **law) -> tuple[jax.Array, model.Cache]:
    """The first new token of every row (B, 1), and the cache with the prompts."""
    cache = model.empty_cache(cfg, first_B, slots)
    logits_BV, cache = model.step(params, tokens_BL, cache, cfg=cfg, by_output=by_output)
    return _choose(logits_BV, 0, key, temperature, **law)[:, None], cache


@functools.partial(jax.jit, static_argnames=('cfg', 'by_output', 'greedy', 'top_k', 'end'), donate_argnames='cache')
def _write(params, token_B, cache, done_B, place, count, key, temperature, *, cfg: ModelConfig, by_output: bool, end,
           **law) -> tuple[jax.Array, model.Cache]:
    """`count` more tokens of (B, CHUNK), the first at `place` behind the prompts; fewer once all rows have ended."""

    def body(carry):
        i, tokens_BC, token_B, cache, done_B = carry
        logits_BV, cache = model.step(params, token_B[:, None], cache, cfg=cfg, by_output=by_output)
        token_B = _choose(logits_BV, place + i, key, temperature, **law)
        tokens_BC = jax.lax.dynamic_update_slice_in_dim(tokens_BC, token_B[:, None], i, 1)
        return i + 1, tokens_BC, token_B, cache, done_B | jnp.isin(token_B, jnp.array(end, jnp.int32))

    tokens_BC = jnp.zeros((token_B.shape[0], CHUNK), jnp.int32)
    carry = (jnp.int32(0), tokens_BC, token_B, cache, done_B)
    _, tokens_BC, _, cache, _ = jax.lax.while_loop(lambda c: (c[0] < count) & ~jnp.all(c[-1]), body, carry)
    return tokens_BC, cache


def _choose(logits_BV, place, key, temperature, *, greedy: bool, top_k: int | None):
    """The token (B,) at a place behind the prompts: the most likely one, or a draw that is the row's own."""
    if greedy:
        return jnp.argmax(logits_BV, -1).astype(jnp.int32)
    if top_k is not None:
        least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    rows = jnp.arange(logits_BV.shape[0])
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), place))(rows)
    return jax.vmap(jax.random.categorical)(keys, logits_BV / temperature).astype(jnp.int32)
