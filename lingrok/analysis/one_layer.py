"""A one-layer model whose first gradient steps can be written down: feed-forward against attention.

Data: N ordinary tokens, of which token 0 is the trigger q, and the noise token tau = N, so V = N + 1. Text is uniform
on the ordinary tokens. After q comes the target of the sequence (uniform on 1..N-1) with probability 1 - noise_prob,
else tau. The last of the T tokens is always q, and the label is what follows it.

Model: x_t = E(z_t) + E~(z_{t-1}), where E~ is what a perfect previous-token head would have written;
logits = U V sum_t a_t x_t + U F x_T with a = softmax_t(x_T' W x_t). In the coordinates C of the 2 V orthonormal
embeddings (first E, then E~) x_t is a 0/1 vector; value and ff are (V, C) and key_query is (C, C), all zero at the
start. `in_coordinates` brings matrices of any other embeddings to this form, so that one model serves both.

The setting is that of the theory of arXiv 2406.03068; the formulas here are derived for it and checked against
gradients. `network_first_step` asks the same question of a whole network.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from lingrok import model, names, optim
from lingrok.config import Config, require
from lingrok.loss import loss_and_grad
from lingrok.tasks.base import masked_mean

TRIGGER = 0
OTHER = 1  # an ordinary token that stands for all others


class Law(NamedTuple):
    """Law of the sequences. noise_prob may be traced."""

    num_tokens: int
    length: int
    noise_prob: Any


class Sequences(NamedTuple):
    """Tokens (B, M), the last of which is the trigger; its label (B,) and the target of the sequence (B,)."""

    tokens_BM: jax.Array
    label_B: jax.Array
    target_B: jax.Array


class Embeddings(NamedTuple):
    """Embeddings of the coordinates (C, D) and unembeddings (V, D)."""

    embed_CD: jax.Array
    unembed_VD: jax.Array


def check(law: Law) -> Law:
    require(law.num_tokens >= 3, f'num_tokens={law.num_tokens}; allowed: at least 3 (trigger, target, one more)')
    require(law.length >= 2, f'length={law.length}; allowed: at least 2')
    return law


def sample(law: Law, key: jax.Array, size: int) -> Sequences:
    """`size` sequences of the law."""
    N, T = check(law)[:2]
    # One draw and not three: XLA takes half a second to compile each draw.
    uniform = jax.random.uniform(key, (size, 2 * T))
    target_B = 1 + jnp.floor(uniform[:, 0] * (N - 1)).astype(int)
    text_BM = jnp.floor(uniform[:, 1:T] * N).astype(int)
    answer_BM = jnp.where(uniform[:, T:] < law.noise_prob, N, target_B[:, None])

    def step(token_B, draws):
        text_B, answer_B = draws
        token_B = jnp.where(token_B == TRIGGER, answer_B, text_B)
        return token_B, token_B

    _, tokens_MB = jax.lax.scan(step, text_BM[:, 0], (text_BM[:, 1:].T, answer_BM[:, : T - 2].T))
    tokens_BM = jnp.concatenate([text_BM[:, :1], tokens_MB.T, jnp.full((size, 1), TRIGGER)], 1)
    return Sequences(tokens_BM, answer_BM[:, -1], target_B)


def answer_law(law: Law) -> jax.Array:
    """Law of the token after a trigger (N - 1, V), for each target."""
    N = law.num_tokens
    return jnp.eye(N - 1, N + 1, 1) * (1 - law.noise_prob) + jax.nn.one_hot(N, N + 1) * law.noise_prob


def token_law(law: Law) -> jax.Array:
    """Exact law of the token at every position (N - 1, M, V), for each target: powers of the chain, then q."""
    N, T = check(law)[:2]
    text_V = jnp.append(jnp.full(N, 1 / N), 0)

    def of_target(answer_V):
        chain_VV = jnp.tile(text_V, (N + 1, 1)).at[TRIGGER].set(answer_V)
        _, law_MV = jax.lax.scan(lambda p_V, _: (p_V @ chain_VV, p_V), text_V, length=T - 1)
        return jnp.concatenate([law_MV, jax.nn.one_hot(TRIGGER, N + 1)[None]])

    return jax.vmap(of_target)(answer_law(law))


def _with_previous(tokens_XMV):
    """Coordinates (..., M, C) of tokens (..., M, V): the token beside the one before it."""
    previous = jnp.concatenate([jnp.zeros_like(tokens_XMV[..., :1, :]), tokens_XMV[..., :-1, :]], -2)
    return jnp.concatenate([tokens_XMV, previous], -1)


def frequencies(law: Law) -> jax.Array:
    """Expected mean over positions of every coordinate (N - 1, C), for each target; exact for finite T."""
    return jnp.mean(_with_previous(token_law(law)), 1)


def expected_first_step(law: Law) -> dict[str, jax.Array]:
    """Minus the expected gradient at zero, exact for finite N and T: value (V, C), ff (V, C), key_query (C, C)."""
    law_JMC = _with_previous(token_law(law))
    residual_JV = answer_law(law) - 1 / (law.num_tokens + 1)
    mean = lambda x_JC: jnp.einsum('jv,jc->vc', residual_JV, x_JC, precision='highest') / len(x_JC)  # noqa: E731
    C = law_JMC.shape[-1]
    return {'value': mean(jnp.mean(law_JMC, 1)), 'ff': mean(law_JMC[:, -1]), 'key_query': jnp.zeros((C, C))}


def predicted_first_step(law: Law, size) -> dict[str, Any]:
    """Leading-order mean and standard deviation of the entries in `entries`, for `size` sequences: name -> number.

    'mean/...' for stationary frequencies (errors O(1/T)), 'sd/...' to leading order in 1/N.
    """
    N, T, alpha = law
    lead = alpha - 1 / (N + 1)
    share = {'value_other': (1 + (1 - alpha) / (N - 1)) / (N + 1), 'value_noise': alpha / (N + 1)}
    found = {'mean/ff_noise': lead, 'sd/ff_noise': (alpha * (1 - alpha) / size) ** 0.5,
             'mean/value_trigger': lead * (1 / (N + 1) + 1 / T)}
    for name, f in share.items():
        found |= {f'mean/{name}': lead * f, f'sd/{name}': ((alpha * (1 - alpha) * f**2 + alpha * f / T) / size) ** 0.5}
    return found | {
        'mean/copy': (1 - alpha) ** 2 / ((N - 1) * (N + 1)),
        'sd/value_copy': ((1 - alpha) / N * (1 / N**2 + 1 / (N * T)) / size) ** 0.5,
        'mean/margin_ff': alpha - (1 - alpha) / (N - 1) - (2 * (1 - alpha) * np.log(N) / (N * size)) ** 0.5,
        'mean/margin_attn': 2 * alpha / (N + 1) * (1 - (1 - alpha) * alpha / (N + 1)),
    }


def zeros(law: Law, embeddings: Embeddings | None = None) -> dict[str, jax.Array]:
    """The three matrices at the start: in coordinates, or in the width of given embeddings."""
    V = law.num_tokens + 1
    out, width = (V, 2 * V) if embeddings is None else 2 * embeddings.embed_CD.shape[1:]
    return {'value': jnp.zeros((out, width)), 'ff': jnp.zeros((out, width)), 'key_query': jnp.zeros((width, width))}


def random_embeddings(law: Law, key: jax.Array, width: int) -> Embeddings:
    """Independent Gaussian vectors of squared length about 1: orthonormal up to O(1 / sqrt(width))."""
    V = law.num_tokens + 1
    vectors = jax.random.normal(key, (3 * V, width)) / width**0.5
    return Embeddings(vectors[: 2 * V], vectors[2 * V :])


def in_coordinates(params, embeddings: Embeddings | None) -> dict[str, jax.Array]:
    """What matrices (D, D) do to embeddings, in the form of the coordinate model; without embeddings the identity."""
    if embeddings is None:
        return params
    embed_CD, unembed_VD = embeddings
    return {'value': unembed_VD @ params['value'] @ embed_CD.T, 'ff': unembed_VD @ params['ff'] @ embed_CD.T,
            'key_query': embed_CD @ params['key_query'] @ embed_CD.T}


def apply(params, tokens_BM: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits of the attention (B, V), of the feed-forward (B, V), and the attention pattern (B, M)."""
    V = len(params['value'])
    last_BC = jnp.concatenate([jax.nn.one_hot(tokens_BM[:, -1], V), jax.nn.one_hot(tokens_BM[:, -2], V)], -1)
    now_BV, before_BV = jnp.split(last_BC @ params['key_query'], 2, -1)
    before_BM = jnp.take_along_axis(before_BV, tokens_BM[:, :-1], 1)
    scores_BM = jnp.take_along_axis(now_BV, tokens_BM, 1) + jnp.pad(before_BM, ((0, 0), (1, 0)))
    pattern_BM = jax.nn.softmax(scores_BM, -1)
    # Gathers and scatters: one-hot vectors of every position would take V times the memory and three times as long.
    row_B1, empty_BV = jnp.arange(len(tokens_BM))[:, None], jnp.zeros_like(now_BV)
    read_BC = jnp.concatenate([empty_BV.at[row_B1, tokens_BM].add(pattern_BM),
                               empty_BV.at[row_B1, tokens_BM[:, :-1]].add(pattern_BM[:, 1:])], -1)
    return read_BC @ params['value'].T, last_BC @ params['ff'].T, pattern_BM


