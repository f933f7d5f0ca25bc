"""Phases: what is read out of the table of a sweep."""

import itertools

import numpy as np
import pytest

from lingrok.analysis import phases, settings


def accuracies(solved: str) -> dict[str, float]:
    return {name: 0.9 if mark == 'x' else 0.3 for name, mark in zip(phases.SETS, solved, strict=True)}


@pytest.mark.parametrize('solved, name', [
    ('....', 'nothing learnt'), ('x...', 'i.d. memorisation'), ('xx..', 'i.d. generalisation'),
    ('x.x.', 'o.o.d. memorisation'), ('xxxx', 'o.o.d. generalisation'),
])
def test_phases_of_table_1(solved, name):
    assert phases.PHASES[phases.phase(accuracies(solved), 0.5)] == name


def test_a_phase_never_falls_when_an_accuracy_rises():
    for marks in itertools.product('.x', repeat=4):
        for place in range(4):
            more = (*marks[:place], 'x', *marks[place + 1 :])
            assert phases.phase(accuracies(''.join(more)), 0.5) >= phases.phase(accuracies(''.join(marks)), 0.5)


def test_the_threshold_counts_as_solved_and_what_was_not_measured_has_no_phase():
    accuracy = accuracies('xxxx')
    assert phases.phase(accuracy, 0.9) == 4 and phases.phase(accuracy, 0.91) == 0
    assert np.isnan(phases.phase(accuracy | {'id_test': np.nan}, 0.5))


def table():
    """Two replicas; the first is best on the selecting tasks at step 20, and worse on the reported ones after it."""
    for replica, select, reported in ((0, (0.1, 0.9, 0.5), (0.2, 0.7, 0.3)), (1, (0.1, 0.2, 0.3), (0.1, 0.5, 0.4))):
        for step, s, r in zip((10, 20, 30), select, reported, strict=True):
            point = {'index': 0, 'replica': replica, 'seed': replica, 'task.num_tasks': 8, 'step': step}
            yield point | {'step': step - 5, 'train/loss': 1.0}
            yield point | {'train/loss': 1.0, 'select_test/accuracy_last': s, 'ood_test/accuracy_last': r}


def test_points_and_early_stopping():
    points = settings.points(table(), ('select_test/accuracy_last', 'ood_test/accuracy_last', 'id_test/accuracy_last'))
    assert [point.coordinates for point in points] == [{'seed': r, 'task.num_tasks': 8} for r in (0, 1)]
    assert [point.steps.tolist() for point in points] == [[10, 20, 30]] * 2
    assert [phases.best(point) for point in points] == [1, 2]
    # Chosen on the selecting tasks alone: the reported ones of replica 1 were best at step 20.
    np.testing.assert_allclose([phases.transience(point, 'ood_test/accuracy_last') for point in points], [0.4, 0])
    assert np.isnan(points[0].values['id_test/accuracy_last']).all()


def test_without_selecting_tasks_the_last_step_is_taken():
    (point, _) = settings.points(table(), ('ood_test/accuracy_last',))
    assert phases.best(point) == 2
