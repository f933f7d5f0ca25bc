"""One self-contained HTML page of a run, of a sweep, or of a folder of figures.

`run_page`, `sweep_page` and `folder_page` read a directory and show what can be shown: what cannot be read is a line at
the top of the page and never an error. Nothing on the page is loaded from anywhere, and whatever comes from a file is
text: `tag` escapes all that it has not made itself, and the page forbids every script but its own.
"""

import base64
import csv
import functools
import hashlib
import html
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lingrok import figures, run, sweep, verify
from lingrok.analysis import settings
from lingrok.config import Config, documented, to_dict
from lingrok.log import Series, read_metrics
from lingrok.metrics import ABSENT, interval

MAX_ROWS = 200  # of a table of numbers; the files have all
MAX_SETTINGS = 2000  # rows of the table of a sweep
MAX_STEPS = 60  # of a slider
MAX_TEXT = 300  # characters of a value of the config
PNG = b'\x89PNG\r\n\x1a\n'
LONG_FORM = ('quantity', 'step', 'replica', 'index', 'value')  # what the analysis scripts write


class Html(str):
    """Text that is markup already: what `tag` makes, and the style and script below. Never what comes from a file."""


class Table(NamedTuple):
    """Cells by row; `left_out` counts the rows of the file that are not here."""

    columns: Sequence[str]
    rows: Sequence[Sequence]
    left_out: int = 0


class Picture(NamedTuple):
    """A figure with what its script wrote about it. film: (label, PNG) of every step that it was drawn at."""

    name: str
    png: bytes
    caption: str = ''
    note: str = ''
    expected: Sequence[Mapping] = ()
    numbers: Table | None = None
    film: Sequence[tuple[str, bytes]] = ()


class Curves(NamedTuple):
    """Statistics along training: a row for every quantity and setting, its cells one text a step."""

    steps: Sequence[int]
    rows: Sequence[tuple[str, str, Sequence[str], Sequence[str]]]  # quantity, setting, mean ± half width, n


# Markup.

VOID = ('img', 'input', 'meta', 'wbr')


def tag(name: str, /, *children, **attributes) -> Html:
    """<name>children</name>; children and attributes that are no Html are text. `class_` is the attribute class.

    >>> tag('p', 'a < b ', tag('b', 'c'), title='"')
    '<p title="&quot;">a &lt; b <b>c</b></p>'
    """
    given = ''.join(f' {key.rstrip("_").replace("_", "-")}="{_text(value)}"' for key, value in attributes.items())
    inside = ''.join(child if isinstance(child, Html) else _text(child) for child in children)
    return Html(f'<{name}{given}>' + ('' if name in VOID else f'{inside}</{name}>'))


def _text(value) -> str:
    """Escaped; half surrogate pairs, which JSON can hold and a file cannot, are replaced."""
    return html.escape(str(value).encode('utf8', 'replace').decode('utf8'))


def table(content: Table, *, name: str = '') -> Html:
    """A table that sorts by the column that is clicked."""
    head = tag('thead', tag('tr', *(tag('th', column, scope='col') for column in content.columns)))
    body = tag('tbody', *(tag('tr', *(cell if isinstance(cell, Html) else tag('td', *_breakable(cell)) for cell in row))
                          for row in content.rows))
    more = [tag('p', f'{content.left_out:,} more rows are in the file.', class_='note')] if content.left_out else []
    return tag('div', tag('div', tag('table', head, body, class_=f'sortable {name}'), class_='wide'), *more)


def _breakable(cell) -> list:
    """The text of a cell with places where a long name may continue on the next line."""
    parts = re.split(r'(?<=[/_,=@])|(?<=\.)(?=[a-z])', str(cell))
    return [parts[0], *(piece for part in parts[1:] for piece in (tag('wbr'), part))]


def image(png: bytes, description: str) -> Html:
    return tag('img', src='data:image/png;base64,' + base64.b64encode(png).decode(), alt=description)


def fold(title: str, *children) -> Html:
    return tag('details', tag('summary', title), *children)


def slider(labels: Sequence, *children) -> Html:
    """`children` with a slider above them: it chooses one of their frames, and one text of every cell that has more."""
    last = len(labels) - 1
    control = tag('input', type='range', min=0, max=last, value=last, hidden='', aria_label='step')
    control = tag('label', 'step ', tag('output', labels[-1]), control, class_='slider')
    return tag('div', control, *children, data_labels=json.dumps([str(label) for label in labels]))


