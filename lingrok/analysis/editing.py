"""One association taken out of a feed-forward by a rank-one edit, beside low-rank truncation at the same cost.

Derived from the open question left by arXiv 2406.03068: truncation removes the noise together with everything else
that shares its singular directions. In a linear memory W = sum_jk A_jk W_E(j) W_U(k)^T (inputs on the left, x W) the
association of one input q with one output tau alone goes with

    W - W_E(q) [W_E(q)^T W W_U(tau)] W_U(tau)^T,       unit vectors W_E(q), W_U(tau).

The matrix edited is the last one of a feed-forward, whose output is read by the unembedding. Its input for a trigger q
is not W_E(q) but what arrives there: METHODS differ in what they take for it.
"""

import jax
import jax.numpy as jnp

from lingrok import model, names
from lingrok.analysis import lowrank, memory
from lingrok.config import Config, ModelConfig, require
from lingrok.tasks.base import masked_mean

EDITED = {'mlp': 'mlp_out', 'gated': 'mlp_out', 'linear': 'mlp_linear'}  # kind of feed-forward -> matrix
# embedding: the trigger's embedding alone; context: the mean over triggers in sequences; whitened: the same, read in
# the direction that changes other text least.
METHODS = ('embedding', 'context', 'whitened')
STRENGTHS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)  # 1: the association is gone, 2: reversed
BUDGETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # nats
RIDGE = 1e-3  # of the mean squared input, added to its second moments
LOW = 0.05  # P(noise) that counts as removed


def erase(matrix_IO: jax.Array, keys_KI: jax.Array, write_O: jax.Array, *, reads_KI: jax.Array | None = None,
          strength: float = 1.0) -> jax.Array:
    """The matrix (x W) that writes nothing along `write_O` for the inputs keys_KI; the difference has rank one.

    reads_KI (K, I): the inputs that notice the edit are those with a part along a read; by default the keys themselves.
    What is written across write_O stays for all inputs. strength: share of the association that goes.
    """
    reads_KI = keys_KI if reads_KI is None else reads_KI
    unit_O = write_O / jnp.linalg.norm(write_O)
    # pinv: a key that is zero (no unit of a ReLU is active) has nothing to erase.
    weights_K = jnp.linalg.pinv(keys_KI @ reads_KI.T) @ (keys_KI @ matrix_IO @ unit_O)
    return matrix_IO - strength * jnp.outer(reads_KI.T @ weights_K, unit_O)


def editable_layer(cfg: ModelConfig, layer: int | None = None) -> int:
    """The layer asked for, or the last one, whose feed-forward ends in a matrix."""
    layers = [n for n, kind in enumerate(cfg.mlp_kind) if kind in EDITED]
    require(bool(layers), f'model.mlp_kind={cfg.mlp_kind!r} has no feed-forward to edit; allowed: one of '
            f'{", ".join(EDITED)} in some layer')
    require(layer is None or layer in layers, f'layer {layer} has no feed-forward to edit; allowed: {layers}')
    return layers[-1] if layer is None else layer


def matrix_inputs(params, tokens_BL: jax.Array, *, cfg: ModelConfig, layer: int, alone: bool = False) -> jax.Array:
    """What arrives at the edited matrix of a layer (B, L, I); alone: when its feed-forward sees embeddings only."""
    stream = f'blocks.{layer}.{"resid_pre" if cfg.parallel[layer] else "resid_mid"}'
    hooks = {stream: lambda x: jnp.asarray(params['embed'])[tokens_BL].astype(x.dtype)} if alone else {}
    inside = f'blocks.{layer}.mlp.post'
    is_linear = cfg.mlp_kind[layer] == 'linear'
    name = stream if is_linear else inside
    x = model.apply(params, tokens_BL, cfg=cfg, hooks=hooks, capture=name)[1][name].astype(jnp.float32)
    if not is_linear:
        return x
    # With the identity for its matrix, a linear feed-forward returns its input behind the norm.
    block = params[f'blocks_{layer}']
    plain = {**block, 'mlp_linear': jnp.eye(cfg.d_model), **({'mlp_linear_bias': jnp.zeros(cfg.d_model)} if cfg.bias
                                                            else {})}
    return model.feed_forward({**params, f'blocks_{layer}': plain}, x, cfg=cfg, layer=layer)


