"""Every matrix of a model cut down to some of its singular directions: what goes with them, and what it costs.

Source: the truncations of arXiv 2406.03068 and of its official code (feed-forwards, value and output matrices, top
directions kept), extended to every matrix, to the bottom directions and to what is lost: bigrams and recall. A fraction
is relative to the largest rank a matrix can have; see `lowrank`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lingrok import model, names
from lingrok.analysis import lowrank
from lingrok.config import Config, ModelConfig, require, truncatable_roles

FRACTIONS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
KEPT = ('top', 'bottom')
QUANTITIES = ('loss', 'loss_bigram', 'accuracy', 'p_noise', 'p_correct')


def entries(cfg: ModelConfig) -> tuple[tuple[int, str], ...]:
    """(layer, role) of every matrix that can be truncated, layer by layer."""
    return tuple((layer, role) for layer in range(cfg.num_layers) for role in truncatable_roles(cfg, layer))


def ranks(fractions, full: int) -> list[int]:
    """Number of directions kept at each fraction of `full`, rounded down as `lowrank.truncate` does."""
    return [lowrank.rank_of(fraction, full) for fraction in fractions]


def grid(params, task_state, key, cfg: Config, *, fractions: tuple[float, ...] = FRACTIONS,
         num_rows: int = 128) -> dict[str, jax.Array]:
    """The metrics of the task for every matrix, fraction and end of the spectrum; the splits share their draws.

    <split>/<quantity>/whole: the model as it is; <split>/<quantity>/blocks.N.<role>/top and /bottom (R,): the fractions
    of `truncation/fractions`; /removed/blocks.N.<role>: without the matrix; /no_relu/blocks.N: without the activation
    of a feed-forward; /no_residual/blocks.N: the last block keeps only what its attention and its feed-forward write,
    and its feed-forward reads that attention alone. <split>/loss/bayes and the like: the baselines of the task on the
    same sequences. soft_rank, spectral_norm and frobenius_norm/blocks.N.<role>: of each matrix, mean over heads; the
    soft rank is Frobenius norm over spectral norm.
    """
    for fraction in fractions:
        lowrank.require_fraction(fraction)
    require(num_rows > 0, f'{num_rows} rows; allowed: at least 1')
    batches = {split: cfg.task.sample(task_state, key, split=split, batch_size=num_rows) for split in cfg.task.splits}
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches.values())
    spectra = {entry: lowrank.spectrum(params, cfg.model, entry[1], entry[0]) for entry in entries(cfg.model)}
    full = {entry: lowrank.full_rank(cfg.model, entry[1], svd) for entry, svd in spectra.items()}

    def metrics(params, model_cfg):
        def on(batch):
            found = cfg.task.metrics(model.apply(params, batch.tokens_BL, cfg=model_cfg)[0], batch)
            return {name: found[name] for name in QUANTITIES if name in found}

        return jax.lax.map(on, stacked)

    def truncated(setting):
        """Metrics with directions start to stop of one matrix; all settings are one loop over one forward pass."""
        index, start, stop = setting
        edits = [lambda e=entry: lowrank.select(
            params, cfg.model, e[1], e[0], (jnp.arange(full[e]) >= start) & (jnp.arange(full[e]) < stop),
            svd=spectra[e]) for entry in spectra]
        return metrics(jax.lax.switch(index, edits), cfg.model)

    settings = [(index, *window) for index, entry in enumerate(spectra) for rank in ranks(fractions, full[entry])
                for window in ((0, rank), (full[entry] - rank, full[entry]))]
    removed = [(index, 0, 0) for index in range(len(spectra))]
    whole = (0, 0, next(iter(full.values())))
    table = jax.lax.map(truncated, tuple(jnp.array([*settings, *removed, whole]).T))
    shape = (len(spectra), len(fractions), len(KEPT), len(batches))

    found = {'truncation/fractions': jnp.array(fractions, jnp.float32)}
    switched = {name: metrics(params, model_cfg) for name, model_cfg in switched_off(cfg.model).items()}
    for quantity, values in table.items():
        found |= {f'{split}/{quantity}/whole': values[-1, k] for k, split in enumerate(batches)}
        found |= {f'{split}/{quantity}/removed/blocks.{layer}.{role}': values[len(settings) + i, k]
                  for k, split in enumerate(batches) for i, (layer, role) in enumerate(spectra)}
        found |= {f'{split}/{quantity}/{name}': x[quantity][k] for name, x in switched.items()
                  for k, split in enumerate(batches)}
        for i, (layer, role) in enumerate(spectra):
            for j, keep in enumerate(KEPT):
                for k, split in enumerate(batches):
                    name = f'{split}/{quantity}/blocks.{layer}.{role}/{keep}'
                    found[name] = values[: len(settings)].reshape(shape)[i, :, j, k]
    baselines = jax.lax.map(lambda batch: cfg.task.baselines(task_state, batch), stacked)
    found |= {f'{split}/{name}': x[k] for name, x in baselines.items() for k, split in enumerate(batches)}
    for (layer, role), svd in spectra.items():
        spectral, frobenius = jnp.max(svd.s, -1), jnp.linalg.norm(svd.s, axis=-1)
        found[f'spectral_norm/blocks.{layer}.{role}'] = jnp.mean(spectral)
        found[f'frobenius_norm/blocks.{layer}.{role}'] = jnp.mean(frobenius)
        found[f'soft_rank/blocks.{layer}.{role}'] = jnp.mean(frobenius / spectral)
    return found


def switched_off(cfg: ModelConfig) -> dict[str, ModelConfig]:
    """Model configs without one nonlinearity, and without the residual around the last attention, by name."""
    changed = {}
    for layer, kind in enumerate(cfg.mlp_kind):
        if any(name.startswith('mlp.') for name in names.MLP_KINDS[kind][1]) and cfg.activation[layer] != 'identity':
            activation = (*cfg.activation[:layer], 'identity', *cfg.activation[layer + 1 :])
            changed[f'no_relu/blocks.{layer}'] = dataclasses.replace(cfg, activation=activation)
    if cfg.attn_residual[-1]:
        residual = (*cfg.attn_residual[:-1], False)
        changed[f'no_residual/blocks.{cfg.num_layers - 1}'] = dataclasses.replace(cfg, attn_residual=residual)
    return changed