def _along(texts: Sequence[str]) -> Html:
    """A cell that a slider changes; it begins at the last step."""
    return tag('td', texts[-1], data_texts=json.dumps(list(texts)))


def curves_table(curves: Curves) -> Html:
    """What was measured, at the step that a slider chooses."""
    several = any(setting for _, setting, _, _ in curves.rows)
    columns = ('quantity', *(('setting',) if several else ()), 'mean ± 95 %', 'n')
    names = {quantity for quantity, *_ in curves.rows}
    below = {name for name in names for other in names if name.startswith(f'{other}/')}
    rows = [(tag('td', *_breakable(quantity), **({} if quantity in below else {'class_': 'main'})),
             *((setting,) if several else ()), _along(means), _along(counts))
            for quantity, setting, means, counts in curves.rows]
    return slider(curves.steps, table(Table(columns, rows)))


def picture(shown: Picture) -> Html:
    """A figure with its caption, its film, and expected numbers beside the measured ones."""
    parts = [tag('h3', shown.name, id=f'figure-{shown.name}'),
             tag('div', image(shown.png, shown.caption.partition('. ')[0] or shown.name), class_='plot', tabindex=0)]
    if shown.caption or shown.note:
        note = tag('span', f' {shown.note}' if shown.note else '', class_='note')
        parts.append(tag('figcaption', shown.caption, note))
    if shown.film:
        frames = [tag('div', image(png, f'{shown.name} at step {label}'), class_='plot frame',
                      **({} if label == shown.film[-1][0] else {'hidden': ''})) for label, png in shown.film]
        parts.append(tag('div', tag('p', 'The whole figure at every saved step:', class_='note'),
                         slider([label for label, _ in shown.film], *frames), class_='film'))
    own = [row for row in shown.expected if row.get('measured') != ABSENT]
    others = [row for row in shown.expected if row.get('measured') == ABSENT]
    if own:
        parts.append(expected_table(own))
    if others:
        parts.append(fold(f'{len(others)} expected numbers of other settings', expected_table(others)))
    if shown.numbers:
        parts.append(fold('The numbers', table(shown.numbers)))
    return tag('figure', *parts)


def expected_table(rows: Sequence[Mapping], *, named: bool = False) -> Html:
    """Expected numbers with their source, beside the measured ones where there are any."""
    measured = any(row.get('measured', ABSENT) != ABSENT for row in rows)
    keys = {**({'figure': 'figure'} if named else {}), 'what': 'what', 'value': 'expected',
            **({'measured': 'measured'} if measured else {}), 'source': 'source of the expected number'}
    return table(Table(tuple(keys.values()), [[row.get(key, '') for key in keys] for row in rows]), name='expected')


