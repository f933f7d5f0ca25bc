"""The points of a sweep: one replica each, what was measured of it, and what to call its setting."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

QUIET = ('eval', 'seed')  # sections of the config that make no setting


class Point(NamedTuple):
    """One replica of a sweep: its coordinates, and every quantity (T,) at the steps (T,) of its evaluations."""

    coordinates: dict
    steps: np.ndarray
    values: dict[str, np.ndarray]


def points(rows: Iterable[Mapping], quantities: Iterable[str]) -> list[Point]:
    """The rows of a sweep (a dict a point and step) as one Point a replica, at the steps of its evaluations."""
    quantities, found = tuple(quantities), {}
    for row in rows:
        if any(name in row for name in quantities):
            found.setdefault((row['index'], row['replica']), []).append(row)
    result = []
    for lines in found.values():
        first = lines[0]
        own = {key: x for key, x in first.items() if key == 'seed' or ('.' in key and '/' not in key)}
        values = {name: np.array([line.get(name, np.nan) for line in lines], float) for name in quantities}
        result.append(Point(own, np.array([line['step'] for line in lines]), values))
    return result


def labels(points: Sequence[Point]) -> list[str]:
    """One name a point, of what differs between the settings: 'num_triggers 3, trigger_mode random'.

    In a grid every coordinate that differs is named; elsewhere, where one thing is changed at a time, only what differs
    from the first point, and of a longer or shorter list only what is added and taken away ('frozen +blocks.0.*').
    """
    settings, differ = _settings(points), differing(points)
    first = settings[0]
    counts = [len({str(setting[key]) for setting in settings}) for key in differ]
    grid = len({str([setting[key] for key in differ]) for setting in settings}) == np.prod(counts)
    if not differ:
        return ['all'] * len(points)
    if grid:
        return [', '.join(_label(key, setting[key]) for key in differ) for setting in settings]
    return [', '.join(_label(key, setting[key], first[key]) for key in differ if str(setting[key]) != str(first[key]))
            or 'as configured' for setting in settings]


def differing(points: Sequence[Point]) -> list[str]:
    """The keys of the config in which the settings differ."""
    settings = _settings(points)
    return [key for key in settings[0] if len({str(setting[key]) for setting in settings}) > 1]


def about(points: Sequence[Point], expected: Mapping[tuple[str, str], Sequence]) -> list:
    """What is expected of the settings at hand: entries whose key differs between them, with the word in a value."""
    differ = differing(points)
    return [entry for (key, word), entries in expected.items() for entry in entries
            if key in differ and any(word in str(point.coordinates[key]) for point in points)]


def _settings(points: Sequence[Point]) -> list[dict]:
    return [{key: value for key, value in point.coordinates.items() if key.partition('.')[0] not in QUIET}
            for point in points]


def _label(key: str, value, first=None) -> str:
    name = key.partition('.')[2]
    if not isinstance(value, (tuple, list)):
        return f'{name} {value:.4g}' if isinstance(value, float) else f'{name} {value}'
    if isinstance(first, (tuple, list)) and len(value) != len(first) and ({*value} < {*first} or {*value} > {*first}):
        changes = [f'+{item}' for item in value if item not in first] + [f'-{item}' for item in first
                                                                       if item not in value]
        return f'{name} {" ".join(changes)}'
    return f'{name} {" ".join(map(str, value)) or "none"}'
