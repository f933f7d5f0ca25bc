"""Sweeps: from axes to programs, and from finished programs to one table.

A point is a dict {dotted key of the config: value}; 'seed' stands for all four random streams. An axis is a list of
points:

    grid({'task.noise_prob': (0.1, 0.5), 'optim.learning_rate': (0.01, 0.1)})     4 points
    zipped({'model.d_model': (64, 128), 'optim.learning_rate': (0.1, 0.05)})      2 points
    chain(axis, axis)       the points of one axis, then those of the other
    product(axis, axis)     every point of one axis with every point of the other

A config file says what it sweeps by `get_sweep(variant) -> points`; the `vary` of its config (seeds, as a rule) is one
more axis, the innermost. Points that share every key that changes a compiled program are the replicas of one program,
split into chunks that fit the memory of the devices. A sweep directory holds

    sweep.json          every point: program, replica, coordinates; decided once, by the first command that plans
    <index>-<run id>/   the run directory of a program
    sweep.csv           every point and step, written by `collect`
"""

import contextlib
import csv
import dataclasses
import fcntl
import hashlib
import importlib.util
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from lingrok import analysis, model, run, train
from lingrok.config import (
    SECTIONS,
    SEED_STREAMS,
    VARIABLE_OPTIM,
    Config,
    ConfigError,
    from_dict,
    require,
    run_id,
    suggest,
    task_class,
)
from lingrok.log import read_metrics, write_atomically

FORMAT_VERSION = 1  # of sweep.json
MEMORY_SHARE = 0.8  # of a device, for one program; the rest is left to the runtime and to fragmentation

Point = dict[str, Any]


def grid(axes: Mapping[str, Sequence]) -> list[Point]:
    """Every combination of the values; the last key changes fastest.

    >>> grid({'task.noise_prob': (0.3, 0.7), 'seed.init': (0, 1)})[:2]
    [{'task.noise_prob': 0.3, 'seed.init': 0}, {'task.noise_prob': 0.3, 'seed.init': 1}]
    """
    return product(*(zipped({key: values}) for key, values in axes.items()))


def zipped(axes: Mapping[str, Sequence]) -> list[Point]:
    """The first values of all keys, then the second ones, and so on. Raises ConfigError for unequal lengths.

    >>> zipped({'model.d_model': (32, 64), 'model.d_mlp': (128, 256)})
    [{'model.d_model': 32, 'model.d_mlp': 128}, {'model.d_model': 64, 'model.d_mlp': 256}]
    """
    lengths = {key: len(values) for key, values in axes.items()}
    require(len(set(lengths.values())) <= 1, f'zipped axes have different lengths: {lengths}; give every key the same '
            'number of values')
    for key, length in lengths.items():
        require(length > 0, f'the axis {key!r} has no values; give it one, or drop it')
    return [dict(zip(axes, map(_plain, values), strict=True)) for values in zip(*axes.values(), strict=True)]


def chain(*axes: Sequence[Point]) -> list[Point]:
    """The points of all axes, one axis after the other."""
    return [dict(point) for axis in axes for point in axis]


def product(*axes: Sequence[Point]) -> list[Point]:
    """Every point of each axis joined with every point of the others. Raises ConfigError for a key in two axes."""
    points = [{}]
    for axis in axes:
        points = [_joined(left, right) for left in points for right in axis]
    return points


def _joined(left: Point, right: Point) -> Point:
    twice = [key for key in left if any(key == other or 'seed' in (key, other) and key.split('.')[0] ==
                                        other.split('.')[0] for other in right)]
    require(not twice, f'two axes set {"".join(twice[:1])!r}; leave it to one of them (the vary of a config is '
            'an axis, too)')
    return left | right


