"""Statistics of measured quantities over replicas. Host arrays in, host arrays out."""

import numpy as np

# 97.5 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom (standard table).
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
         2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


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
    quantile = np.asarray((np.nan, *_T975, 1.96))[np.clip(count - 1, 0, len(_T975) + 1)]
    return mean, quantile * np.sqrt(variance / np.maximum(count, 1))


def text(values: np.ndarray) -> str:
    """'0.512 ± 0.013 (n=4)' for the values of the replicas."""
    mean, half = interval(values)
    count = int(np.sum(np.isfinite(np.asarray(values, float))))
    spread = f' ± {half:.3f}' if np.isfinite(half) else ''
    return f'{mean:.3f}{spread} (n={count})'