def loss(params, batch: Sequences) -> jax.Array:
    """Mean cross-entropy in nats."""
    attn_BV, ff_BV, _ = apply(params, batch.tokens_BM)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(attn_BV + ff_BV, batch.label_B))


def first_step(law: Law, key: jax.Array, size: int, embeddings: Embeddings | None = None) -> dict[str, jax.Array]:
    """Minus the gradient at zero on `size` sequences, read in coordinates: the first step of a unit learning rate."""
    batch = sample(law, key, size)
    grad = jax.grad(lambda params: loss(in_coordinates(params, embeddings), batch))(zeros(law, embeddings))
    return in_coordinates(jax.tree.map(jnp.negative, grad), embeddings)


def mean_over_blocks(fn: Callable, key: jax.Array, *, size: int, block: int):
    """Mean of fn(key, block) over size / block blocks of sequences, at the memory of one."""
    require(size % block == 0, f'size={size}; allowed: a multiple of {block}')
    found = jax.lax.map(lambda k: fn(k, block), jax.random.split(key, size // block))
    return jax.tree.map(lambda x: jnp.mean(x, 0), found)


def entries(step, tokens_BM: jax.Array) -> dict[str, jax.Array]:
    """The entries and margins of a first step that the theory speaks of.

    ff_noise F[tau, q]; value_other, value_noise, value_trigger: V[tau, .] of an ordinary token, of tau, of q;
    value_copy V[k, k], copy: its lead over V[k, j], mean over k; margin_ff, margin_attn: logit of tau minus the best
    other one on test sequences; key_query: the largest entry of that matrix.
    """
    value_VC, N = step['value'], len(step['value']) - 1
    square = value_VC[OTHER:N, OTHER:N]
    off = (jnp.sum(square, 1) - jnp.diagonal(square)) / (N - 2)
    attn_BV, ff_BV, _ = apply({**step, 'key_query': jnp.zeros_like(step['key_query'])}, tokens_BM)
    return {
        'ff_noise': step['ff'][N, TRIGGER], 'value_other': value_VC[N, OTHER], 'value_noise': value_VC[N, N],
        'value_trigger': value_VC[N, TRIGGER], 'value_copy': value_VC[OTHER, OTHER],
        'copy': jnp.mean(jnp.diagonal(square) - off), 'margin_ff': jnp.mean(noise_lead(ff_BV)),
        'margin_attn': jnp.mean(noise_lead(attn_BV)), 'key_query': jnp.max(jnp.abs(step['key_query'])),
    }


def noise_lead(logits_XV: jax.Array) -> jax.Array:
    """Logit of the noise token, the last one, minus the best other logit (...)."""
    return logits_XV[..., -1] - jnp.max(logits_XV[..., :-1], -1)


def first_step_moments(law: Law, key: jax.Array, *, sizes: Sequence[int], total: int, num_test: int = 32,
                       width: int | None = None) -> dict[str, jax.Array]:
    """Mean and standard deviation of `entries` over repetitions, for each number m of sequences in `sizes`.

    'mean/...' and 'sd/...' (X,), X = len(sizes). The same `total` sequences are cut into repetitions of each size.
    width: random embeddings of this width, drawn anew from the key; by default orthonormal ones.
    """
    test_key, embed_key, key = jax.random.split(key, 3)
    embeddings = None if width is None else random_embeddings(law, embed_key, width)
    tokens_BM, block = sample(law, test_key, num_test).tokens_BM, min(sizes)
    require(all(size % block == 0 and total % size == 0 for size in sizes),
            f'sizes={tuple(sizes)}; allowed: multiples of the smallest that divide total={total}')
    steps = jax.lax.map(lambda k: first_step(law, k, block, embeddings), jax.random.split(key, total // block))

    def moments(size):
        grouped = jax.tree.map(lambda x: jnp.mean(x.reshape(-1, size // block, *x.shape[1:]), 1), steps)
        found = jax.lax.map(lambda step: entries(step, tokens_BM), grouped)
        return {f'{kind}/{name}': fn(x) for name, x in found.items()
                for kind, fn in (('mean', jnp.mean), ('sd', lambda x: jnp.std(x, ddof=1)))}

    found = [moments(size) for size in sizes]
    return jax.tree.map(lambda *x: jnp.stack(x), *found)


def key_query_formula(params, batch: Sequences) -> jax.Array:
    """Minus the gradient of the key-query matrix (C, C): mean of x_T [sum_t a_t r' V (x_t - xbar) x_t]'.

    r is the label minus the predicted law, a the pattern, xbar the mean of x_t under it. Derived, exact.
    """
    attn_BV, ff_BV, pattern_BM = apply(params, batch.tokens_BM)
    x_BMC = _with_previous(jax.nn.one_hot(batch.tokens_BM, attn_BV.shape[1]))
    r_BV = jax.nn.one_hot(batch.label_B, attn_BV.shape[1]) - jax.nn.softmax(attn_BV + ff_BV)
    gain_BM = jnp.einsum('bv,vc,bmc->bm', r_BV, params['value'], x_BMC)
    gain_BM = pattern_BM * (gain_BM - jnp.sum(pattern_BM * gain_BM, 1, keepdims=True))
    return jnp.einsum('bc,bm,bmd->cd', x_BMC[:, -1], gain_BM, x_BMC) / len(x_BMC)


def key_query_row(law: Law, key: jax.Array, *, size: int, trained_ff: bool, block: int = 500) -> dict[str, jax.Array]:
    """Row q of minus the gradient of the key-query matrix at the second step, by autodiff and by the formula.

    The values are those after a first step of unit rate on `size` sequences, the gradient is that on `size` fresh
    ones. trained_ff: the feed-forward already predicts tau after q with the noise probability; else it is zero.
    Entries: trigger and noise (E), after_trigger and after_noise (E~), other (mean over ordinary tokens, E);
    formula_error: largest difference of the two gradients relative to the largest entry.
    """
    first_key, key = jax.random.split(key)
    step = mean_over_blocks(lambda k, n: first_step(law, k, n), first_key, size=size, block=block)
    N, alpha = law.num_tokens, law.noise_prob
    ff_VC = zeros(law)['ff']
    if trained_ff:
        ff_VC = ff_VC.at[N, TRIGGER].set(jnp.log(N * alpha / (1 - alpha)))
    params = {'value': step['value'], 'ff': ff_VC, 'key_query': zeros(law)['key_query']}

    def both(k, n):
        batch = sample(law, k, n)
        return -jax.grad(loss)(params, batch)['key_query'], key_query_formula(params, batch)

    grad_CC, formula_CC = mean_over_blocks(both, key, size=size, block=block)
    row_C = grad_CC[TRIGGER]
    return {'trigger': row_C[TRIGGER], 'noise': row_C[N], 'after_trigger': row_C[N + 1 + TRIGGER],
            'after_noise': row_C[2 * N + 1], 'other': jnp.mean(row_C[OTHER:N]),
            'formula_error': jnp.max(jnp.abs(grad_CC - formula_CC)) / jnp.max(jnp.abs(grad_CC))}


def reference_losses(law: Law, batch: Sequences) -> dict[str, jax.Array]:
    """Losses of two exact predictors: of the context (bayes), and of the law alone (distribution_only)."""
    N, alpha = law.num_tokens, law.noise_prob
    is_noise_B, visible_B = batch.label_B == N, is_visible(batch)
    blind_B = jnp.where(is_noise_B, alpha, (1 - alpha) / (N - 1))
    seen_B = jnp.where(is_noise_B, alpha, 1 - alpha)
    return {'loss/bayes': -jnp.mean(jnp.log(jnp.where(visible_B, seen_B, blind_B))),
            'loss/distribution_only': -jnp.mean(jnp.log(blind_B))}


def is_visible(batch: Sequences) -> jax.Array:
    """Whether the target has followed an earlier trigger (B,)."""
    return jnp.any(_after_trigger(batch) & (batch.tokens_BM == batch.target_B[:, None]), 1)


def _after_trigger(batch: Sequences):
    return jnp.pad(batch.tokens_BM[:, :-1] == TRIGGER, ((0, 0), (1, 0)))


def evaluate(params, batch: Sequences) -> dict[str, jax.Array]:
    """Loss, what the model predicts with and without its feed-forward, where it looks, and what is stored where.

    p_noise on all sequences, p_target on those that show their target; .../no_ff without the logits of the
    feed-forward. attention_target, attention_noise: mass on targets and on noise tokens that follow a trigger.
    margin/ff, margin/value: F[tau, q] minus the best other F[., q]; V[tau, .] minus the best other value, mean over
    ordinary tokens.
    """
    attn_BV, ff_BV, pattern_BM = apply(params, batch.tokens_BM)
    N, visible_B = attn_BV.shape[1] - 1, is_visible(batch)
    after_BM = _after_trigger(batch)
    found = {'loss/model': loss(params, batch)}
    for name, logits_BV in {'': attn_BV + ff_BV, '/no_ff': attn_BV}.items():
        p_BV = jax.nn.softmax(logits_BV)
        found[f'p_noise{name}'] = jnp.mean(p_BV[:, N])
        found[f'p_target{name}'] = masked_mean(p_BV[jnp.arange(len(p_BV)), batch.target_B], visible_B)
    for name, token in {'target': batch.target_B[:, None], 'noise': N}.items():
        found[f'attention_{name}'] = jnp.mean(jnp.sum(pattern_BM * (after_BM & (batch.tokens_BM == token)), 1))
    return found | {'margin/ff': noise_lead(params['ff'][:, TRIGGER]),
                    'margin/value': jnp.mean(noise_lead(params['value'][:, OTHER:N].T))}


def train(law: Law, key: jax.Array, optimizer: optax.GradientTransformation, *, num_steps: int, batch_size: int,
          eval_size: int = 512) -> dict[str, jax.Array]:
    """`evaluate` and `reference_losses` of the model after 0, 1, ... steps from zero: name -> (num_steps + 1,).

    Every step draws fresh sequences; all evaluations are on the same ones.
    """
    eval_key, key = jax.random.split(key)
    held_out = sample(law, eval_key, eval_size)

    def step(carry, k):
        params, state = carry
        found = evaluate(params, held_out)
        updates, state = optimizer.update(jax.grad(loss)(params, sample(law, k, batch_size)), state)
        return (optax.apply_updates(params, updates), state), found

    start = zeros(law)
    (params, _), found = jax.lax.scan(step, (start, optimizer.init(start)), jax.random.split(key, num_steps))
    found = jax.tree.map(lambda x, last: jnp.append(x, last), found, evaluate(params, held_out))
    return found | {name: jnp.full(num_steps + 1, x) for name, x in reference_losses(law, held_out).items()}


def reference_params(law: Law, strength, sharpness=10.0) -> dict[str, jax.Array]:
    """A solution by hand: q looks at what followed q unless that is noise, values copy, the feed-forward adds noise.

    W = sharpness E(q) (E~(q) - E(tau))', V = strength U(v) E(v)' for every v, F = (strength + log(alpha / (1 -
    alpha))) U(tau) E(q)': the parametrisation of arXiv 2505.15009, with the logit of the value path added to that of
    the feed-forward, which reads x_T alone here.
    """
    N, alpha = law.num_tokens, law.noise_prob
    start = zeros(law)
    return {
        'value': start['value'].at[:, : N + 1].set(strength * jnp.eye(N + 1)),
        'ff': start['ff'].at[N, TRIGGER].set(strength + jnp.log(alpha / (1 - alpha))),
        'key_query': start['key_query'].at[TRIGGER, N + 1 + TRIGGER].set(sharpness).at[TRIGGER, N].set(-sharpness),
    }


def best_reference(law: Law, key: jax.Array, *, size: int = 512) -> dict[str, jax.Array]:
    """`evaluate` of the solution by hand, at the strength of least loss out of 0.5, 1, ..., 10."""
    batch = sample(law, key, size)
    strengths = jnp.arange(0.5, 10.25, 0.5)
    losses = jax.lax.map(lambda s: loss(reference_params(law, s), batch), strengths)
    best = strengths[jnp.argmin(losses)]
    return evaluate(reference_params(law, best), batch) | {'strength': best}


def per_key(fn: Callable, keys: jax.Array):
    """fn(key) of every key, as host arrays with a leading axis S: one key after the other on each of the devices."""
    count = max(n for n in range(1, len(jax.devices()) + 1) if len(keys) % n == 0)
    mesh = jax.make_mesh((count,), ('key',), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:count])
    run = jax.shard_map(lambda keys: jax.lax.map(fn, keys), mesh=mesh, in_specs=P('key'), out_specs=P('key'),
                        check_vma=False)
    return jax.device_get(jax.jit(run)(keys))


def network_first_step(params, task_state, key, cfg: Config, *, sizes: Sequence[int], repetitions: int,
                       num_test: int = 64) -> dict[str, jax.Array]:
    """How a small step on the last feed-forward alone, or on the last value and output matrices alone, favours noise.

    The gradient of the training loss on m sequences, for each m in `sizes`, is projected on the gradient of a reading:
    that is the change of the reading by a step of unit rate. Readings are logits of the noise token minus the mean of
    the others, of the part's own answer to the embedding of a trigger (alone), and of the model at repeated triggers
    of clean test sequences (context).

    'mean/<part>/<reading>', 'sd/<part>/<reading>' (X,) over repetitions, part ff or attn, X = len(sizes); 'ratio/<part>
    /<reading>': mean over sd.
    """
    last = cfg.model.num_layers - 1
    test_key, key = jax.random.split(key)
    test = cfg.task.sample(task_state, test_key, split='clean', batch_size=num_test)
    parts = network_parts(cfg)

    def readings(block):
        edited = {**params, f'blocks_{last}': block}
        logits_BLV, _ = model.apply(edited, test.tokens_BL, cfg=cfg.model)
        context = masked_mean(_noise_over_mean(logits_BLV, cfg), test.groups['occurrence_BL'] >= 2)
        embed_BLD = jnp.asarray(params['embed'])[test.groups['triggers_Bk']]
        ff_BLD = model.feed_forward(edited, embed_BLD, cfg=cfg.model, layer=last)
        attn_BLD = embed_BLD @ _value_output(block, cfg)
        alone = {part: jnp.mean(_noise_over_mean(model.unembed(params, x, cfg=cfg.model), cfg))
                 for part, x in (('ff', ff_BLD), ('attn', attn_BLD))}
        return {**{f'{part}/alone': value for part, value in alone.items()}, 'context': context}

    slopes = jax.jacrev(readings)(jax.tree.map(jnp.asarray, params[f'blocks_{last}']))
    trainable, frozen = optim.split(params, cfg.optim.frozen)

    def changes(size, k):
        batch = cfg.task.sample(task_state, k, split='train', batch_size=size)
        _, grads = loss_and_grad(trainable, frozen, batch, cfg=cfg.model, skip=False)
        block = grads[f'blocks_{last}']
        return {f'{part}/{reading}': -sum(jnp.sum(block[role] * slopes[name][role]) for role in roles)
                for part, roles in parts.items()
                for reading, name in (('alone', f'{part}/alone'), ('context', 'context'))}

    found = {}
    for i, size in enumerate(sizes):
        keys = jax.random.split(jax.random.fold_in(key, i), repetitions)
        for name, x in jax.lax.map(lambda k, size=size: changes(size, k), keys).items():
            mean, sd = jnp.mean(x), jnp.std(x, ddof=1)
            for kind, value in (('mean', mean), ('sd', sd), ('ratio', mean / sd)):
                found.setdefault(f'{kind}/{name}', []).append(value)
    return {name: jnp.stack(values) for name, values in found.items()}


def network_parts(cfg: Config) -> dict[str, tuple[str, ...]]:
    """Roles of the matrices of the last feed-forward and of the last value path."""
    kind = cfg.model.mlp_kind[-1]
    require(kind != 'none', 'the last layer has no feed-forward; allowed: a run with one; see model.mlp_kind')
    return {'ff': names.MLP_KINDS[kind][0], 'attn': ('ov',) if cfg.model.value_output == 'merged' else ('v', 'o')}


def _value_output(block, cfg: Config):
    """The product of value and output matrices (D, D), summed over heads."""
    D, H = cfg.model.d_model, cfg.model.num_heads
    if cfg.model.value_output == 'merged':
        return jnp.sum(block['ov'].reshape(D, H, D), 1)
    v_DGK = block['v'].reshape(D, cfg.model.num_kv_heads, -1)
    v_DHK = jnp.repeat(v_DGK, H // cfg.model.num_kv_heads, 1)
    return v_DHK.reshape(D, -1) @ block['o']


def _noise_over_mean(logits_XV, cfg: Config):
    noise_X = logits_XV[..., cfg.task.noise_id]
    return noise_X - (jnp.sum(logits_XV, -1) - noise_X) / (logits_XV.shape[-1] - 1)