def page(title: str, state: str, facts: Mapping[str, str], notes: Sequence[str],
         sections: Mapping[str, Sequence[Html]]) -> str:
    """The page: title, state and facts, what is wrong, contents, and the sections that hold something."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    sections = {name: parts for name, parts in sections.items() if parts}
    anchors = {name: name.lower().replace(' ', '-') for name in sections}
    warning = tag('section', tag('h2', 'Attention'), tag('ul', *(tag('li', note) for note in notes)),
                  class_='attention', role='note') if notes else Html()
    head = tag('head', tag('meta', charset='utf-8'),
               tag('meta', http_equiv='Content-Security-Policy', content=policy),
               tag('meta', name='viewport', content='width=device-width, initial-scale=1'),
               tag('meta', name='color-scheme', content='light dark'),
               tag('title', f'{title} · lingrok'), tag('style', Html(STYLE)))
    kind = state.partition(' ')[0].strip(',:')
    body = tag('body', tag('header', tag('h1', title), tag('p', state, class_=f'state {kind}'),
                           tag('dl', *(tag('div', tag('dt', key), tag('dd', value)) for key, value in facts.items()))),
               tag('main', warning, tag('nav', *(tag('a', name, href=f'#{anchors[name]}') for name in sections)),
                   *(tag('section', tag('h2', name), *parts, id=anchors[name]) for name, parts in sections.items())),
               tag('script', Html(SCRIPT)))
    return '<!doctype html>\n' + tag('html', head, body, lang='en') + '\n'


# Numbers.


def statistic(values) -> tuple[str, str]:
    r"""('mean ± half width of the 95 % interval', 'n') over replicas; NaN replicas are left out.

    >>> statistic([1.0, 2.0, 3.0])
    ('2.0\xa0±\xa02.5', '3')
    >>> statistic([0.25])
    ('0.25', '1')
    """
    mean, half = interval(values)
    count = int(np.isfinite(np.asarray(values, float)).sum())
    if np.isfinite(half) and half > 0:
        decimals = max(1 - math.floor(math.log10(half)), 0)  # two digits of the interval
        shown = f'{mean:.{decimals}f}\xa0±\xa0{half:.{decimals}f}'
    else:
        shown = f'{mean:.4g}' + ('\xa0±\xa00' if half == 0 else '')
    return (shown if count else 'not defined'), str(count)


def curves(series: Mapping[str, Series], names: Iterable[str], groups: Mapping[str, Sequence[int]]) -> Curves | None:
    """Statistics of every setting at the steps of the evaluations; None if nothing was measured.

    names: headline quantities; each is followed by its baselines and by the same of edited models ('name/...').
    """
    scalars = {name: x for name, x in series.items() if x.values.ndim == 2}
    wanted = [own for name in names for own in scalars if own == name or own.startswith(f'{name}/')]
    wanted = list(dict.fromkeys(wanted))
    if not wanted:
        return None
    steps = sorted({int(step) for name in wanted for step in scalars[name].steps})
    steps = [steps[i] for i in evenly(len(steps), MAX_STEPS)]
    rows = []
    for name in wanted:
        at = dict(zip(map(int, scalars[name].steps), scalars[name].values, strict=True))
        for setting, replicas in groups.items():
            cells = [statistic(at[step][list(replicas)]) if step in at else ('', '') for step in steps]
            rows.append((name, setting, *zip(*cells, strict=True)))
    return Curves(steps, rows)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the places 0 to count - 1, the first and the last among them.

    >>> evenly(3, 60), evenly(101, 3)
    ([0, 1, 2], [0, 50, 100])
    """
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, most)).round()})


def last_values(series: Mapping[str, Series], groups: Mapping[str, Sequence[int]]) -> Table:
    """Every quantity without an axis at its last step."""
    rows = [(name, setting, int(x.steps[-1]), *statistic(x.values[-1][list(replicas)]))
            for name, x in series.items() if x.values.ndim == 2 for setting, replicas in groups.items()]
    return _without_empty(Table(('quantity', 'setting', 'step', 'mean ± 95 %', 'n'), rows))


def _without_empty(content: Table) -> Table:
    """Without the columns that say nothing in any row."""
    kept = [i for i in range(len(content.columns)) if any(str(row[i]) for row in content.rows)]
    return Table([content.columns[i] for i in kept], [[row[i] for i in kept] for row in content.rows], content.left_out)


def csv_table(text: str, groups: Mapping[str, Sequence[int]]) -> Table:
    """The table of a script: as it is; in long form, statistics over the replicas of each setting at the last step."""
    header, *lines = csv.reader(io.StringIO(text))
    if tuple(header) != LONG_FORM:
        return Table(header, lines[:MAX_ROWS], max(len(lines) - MAX_ROWS, 0))
    found: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
    for name, step, replica, index, value in lines:
        found.setdefault((name, index), {}).setdefault(int(step), {})[int(replica)] = float(value)
    rows = []
    for (name, index), by_step in found.items():
        step = max(by_step)
        for setting, replicas in groups.items():
            values = [by_step[step][replica] for replica in replicas if replica in by_step[step]]
            if values:
                rows.append((name, index, setting, step, *statistic(values)))
    kept = Table(('quantity', 'index', 'setting', 'step', 'mean ± 95 %', 'n'), rows[:MAX_ROWS],
                 max(len(rows) - MAX_ROWS, 0))
    return _without_empty(kept)


# Reading.


def _attempt(read: Callable[[], Any], notes: list[str], instead: Any = None) -> Any:
    """read(), or `instead` and a note. Files that something else wrote or broke make a library raise anything."""
    try:
        return read()
    except Exception as error:
        reason = ' '.join(str(error).split())[:MAX_TEXT]
        notes.append(reason if isinstance(error, run.RunError) else f'{reason or type(error).__name__} '
                     f'({type(error).__name__})')
        return instead


