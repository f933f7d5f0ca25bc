"""Which set of data a model has learnt to solve: phases over the number of tasks and the share of inputs, transience.

Source: arXiv 2406.02550, Table 1. The four accuracies are those at the last shot on training and unseen tasks, on
training and unused inputs. Numbers of whole runs in, numbers out.
"""

from collections.abc import Mapping

import numpy as np

from lingrok.analysis.settings import Point

SETS = ('id_train', 'id_test', 'ood_train', 'ood_test')
PHASES = ('nothing learnt', 'i.d. memorisation', 'i.d. generalisation', 'o.o.d. memorisation', 'o.o.d. generalisation')
THRESHOLD = 0.75  # accuracy from which a set counts as solved; ratio matching gives .66 at p = 29 and 31 shots
SELECT = ('select_test/accuracy_last', 'select_train/accuracy_last')  # on unseen tasks that are not reported


def best(point: Point) -> int:
    """Index of the step with the best accuracy on the selecting unseen tasks; the last step where none was measured."""
    for name in SELECT:
        scores = point.values.get(name)
        if scores is not None and np.isfinite(scores).any():
            return int(np.nanargmax(scores))
    return len(point.steps) - 1


def phase(accuracy: Mapping[str, float], threshold: float = THRESHOLD) -> float:
    """Index into PHASES of the accuracies of the four SETS; NaN where one was not measured.

    The highest phase whose sets are all solved: on unseen tasks and inputs 4, on unseen tasks 3, on unused inputs 2, on
    training data 1.
    """
    if not all(np.isfinite(accuracy[name]) for name in SETS):
        return np.nan
    solved = {name: accuracy[name] >= threshold for name in SETS}
    return next((number for number, name in ((4, 'ood_test'), (3, 'ood_train'), (2, 'id_test'), (1, 'id_train'))
                 if solved[name]), 0)


def transience(point: Point, quantity: str) -> float:
    """How much of the accuracy at the best step is gone at the last one; positive where early stopping would help."""
    series = point.values[quantity]
    return float(series[best(point)] - series[-1])
