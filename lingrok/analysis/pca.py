"""Principal components of head, attention and MLP outputs: the 'circle of circles' of arXiv 2406.02550 (Fig 1d, 6b).

One example of a fixed context runs over all p^2 inputs (`analysis.scan`); what a part of the model adds to the residual
stream at two tokens of that example is one vector an input. Components are those of centred vectors. No head is chosen
by index: `ring` says how well the residues x lie on a ring, in the order of their discrete logarithms.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lingrok import names
from lingrok.analysis.characters import power, primitive_root
from lingrok.analysis.heads import head_outputs
from lingrok.analysis.scan import scan
from lingrok.config import Config, require, suggest

PARTS = ('heads', 'attn_out', 'mlp_out')
TOKENS = ('xy', 'xz', 'yz')
NUM_SHUFFLED = 64


def components(values_BD: jax.Array, *, fit=slice(None), uncentred: bool = False) -> tuple[jax.Array, jax.Array]:
    """Scores (B, 4) on the first four principal components of the vectors `fit`, and each share of their variance (4,).

    uncentred: as the official code, which adds the mean of the data to the directions and projects uncentred data.
    """
    mean_D = jnp.mean(values_BD[fit], 0)
    _, s, directions_RD = jnp.linalg.svd(values_BD[fit] - mean_D, full_matrices=False)
    total = jnp.sum(s**2)
    top_RD = directions_RD[:4]
    scores = values_BD @ (top_RD + mean_D).T if uncentred else (values_BD - mean_D) @ top_RD.T
    return scores, s[:4] ** 2 / jnp.where(total > 0, total, 1)


def ring(scores_B: jax.Array, key: jax.Array, root: int | None = None) -> dict[str, jax.Array]:
    """How well inputs (p^2, 2), two scores each, form a circle of circles; inputs with x = 0 or y = 0 are left out.

    ring: share of the variance that one frequency of log x explains; the last frequency, which makes two clusters, is
    none. shuffled: mean of the same for residues x in random order. radius_ratio: root mean square distance from the
    centre of the x class, over that of the class centres from their mean. centre: distance of the class x = 0 from
    that mean, over the same.
    """
    p = round(scores_B.shape[0] ** 0.5)
    scores_xy2 = scores_B.reshape(p, p, 2)
    inner_xy2 = scores_xy2[1:, 1:] - jnp.mean(scores_xy2[1:, 1:], (0, 1))
    means_x2 = jnp.mean(inner_xy2, 1)
    zero_2 = jnp.mean(scores_xy2[0, 1:], 0) - jnp.mean(scores_xy2[1:, 1:], (0, 1))
    variance = jnp.mean(jnp.sum(inner_xy2**2, -1))

    def explained(order):
        padded_x2 = jnp.concatenate([jnp.zeros((1, 2)), means_x2[order]])
        return jnp.max(jnp.sum(power(padded_x2, root), -1)[:-1]) / (p - 1) / jnp.where(variance > 0, variance, 1)

    orders = jax.vmap(lambda k: jax.random.permutation(k, p - 1))(jax.random.split(key, NUM_SHUFFLED))
    between = jnp.mean(jnp.sum(means_x2**2, -1))
    large = jnp.sqrt(jnp.where(between > 0, between, jnp.nan))
    return {
        'ring': explained(jnp.arange(p - 1)),
        'shuffled': jnp.mean(jax.vmap(explained)(orders)),
        'radius_ratio': jnp.sqrt(jnp.maximum(variance - between, 0)) / large,
        'centre': jnp.linalg.norm(zero_2) / large,
    }


def scanned_components(params, task_state, key, cfg: Config, *, part: str = 'heads', tokens: str = 'xy', slot: int = 2,
                       vector: tuple[int, int] | None = None, root: int | None = None,
                       uncentred: bool = False, zero: bool = True) -> dict[str, jax.Array]:
    """Components of a part of every block, and of the token embedding, with their ring statistics.

    PART/scores (N, H, p^2, 4), PART/variance (N, H, 4), PART/ring and the others of `ring` (N, H); a part that is no
    head has H = 1, and N counts the layers that have it. For heads, previous and self (N, H): attention from the y
    token to the x and the y token, whose quotient the radius ratio is if one map takes both residues to a circle.
    best/...: of the head with the highest ring score. embedding/scores (p, 4) and variance (4,). root: of the
    logarithm. zero=False: the directions are those of inputs without a zero, which else may fill the first ones.
    """
    require(part in PARTS, f'part {part!r}; {suggest(part, PARTS)}')
    require(tokens in TOKENS, f'tokens {tokens!r}; {suggest(tokens, TOKENS)}')
    p, model_cfg = cfg.task.p, cfg.model
    available = names.activation_names(model_cfg)
    inner = 'attn.z' if part == 'heads' else part
    layers = [n for n in range(model_cfg.num_layers) if f'blocks.{n}.{inner}' in available]
    require(bool(layers), f'the model has no {part}: model.mlp_kind={model_cfg.mlp_kind}')
    capture = [f'blocks.{n}.{inner}' for n in layers] + ['blocks.*.attn.pattern'] * (part == 'heads')
    acts = scan(params, task_state, key, cfg, slot=slot, vector=vector, capture=capture)

    def features(layer):
        """(H, p^2, 2 D) for the two tokens side by side."""
        if part == 'heads':
            values_B3HD = head_outputs(params, acts, model_cfg, layer)
        else:
            values_B3HD = acts[f'blocks.{layer}.{part}'][:, :, None]
        both = values_B3HD[:, ['xyz'.index(token) for token in tokens]]
        return both.transpose(2, 0, 1, 3).reshape(both.shape[2], p * p, -1)

    values_NHBD = jnp.stack([features(layer) for layer in layers])
    x, y = np.divmod(np.arange(p * p), p)
    fit = slice(None) if zero else np.flatnonzero(x * y)
    scores, variance = jax.vmap(jax.vmap(lambda v: components(v, fit=fit, uncentred=uncentred)))(values_NHBD)
    statistics = jax.vmap(jax.vmap(lambda s: ring(s[:, :2], key, root)))(scores)
    embedding = components(jnp.asarray(params['embed'])[:p], fit=slice(None if zero else 1, None), uncentred=uncentred)
    found = {f'{part}/{name}': value for name, value in statistics.items()}
    found |= {f'{part}/scores': scores, f'{part}/variance': variance, 'root': jnp.asarray(primitive_root(p, root))}
    found |= {'embedding/scores': embedding[0], 'embedding/variance': embedding[1]}
    best = jnp.argmax(statistics['ring'])
    found |= {f'best/{name}': value.reshape(-1)[best] for name, value in statistics.items()}
    found['best/variance'] = jnp.sum(variance[..., :2], -1).reshape(-1)[best]
    if part == 'heads':
        at_y_NHM = jnp.stack([jnp.mean(acts[f'blocks.{n}.attn.pattern'][:, :, 1], 0) for n in layers])
        found['heads/previous'], found['heads/self'] = at_y_NHM[..., -3], at_y_NHM[..., -2]
        found['best/predicted_ratio'] = (at_y_NHM[..., -2] / at_y_NHM[..., -3]).reshape(-1)[best]
    return found