def read_pictures(folder: Path, groups: Mapping[str, Sequence[int]], notes: list[str], *, name: str = ''
                  ) -> list[Picture]:
    """The figures of a folder, the one of training first. name: of the run that they should be of."""
    paths = sorted(folder.glob('*.png'), key=lambda path: (path.stem != 'training', path.name))
    reports = {path.stem: _report(path, notes) for path in sorted(folder.glob('*.json'))} if paths else {}
    shared = {stem: {**report, 'caption': caption} for report in reports.values()
              if isinstance(report.get('captions'), Mapping) for stem, caption in report['captions'].items()}
    found = []
    for path in paths:
        png = path.read_bytes()
        if not png.startswith(PNG):
            notes.append(f'{path} is no PNG and is left out')
            continue
        report = {**shared.get(path.stem, {}), **reports.get(path.stem, {})}
        expected = report.get('expected')
        expected = [row for row in expected if isinstance(row, Mapping)] if isinstance(expected, list) else []
        numbers = path.with_suffix('.csv')
        content = _attempt(lambda numbers=numbers: csv_table(numbers.read_text(), groups), notes) if numbers.exists(
            ) else None
        caption = report.get('caption') if isinstance(report.get('caption'), str) else ''
        found.append(Picture(path.stem, png, caption, _origin(report, name), expected, content,
                             _film(folder / path.stem)))
    return found


def _report(path: Path, notes: list[str]) -> dict:
    report = _attempt(lambda: json.loads(path.read_text()), notes, {})
    return report if isinstance(report, dict) else {}


def _origin(report: Mapping, name: str) -> str:
    """The steps that a figure shows, and the run that it was drawn from where that has another name."""
    steps, origin = report.get('steps'), report.get('run')
    parts = [f'Step{"s" if len(steps) > 1 else ""} {", ".join(map(str, steps))}.'] if isinstance(steps, list) else []
    if name and isinstance(origin, str) and Path(origin).name != name:
        parts.append(f'Drawn from another run, or before this one was renamed: {origin}.')
    return ' '.join(parts)


def _film(folder: Path) -> list[tuple[str, bytes]]:
    """(step, PNG) of the frames in a folder, by step."""
    frames = sorted((path for path in folder.glob('*.png') if path.stem.isdecimal()), key=lambda path: int(path.stem))
    chosen = [frames[i] for i in evenly(len(frames), MAX_STEPS)] if frames else []
    return [(path.stem, png) for path in chosen if (png := path.read_bytes()).startswith(PNG)]


def _training_picture(series: Mapping[str, Series], cfg: Config, notes: list[str]) -> list[Picture]:
    """The figure that ends the training of this task, drawn from the metrics so far."""
    plot = figures.TRAINING.get(cfg.task.NAME)
    if plot is None or not series:
        return []

    def draw() -> bytes:
        file = io.BytesIO()
        plot(series, cfg).savefig(file, format='png', dpi=200)
        return file.getvalue()

    found: list[str] = []
    png = _attempt(draw, found)
    notes += [f'the training figure cannot be drawn from what was measured so far: {reason}' for reason in found]
    return [Picture('training', png, figures.style.caption(plot), 'Drawn by the report.')] if png else []


def _series(directory: Path, notes: list[str]) -> dict[str, Series]:
    """The metrics of a run as numbers, without the arrays where those cannot be read."""
    found: list[str] = []
    series = _attempt(lambda: read_metrics(directory), found)
    if series is None:
        notes += [f'metrics or arrays of {directory} cannot be read: {reason}' for reason in found]
        series = _attempt(lambda: read_metrics(directory, arrays=False), [], {})
    return {name: x for name, x in series.items() if x.values.dtype.kind in 'fiu' and x.values.ndim > 1}


