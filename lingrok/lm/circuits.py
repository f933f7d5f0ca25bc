"""How a language model finds the indirect object: where its heads look, what it needs, and what writes the answer.

The measurements of arXiv 2211.00593 and the field since, each a function of (params, what is asked): attention,
activation patching, ablation, logit lens, direct logit attribution, induction scores. All run block by block
(`forward`), so that one compiled block serves all layers and what lies before an intervention is computed once.
Axes: as in `names`, and W words asked for, N layers or depths, P groups of positions. Values keep the axis B of
sentences first, for intervals. Logit differences are in nats: logit(IO) - logit(S) = log P(IO) - log P(S).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lingrok.analysis import heads
from lingrok.config import ModelConfig, require
from lingrok.lm import forward, ioi, prompts
from lingrok.log import Series
from lingrok.pretrained.language import Pretrained

WORDS = ('IO', 'S', 'the')
IO, S = 0, 1
# What is no group of its own lies before S2 or behind it.
GROUPS = ('IO', 'S1', 'S1+1', 'before S2', 'S2', 'behind S2', 'last')
CORRUPTIONS = ('abc', 's2')
SUBLAYERS = ('attn_out', 'mlp_out')


class Cases(NamedTuple):
    """Sentences as one batch, filled up on the right: tokens (B, L), the position (B,) of the last token of each, and
    the tokens (B, W) whose probability behind it is asked: IO, S and a generic word."""

    tokens_BL: jax.Array
    last_B: jax.Array
    words_BW: jax.Array


def cases(pretrained: Pretrained, *, count: int, seed: int = 0) -> Cases:
    """Sentences of `ioi.sentences`; the generic word is ' the'."""
    asked = ioi.sentences(pretrained.tokenizer, count=count, seed=seed)
    generic = ioi.generic_tokens(pretrained.tokenizer)
    require('the' in generic, '" the" is not one token of this tokenizer; try a model with a larger vocabulary')
    batch = prompts.batch(pretrained, [sentence.text for sentence in asked])
    words = [(sentence.io_token, sentence.subject_token, generic['the']) for sentence in asked]
    return Cases(jnp.asarray(batch.tokens_BL), jnp.asarray(batch.last_B), jnp.array(words, jnp.int32))


def places(asked: Cases) -> dict[str, np.ndarray]:
    """Position (B,) of IO, of S the first (S1) and the second time (S2), of the last token, and of the first one."""
    tokens_BL, last_B, words_BW = map(np.asarray, asked)
    inside_BL = np.arange(tokens_BL.shape[1]) <= last_B[:, None]
    io_BL, s_BL = ((tokens_BL == words_BW[:, [w]]) & inside_BL for w in (IO, S))
    for name, found_BL, times in (('IO', io_BL, 1), ('S', s_BL, 2)):
        wrong = np.flatnonzero(found_BL.sum(1) != times)
        require(wrong.size == 0, f'{name} occurs {found_BL[wrong[:1]].sum()} times in sentence {wrong[:1].sum()}; '
                f'allowed: {times}, for its positions have to be found')
    s1_B, s2_B = np.argmax(s_BL, 1), s_BL.shape[1] - 1 - np.argmax(s_BL[:, ::-1], 1)
    return {'IO': np.argmax(io_BL, 1), 'S1': s1_B, 'S2': s2_B, 'last': last_B, 'first': np.zeros_like(last_B)}


def groups(asked: Cases) -> jax.Array:
    """Which positions belong to each of GROUPS (P, B, L); every one to one group, fillings to the last but one."""
    at = places(asked)
    position_L = np.arange(asked.tokens_BL.shape[1])
    group_BL = np.where(position_L < at['S2'][:, None], GROUPS.index('before S2'), GROUPS.index('behind S2'))
    rows = np.arange(len(group_BL))
    for name, place_B in (('S1+1', at['S1'] + 1), *((name, at[name]) for name in ('IO', 'S1', 'S2', 'last'))):
        group_BL[rows, place_B] = GROUPS.index(name)
    return jnp.asarray(group_BL == np.arange(len(GROUPS))[:, None, None])


def log_probs(params, h_BLD: jax.Array, asked: Cases, *, cfg: ModelConfig) -> jax.Array:
    """Log-probability (B, W) in nats of the words, from the residual stream behind the last block."""
    log_BV = forward.log_probs(params, forward.at(h_BLD, asked.last_B), cfg=cfg)
    return jnp.take_along_axis(log_BV, asked.words_BW, 1)


def lead(log_BW: jax.Array) -> jax.Array:
    """The logit difference (B,), IO over S, of log-probabilities (B, W) of the words."""
    return log_BW[:, IO] - log_BW[:, S]


def run(params, tokens_BL: jax.Array, *, cfg: ModelConfig, capture: Sequence[str]
        ) -> tuple[list[jax.Array], list[dict[str, jax.Array]]]:
    """The streams of `forward.residuals`, and what is captured in every block."""
    stream, captured = [forward.embed(params, tokens_BL, cfg=cfg)], []
    for layer in range(cfg.num_layers):
        h_BLD, acts = forward.block(params, stream[-1], cfg=cfg, layer=layer, capture=capture)
        stream.append(h_BLD)
        captured.append(acts)
    return stream, captured


# Attention

def attention(params, tokens_BL: jax.Array, *, cfg: ModelConfig) -> np.ndarray:
    """Attention patterns (N, B, H, L, M) of all heads."""
    _, acts = run(params, tokens_BL, cfg=cfg, capture=['attn.pattern'])
    return np.stack([block['attn.pattern'] for block in acts])


def attention_from_last(pattern_NBHLM: np.ndarray, asked: Cases) -> dict[str, np.ndarray]:
    """What every head puts from the last position on IO, S1, S2 and the first token (B, N, H), each 0 to 1."""
    rows = np.arange(pattern_NBHLM.shape[1])
    at = places(asked)
    # Indices with a slice between them come first in numpy: (B, N, H).
    return {name: pattern_NBHLM[:, rows, :, at['last'], at[name]] for name in ('IO', 'S1', 'S2', 'first')}


def repeated_tokens(cfg: ModelConfig, *, rows: int = 8, half: int = 32, seed: int = 0) -> np.ndarray:
    """Random tokens (B, L) whose second half repeats the first, in which no token occurs twice."""
    require(2 <= half <= min(cfg.max_len // 2, cfg.vocab_size), f'half={half}; allowed: 2 to '
            f'{min(cfg.max_len // 2, cfg.vocab_size):,}, half of the context and no more than the vocabulary')
    rng = np.random.default_rng(seed)
    first = np.stack([rng.choice(cfg.vocab_size, half, replace=False) for _ in range(rows)])
    return np.concatenate([first, first], 1).astype(np.int32)


def repetition_scores(pattern_BHLM) -> dict[str, jax.Array]:
    """Where heads look in `repeated_tokens`: mass on one token (B, H), means over the queries of the second half.

    induction: on the token behind the earlier occurrence of the query's token, L / 2 - 1 back (prefix matching,
    arXiv 2209.11895); duplicate: on the earlier occurrence, L / 2 back; previous: on the token before.
    """
    length = pattern_BHLM.shape[-1]
    query = np.arange(length // 2, length)
    back = {'induction': length // 2 - 1, 'duplicate': length // 2, 'previous': 1}
    return {name: jnp.mean(pattern_BHLM[..., query, query - steps], -1) for name, steps in back.items()}


def uniform_score(length: int) -> float:
    """What each of `repetition_scores` is for a uniform pattern."""
    return float(np.mean(1 / np.arange(length // 2 + 1, length + 1)))


def induction(params, tokens_BL: jax.Array, *, cfg: ModelConfig) -> dict[str, np.ndarray]:
    """`repetition_scores` of every head (B, N, H)."""
    _, acts = run(params, tokens_BL, cfg=cfg, capture=['attn.pattern'])
    scores = [repetition_scores(block['attn.pattern']) for block in acts]
    return {name: np.stack([score[name] for score in scores], 1) for name in scores[0]}


# Activation patching

def corrupted(asked: Cases, names: Sequence[int], *, kind: str = 'abc', seed: int = 0) -> Cases:
    """The same sentences with other names of one token each, position by position; the words asked for stay.

    abc: three names that the sentence does not have, in place of IO, S1 and S2: it says nothing of who is asked for.
    s2: IO in place of S2 only, so that S is asked for. names: tokens to draw from.
    """
    require(kind in CORRUPTIONS, f'corruption {kind!r}; allowed: {", ".join(CORRUPTIONS)}')
    tokens_BL, words_BW = np.array(asked.tokens_BL), np.asarray(asked.words_BW)
    at, rng = places(asked), np.random.default_rng(seed)
    for row, (io, s, *_) in enumerate(words_BW):
        others = [name for name in names if name not in (io, s)]
        require(kind == 's2' or len(set(others)) >= 3, f'{len(set(others))} other names; allowed: 3 or more')
        new = {'S2': io} if kind == 's2' else dict(zip(('IO', 'S1', 'S2'), rng.choice(others, 3, False), strict=True))
        for name, token in new.items():
            tokens_BL[row, at[name][row]] = token
    return asked._replace(tokens_BL=jnp.asarray(tokens_BL))


class Patching(NamedTuple):
    """How much of the clean logit difference clean activations bring into the corrupted run: 0 corrupted, 1 clean.

    Of sentence b: (patched_b - corrupted_b) / mean over sentences of (clean - corrupted); the mean over sentences is
    then (mean patched - mean corrupted) / (mean clean - mean corrupted). clean, corrupted (B,): differences in nats.
    residual (B, N, P): the stream before each block, by group of positions; heads (B, N, H): 'attn.z' of a head;
    attn_out, mlp_out (B, N): what a whole sublayer adds, at all positions.
    """

    clean: np.ndarray
    corrupted: np.ndarray
    residual: np.ndarray
    heads: np.ndarray
    attn_out: np.ndarray
    mlp_out: np.ndarray


def patching(params, clean: Cases, other: Cases, *, cfg: ModelConfig, positions: str = 'all') -> Patching:
    """Activations of the clean sentences put into the corrupted ones (`corrupted`), see `Patching`.

    positions: where heads are patched, at 'all' positions or at the 'last' one, which the answer is read from.
    """
    require(positions in ('all', 'last'), f'positions={positions!r}; allowed: all, last')
    require(clean.tokens_BL.shape == other.tokens_BL.shape and np.array_equal(clean.last_B, other.last_B),
            'clean and corrupted sentences differ in length; allowed: the same positions')
    stream, acts = run(params, clean.tokens_BL, cfg=cfg, capture=('attn.z', *SUBLAYERS))
    base = forward.residuals(params, other.tokens_BL, cfg=cfg)
    clean_B, base_B = (lead(log_probs(params, x[-1], clean, cfg=cfg)) for x in (stream, base))
    scale = jnp.mean(clean_B - base_B)
    require(abs(scale) > 1e-6, 'clean and corrupted sentences have the same mean logit difference; nothing to restore')
    groups_PBL1 = groups(clean)[..., None]
    patched_BL11 = groups_PBL1[GROUPS.index('last')][..., None] if positions == 'last' else jnp.array(True)

    def restored(h_BLD, layer, replace=None):
        h_BLD = forward.resume(params, h_BLD, cfg=cfg, start=layer, replace={layer: replace or {}})
        return (lead(log_probs(params, h_BLD, clean, cfg=cfg)) - base_B) / scale

    found: dict[str, list] = {name: [] for name in ('residual', 'heads', *SUBLAYERS)}
    for layer in range(cfg.num_layers):
        found['residual'].append([restored(jnp.where(group_BL1, stream[layer], base[layer]), layer)
                                  for group_BL1 in groups_PBL1])
        found['heads'].append([restored(base[layer], layer, {'attn.z': (head_H1 & patched_BL11, acts[layer]['attn.z'])})
                               for head_H1 in _each_head(cfg)])
        for name in SUBLAYERS:
            found[name].append(restored(base[layer], layer, {name: (jnp.array(True), acts[layer][name])}))
    return Patching(np.asarray(clean_B), np.asarray(base_B),
                    **{name: np.moveaxis(np.array(values), -1, 0) for name, values in found.items()})


def _each_head(cfg: ModelConfig) -> jax.Array:
    """Masks (H, H, 1) that choose one head of 'attn.z' each."""
    return jnp.eye(cfg.num_heads, dtype=bool)[..., None]


# Ablation

def mean_from_end(x: jax.Array, last_B: jax.Array) -> jax.Array:
    """x (B, L, ...) with every position replaced by the mean over the sentences that have one so far from their end."""
    length = x.shape[1]
    back_BL = last_B[:, None] - jnp.arange(length)  # the position `r` from the end, and by the same token its inverse
    inside_BL = (back_BL >= 0).astype(x.dtype).reshape(*back_BL.shape, *[1] * (x.ndim - 2))
    rows = jnp.arange(x.shape[0])[:, None]
    aligned = x[rows, jnp.maximum(back_BL, 0)] * inside_BL
    mean = jnp.sum(aligned, 0) / jnp.maximum(jnp.sum(inside_BL, 0), 1)
    return mean[jnp.maximum(back_BL, 0)]


def ablation(params, asked: Cases, *, cfg: ModelConfig) -> dict[str, np.ndarray]:
    """Log-probabilities in nats of the words, without every head and every feed-forward.

    A part is replaced by its mean over these sentences, position by position counted from the end: a head in 'attn.z',
    before the output matrix, a feed-forward in 'mlp_out'. intact (B, W); heads (B, N, H, W); mlps (B, N, W).
    """
    stream, acts = run(params, asked.tokens_BL, cfg=cfg, capture=('attn.z', 'mlp_out'))

    def without(layer, name, where):
        replace = {name: (where, mean_from_end(acts[layer][name], asked.last_B))}
        h_BLD = forward.resume(params, stream[layer], cfg=cfg, start=layer, replace={layer: replace})
        return log_probs(params, h_BLD, asked, cfg=cfg)

    layers = range(cfg.num_layers)
    heads_NHBW = [[without(layer, 'attn.z', head_H1) for head_H1 in _each_head(cfg)] for layer in layers]
    mlps_NBW = [without(layer, 'mlp_out', jnp.array(True)) for layer in layers]
    return {'intact': np.asarray(log_probs(params, stream[-1], asked, cfg=cfg)),
            'heads': np.moveaxis(np.array(heads_NHBW), 2, 0), 'mlps': np.moveaxis(np.array(mlps_NBW), 1, 0)}


# What the residual stream already says, and who wrote it

def logit_lens(params, stream: Sequence[jax.Array], asked: Cases, *, cfg: ModelConfig) -> dict[str, np.ndarray]:
    """What the final norm and the unembedding make of the residual stream before every block and behind the last one.

    log_prob (B, N + 1, W) in nats, and rank (B, N + 1, W), 1 for the most likely token.
    """
    found = {'log_prob': [], 'rank': []}
    for h_BLD in stream:
        log_BV = forward.log_probs(params, forward.at(h_BLD, asked.last_B), cfg=cfg)
        log_BW = jnp.take_along_axis(log_BV, asked.words_BW, 1)
        found['log_prob'].append(log_BW)
        found['rank'].append(1 + jnp.sum(log_BV[:, None] > log_BW[..., None], -1))
    return {name: np.stack(values, 1) for name, values in found.items()}


def attribution(params, asked: Cases, *, cfg: ModelConfig) -> dict[str, np.ndarray]:
    """The logit difference of IO and S in nats as a sum over what was added to the residual stream.

    The scale of the final norm is frozen at its value, so that the logits are linear in the stream: direct logit
    attribution. embed (B,), with positions; heads (B, N, H); attn_bias (B, N), of the output matrices; mlps (B, N),
    with their biases; norm_bias (B,); total (B,): the logit difference itself, which they add up to.
    """
    require(cfg.norm == 'none' or cfg.norm_position == 'pre', 'a norm behind each sublayer (model.norm_position=post) '
            'rescales what was added before; allowed: pre')
    require(all(cfg.attn_residual), 'a block without a residual stream around its attention drops what was added '
            'before; allowed: model.attn_residual true in every layer')
    stream, acts = run(params, asked.tokens_BL, cfg=cfg, capture=('attn.z', 'mlp_out'))
    last = {name: forward.at(h_BLD, asked.last_B) for name, h_BLD in (('embed', stream[0]), ('final', stream[-1]))}
    direction_BD, constant_B = _direction(params, last['final'].astype(jnp.float32), asked.words_BW, cfg)
    heads_NBHD, mlps_NBD, biases_ND = [], [], []
    for layer, block in enumerate(acts):
        z_B1HK = forward.at(block['attn.z'], asked.last_B)[:, None]
        heads_NBHD.append(heads.head_outputs(params, {f'blocks.{layer}.attn.z': z_B1HK}, cfg, layer)[:, 0])
        mlps_NBD.append(forward.at(block['mlp_out'], asked.last_B))
        role = 'ov_bias' if cfg.value_output == 'merged' else 'o_bias'
        added = cfg.bias and cfg.value_output == 'factored'  # a merged value has its bias inside 'attn.z'
        biases_ND.append(params[f'blocks_{layer}'][role] if added else jnp.zeros(cfg.d_model))
    found = {
        'embed': jnp.einsum('bd,bd->b', last['embed'], direction_BD),
        'heads': jnp.einsum('nbhd,bd->bnh', jnp.stack(heads_NBHD), direction_BD),
        'attn_bias': jnp.einsum('nd,bd->bn', jnp.stack(biases_ND), direction_BD),
        'mlps': jnp.einsum('nbd,bd->bn', jnp.stack(mlps_NBD), direction_BD),
        'norm_bias': constant_B,
        'total': lead(log_probs(params, stream[-1], asked, cfg=cfg)),
    }
    return {name: np.asarray(value) for name, value in found.items()}


def _direction(params, h_BD, words_BW, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """d (B, D) and c (B,) for which d . h + c is the logit difference, the norm of h being frozen."""
    unembed_VD = jnp.asarray(params['embed'] if cfg.tied else params['unembed'].T)
    u_BD = (unembed_VD[words_BW[:, IO]] - unembed_VD[words_BW[:, S]]).astype(jnp.float32)
    if cfg.norm == 'none':
        return u_BD, jnp.zeros(len(u_BD))
    scaled_BD = u_BD * params['norm_scale']
    if cfg.norm == 'layernorm':
        h_BD = h_BD - jnp.mean(h_BD, -1, keepdims=True)
        scaled_BD = scaled_BD - jnp.mean(scaled_BD, -1, keepdims=True)  # what the centring of the norm makes of it
        constant_B = u_BD @ params['norm_bias'].astype(jnp.float32)
    else:
        constant_B = jnp.zeros(len(u_BD))
    return scaled_BD * jax.lax.rsqrt(jnp.mean(h_BD**2, -1, keepdims=True) + cfg.norm_eps), constant_B


def strongest(score_BNH: np.ndarray) -> tuple[int, int, np.ndarray]:
    """Layer and head with the largest mean on the first half of the sentences, and its values on the second half.

    A head that is chosen and shown on the same sentences looks better than it is.
    """
    count = len(score_BNH)
    require(count >= 2, f'{count} sentences; allowed: 2 or more, as one half chooses a head and the other tests it')
    mean_NH = np.mean(score_BNH[: count // 2], 0)
    layer, head = np.unravel_index(np.argmax(mean_NH), mean_NH.shape)
    return int(layer), int(head), score_BNH[count // 2 :, layer, head]


def best_heads(scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of scores (B, N, H) by name: best/<name> (B / 2,), see `strongest`, place/<name> (1, 2), its layer and head, and
    depth/<name> (1,), of the layer, where 0 is the first one and 1 the last one."""
    found = {}
    for name, score_BNH in scores.items():
        layer, head, value_B = strongest(score_BNH)
        found |= {f'best/{name}': value_B, f'place/{name}': np.array([[layer, head]]),
                  f'depth/{name}': np.array([layer / max(score_BNH.shape[1] - 1, 1)])}
    return found


def series(found: Mapping[str, np.ndarray]) -> dict[str, Series]:
    """Values (B, ...) as the one step of a series, the replicas being sentences."""
    return {name: Series(np.zeros(1, int), np.asarray(values)[None]) for name, values in found.items()}
