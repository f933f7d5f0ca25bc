"""What a language model says next, and what truncating one of its matrices changes (arXiv 2312.13558, 2406.03068).

A `Study` keeps the residual streams of the whole model on a set of prompts and on a text. An edited model then costs
only the blocks from the edit on: of a heat map over all layers, half the work. Axes: B prompts, W windows of a text.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lingrok.analysis import lowrank
from lingrok.config import parse_truncation, require
from lingrok.lm import forward
from lingrok.lm.prompts import Prompts, Question, batch
from lingrok.pretrained.language import Pretrained

BOOTSTRAP = 2000  # draws


class Study(NamedTuple):
    """A model, what it is asked, and its residual streams on the prompts and on a text (none: empty)."""

    pretrained: Pretrained
    question: Question
    prompts: Prompts
    prompt_streams: list[jax.Array]
    text_streams: list[jax.Array]
    text_log_probs: tuple[jax.Array, ...]


def study(pretrained: Pretrained, question: Question, text_WL: np.ndarray | None = None) -> Study:
    """The whole model on the prompts of a question and on windows of a text (W, L)."""
    cfg, params = pretrained.config, pretrained.params
    prompts = batch(pretrained, question.texts)
    streams = forward.residuals(params, jnp.asarray(prompts.tokens_BL), cfg=cfg)
    text = [] if text_WL is None else forward.residuals(params, jnp.asarray(text_WL), cfg=cfg)
    log_probs = tuple(forward.log_probs(params, row, cfg=cfg) for row in text[-1]) if text else ()
    return Study(pretrained, question, prompts, streams, text, log_probs)


def measure(study: Study, params, start: int) -> dict[str, np.ndarray]:
    """What the model with other params says of the prompts. Nothing before the block `start` may differ.

    p/<word>, log_p/<word>, rank/<word> (B,): probability of the word, its natural logarithm, and its rank among all
    tokens, 1 for the most likely (of a set of words: the best rank); kl (W,): nats by which it departs from the whole
    model on the text, mean over positions of KL(whole, edited).
    """
    cfg, last_B = study.pretrained.config, study.prompts.last_B
    h_BLD = forward.resume(params, study.prompt_streams[start], cfg=cfg, start=start)
    log_BV = forward.log_probs(params, forward.at(h_BLD, last_B), cfg=cfg)
    found = {}
    for name, ids in study.question.words.items():
        log_B, rank_B = _of_word(log_BV, jnp.asarray(ids).reshape(len(last_B), -1))
        found |= {f'p/{name}': jnp.exp(log_B), f'log_p/{name}': log_B, f'rank/{name}': rank_B}
    if study.text_streams:
        h_WLD = forward.resume(params, study.text_streams[start], cfg=cfg, start=start)
        # Window by window: the logits of all of them would take more memory than the model.
        found['kl'] = jnp.stack([_divergence(whole_LV, forward.log_probs(params, h_LD, cfg=cfg))
                                 for whole_LV, h_LD in zip(study.text_log_probs, h_WLD, strict=True)])
    return {name: np.asarray(value) for name, value in found.items()}


@jax.jit
def _of_word(log_BV, ids_BK):
    log_BK = jnp.take_along_axis(log_BV, ids_BK, 1)
    rank_BK = 1 + jnp.sum(log_BV[:, None] > log_BK[..., None], -1)
    return jax.nn.logsumexp(log_BK, -1), jnp.min(rank_BK, -1)


@jax.jit
def _divergence(log_p_LV, log_q_LV):
    return jnp.mean(jnp.sum(jnp.exp(log_p_LV) * (log_p_LV - log_q_LV), -1))


def compare(study: Study, entries: Sequence[str]) -> dict[str, np.ndarray]:
    """`measure` of the whole model and of edited ones: 'whole/p/the', '<entry>/p/the', ...; see `edited`."""
    layers = study.pretrained.config.num_layers
    found = {'whole': measure(study, study.pretrained.params, layers)}
    for entry in entries:
        found[entry] = measure(study, edited(study.pretrained, entry), first_layer(entry, layers))
    return {f'{model}/{name}': value for model, values in found.items() for name, value in values.items()}


def top_words(study: Study, params, start: int, row: int, count: int = 10) -> list[tuple[str, float]]:
    """The most likely tokens behind one prompt, with their probabilities."""
    cfg = study.pretrained.config
    h_1LD = forward.resume(params, study.prompt_streams[start][row : row + 1], cfg=cfg, start=start)
    log_V = np.asarray(forward.log_probs(params, h_1LD[0, study.prompts.last_B[row]], cfg=cfg))
    return [(study.pretrained.tokenizer.decode([int(i)]), float(np.exp(log_V[i]))) for i in np.argsort(-log_V)[:count]]


def edited(pretrained: Pretrained, entry: str) -> dict:
    """Params with one truncation or several: 'blocks.28.mlp_in@0.01+blocks.28.mlp_out@0.1'; '' is the whole model."""
    params = pretrained.params
    for layer, role, fraction, keep in _parsed(entry):
        params = lowrank.truncate(params, pretrained.config, role, layer, fraction, keep=keep)
    return params


def first_layer(entry: str, num_layers: int) -> int:
    """The first block that differs from that of the whole model."""
    return min((layer for layer, *_ in _parsed(entry)), default=num_layers)


def _parsed(entry: str) -> list[tuple]:
    return [parse_truncation(part, '--truncate') for part in entry.split('+')] if entry else []


def truncations(pretrained: Pretrained, layers: Iterable[int], roles: Sequence[str], fractions: Sequence[float],
                keeps: Sequence[str] = ('top',), *, skip: Iterable[str] = ()) -> Iterator[tuple[str, dict]]:
    """Every truncation of one matrix, and its params; one decomposition a matrix, none where all is in `skip`."""
    cfg, params, skip = pretrained.config, pretrained.params, set(skip)
    for layer in layers:
        for role in roles:
            wanted = {name: (fraction, keep) for fraction in fractions for keep in keeps
                      if not (fraction == 0 and keep != keeps[0])  # nothing kept is nothing kept
                      if (name := entry(layer, role, fraction, keep)) not in skip}
            svd = lowrank.spectrum(params, cfg, role, layer) if any(f > 0 for f, _ in wanted.values()) else None
            for name, (fraction, keep) in wanted.items():
                yield name, lowrank.truncate(params, cfg, role, layer, fraction, keep=keep, svd=svd)


def entry(layer: int, role: str, fraction: float, keep: str = 'top') -> str:
    """The name of a truncation, which `edited` reads."""
    return f'blocks.{layer}.{role}@{fraction:g}' + ('@bottom' if keep == 'bottom' else '')


def halves(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which prompts choose, and which report: the first and the second half, as masks."""
    require(count >= 4, f'{count} prompts; allowed: at least 4, half of which choose a truncation and half test it')
    first = np.arange(count) < count // 2
    return first, ~first