def _versions(directory: Path, notes: list[str]) -> list[dict]:
    """What versions.json says of every start of a run."""
    path = directory / 'versions.json'
    starts = _attempt(lambda: json.loads(path.read_text()), notes, [])
    starts = [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []
    mine = _attempt(lambda: metadata.version('lingrok'), [])
    theirs = {str(start['lingrok']) for start in starts if 'lingrok' in start} - {mine}
    if mine and theirs:
        notes.append(f'trained with lingrok {", ".join(sorted(theirs))}, read by lingrok {mine}')
    return starts


def _versions_table(starts: Sequence[Mapping]) -> list[Html]:
    columns = list(dict.fromkeys(key for start in starts for key in start))
    return [table(Table(columns, [[start.get(key, '') for key in columns] for start in starts]))] if starts else []


def _problems(directory: Path, notes: list[str]) -> None:
    """Adds what `verify` finds."""
    found = verify.problems(directory)
    while (problem := _attempt(lambda: next(found, None), notes)) is not None:
        if problem not in notes:
            notes.append(problem)


def _leaves(tree, prefix: str = '') -> list[tuple[str, Any]]:
    """Dotted names and values of nested dicts."""
    if not isinstance(tree, Mapping):
        return [(prefix.rstrip('.'), tree)]
    return [leaf for key, value in tree.items() for leaf in _leaves(value, f'{prefix}{key}.')]


def _span(ordered: Sequence[int]) -> str:
    """'3', or '3 to 5', of numbers in order."""
    return ' to '.join(map(str, dict.fromkeys((ordered[0], ordered[-1]))))


def _short(value) -> str:
    text = ', '.join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= MAX_TEXT else f'{text[:MAX_TEXT]} … ({len(text):,} characters)'


def config_tables(cfg: Config) -> list[Html]:
    """Keys that differ from their default, with their meaning, and all keys."""
    tree, rows = to_dict(cfg), []
    for section, cls in {'task': type(cfg.task), **{name: type(getattr(cfg, name)) for name in tree
                                                    if name not in ('format_version', 'name', 'task', 'vary')}}.items():
        for entry in documented(cls):
            value = tree[section][entry.name]
            default = list(entry.default) if isinstance(entry.default, tuple) else entry.default
            rows.append((f'{section}.{entry.name}', _short(value), _short(default), entry.doc))
    changed = [row for row in rows if row[1] != row[2]]
    changed += [(f'vary.{name}', _short(values), '', 'one value a replica') for name, values in cfg.vary.items()]
    columns = ('key', 'value', 'default', 'meaning')
    return [tag('p', f'What differs from the defaults of the task {cfg.task.NAME}.', class_='note'),
            table(Table(columns, changed), name='config'),
            fold(f'All {len(rows)} keys', table(Table(columns, rows), name='config'))]


def _raw_config(directory: Path, notes: list[str]) -> tuple[dict, list[Html]]:
    """config.json as it is, where it cannot be read as a config."""
    path = directory / 'config.json'
    tree = _attempt(lambda: json.loads(path.read_text()), []) if path.exists() else None
    if not isinstance(tree, dict):
        return {}, []
    leaves = _leaves(tree)
    rows = [(key, _short(value)) for key, value in leaves[:MAX_ROWS]]
    return tree, [tag('p', 'As stored; it cannot be read as a config of this version.', class_='note'),
                  table(Table(('key', 'value'), rows, max(len(leaves) - MAX_ROWS, 0)), name='config')]


def _in_use(directory: Path) -> bool:
    try:
        return (directory / 'LOCK').exists() and run.in_use(directory)
    except OSError:  # a directory that cannot be written has nobody who trains in it
        return False


def _figure_section(pictures: Sequence[Picture], hint: str) -> list[Html]:
    if not pictures:
        return [tag('p', hint)]
    compared = [{**row, 'figure': shown.name} for shown in pictures for row in shown.expected
                if row.get('measured') != ABSENT]
    contents = tag('p', *(tag('a', shown.name, href=f'#figure-{shown.name}') for shown in pictures), class_='contents')
    overview = [fold(f'All {len(compared)} expected numbers in one table', expected_table(compared, named=True))]
    return [contents, *(overview if compared else []), *map(picture, pictures)]


# Pages.


def run_page(directory: Path, *, check: bool = True) -> tuple[str, list[str]]:
    """(HTML, notes) of a run directory in any state. check: read every checkpoint against its hashes."""
    directory, notes = Path(directory), []
    loaded = _attempt(lambda: run.load_run(directory), notes)
    series = _series(directory, notes)
    count = loaded.config.num_replicas if loaded else next((x.values.shape[1] for x in series.values()), 0)
    odd = [name for name, x in series.items() if x.values.shape[1] != count]
    if odd:
        notes.append(f'metrics without one number for each of the {count} replicas are left out: {", ".join(odd)}')
    series = {name: x for name, x in series.items() if name not in odd}
    last = max((int(x.steps[-1]) for x in series.values()), default=0)
    # Without a config, whether replicas differ in the seed alone is not known.
    groups = loaded.config.groups() if loaded else {f'replica {i}': [i] for i in range(count)}
    if loaded is None:
        tree, config_section = _raw_config(directory, notes)
        title, total, headline = str(tree.get('name', directory.name)), '', [
            name for name in series if series[name].values.ndim == 2]
    else:
        cfg = loaded.config
        config_section, title, total, headline = config_tables(cfg), cfg.name, cfg.train.num_steps, loaded.task.headline
    starts = _versions(directory, notes) if (directory / 'versions.json').exists() else []
    pictures = read_pictures(directory / 'figures', groups, notes, name=directory.name)
    if loaded is not None:
        drawn = next((i for i, shown in enumerate(pictures) if shown.name == 'training'), None)
        if drawn is None:
            pictures = [*_training_picture(series, loaded.config, notes), *pictures]
        elif not pictures[drawn].caption and loaded.task.NAME in figures.TRAINING:
            caption = figures.style.caption(figures.TRAINING[loaded.task.NAME])
            pictures[drawn] = pictures[drawn]._replace(caption=caption)
        frozen = _attempt(loaded.nan_replicas, notes, [])
        if frozen:
            notes.append(f'replicas {", ".join(map(str, frozen))} turned NaN, were frozen, and count in no interval')
    if check:
        _problems(directory, notes)
    state = _run_state(directory, loaded, last, total)
    if not state.startswith('finished'):
        notes.insert(0, f'the run is {state}: its numbers are not final')
    facts = _run_facts(directory, loaded, groups, starts)
    shown = curves(series, headline, groups)
    with_axis = [name for name, x in series.items() if x.values.ndim > 2]
    sections = {
        'Headline numbers': [] if shown is None else [
            tag('p', f'Mean over the replicas of a setting with half of its 95 % Student interval, at the step '
                f'{"of the slider" if len(shown.steps) > 1 else shown.steps[-1]}. n: replicas; one has no interval. '
                'Below a quantity: exact predictors on the same rows, and the model with a part cut.', class_='note'),
            curves_table(shown),
            fold('All quantities at their last step', table(last_values(series, groups)),
                 *([tag('p', f'With an axis, in the figures: {", ".join(with_axis)}.', class_='note')]
                   if with_axis else []))],
        'Figures': _figure_section(pictures, 'No figures and nothing to draw one from; the scripts of '
                                   'experiments/ write them into the folder figures of the run.'),
        'Config': config_section,
        'Versions': _versions_table(starts),
    }
    return page(title, state, facts, notes, sections), notes


def _run_state(directory: Path, loaded, last: int, total) -> str:
    if loaded is None:
        return 'broken: its config cannot be read'
    if loaded.finished:
        return f'finished, {total} steps'
    return f'{"running" if _in_use(directory) else "unfinished"}, step {last} of {total}'


def _run_facts(directory: Path, loaded, groups: Mapping, starts: Sequence[Mapping]) -> dict[str, str]:
    facts = {'directory': str(directory.absolute())}
    if loaded is not None:
        seeds = sorted({len(replicas) for replicas in groups.values()})
        facts |= {'task': loaded.task.NAME,
                  'replicas': f'{loaded.config.num_replicas}: {len(groups)} setting(s) of {_span(seeds)} seed(s)',
                  'parameters': f'{run.model.num_parameters(loaded.config.model):,} a replica',
                  'checkpoints at': ', '.join(map(str, loaded.steps)) or 'none yet',
                  'load it': f'lingrok.load_run({str(directory)!r})'}
    if starts:
        device = ' '.join(dict.fromkeys(str(starts[-1].get('device', 'unknown device')).split()))  # 'cpu cpu'
        facts['trained on'] = f'{device}, jax {starts[-1].get("jax", "unknown")}'
    return facts


def sweep_page(directory: Path, *, check: bool = True) -> tuple[str, list[str]]:
    """(HTML, notes) of a sweep directory in any state. check: read every checkpoint against its hashes."""
    directory, notes = Path(directory), []
    stored = _attempt(lambda: sweep.read_json(directory), notes, {})
    programs = _attempt(lambda: [(str(x['directory']), len(x['rows'])) for x in stored['programs']], notes, []
                        ) if stored else []
    paths = [directory / name for name, _ in programs]
    status = [_attempt(lambda path=path: sweep.program_state(path), notes, ('broken', 0, 0)) for path in paths]
    loaded = [_attempt(lambda path=path: run.load_run(path), []) if (path / 'config.json').exists() else None
              for path in paths]
    first = next((one for one in loaded if one is not None), None)
    starts = [start for path in paths if (path / 'versions.json').exists()
              for start in [{'program': path.name} | x for x in _versions(path, notes)]]
    if check:
        for path in paths:
            if (path / 'config.json').exists():
                _problems(path, notes)
    frozen = {path.name: found for path, one in zip(paths, loaded, strict=True) if one is not None
              and (found := _attempt(one.nan_replicas, [], []))}
    notes += [f'{name}: replicas {found} turned NaN and count in no interval' for name, found in frozen.items()]
    done = sum(state == 'finished' for state, _, _ in status)
    state = f'{"finished" if status and done == len(status) else "unfinished"}, {done} of {len(programs)} programs'
    if not state.startswith('finished'):
        notes.insert(0, f'the sweep is {state}: its numbers are not final')
    overview = Table(('program', 'directory', 'state', 'step', 'of', 'replicas'),
                     [(i, name, *state, replicas)
                      for i, ((name, replicas), state) in enumerate(zip(programs, status, strict=True))])
    pictures = read_pictures(directory / 'figures', {'': range(10**5)}, notes)
    facts = {'directory': str(directory.absolute()), 'points': str(sum(count for _, count in programs)),
             'programs': str(len(programs))} | ({'task': first.task.NAME} if first else {})
    sections = {
        'Settings': _settings(directory, stored, first, notes) if first else [],
        'Programs': [table(overview)] if status else [],
        'Figures': _figure_section(pictures, f'No figures yet: the scripts of experiments/'
                                   f'{first.task.NAME if first else "<task>"}/ that read a sweep write them.'),
        'Config': [tag('p', f'Of the program {first.path.name}; what differs between the settings is in their table.',
                       class_='note'), *config_tables(first.config)] if first else [],
        'Versions': [fold(f'{len(starts)} starts', *_versions_table(starts))] if starts else [],
    }
    return page(str(stored.get('name', directory.name)), state, facts, notes, sections), notes


def _settings(directory: Path, stored: Mapping, first, notes: list[str]) -> list[Html]:
    """The settings of a sweep by what differs between them: headline numbers at the last step, mean over seeds."""
    wanted = first.task.headline
    points = _attempt(lambda: settings.points(sweep.rows(directory), wanted), [])
    if points is None:  # some program cannot be read: the others, one by one
        points = []
        for index, program in enumerate(stored['programs']):
            found: list[str] = []
            own = functools.partial(sweep.rows, directory, only=index)
            points += _attempt(lambda own=own: settings.points(own(), wanted), found, [])
            notes += [f'{program["directory"]} is left out of the table of settings: {reason}' for reason in found]
    if not points:
        return [tag('p', 'No evaluations yet.')]
    differ = _attempt(lambda: _differing(stored), notes, [])
    grouped: dict[tuple, list] = {}
    for point in points:
        grouped.setdefault(tuple(_short(point.coordinates[key]) for key in differ), []).append(point)
    rows = []
    for coordinates, own in grouped.items():
        cells = [statistic([point.values[name][-1] for point in own]) for name in wanted]
        steps = sorted({int(point.steps[-1]) for point in own})
        rows.append((*coordinates, *(mean for mean, _ in cells), cells[0][1], _span(steps)))
    content = Table((*differ, *wanted, 'n', 'step'), rows[:MAX_SETTINGS], max(len(rows) - MAX_SETTINGS, 0))
    return [tag('p', 'One row a setting, at its last step: mean over seeds with half of the 95 % Student interval.',
                class_='note'), table(content)]


def _differing(stored: Mapping) -> list[str]:
    """The coordinates in which the points of a sweep differ, of programs that have not started, too."""
    columns = zip(stored['columns'], zip(*stored['points'], strict=True), strict=True)
    return [key for key, values in columns if key.partition('.')[0] not in settings.QUIET
            and len({str(value) for value in values}) > 1]


def folder_page(directory: Path) -> tuple[str, list[str]]:
    """(HTML, notes) of a folder of figures that belong to no run, such as runs/theory."""
    directory, notes = Path(directory), []
    pictures = read_pictures(directory, {'': range(10**5)}, notes)
    facts = {'directory': str(directory.absolute())}
    return page(directory.name, f'figures, {len(pictures)}', facts, notes, {
        'Figures': _figure_section(pictures, 'Nothing that could be shown.')}), notes


SCRIPT = """'use strict';
const compare = (a, b) => {
  const x = parseFloat(a), y = parseFloat(b);
  if (isNaN(x) && isNaN(y)) return a.localeCompare(b);
  return isNaN(x) ? 1 : isNaN(y) ? -1 : x - y;
};
for (const table of document.querySelectorAll('table.sortable')) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = document.createElement('button');
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.onclick = () => {
      const up = head.getAttribute('aria-sort') !== 'ascending';
      heads.forEach(other => other.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const text = row => row.cells[column].textContent;
      const rows = [...body.rows].sort((a, b) => compare(text(a), text(b)));
      body.append(...(up ? rows : rows.reverse()));
    };
  });
}
for (const box of document.querySelectorAll('[data-labels]')) {
  const labels = JSON.parse(box.dataset.labels), input = box.querySelector('input');
  input.hidden = labels.length < 2;
  input.oninput = () => {
    const chosen = +input.value;
    box.querySelector('output').textContent = labels[chosen];
    for (const cell of box.querySelectorAll('[data-texts]'))
      cell.textContent = JSON.parse(cell.dataset.texts)[chosen];
    box.querySelectorAll('.frame').forEach((frame, i) => { frame.hidden = i !== chosen; });
  };
}
"""

STYLE = """
:root { --page: #fff; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --card: #f6f8fa; --link: #0072b2;
  --good: #00704f; --warn: #8a4b00; --warn-card: #fff4e0; --shade: #0004; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e6e9ed; --soft: #9aa4af; --line: #30363d;
  --card: #1c2127; --link: #6cb6e8; --good: #4cc59a; --warn: #f0b35a; --warn-card: #2b2214;
  --shade: #fff4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); overflow-wrap: anywhere;
  font: 1rem/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; }
header, main { max-width: 64rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 0 0 .75rem; }
a { color: var(--link); }
.state { display: inline-block; margin: .5rem 0; padding: .1rem .7rem; border-radius: 1rem; font-size: .9rem;
  font-weight: 600; color: var(--warn); border: 1px solid currentColor; }
.state.finished, .state.figures { color: var(--good); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: .5rem 1.5rem; margin: .5rem 0;
  font-size: .9rem; }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; }
nav, .contents { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 1.25rem 0 0; }
.attention { margin-top: 1.25rem; padding: .75rem 1rem; background: var(--warn-card);
  border-left: 4px solid var(--warn); }
.attention h2 { margin: 0; padding: 0; border: 0; font-size: 1rem; }
.attention ul { margin: .25rem 0 0; padding-left: 1.2rem; font-size: .9rem; }
.note { color: var(--soft); font-size: .875rem; }
.wide, .plot { overflow-x: auto; }
.wide { --under: var(--page); background: /* a shade at the right edge until the end of a wide table is reached */
  linear-gradient(to left, var(--under) 40%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--shade), transparent) right / .9rem 100% no-repeat scroll; }
figure .wide { --under: var(--card); margin-top: .75rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
td { max-width: 26rem; min-width: 2.5rem; overflow-wrap: break-word; }
.expected td, .config td { min-width: 6rem; }
.main { font-weight: 600; }
th button { all: unset; cursor: pointer; font-weight: 600; white-space: nowrap; }
th button:focus-visible { outline: 2px solid var(--link); }
th button::after { content: ' \\2195'; color: var(--soft); font-weight: 400; }
th[aria-sort=ascending] button::after { content: ' \\2191'; color: var(--link); }
th[aria-sort=descending] button::after { content: ' \\2193'; color: var(--link); }
figure { margin: 1.5rem 0 2.5rem; padding: 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; }
.plot { background: #fff; border-radius: .3rem; padding: .5rem; }
.plot img { display: block; width: 100%; min-width: 40rem; height: auto; }
@media (max-width: 44rem) { .plot::before { content: 'wider than the screen: scroll \\2192'; position: sticky; left: 0;
  display: block; width: max-content; color: #57606a; font-size: .75rem; } }
figcaption { margin: .75rem 0; max-width: 52rem; font-size: .9rem; }
.slider { display: flex; flex-wrap: wrap; align-items: center; gap: .25rem .75rem; margin: .5rem 0; }
.slider output { min-width: 4rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.slider input { flex: 1 1 12rem; max-width: 30rem; accent-color: var(--link); }
[hidden] { display: none !important; }
details { margin: .75rem 0; }
summary { cursor: pointer; color: var(--link); font-size: .9rem; }
@media print {
  :root { --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --card: #fff; --warn-card: #fff; --link: #000; }
  nav, .contents, .slider input, th button::after { display: none; }
  header, main { max-width: none; padding: 0; }
  figure { border: 0; padding: 0; break-inside: avoid; }
  tr, h2, h3 { break-inside: avoid; break-after: avoid; }
  tr { break-after: auto; }
  .wide, .plot { overflow: visible; background: none; }
  .plot::before { display: none !important; }
  .plot img { min-width: 0; }
  body { font-size: 10pt; }
}
"""