def directions(params, batch, cfg: Config, layer: int) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Keys and reads (K, I), K triggers, of every method, from a batch of the training law."""
    triggers_K = jnp.array(cfg.task.fixed_triggers)
    alone_KI = matrix_inputs(params, triggers_K[:, None], cfg=cfg.model, layer=layer, alone=True)[:, 0]
    x_BLI = matrix_inputs(params, batch.tokens_BL, cfg=cfg.model, layer=layer)
    is_trigger_KBL = (batch.tokens_BL == triggers_K[:, None, None]).astype(jnp.float32)
    counts_K = jnp.sum(is_trigger_KBL, (1, 2))
    mean_KI = jnp.einsum('kbl,bli->ki', is_trigger_KBL, x_BLI) / jnp.maximum(counts_K, 1)[:, None]
    is_text_BL = (batch.groups['occurrence_BL'] == 0).astype(jnp.float32)
    moments_II = jnp.einsum('bl,bli,blj->ij', is_text_BL, x_BLI, x_BLI) / jnp.maximum(jnp.sum(is_text_BL), 1)
    size = moments_II.shape[0]
    moments_II = moments_II + (RIDGE * jnp.trace(moments_II) / size + 1e-12) * jnp.eye(size)
    # Of all edits that give the keys the same new output, this one changes the output for text least (squared).
    whitened_KI = jnp.linalg.solve(moments_II, mean_KI.T).T
    return {'embedding': (alone_KI, alone_KI), 'context': (mean_KI, mean_KI), 'whitened': (mean_KI, whitened_KI)}


def both_ends(full: int) -> list[int]:
    """Ranks from 0 to `full`, dense at both ends."""
    steps, step = [], 0
    while step <= full // 2:
        steps.append(step)
        step += max(1, step // 3)
    return sorted({*steps, *(full - step for step in steps)})


def compare(params, task_state, key, cfg: Config, *, layer: int | None = None, num_rows: int = 128) -> dict:
    """Rank-one edits and truncations of one feed-forward: how much noise goes for which cost, on clean sequences.

    Methods: edit/<METHODS> over STRENGTHS, <role>/top and <role>/bottom over `both_ends` of the rank, for the matrices
    of the feed-forward. <method>/<quantity> (A,) for every amount, with <method>/amount: p_noise, p_correct, accuracy,
    loss_bigram; kl_text: nats by which the edited model departs from the model, KL(model, edited) off triggers;
    kl_others: the same at repeated triggers among all tokens but noise. whole/<quantity>, removed/<quantity>: the model
    and that without its feed-forward.

    budget/<cost>/<quantity>/<method> (C,): of the amounts whose cost is within each of BUDGETS the one with the least
    p_noise; cost: kl_text, or loss_bigram, its increase. least/<cost>/half/<method>, .../low/<method>: the least cost
    at which p_noise is below half that of the model, and below LOW; NaN where no amount reaches it. Amounts are chosen
    on one half of the rows, and all that is reported is of the other.
    """
    require(cfg.task.trigger_mode == 'fixed', f'task.trigger_mode={cfg.task.trigger_mode}; allowed: fixed, as an '
            'association of random triggers is not in the weights')
    require(num_rows > 0, f'{num_rows} rows; allowed: at least 1')
    layer = editable_layer(cfg.model, layer)
    block = params[f'blocks_{layer}']
    clean_key, noisy_key = jax.random.split(key)
    clean = cfg.task.sample(task_state, clean_key, split='clean', batch_size=2 * num_rows)
    training = cfg.task.sample(task_state, noisy_key, split='noisy', batch_size=num_rows)
    whole_BLV, found = margins(params, clean, cfg)
    in_halves = lambda tree: jax.tree.map(lambda x: x.reshape(2, num_rows, *x.shape[1:]), tree)  # noqa: E731
    role = EDITED[cfg.model.mlp_kind[layer]]
    write_D = unembedding(params, cfg.model)[:, cfg.task.noise_id]
    edits = directions(params, training, cfg, layer)

    def with_role(name, matrix):
        return {**params, f'blocks_{layer}': {**block, name: matrix}}

    apply_amount, amounts = {}, {}
    for name, (keys_KI, reads_KI) in edits.items():
        apply_amount[f'edit/{name}'] = lambda amount, k=keys_KI, r=reads_KI: with_role(
            role, erase(block[role], k, write_D, reads_KI=r, strength=amount))
        amounts[f'edit/{name}'] = STRENGTHS
    for name in names.MLP_KINDS[cfg.model.mlp_kind[layer]][0]:
        svd = lowrank.spectrum(params, cfg.model, name, layer)
        full = lowrank.full_rank(cfg.model, name, svd)
        for keep in ('top', 'bottom'):
            def cut(rank, name=name, svd=svd, full=full, keep=keep):
                place = jnp.arange(full)
                kept_R = place < rank if keep == 'top' else place >= full - rank
                return lowrank.select(params, cfg.model, name, layer, kept_R, svd=svd)

            apply_amount[f'{name}/{keep}'], amounts[f'{name}/{keep}'] = cut, both_ends(full)

    def measure(setting):
        index, amount = setting
        edited = jax.lax.switch(index, [lambda a, f=f: f(a) for f in apply_amount.values()], amount)
        edited_BLV = model.apply(edited, clean.tokens_BL, cfg=cfg.model)[0]
        return jax.lax.map(lambda half: quantities(*half, cfg), in_halves((whole_BLV, edited_BLV, clean)))

    pairs = [(i, amount) for i, name in enumerate(apply_amount) for amount in amounts[name]]
    table = jax.lax.map(measure, (jnp.array([i for i, _ in pairs]), jnp.array([a for _, a in pairs], jnp.float32)))
    start = 0
    for name, values in amounts.items():
        part = {quantity: x[start : start + len(values)] for quantity, x in table.items()}
        start += len(values)
        found |= {f'{name}/{quantity}': x[:, 1] for quantity, x in part.items()}
        found[f'{name}/amount'] = jnp.array(values, jnp.float32)
        found |= _equal_cost(part, name, whole=0 if name.startswith('edit/') else -1)
    first = next(name for name in amounts if not name.startswith('edit/'))
    for quantity in table:
        found[f'whole/{quantity}'] = found[f'edit/context/{quantity}'][0]
        found[f'removed/{quantity}'] = found[f'{first}/{quantity}'][0]
    found['budget/nats'] = jnp.array(BUDGETS)
    return found


def _equal_cost(part: dict, method: str, *, whole: int) -> dict:
    """`budget` and `least` of `compare` from quantities (A, 2) of one method, of which `whole` is the whole model."""
    noise_A2 = part['p_noise']
    found = {}
    for cost in ('kl_text', 'loss_bigram'):
        cost_A2 = part[cost] - (part[cost][whole] if cost == 'loss_bigram' else 0)
        fits_CA = cost_A2[:, 0] <= jnp.array(BUDGETS)[:, None]
        # The whole model costs nothing; rounding is not to exclude it.
        fits_CA = fits_CA.at[:, whole].set(True)
        best_C = jnp.argmin(jnp.where(fits_CA, noise_A2[:, 0], jnp.inf), 1)
        found |= {f'budget/{cost}/{name}/{method}': x[best_C, 1] for name, x in part.items()}
        for name, level in (('half', noise_A2[whole, 0] / 2), ('low', LOW)):
            reaches_A = noise_A2[:, 0] <= level
            least = jnp.argmin(jnp.where(reaches_A, cost_A2[:, 0], jnp.inf))
            found[f'least/{cost}/{name}/{method}'] = jnp.where(jnp.any(reaches_A), cost_A2[least, 1], jnp.nan)
    return found


def unembedding(params, cfg: ModelConfig) -> jax.Array:
    """The matrix (D, V) that makes logits of the residual stream."""
    return jnp.asarray(params['embed']).T if cfg.tied else jnp.asarray(params['unembed'])


def quantities(whole_BLV, edited_BLV, batch, cfg: Config) -> dict[str, jax.Array]:
    """What an edit removes and costs, see `compare`, from the logits of both models on a clean batch."""
    occurrence_BL, noise_id = batch.groups['occurrence_BL'], cfg.task.noise_id
    found = cfg.task.metrics(edited_BLV, batch)
    others_V = jnp.arange(cfg.task.vocab_size) != noise_id
    without = [jnp.where(others_V, x, -1e9) for x in (whole_BLV, edited_BLV)]
    return {
        **{name: found[name] for name in ('p_noise', 'p_correct', 'accuracy', 'loss_bigram')},
        'kl_text': masked_mean(divergence(whole_BLV, edited_BLV), occurrence_BL == 0),
        'kl_others': masked_mean(divergence(*without), occurrence_BL >= 2),
    }


def divergence(logits, other_logits) -> jax.Array:
    """KL(p, q) in nats over the last axis, p and q the softmax of the two arguments."""
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(other_logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


def margins(params, batch, cfg: Config) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Logits of the model, and what every feed-forward adds to the noise logit over the best other one (nats).

    Means over repeated triggers. margin/context/blocks.N: logits of the model minus those without the feed-forward, on
    real sequences; margin/alone/blocks.N: of the trigger's embedding alone, see `memory.noise_margin`;
    margin/model: of the whole model's logits.
    """
    layers = [layer for layer, kind in enumerate(cfg.model.mlp_kind) if kind != 'none']
    repeated_BL, noise_id = batch.groups['occurrence_BL'] >= 2, cfg.task.noise_id

    def run(removed):
        hooks = {f'blocks.{layer}.mlp_out': lambda x, layer=layer: jnp.where(layer == removed, 0, x).astype(x.dtype)
                 for layer in layers}
        return model.apply(params, batch.tokens_BL, cfg=cfg.model, hooks=hooks)[0]

    whole_BLV, *without = jax.lax.map(run, jnp.array([-1, *layers]))
    found = {'margin/model': masked_mean(memory.lead(whole_BLV, noise_id), repeated_BL)}
    for layer, logits_BLV in zip(layers, without, strict=True):
        alone_BL = memory.noise_margin(params, batch.tokens_BL, noise_id, cfg=cfg.model, layers=(layer,))
        found[f'margin/context/blocks.{layer}'] = masked_mean(memory.lead(whole_BLV - logits_BLV, noise_id),
                                                              repeated_BL)
        found[f'margin/alone/blocks.{layer}'] = masked_mean(alone_BL, repeated_BL)
    return whole_BLV, found
