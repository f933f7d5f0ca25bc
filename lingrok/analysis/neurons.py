"""What single MLP neurons compute: their activations as functions of one example (x, y), sorted by what explains them.

Source: the neuron maps that the authors of arXiv 2406.02550 gave their reviewers (p = 29): neurons of specific x in the
first block, periodic ones, and neurons on lines through 0, which know the ratio y / x. Here all neurons are scored and
none is picked by hand. One example of a fixed context runs over all p^2 inputs (`analysis.scan`).
"""

import jax
import jax.numpy as jnp
import numpy as np

from lingrok.analysis.characters import joint_power, neuron_layers
from lingrok.analysis.scan import scan, scanned_rows
from lingrok.config import Config, require

# What explains the activations of a neuron: which of x and y are 0; and, on inputs without a zero, x, y, the ratio
# y / x (a line through 0), the product x y, the answer z = a x + b y, or one wave of a character in x and one in y,
# none of them constant. With the zeros, neurons of (0, 0) and of x = 0 would count as neurons of the ratio.
KINDS = ('zero', 'x', 'y', 'ratio', 'product', 'answer', 'character')
SHARES = (*KINDS, 'other', 'silent')
THRESHOLD = 0.5


def explained(maps_BF: jax.Array, class_B: jax.Array, num_classes: int) -> jax.Array:
    """Share of the variance (F,) of functions of B inputs that class means explain.

    It is adjusted for the number of classes, so that it is 0 on average for independent values. NaN for constants.
    """
    member_BC = (class_B[:, None] == jnp.arange(num_classes)).astype(jnp.float32)
    count_C, size = jnp.sum(member_BC, 0), maps_BF.shape[0]
    centred_BF = maps_BF - jnp.mean(maps_BF, 0)
    total_F = jnp.sum(centred_BF**2, 0)
    between_F = jnp.sum((member_BC.T @ centred_BF) ** 2 / jnp.maximum(count_C, 1)[:, None], 0)
    freedom = jnp.maximum(size - jnp.sum(count_C > 0), 1)
    silent_F = total_F <= 1e-9 * jnp.maximum(jnp.sum(maps_BF**2, 0), 1e-12)
    return jnp.where(silent_F, jnp.nan, 1 - (1 - between_F / jnp.where(silent_F, 1, total_F)) * (size - 1) / freedom)


def character_peak(maps_BF: jax.Array, p: int) -> jax.Array:
    """Share of the variance (F,) in the largest wave cos(k log x + l log y + phase), k and l not 0; B = (p - 1)^2."""
    centred_xyF = (maps_BF - jnp.mean(maps_BF, 0)).reshape(p - 1, p - 1, -1)
    power_klF = joint_power(jnp.pad(centred_xyF, ((1, 0), (1, 0), (0, 0))))[2:, 2:]
    half = np.arange(1, p - 1) == (p - 1) // 2
    own_conjugate = half[:, None] & half  # the quadratic character of x y
    wave_klF = power_klF + jnp.where(own_conjugate[..., None], 0, power_klF[::-1, ::-1])
    total_F = jnp.sum(centred_xyF**2, (0, 1))
    return jnp.max(wave_klF, (0, 1)) / jnp.where(total_F > 0, total_F, 1)