def _plain(value):
    """A value as plain Python: numpy scalars and arrays would not survive JSON."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


@dataclasses.dataclass(frozen=True)
class Program:
    """Points that train together: `rows` of the sweep's table, in the order of the replicas of `config`."""

    index: int
    config: Config
    rows: tuple[int, ...]
    memory: int  # bytes a device, measured from the compiled program

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return f'{self.index:04d}-{run_id(self.config)}'


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A planned sweep: a table of coordinates (one row a point, one column a key) and the programs that fill it."""

    name: str
    id: str
    columns: tuple[str, ...]
    points: tuple[tuple, ...]
    programs: tuple[Program, ...]

    def program(self, index: int) -> Program:
        require(0 <= index < len(self.programs), f'index {index} is out of range; this sweep has the programs 0 to '
                f'{len(self.programs) - 1}')
        return self.programs[index]


@dataclasses.dataclass(frozen=True)
class _Group:
    """Points that could all be replicas of one program; `config.vary` holds them all."""

    config: Config
    rows: tuple[int, ...]


def resolve(tree: Mapping, points: Sequence[Point]) -> tuple[tuple[str, ...], tuple[tuple, ...], list[_Group]]:
    """Columns, table of coordinates, and groups of points that share every key that is compiled in.

    tree: a config as nested dicts. Its `vary` is the innermost axis. Raises ConfigError for an unknown key, a value
    that the key cannot have, and a point that occurs twice.
    """
    tree, varied = {**tree}, dict(tree.get('vary', {}))
    tree['vary'] = {}
    task = task_class(tree['task']['name'])
    variable = {*(f'seed.{s}' for s in SEED_STREAMS), *(f'optim.{n}' for n in VARIABLE_OPTIM),
                *(f'task.{n}' for n in task.VARIABLE)}
    base = {f'{section}.{key}': value for section in ('task', *SECTIONS) for key, value in tree[section].items()}
    for key in ('task.name', *(key for key in base if key.startswith('slurm.'))):
        del base[key]
    vary = {('seed' if key == 'all' else f'{section}.{key}'): values
            for section, keys in varied.items() for key, values in keys.items() if len(values)}
    points = product(points, zipped(vary)) if vary else chain(points)
    require(bool(points), 'the sweep has no points; see get_sweep of the config')
    columns = list(dict.fromkeys(key for point in points for key in point))
    for key in columns:
        require(key in base or key == 'seed', f'the sweep sets {key!r}, which is no key of the config; '
                + suggest(key, ('seed', *base)))
    columns, points = _split_seed(columns, points)
    rows = [tuple(point.get(key, base.get(key)) for key in columns) for point in points]
    return (columns, *_grouped(tree, columns, rows, variable | {'seed'}))


def _split_seed(columns: list[str], points: Sequence[Point]):
    """'seed' as four columns, unless every point sets it and no point sets a single stream."""
    streams = [f'seed.{stream}' for stream in SEED_STREAMS]
    if 'seed' not in columns or (all('seed' in point for point in points) and not set(streams) & set(columns)):
        return tuple(columns), points
    for point in points:
        if 'seed' in point:
            seed = point.pop('seed')
            point |= {stream: seed for stream in streams if stream not in point}
    rest = [key for key in columns if key != 'seed' and key not in streams]
    return (*rest, *streams), points


def _grouped(tree, columns, rows, variable) -> tuple[tuple[tuple, ...], list[_Group]]:
    static = [i for i, key in enumerate(columns) if key not in variable]
    traced = [i for i, key in enumerate(columns) if key in variable]
    members: dict[str, list[int]] = {}
    for row, values in enumerate(rows):
        members.setdefault(json.dumps([values[i] for i in static]), []).append(row)
    groups, table = [], list(rows)
    for group in members.values():
        own = {section: dict(keys) if isinstance(keys, Mapping) else keys for section, keys in tree.items()}
        for i in static:
            section, _, key = columns[i].partition('.')
            own[section][key] = rows[group[0]][i]
        for i in traced:
            section, _, key = columns[i].partition('.')
            own['vary'].setdefault(section, {})[key or 'all'] = [rows[row][i] for row in group]
        config = from_dict(own)
        # Values as the config understood them: 1 and 1.0 are one learning rate.
        checked = {columns[i]: config.vary[columns[i]] for i in traced}
        for place, row in enumerate(group):
            table[row] = tuple(checked[key][place] if key in checked else value
                               for key, value in zip(columns, rows[row], strict=True))
        groups.append(_Group(config, tuple(group)))
    _refuse_twice(columns, table)
    return tuple(table), groups


def _refuse_twice(columns, table) -> None:
    seen: dict[str, int] = {}
    for row, values in enumerate(table):
        first = seen.setdefault(json.dumps(values), row)
        require(first == row, f'the points {first} and {row} of the sweep are the same: '
                f'{dict(zip(columns, values, strict=True))}; drop one')


def plan(tree: Mapping, points: Sequence[Point], *, devices: Sequence | None = None, budget: int | None = None,
         max_replicas: int = 0, one_program: bool = False) -> Sweep:
    """Points of a config as programs that fit the devices.

    Args:
        tree: the config as nested dicts.
        points: as `get_sweep` returns them.
        devices: those of one program; all by default.
        budget: bytes a device that a program may take; by default MEMORY_SHARE of the device.
        max_replicas: most replicas of a program; 0: as many as fit the memory.
        one_program: raise ConfigError instead of making more than one program.
    """
    devices = jax.devices() if devices is None else devices
    columns, table, groups = resolve(tree, points)
    if one_program and len(groups) > 1:
        static = [key for key in columns if key not in groups[0].config.vary]
        raise ConfigError(f'one program was asked for, but the sweep changes {", ".join(static)}, which is compiled in:'
                          f' {len(groups)} programs; drop it from the sweep, or drop --one_program')
    budget = device_budget(devices) if budget is None else budget
    programs = []
    for group in groups:
        most, memory = _most_replicas(group.config, devices, budget, max_replicas)
        num = len(group.rows)
        each = -(-num // -(-num // most))  # as equal as can be
        for start in range(0, num, each):
            places = range(start, min(start + each, num))
            config = _subset(group.config, places)
            programs.append(Program(len(programs), config, tuple(group.rows[i] for i in places), memory))
    if one_program:
        require(len(programs) == 1, f'one program was asked for, but {len(table)} replicas take {len(programs)} to fit '
                f'{programs[0].memory:,} bytes a device; drop --one_program')
    return Sweep(groups[0].config.name, _identity(groups), columns, table, tuple(programs))


def _identity(groups: Sequence[_Group]) -> str:
    """Changes with every number that a sweep computes, not with how its points are grouped into programs."""
    content = sorted(f'{run_id(group.config)} {group.rows}' for group in groups)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]


def _subset(config: Config, places) -> Config:
    vary = {key: tuple(values[i] for i in places) for key, values in config.vary.items()}
    return dataclasses.replace(config, vary=vary)


def device_budget(devices: Sequence) -> int:
    """Bytes of one device that a program may take. CPU devices share the memory of the machine."""
    stats = devices[0].memory_stats()
    if stats and 'bytes_limit' in stats:
        return int(stats['bytes_limit'] * MEMORY_SHARE)
    return int(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') * MEMORY_SHARE / len(devices))


def _most_replicas(config: Config, devices, budget: int, max_replicas: int) -> tuple[int, int]:
    """(replicas a program, bytes a device of a program with that many)."""
    wanted = min(config.num_replicas, max_replicas or config.num_replicas)
    if _state_bytes(config) * wanted <= budget * (1 if config.train.parallel == 'batch' else len(devices)):
        # The very program that would run: what is compiled here comes back from the compilation cache.
        memory = program_memory(_subset(config, range(wanted)), devices)
        if memory <= budget:
            return wanted, memory
    by_batch = config.train.parallel == 'batch'
    some = devices if by_batch else devices[:1]
    one, two = (program_memory(_repeat(config, count), some) for count in (1, 2))
    if one > budget:
        raise ConfigError(f'one replica takes {one:,} bytes a device, the budget is {budget:,}; try a smaller '
                          'train.batch_size or eval.batch_size, train.parallel=batch on several devices, or more '
                          '--memory_gib')
    each = max(two - one, 1)
    here = 1 + (budget - one) // each
    most = min(wanted, here * (1 if by_batch else len(devices)))
    return most, one + each * (-(-most // (1 if by_batch else len(devices))) - 1)


def _repeat(config: Config, count: int) -> Config:
    """`count` replicas of the first point; what they compute is never looked at."""
    return dataclasses.replace(config, vary={key: values[:1] * count for key, values in
                                             (config.vary or {'seed': (0,)}).items()})


def _state_bytes(config: Config) -> int:
    """Bytes of the training state and the task state of a replica."""
    settings = {key: np.asarray(values[0]) for key, values in config.coordinates().items()}
    settings = {key: x.astype(np.int32 if key.startswith('seed.') else np.float32) for key, x in settings.items()}
    shapes = jax.eval_shape(lambda s: (train.init(s, cfg=config), train.init_task(s, cfg=config)), settings)
    return _nbytes(shapes)


def _nbytes(shapes) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def program_memory(config: Config, devices) -> int:
    """Bytes that training or evaluating all replicas of a config takes on one device, from the compiled programs."""
    programs = make_programs(config, devices)
    sharding = NamedSharding(programs.mesh, programs.spec)
    shapes = jax.eval_shape(lambda s: (programs.init(s), programs.init_task(s)), programs.settings)
    state, task_state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    programs.compile(state, task_state)
    kept = (_nbytes(state) - _nbytes(state.params)) // (programs.mesh.size if programs.spec else 1)
    training, evaluation = (_peak(x.memory_analysis()) for x in (programs.train_chunk, programs.evaluate))
    return max(training, evaluation + kept)


def make_programs(config: Config, devices=None) -> train.Programs:
    """The programs that a run of this config compiles."""
    return train.Programs(config, capacity=run.capacity(config.train), devices=devices,
                          **analysis.evaluation(config.task.NAME))


def _peak(memory) -> int:
    """Bytes on a device while a program runs: arguments, results (donated ones once), and what is in between."""
    return (memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes)


@contextlib.contextmanager
def _locked(directory: Path):
    """One process at a time plans a sweep; the tasks of an array that start together wait for the first."""
    with (directory / 'LOCK').open('a') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def default_directory(tree: Mapping, points: Sequence[Point]) -> Path:
    _, _, groups = resolve(tree, points)
    return Path('runs') / f'{groups[0].config.name}-sweep-{_identity(groups)}'


def open_sweep(directory, tree: Mapping, points: Sequence[Point], **options) -> Sweep:
    """The sweep of a directory, planned (see `plan`) if it has not been yet.

    Raises ConfigError if the directory holds another sweep or something else. How the points are grouped is decided
    once and kept, so that the same index is the same program for everyone, on every machine.
    """
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        if (directory / 'sweep.json').exists():
            return _stored(directory, tree, points)
        others = [p.name for p in directory.iterdir() if p.name != 'LOCK' and not p.name.endswith('.tmp')]
        require(not others, f'{directory} holds {sorted(others)[:3]} and no sweep; choose another --workdir')
        sweep = plan(tree, points, **options)
        write_atomically(directory / 'sweep.json', _to_json(sweep).encode())
        return sweep


def _to_json(sweep: Sweep) -> str:
    """sweep.json: one line a program and one line a point."""
    head = {'format_version': FORMAT_VERSION, 'name': sweep.name, 'id': sweep.id, 'columns': sweep.columns}
    programs = [{'directory': p.name, 'memory': p.memory, 'rows': p.rows} for p in sweep.programs]
    lists = (f'"{name}": [\n' + ',\n'.join(map(json.dumps, items)) + '\n]'
             for name, items in (('programs', programs), ('points', sweep.points)))
    return '{' + ',\n'.join((json.dumps(head)[1:-1], *lists)) + '}\n'


def read_json(directory) -> dict:
    """sweep.json of a sweep directory, for reading. Raises ConfigError if there is none, or of another version."""
    path = Path(directory) / 'sweep.json'
    require(path.exists(), f'{directory} is not a sweep directory: it has no sweep.json')
    try:
        stored = json.loads(path.read_text())
        version = stored['format_version']
        for entry in stored['programs'] if version == FORMAT_VERSION else ():
            entry['directory'], entry['rows']
    except (ValueError, KeyError, TypeError) as error:
        reason = f'it has no {error}' if isinstance(error, KeyError) else error
        raise ConfigError(f'{path} cannot be read, it is damaged or of another program: {reason}; its runs can be read '
                          'one by one, and the sweep be planned anew in another --workdir') from error
    require(version == FORMAT_VERSION, f'{path} has format version {version!r}; this lingrok reads {FORMAT_VERSION}')
    return stored


def _stored(directory: Path, tree, points) -> Sweep:
    stored = read_json(directory)
    columns, table, groups = resolve(tree, points)
    found = _identity(groups)
    require(stored['id'] == found, f'{directory} holds another sweep ({stored["name"]}, {len(stored["points"])} points,'
            f' id {stored["id"]}; asked for: {len(table)} points, id {found}); choose another --workdir')
    home = {row: (group, place) for group in groups for place, row in enumerate(group.rows)}
    programs = []
    for index, entry in enumerate(stored['programs']):
        group = home[entry['rows'][0]][0]
        config = _subset(group.config, [home[row][1] for row in entry['rows']])
        programs.append(Program(index, config, tuple(entry['rows']), entry['memory']))
    return Sweep(groups[0].config.name, found, columns, table, tuple(programs))


def status(directory) -> list[tuple[str, int, int]]:
    """(state, last step on disk, all steps) of every program: finished, running, unfinished, broken, not started."""
    directory = Path(directory)
    return [program_state(directory / entry['directory']) for entry in read_json(directory)['programs']]


def program_state(directory: Path) -> tuple[str, int, int]:
    """(state, last step on disk, all steps) of the run directory of a program; see `status`."""
    try:
        steps = json.loads((directory / 'config.json').read_text())['train']['num_steps']
    except OSError:
        return 'not started', 0, 0
    except (ValueError, KeyError, TypeError):
        return 'broken', 0, 0
    if (directory / 'DONE').exists():
        return 'finished', steps, steps
    series = read_metrics(directory)
    last = max((int(s.steps[-1]) for s in series.values()), default=0)
    return ('running' if run.in_use(directory) else 'unfinished'), last, steps


def rows(directory, *, only: int | None = None) -> Iterator[dict]:
    """One long table of what the programs of a sweep have measured so far: a dict for every point and step.

    Keys: index (program), replica, the coordinates, step, and the quantities measured at this step; a quantity with one
    axis is 'name[0]', 'name[1]', ... Programs that have not started have no rows. The directory of a single run is a
    sweep of one program. only: the index of the one program to read.
    """
    directory = Path(directory)
    stored = _as_sweep(directory)
    for index, entry in enumerate(stored['programs']):
        if only not in (None, index) or not (directory / entry['directory'] / 'metrics.jsonl').exists():
            continue
        by_step: dict[int, dict[str, np.ndarray]] = {}
        for name, (steps, values) in read_metrics(directory / entry['directory']).items():
            for step, value_S in zip(steps, values, strict=True):
                row = by_step.setdefault(int(step), {})
                if value_S.ndim == 1:
                    row[name] = value_S
                elif value_S.ndim == 2:
                    row |= {f'{name}[{i}]': value_S[:, i] for i in range(value_S.shape[1])}
        for replica, point in enumerate(entry['rows']):
            place = {'index': index, 'replica': replica}
            place |= dict(zip(stored['columns'], stored['points'][point], strict=True))
            for step in sorted(by_step):
                yield place | {'step': step} | {name: value_S[replica] for name, value_S in by_step[step].items()}


def _as_sweep(directory: Path) -> dict:
    """sweep.json; for the directory of a single run what its own would say."""
    if (directory / 'sweep.json').exists() or not (directory / 'config.json').exists():
        return read_json(directory)
    vary = run.load_run(directory).coordinates
    points = list(zip(*vary.values(), strict=True)) or [()]
    return {'columns': list(vary), 'points': points, 'programs': [{'directory': '.', 'rows': range(len(points))}]}


def base(directory) -> dict:
    """'task.key' -> value of the task of the first program: the coordinates of every point that does not set them."""
    directory = Path(directory)
    task = run.load_run(directory / _as_sweep(directory)['programs'][0]['directory']).config.task
    return {f'task.{field.name}': getattr(task, field.name) for field in dataclasses.fields(task)}


def collect(directory) -> Path:
    """Writes sweep.csv, the table of `rows`; returns its path. Empty: not measured at this step; nan: turned NaN."""
    directory = Path(directory)
    columns = dict.fromkeys(itertools.chain.from_iterable(rows(directory)))
    require(bool(columns), f'{directory} has no results yet; run the sweep first')
    path = directory / 'sweep.csv'
    with path.with_suffix('.csv.tmp').open('w', newline='') as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        for row in rows(directory):
            table.writerow({key: f'{x:.7g}' if isinstance(x, (float, np.floating)) else x for key, x in row.items()})
    path.with_suffix('.csv.tmp').replace(path)
    return path


def read_table(path) -> dict[str, np.ndarray]:
    """A table written by `collect` as columns: numbers, NaN where empty; strings where not all are numbers.

    `pandas.read_csv` reads the same file.
    """
    with Path(path).open(newline='') as file:
        header, *lines = csv.reader(file)

    def column(values) -> np.ndarray:
        try:
            return np.array([float(x) if x else np.nan for x in values])
        except ValueError:
            return np.array(values)

    return {name: column(values) for name, values in zip(header, zip(*lines, strict=True), strict=True)}


def load_config_file(path):
    """The module of a config file, for its `get_config(variant)` and, where it has one, `get_sweep(variant)`."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def num_parameters(program: Program) -> int:
    """Parameters of one replica."""
    return model.num_parameters(program.config.model)