def choose(table: Mapping[str, Mapping[str, np.ndarray]], whole: Mapping[str, np.ndarray], question: Question,
           rows: np.ndarray, max_kl: float = np.inf) -> str | None:
    """The edited model with the greatest mean log P(answer) - log P(generic) on `rows`, or None if none will do.

    Only models count that lose nothing of log P(answer) on these rows and depart from the whole model by at most
    `max_kl` nats on the text (section 8.1 of the protocol; the authors' own choice is not known).
    """
    answer = f'log_p/{question.answer}'
    leads = {name: float(np.mean(lead(found, question)[rows])) for name, found in table.items()
             if np.mean(found[answer][rows]) >= np.mean(whole[answer][rows]) and np.mean(found.get('kl', 0)) <= max_kl}
    return max(leads, key=leads.get, default=None)


def lead(found: Mapping[str, np.ndarray], question: Question) -> np.ndarray:
    """log P(answer) - log P(generic) in nats, of every prompt (B,)."""
    return found[f'log_p/{question.answer}'] - found[f'log_p/{question.generic}']


def compose(study: Study, table: Mapping[str, Mapping[str, np.ndarray]], whole: Mapping[str, np.ndarray],
            rows: np.ndarray, *, tries: int = 2, max_kl: float = np.inf) -> tuple[str, dict[str, np.ndarray]]:
    """Truncations of several layers, added one by one from the last layer down wherever `choose` prefers the result.

    The best single ones cannot simply be put together (issue 19 of the LASER code). tries: how many truncations of a
    layer, the best ones alone, are tried. Returns the entry ('' if nothing helps) and what it says.
    """
    pretrained, question = study.pretrained, study.question
    best, found, params = '', dict(whole), pretrained.params
    for layer in reversed(range(pretrained.config.num_layers)):
        own = [name for name in table if first_layer(name, 0) == layer]
        own.sort(key=lambda name: -np.mean(lead(table[name], question)[rows]))
        for name in own[:tries]:
            together = f'{best}+{name}' if best else name
            other = edited(pretrained._replace(params=params), name)
            tried = measure(study, other, layer)
            if choose({best: found, together: tried}, whole, question, rows, max_kl) == together:
                best, found, params = together, tried, other
                break
    return best, found


def bootstrap(values_B: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean over prompts, by percentiles of means of prompts drawn with replacement."""
    rng = np.random.default_rng(seed)
    means = [np.mean(rng.choice(values_B, len(values_B))) for _ in range(BOOTSTRAP)]
    return tuple(np.percentile(means, (2.5, 97.5)))


def windows(tokenizer, text: str, count: int, length: int, seed: int = 0) -> np.ndarray:
    """Tokens (W, L) of windows at random places of a text; they may overlap."""
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
    require(len(ids) >= length, f'the text has {len(ids):,} tokens; allowed: at least {length}, the length of a window')
    starts = np.random.default_rng(seed).integers(0, len(ids) - length + 1, count)
    return ids[starts[:, None] + np.arange(length)]
