"""Quantities: of a model on the batches of every split (traced), and their statistics over replicas (on the host)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lingrok import model
from lingrok.tasks.base import Batch

# 97.5 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom (standard table).
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
         2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


ABSENT = 'not in this run'  # the text of a quantity that a comparison names and a run does not have


def of_variants(variants: Mapping[str, dict], batches: Mapping[str, Batch], cfg) -> dict[str, jax.Array]:
    """The metrics of the config's task for several models on the batches of every split.

    variants: name -> params; the metrics of variant '' are 'split/quantity', of the others 'split/quantity/name'.
    """
    chosen = list(variants.values())
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches.values())

    def measure(index):
        params = jax.lax.switch(index, [lambda p=p: p for p in chosen])

        def on(batch):
            return cfg.task.metrics(_logits(params, batch.tokens_BL, cfg), batch)

        return jax.lax.map(on, stacked)

    # Loops over variants and splits: one forward pass is compiled, whatever their number.
    table = jax.lax.map(measure, jnp.arange(len(chosen)))
    return {f'{split}/{quantity}' + (f'/{variant}' if variant else ''): values[v, s]
            for quantity, values in table.items()
            for v, variant in enumerate(variants) for s, split in enumerate(batches)}


def _logits(params, tokens_BL, cfg):
    """Logits, computed in pieces of the training batch size where that divides: what fits in training fits here."""
    size, length = tokens_BL.shape
    piece = cfg.train.batch_size if size % cfg.train.batch_size == 0 else size
    run = lambda tokens_BL: model.apply(params, tokens_BL, cfg=cfg.model)[0]  # noqa: E731
    return jax.lax.map(run, tokens_BL.reshape(-1, piece, length)).reshape(size, length, -1)


def interval(values: np.ndarray, axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """Mean and half width of its 95 % Student interval over the replica axis; NaN replicas are left out.

    The half width is NaN with fewer than two replicas: one seed has no error bar.
    """
    values = np.asarray(values, float)
    count = np.sum(np.isfinite(values), axis)
    clean = np.where(np.isfinite(values), values, 0.0)
    mean = np.where(count > 0, clean.sum(axis) / np.maximum(count, 1), np.nan)
    residual = np.where(np.isfinite(values), values - np.expand_dims(mean, axis), 0.0)
    variance = np.where(count > 1, (residual**2).sum(axis) / np.maximum(count - 1, 1), np.nan)
    freedom = np.maximum(count - 1, 1)
    beyond = 1.959964 + 2.37222 / freedom + 2.82245 / freedom**2  # Fisher's expansion at the normal quantile
    listed = freedom <= len(_T975)
    quantile = np.where(listed, np.asarray(_T975)[np.where(listed, freedom - 1, 0)], beyond)
    return mean, quantile * np.sqrt(variance / np.maximum(count, 1))


def text(values: np.ndarray) -> str:
    """Mean and 95 % interval over the values of the replicas.

    >>> text([0.5, 0.52, 0.54])
    '0.520 ± 0.050 (n=3)'
    """
    mean, half = interval(values)
    count = int(np.sum(np.isfinite(np.asarray(values, float))))
    if count == 0:
        return 'not defined (n=0)'
    spread = f' ± {half:.3f}' if np.isfinite(half) else ''
    return f'{mean:.3f}{spread} (n={count})'
