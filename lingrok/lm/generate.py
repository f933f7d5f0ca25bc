"""Text that a model writes: greedy or sampled, many prompts at once, with a cache of keys and values.

Prompts are padded on the left, so that all rows end in the same slot. One compiled program reads the prompts, a second
one writes CHUNK tokens a call; between calls the texts are decoded, to look for stop strings, which need not be whole
tokens.
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
ROUND = 32  # lengths are rounded up to a multiple, so that prompts of similar length share a program


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
    length = min(-(-longest // ROUND) * ROUND, cfg.max_len - max_new_tokens)
    chunks = -(-max_new_tokens // CHUNK)
    slots = min(length + chunks * CHUNK, cfg.max_len)
    tokens_BL = np.zeros((len(prompts), length), np.int32)
    for row, ids in zip(tokens_BL, prompts, strict=True):
        row[length - len(ids) :] = ids
    first_B = length - np.array([len(ids) for ids in prompts], np.int32)
    by_output = jax.default_backend() == 'cpu'
    if by_output:
        params = _by_output(params)
    logits_BV, cache = _read(params, tokens_BL, first_B, cfg=cfg, slots=slots, by_output=by_output)
    written = [[] for _ in texts]
    done_B = np.zeros(len(texts), bool)
    for chunk in range(chunks):
        tokens_BC, logits_BV, cache = _write(
            params, logits_BV, cache, done_B, jax.random.key(seed), chunk * CHUNK, temperature or 1.0, cfg=cfg,
            by_output=by_output, greedy=temperature == 0, top_k=top_k, end=pretrained.end_ids)
        for row, new in enumerate(np.asarray(tokens_BC).tolist()):
            if not done_B[row]:
                ends = [i for i, token in enumerate(new) if token in pretrained.end_ids]
                written[row] += new[: ends[0]] if ends else new
                done_B[row] = bool(ends) or _cut(tokenizer.decode(written[row]), stop)[1]
        if done_B.all():
            break
    return [row[:max_new_tokens] for row in written]


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


@functools.partial(jax.jit, static_argnames=('cfg', 'slots', 'by_output'))
def _read(params, tokens_BL, first_B, *, cfg: ModelConfig, slots: int, by_output: bool):
    return model.step(params, tokens_BL, model.empty_cache(cfg, first_B, slots), cfg=cfg, by_output=by_output)


@functools.partial(jax.jit, static_argnames=('cfg', 'by_output', 'greedy', 'top_k', 'end'),
                   donate_argnames=('logits_BV', 'cache'))
def _write(params, logits_BV, cache, done_B, key, start, temperature, *, cfg: ModelConfig, by_output: bool,
           greedy: bool, top_k: int | None, end):
    """CHUNK more tokens (B, CHUNK), the logits behind them, and the cache; stops early once all rows have ended."""
    rows = logits_BV.shape[0]
    row_keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(rows))

    def choose(logits_BV, place):
        if greedy:
            return jnp.argmax(logits_BV, -1).astype(jnp.int32)
        if top_k is not None:
            least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
            logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
        keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, place)
        return jax.vmap(jax.random.categorical)(keys, logits_BV / temperature).astype(jnp.int32)

    def body(carry):
        i, tokens_BC, logits_BV, cache, done_B = carry
        token_B = choose(logits_BV, start + i)
        tokens_BC = jax.lax.dynamic_update_slice_in_dim(tokens_BC, token_B[:, None], i, 1)
        done_B = done_B | jnp.isin(token_B, jnp.array(end, jnp.int32))
        logits_BV, cache = model.step(params, token_B[:, None], cache, cfg=cfg, by_output=by_output)
        return i + 1, tokens_BC, logits_BV, cache, done_B

    carry = (jnp.int32(0), jnp.zeros((rows, CHUNK), jnp.int32), logits_BV, cache, done_B)
    _, tokens_BC, logits_BV, cache, _ = jax.lax.while_loop(lambda c: (c[0] < CHUNK) & ~jnp.all(c[-1]), body, carry)
    return tokens_BC, logits_BV, cache
