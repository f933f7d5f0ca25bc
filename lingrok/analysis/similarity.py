"""Similarity of the residual stream between inputs: are inputs of equal ratio y / x told from others (Fig 8)?

Source: arXiv 2406.02550. One example of a fixed context runs over all p^2 inputs (`analysis.scan`); the similarity of
two inputs is the Pearson correlation of the residual vectors after a block, at one token of that example.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lingrok.analysis.heads import head_outputs
from lingrok.analysis.scan import scan
from lingrok.config import Config, require, suggest

NUM_SHUFFLED = 64


def pearson(values_BD: jax.Array) -> jax.Array:
    """Correlations (B, B) of vectors over their features."""
    centred_BD = values_BD - jnp.mean(values_BD, -1, keepdims=True)
    norm_B1 = jnp.linalg.norm(centred_BD, axis=-1, keepdims=True)
    unit_BD = centred_BD / jnp.where(norm_B1 > 0, norm_B1, 1)
    return unit_BD @ unit_BD.T


def ratio_contrast(similarity_BB: jax.Array, key: jax.Array, task) -> dict[str, jax.Array]:
    """Mean similarity of inputs with equal ratio y / x, minus that of other inputs.

    Only pairs that share neither x nor y count, of inputs without a zero: what has the same x is similar anyhow.
    shuffled: 97.5 % quantile of the same for ratios dealt out at random to the inputs.
    """
    p = task.p
    x, y = np.divmod(np.arange(p * p), p)
    inner = np.flatnonzero(x * y)
    ratio_B = np.asarray([yi * pow(int(xi), -1, p) % p for xi, yi in zip(x[inner], y[inner], strict=True)])
    apart_BB = (x[inner][:, None] != x[inner]) & (y[inner][:, None] != y[inner])
    counted_BB = jnp.where(apart_BB, similarity_BB[inner][:, inner], 0)
    total, number = jnp.sum(counted_BB), np.sum(apart_BB)

    def contrast(label_B):
        class_BC = (label_B[:, None] == jnp.arange(1, p)).astype(jnp.float32)
        inside = jnp.sum(class_BC * (counted_BB @ class_BC))
        pairs = jnp.sum(class_BC * (jnp.asarray(apart_BB, jnp.float32) @ class_BC))
        return inside / pairs - (total - inside) / (number - pairs)

    keys = jax.random.split(key, NUM_SHUFFLED)
    shuffled = jax.lax.map(lambda k: contrast(jax.random.permutation(k, jnp.asarray(ratio_B))), keys)
    return {'contrast': contrast(jnp.asarray(ratio_B)), 'shuffled': jnp.quantile(shuffled, 0.975)}


def by_direction(similarity_BB: jax.Array, task) -> jax.Array:
    """Mean similarity (p + 1, p + 1) of different inputs by their lines through 0: ratios y / x, then x = 0."""
    pairs = jnp.stack(jnp.divmod(jnp.arange(task.p**2), task.p), -1)
    class_CB = (task.direction(pairs) == jnp.arange(task.p + 1)[:, None]).astype(jnp.float32)
    different_BB = 1 - jnp.eye(task.p**2)
    return (class_CB @ (similarity_BB * different_BB) @ class_CB.T) / (class_CB @ different_BB @ class_CB.T)


PARTS = ('resid_post', 'heads')


def similarities(params, task_state, key, cfg: Config, *, part: str = 'resid_post', slot: int = 2,
                 vector: tuple[int, int] | None = None, centred: bool = False,
                 pictures: bool = True) -> dict[str, jax.Array]:
    """Similarities after every block at the x, y and z token of the scanned example; N is the number of blocks.

    part: the residual stream after a block, or what each head adds to it: N H, block by block, within a block in order
    of their contrast at the z token, as numbers of heads mean little across seeds. TOKEN/contrast, TOKEN/shuffled (N,),
    TOKEN/by_direction (N, p + 1, p + 1) for the tokens y and z; with pictures also x/similarity (N, p, p), inputs in
    order of x, and y/ and z/similarity (N, p^2, p^2), in x-major order. centred: of vectors from which the mean over
    inputs is taken, which else may be most of them.
    """
    require(part in PARTS, f'part {part!r}; {suggest(part, PARTS)}')
    p, layers = cfg.task.p, range(cfg.model.num_layers)
    name = 'attn.z' if part == 'heads' else part
    acts = scan(params, task_state, key, cfg, slot=slot, vector=vector, capture=(f'blocks.*.{name}',))
    if part == 'heads':
        each = [head_outputs(params, acts, cfg.model, n).transpose(2, 0, 1, 3) for n in layers]
        values_NB3D = jnp.concatenate(each)
    else:
        values_NB3D = jnp.stack([acts[f'blocks.{n}.{part}'] for n in layers])
    if centred:
        values_NB3D = values_NB3D - jnp.mean(values_NB3D, 1, keepdims=True)
    found = {'x/similarity': jax.vmap(pearson)(values_NB3D[:, 1::p, 0])} if pictures else {}
    for token, name in ((1, 'y'), (2, 'z')):
        similarity_NBB = jax.vmap(pearson)(values_NB3D[:, :, token])
        statistics = jax.lax.map(lambda s: ratio_contrast(s, key, cfg.task), similarity_NBB)
        found |= {f'{name}/{quantity}': value for quantity, value in statistics.items()}
        found[f'{name}/by_direction'] = jax.vmap(lambda s: by_direction(s, cfg.task))(similarity_NBB)
        found[f'{name}/highest_contrast'] = jnp.max(found[f'{name}/contrast'])
        if pictures:
            found[f'{name}/similarity'] = similarity_NBB
    if part == 'heads':
        order_NH = jnp.argsort(-found['z/contrast'].reshape(len(layers), -1), -1)
        order = (order_NH + order_NH.shape[1] * jnp.arange(len(layers))[:, None]).reshape(-1)
        found = {name: value[order] if value.ndim else value for name, value in found.items()}
    return found