def ratios(p: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of the inputs without a zero in x-major order, and y / x of each."""
    x, y = np.divmod(np.arange(p * p), p)
    inner = np.flatnonzero(x * y)
    return inner, np.array([b * pow(a, -1, p) % p for a, b in zip(x[inner].tolist(), y[inner].tolist(), strict=True)])


def scores(maps_BF: jax.Array, answer_B: jax.Array, task) -> jax.Array:
    """How well each of KINDS explains each neuron (kinds, F) from its activations (p^2, F); NaN for a constant."""
    p = task.p
    x, y = np.divmod(np.arange(p * p), p)
    inner, ratio = ratios(p)
    classes = (x[inner], y[inner], ratio, (x * y % p)[inner], answer_B[inner])
    inner_BF = maps_BF[inner]
    by_class = [explained(inner_BF, jnp.asarray(class_B), p) for class_B in classes]
    peak_F = jnp.where(jnp.isnan(by_class[0]), jnp.nan, character_peak(inner_BF, p))
    return jnp.stack([explained(maps_BF, jnp.asarray((x > 0) + 2 * (y > 0)), 4), *by_class, peak_F])


def kinds(scores_KF: jax.Array) -> jax.Array:
    """Kind (F,), a place in SHARES: zero if that explains more than THRESHOLD, else the best of the others."""
    known_KF = jnp.where(jnp.isnan(scores_KF), -1, scores_KF)
    best_F = 1 + jnp.argmax(known_KF[1:], 0)
    kind_F = jnp.where(jnp.max(known_KF[1:], 0) > THRESHOLD, best_F, len(KINDS))
    kind_F = jnp.where(known_KF[0] > THRESHOLD, 0, kind_F)
    return jnp.where(jnp.isnan(scores_KF[0]), len(KINDS) + 1, kind_F)


def kind_shares(scores_KF: jax.Array) -> jax.Array:
    """Share of neurons of each of SHARES."""
    return jnp.mean((kinds(scores_KF) == jnp.arange(len(SHARES))[:, None]).astype(jnp.float32), -1)


def preferred_ratios(maps_BF: jax.Array, scores_KF: jax.Array, p: int) -> jax.Array:
    """Share of neurons (p - 1,) that are of the kind ratio and most active at the ratio 1, ..., p - 1."""
    inner, ratio = ratios(p)
    member_CB = jnp.asarray(ratio == np.arange(1, p)[:, None], jnp.float32)
    best_F = jnp.argmax(member_CB @ maps_BF[inner], 0)
    is_ratio_F = kinds(scores_KF) == KINDS.index('ratio')
    return jnp.mean(((best_F == jnp.arange(p - 1)[:, None]) & is_ratio_F).astype(jnp.float32), -1)


def neuron_kinds(params, task_state, key, cfg: Config, *, slot: int = 2,
                 vector: tuple[int, int] | None = None) -> dict[str, jax.Array]:
    """Kinds of the neurons of every layer that has some (n leading), at the y and z token of the scanned example.

    TOKEN/shares (n, SHARES): share of neurons of each kind. TOKEN/shuffled: the same with the inputs of every neuron in
    random order. TOKEN/top (n, KINDS, p, p): activations, as functions of x and y, of the neuron that each kind
    explains best, and TOKEN/top_score (n, KINDS). TOKEN/preferred (n, p - 1): of `preferred_ratios`, and
    TOKEN/ratios_present: share of the ratios that some ratio neuron of the model prefers. TOKEN/most_KIND: the largest
    share of a kind in a layer.
    """
    p, layers = cfg.task.p, neuron_layers(cfg.model)
    require(bool(layers), f'the model has no MLP neurons: model.mlp_kind={cfg.model.mlp_kind}')
    capture = [f'blocks.{n}.mlp.post' for n in layers]
    acts = scan(params, task_state, key, cfg, slot=slot, vector=vector, capture=capture)
    answer_B = scanned_rows(cfg.task, task_state, key, slot=slot, vector=vector)[:, -1]
    order = jax.random.permutation(jax.random.fold_in(key, 1), p * p)
    maps_nBF = jnp.stack([acts[layer][:, token] for token in (1, 2) for layer in capture])
    both_nBF = jnp.concatenate([maps_nBF, maps_nBF[:, order]])
    scores_nKF, shuffled_nKF = jnp.split(jax.lax.map(lambda m: scores(m, answer_B, cfg.task), both_nBF), 2)
    known_nKF = jnp.where(jnp.isnan(scores_nKF), -jnp.inf, scores_nKF)
    best_nK = jnp.argmax(known_nKF, -1)
    quantities = {
        'shares': jax.vmap(kind_shares)(scores_nKF),
        'preferred': jax.vmap(lambda m, s: preferred_ratios(m, s, p))(maps_nBF, scores_nKF),
        'shuffled': jax.vmap(kind_shares)(shuffled_nKF),
        'top': jax.vmap(lambda m, i: m.T[i])(maps_nBF, best_nK).reshape(*best_nK.shape, p, p),
        'top_score': jnp.max(known_nKF, -1),
    }
    found = {}
    for token, half in (('y', slice(None, len(layers))), ('z', slice(len(layers), None))):
        found |= {f'{token}/{name}': value[half] for name, value in quantities.items()}
        found[f'{token}/ratios_present'] = jnp.mean(jnp.any(quantities['preferred'][half] > 0, 0).astype(jnp.float32))
        found |= {f'{token}/most_{kind}': jnp.max(quantities['shares'][half, k]) for k, kind in enumerate(KINDS)}
    return found
