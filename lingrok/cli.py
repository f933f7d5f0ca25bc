"""What the scripts in `experiments/` share: config flags, one-line errors, compilation cache, writing figures."""

import contextlib
import csv
import difflib
import errno
import json
import os
import re
import sys
import textwrap
import traceback
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from lingrok.metrics import ABSENT

_MULTIHOST = flags.DEFINE_bool(
    'multihost', False, 'one of several processes, as a rule one a host, that train together: TPU pods, SLURM and Open '
    'MPI are detected; elsewhere set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID')

CSV_LIMIT = 10**5
CHOSEN = 'chosen.json'  # what laser.py has chosen for a model, by question
FILM = 24  # most frames of a figure at every step
EXIT_FAILED, EXIT_USAGE, EXIT_NAN = 1, 2, 4  # after a signal: 128 + its number, as a shell expects


def main(run: Callable[..., int | None], argv: list[str] | None = None, *, paths: bool = False) -> None:
    """Parses the flags, calls `run` and exits. What a user can mend ends in one line on stderr and exit code 2.

    paths: the script takes arguments that are no flags; `run` gets their list.
    """
    import jax

    from lingrok.launch import cores

    # One virtual device a core: replicas then train side by side, each on its own core. Settled before jax starts.
    if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
        jax.config.update('jax_num_cpu_devices', len(cores()))
    # Threads of LAPACK, which evaluations call for SVDs, would fight with those of the devices, and made an evaluation
    # half as long again. Read when scipy is loaded, which jax does when it first needs LAPACK.
    os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')
    if not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
        jax.config.update('jax_compilation_cache_dir', str(Path.home() / '.cache' / 'lingrok' / 'jax'))

    from lingrok.checkpoint import CheckpointError
    from lingrok.config import ConfigError
    from lingrok.run import Interrupted, RunError

    joined = False
    try:
        rest = _parse(sys.argv if argv is None else argv, paths)
        if _MULTIHOST.value:
            joined = True
            _join_processes()
        code = run(rest) if paths else run()
    except Interrupted as interrupt:
        print(interrupt, file=sys.stderr)
        code = 128 + interrupt.signum
    except KeyboardInterrupt:
        print('stopped at once; what was saved stays, the same command resumes', file=sys.stderr)
        code = 130
    except (ConfigError, RunError, CheckpointError, flags.Error) as error:
        code = fail(' '.join(str(error).split()))
    except OSError as error:
        where = f'{error.filename}: ' if error.filename else ''
        unusable = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)
        advice = 'choose another place' if error.errno in unusable else 'what was saved stays, the same command resumes'
        code = fail(f'{where}{error.strerror or error}; {advice}')
    except Exception:
        if not joined:
            raise
        traceback.print_exc()
        code = EXIT_FAILED
    if joined and code in (EXIT_FAILED, EXIT_USAGE, 130):
        # An orderly exit would wait for the other processes, which wait for this one. They end when it is gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code or 0)


def _join_processes() -> None:
    """Makes this process one of several; before anything else uses jax."""
    import jax

    number = {name: int(os.environ[f'JAX_{name.upper()}']) if f'JAX_{name.upper()}' in os.environ else None
              for name in ('num_processes', 'process_id')}
    jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM from the run
    try:
        jax.distributed.initialize(**number)
    except (RuntimeError, ValueError) as error:
        raise flags.Error(f'--multihost: {error}') from error


def fail(message: str) -> int:
    print(f'error: {message}', file=sys.stderr)
    return EXIT_USAGE


def _parse(argv: list[str], paths: bool) -> list[str]:
    """Parses absl flags; returns the other arguments. Whatever absl or the config file raise becomes a ConfigError."""
    from ml_collections import ConfigDict

    from lingrok.config import ConfigError

    if {'--help', '-h'} & {*argv[1:]}:
        print(sys.modules['__main__'].__doc__, flags.FLAGS.main_module_help(), sep='\n')
        sys.exit(0)
    path = config_argument(argv).partition(':')[0]
    if path and not Path(path).is_file():
        raise ConfigError(f'{path} is not a file; --config looks like --config=configs/recall.py:demo')
    try:
        rest = flags.FLAGS(argv)
    except Exception as error:
        raise ConfigError(_problem(error, argv)) from error
    if len(rest) > 1 and not paths:
        raise ConfigError(f'unexpected argument {rest[1]!r}; flags look like --config=configs/recall.py:demo')
    if path and not isinstance(flags.FLAGS['config'].value, ConfigDict):
        raise ConfigError(f'get_config of {path} returned {flags.FLAGS["config"].value!r}; allowed: a ConfigDict, such '
                          'as lingrok.config.defaults makes')
    return rest[1:]


def config_argument(argv: list[str]) -> str:
    """path:variant of --config=path:variant or --config path:variant."""
    for arg, following in zip(argv, [*argv[1:], ''], strict=True):
        name, equals, value = arg.partition('=')
        if name in ('--config', '-config'):
            return value if equals else following
    return ''


def _problem(error: Exception, argv: list[str]) -> str:
    """What is wrong with the flags, in one line."""
    from lingrok.config import ConfigError, unknown_key

    chain = [error]
    while (inner := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__)):
        chain.append(inner)
    refused = [e for e in chain if isinstance(e, ConfigError)]
    if refused:
        return str(refused[-1])  # the ones before it are wrappings with a traceback in their text
    path = config_argument(argv).partition(':')[0]
    for e in reversed(chain):
        frames = traceback.extract_tb(e.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).absolute() == Path(path).absolute()]
        if lines or isinstance(e, SyntaxError):
            return f'{path}, line {lines[-1] if lines else e.lineno}: {type(e).__name__}: {e}'
    if "no attribute 'get_config'" in str(error):
        return f'{path} has no function get_config; see configs/recall.py'
    keys = _config_keys(argv)
    for key in (arg[len('--config.') :].partition('=')[0] for arg in argv if arg.startswith('--config.')):
        if keys and key not in keys and f'{key}.' not in {name[: len(key) + 1] for name in keys}:
            group = [name for name in keys if name.rpartition('.')[0] == key.rpartition('.')[0]]
            near = difflib.get_close_matches(key, keys, 1)
            return unknown_key('the config', key, group or near or keys)
    if isinstance(error, flags.Error):
        allowed = {'invalid literal for int': 'a whole number', 'convert string to float': 'one number'}
        vary = '; values that differ between replicas go into config.vary' if '--config.' in str(error) else ''
        hint = next((f'; allowed: {kind}{vary}'
                     for text, kind in allowed.items() if text in str(error)), '')
        return f'{error}{hint}'
    return f'{error}; config flags look like --config.optim.learning_rate=0.1'


def _config_keys(argv: list[str]) -> list[str]:
    """Dotted names of all keys of the config file, without overrides."""
    with contextlib.suppress(Exception):
        return list(_leaves(flags.FLAGS['config'].parser.parse(config_argument(argv)).to_dict()))
    return []


def _leaves(tree: Mapping, prefix: str = ''):
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f'{prefix}{name}.')
        else:
            yield prefix + name


def list_configs(folder: Path) -> str:
    """Every config file of a folder with the first line of its docstring, and its variants as --config takes them."""
    from lingrok.sweep import load_config_file

    lines = []
    for path in sorted(folder.glob('*.py')):
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        try:
            module = load_config_file(path)
            title, variants = (module.__doc__ or '').partition('\n')[0], getattr(module, 'VARIANTS', ())
        except Exception as error:  # a file that somebody is writing does not hide the others
            title, variants = f'cannot be read: {type(error).__name__}: {error}', ()
        lines += [f'{shown}  {title}', *textwrap.wrap(' '.join(f':{name}' for name in variants if name), 112,
                                                      initial_indent='    ', subsequent_indent='    ')]
    return '\n'.join(lines)


class Expected(NamedTuple):
    """A number to compare with: of what, which, from where, and the quantity measured here ('name' or 'name[3]')."""

    what: str
    value: str
    source: str
    quantity: str


def experiment(measure: Callable, figure: Callable, *, task: str, expected: Sequence[Expected] = (),
               frame: Callable | None = None, curves: Sequence[str] = (), default_steps: str = 'last') -> None:
    """The main program of an analysis script: `script.py RUN` measures a run directory and draws one figure.

    Writes <name>.png, .pdf, .csv (the numbers) and .json (caption, expected numbers beside the measured ones) to the
    `figures` folder of the run, where <name> is that of the script, and prints the comparison. Several steps make
    <name>_steps.png and so on, and where that is another figure, the whole one at each step, <name>_steps/<step>.png.

    Args:
        measure: (run, steps=..., seed=...) -> {name: Series}; as a rule `run.measure(fn, ...)`.
        figure: (series, config) -> Figure, of the last step measured.
        task: name of the task that the run must be of.
        expected: numbers to print beside the measured ones.
        frame: draw(axis, {name: array of one step and replica}, config): a film strip, where several steps are asked.
        curves: quantities drawn against the step where several steps are asked for.
        default_steps: --steps where it is not given.
    """
    name = Path(sys.argv[0]).stem
    own = {'module_name': sys.argv[0]}
    steps = flags.DEFINE_string('steps', default_steps, 'saved steps: last, all, or a list such as 0,100,900', **own)
    seed = flags.DEFINE_integer('seed', 0, 'of what the measurement draws', **own)
    out = flags.DEFINE_string('out', '', 'folder of the results; by default the figures folder of the run', **own)

    def go(paths: list[str]) -> None:
        from lingrok import figures
        from lingrok.config import require
        from lingrok.log import Series
        from lingrok.run import load_run

        run = load_run(one_path(paths))
        require(run.task.NAME == task, f'{run.path} is a run of the task {run.task.NAME}; this script reads {task}')
        chosen = _chosen_steps(steps.value, run.steps)
        directory = _folder(out.value, Path(run.path) / 'figures')
        if run.nan_replicas():
            print(f'warning: replicas {run.nan_replicas()} had turned NaN and are left out', file=sys.stderr)
        series = measure(run, steps=chosen, seed=seed.value)
        several = len(chosen) > 1 and (frame or curves)
        drawn = figures.style.dynamics(series, run.config, frame=frame, curves=curves) if several else figure(
            series, run.config)
        stem = f'{name}_steps' if several else name
        if several:
            drawn.set_label(f'{drawn.get_label()} The whole figure: {figures.style.caption(figure)}')
        report = {'run': str(run.path), 'steps': chosen, 'seed': seed.value,
                  'expected': compare(series, run.config, expected)}
        _write_results(drawn, directory, stem, series, report)
        if several:
            _write_film(lambda until: figure({key: Series(x.steps[: until + 1], x.values[: until + 1])
                                              for key, x in series.items()}, run.config), chosen, directory / stem)

    main(go, paths=True)


def calculation(measure: Callable, figure: Callable, *, expected: Sequence[Expected] = ()) -> None:
    """The main program of a script that needs no run: `script.py` computes, draws one figure, writes and prints.

    The files are those of `experiment`, in runs/theory or the folder --out.

    Args:
        measure: (seed) -> {name: Series}; as many replicas as it likes, which may differ between quantities.
        figure: (series) -> Figure.
        expected: numbers to print beside the measured ones.
    """
    own = {'module_name': sys.argv[0]}
    seed = flags.DEFINE_integer('seed', 0, 'of all that is drawn', lower_bound=0, **own)
    out = flags.DEFINE_string('out', '', 'folder of the results; by default runs/theory', **own)

    def go() -> None:
        directory = _folder(out.value, Path('runs/theory'))
        series = measure(seed.value)
        report = {'seed': seed.value, 'expected': _compare(series, {'': slice(None)}, expected)}
        _write_results(figure(series), directory, Path(sys.argv[0]).stem, series, report)

    main(go)


def language_model(measure: Callable, figure: Callable, *, expected: Sequence[Expected] = ()) -> None:
    """The main program of a script that studies a pretrained language model: `script.py --model=smollm2`.

    With --models or --revisions it does so for one model after the other, the checkpoints of one training as a rule,
    and a killed script goes on with the next one. The files are those of `experiment`, in runs/lm/<model> or the folder
    --out, which exists once `measure` is called.

    Args:
        measure: (model, seed, folder) -> {name: Series}, of one step, the replicas being texts; model: a
            `language.Pretrained`; folder: where to keep what a killed script goes on from.
        figure: (series) -> Figure.
        expected: numbers to print beside the measured ones.
    """
    own = {'module_name': sys.argv[0]}
    name = flags.DEFINE_string('model', 'smollm2', 'smollm2, a Hugging Face folder, a .gguf file, or a hub name '
                               'owner/model', **own)
    revision = flags.DEFINE_string('revision', '', 'branch, tag or commit of a hub name', **own)
    models = flags.DEFINE_list('models', [], 'several folders or files instead of --model, such as the checkpoints of '
                               'one training; a number at the end of a name is its step', **own)
    revisions = flags.DEFINE_list('revisions', [], 'several revisions of the hub name, such as step0,step512', **own)
    dtype = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'of parameters and activations', **own)
    seed = flags.DEFINE_integer('seed', 0, 'of all that is drawn', lower_bound=0, **own)
    out = flags.DEFINE_string('out', '', 'folder of the results; by default runs/lm/<model>', **own)

    def go() -> None:
        from lingrok.pretrained.language import load_pretrained

        several = [(path, None) for path in models.value] or [(name.value, tag) for tag in revisions.value]
        chosen = several or [(name.value, revision.value or None)]
        titles = [f'{path}@{tag}' if tag else path for path, tag in chosen]
        shared = os.path.commonprefix([title.strip('./') for title in titles])
        directory = _folder(out.value, Path('runs/lm') / (shared.replace('/', '_').rstrip('_.@') or 'models'))
        stem, parts = Path(sys.argv[0]).stem, []
        for (path, tag), title in zip(chosen, titles, strict=True):
            folder = directory / title.strip('./').replace('/', '_') if several else directory

            def of_one(path=path, tag=tag, folder=folder):
                model = load_pretrained(path, tag, dtype.value)
                folder.mkdir(parents=True, exist_ok=True)
                return measure(model, seed.value, folder)

            parts.append(_kept(folder / f'{stem}.npz', of_one) if several else of_one())
        series = _joined(parts, titles) if several else parts[0]
        report = {'model': ', '.join(titles), 'dtype': dtype.value, 'seed': seed.value,
                  'expected': _compare(series, {'': slice(None)}, expected)}
        _write_results(figure(series), directory, stem, series, report)

    main(go)


def _kept(path: Path, measure: Callable) -> dict:
    """{name: Series} of one model: from its file if it is there and was made by the same command, or measured."""
    from lingrok.log import Series

    own = {flag.name: flag.value for flag in flags.FLAGS.get_flags_for_module(sys.argv[0])}
    command = json.dumps({key: value for key, value in own.items() if key not in ('models', 'revisions', 'out')})
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(path) as file:
        if str(file['command']) == command:
            return {name: Series(np.zeros(1, int), file[name]) for name in file.files if name != 'command'}
    series = measure()
    part = path.with_name(path.name + '.part.npz')
    np.savez_compressed(part, command=command, **{name: values for name, (_, values) in series.items()})
    part.replace(path)
    return series


def _joined(parts: Sequence[Mapping], titles: Sequence[str]) -> dict:
    """The series of several models as one along their steps, which are the numbers at the end of their titles."""
    from lingrok.log import Series

    found = [re.search(r'(\d+)\D*$', title) for title in titles]
    steps = np.array([int(match[1]) for match in found] if all(found) else range(len(titles)))
    order = np.argsort(steps, kind='stable')
    return {name: Series(steps[order], np.concatenate([parts[i][name].values for i in order])) for name in parts[0]}


def _folder(asked: str, default: Path) -> Path:
    """The folder of the results; raises before anything is computed if it cannot be one."""
    from lingrok.config import require

    folder = Path(asked) if asked else default
    taken = [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]
    require(not taken, f'--out={folder}: {taken and taken[0]} is a file; choose another folder')
    return folder


def _write_results(figure, directory: Path, stem: str, series: Mapping, report: Mapping) -> None:
    """Figure, numbers, and report with the figure's caption; prints the expected numbers beside the measured ones."""
    path = write_figure(figure, directory, stem, series)
    (directory / f'{stem}.json').write_text(json.dumps({'caption': figure.get_label(), **report}, indent=1) + '\n')
    compared = report['expected']
    shown = [row for row in compared if row['measured'] != ABSENT]
    for row in shown:
        print(f'{row["what"]}: expected {row["value"]} ({row["source"]}); measured {row["measured"]}')
    if len(shown) < len(compared):
        print(f'{len(compared) - len(shown)} expected numbers are of other settings, see {stem}.json')
    print(f'figure: {path} (and .pdf, .csv, .json)')


def _write_film(draw: Callable, steps: Sequence[int], folder: Path) -> None:
    """draw(i), the figure as it is at steps[i], for at most FILM steps: <step>.png in a folder of their own."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob('*.png'):
        old.unlink()
    for i in np.unique(np.linspace(0, len(steps) - 1, min(FILM, len(steps))).round().astype(int)):
        draw(int(i)).savefig(folder / f'{steps[i]}.png', dpi=110)


def _chosen_steps(text: str, saved: list[int]) -> list[int]:
    from lingrok.config import require

    if text in ('last', 'all'):
        return saved if text == 'all' else saved[-1:]
    parts = text.split(',')
    numbers = all(part.strip().isdecimal() for part in parts)
    require(numbers, f'--steps={text}; allowed: last, all, or a list of {saved}')
    chosen = sorted({int(part) for part in parts})
    missing = [step for step in chosen if step not in saved]
    require(not missing, f'--steps: the run has no checkpoint of step {missing and missing[0]}; it has {saved}')
    return chosen


def compare(series: Mapping, config, expected: Sequence[Expected]) -> list[dict]:
    """Expected numbers beside the measured ones: mean and 95 % interval over the replicas of every setting."""
    return _compare(series, config.groups(), expected)


def _compare(series: Mapping, groups: Mapping, expected: Sequence[Expected]) -> list[dict]:
    from lingrok.metrics import text

    rows = []
    for entry in expected:
        name, _, index = entry.quantity.partition('[')
        measured = {}
        if name in series:
            values = series[name].values[-1]
            place = tuple(int(i) for i in index.rstrip(']').split(',')) if index else ()
            if values.ndim == 1 + len(place) and all(-n <= i < n for i, n in zip(place, values.shape[1:], strict=True)):
                values = values[(slice(None), *place)]
                measured = {label: text(values[group]) for label, group in groups.items()}
        shown = '; '.join(f'{label}: {value}' if label else value for label, value in measured.items())
        rows.append({**entry._asdict(), 'measured': shown or ABSENT})
    return rows


def write_figure(figure, directory: Path, name: str, series: Mapping) -> Path:
    """Writes name.png, name.pdf and the numbers behind them, name.csv (quantity, step, replica, index, value).

    index: place in a quantity that has axes, '3' or '3/5', empty where it is one number a replica. A quantity of more
    than 10^5 numbers, as a rule a picture, goes to name.npz as an array (steps, replicas, ...).
    """
    path = save_figure(figure, directory, name)
    large = {quantity: values for quantity, (_, values) in series.items() if values.size > CSV_LIMIT}
    if large:
        np.savez_compressed(directory / f'{name}.npz', **large)
    with (directory / f'{name}.csv').open('w', newline='') as file:
        rows = csv.writer(file)
        rows.writerow(('quantity', 'step', 'replica', 'index', 'value'))
        for quantity, (steps, values) in series.items():
            if quantity in large:
                continue
            rows.writerows((quantity, steps[i], replica, '/'.join(map(str, place)), f'{value:.6g}')
                           for (i, replica, *place), value in np.ndenumerate(values))
    return path


def save_figure(figure, directory: Path, name: str) -> Path:
    """Writes name.png and name.pdf; returns the path of the former."""
    directory.mkdir(parents=True, exist_ok=True)
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine('none')  # laid out once and not once a file
    figure.savefig(directory / f'{name}.pdf')
    figure.savefig(directory / f'{name}.png', dpi=200)
    return directory / f'{name}.png'


def write_report(directory: Path, name: str, figures: Mapping[str, Any], rows: Sequence[Mapping],
                 expected: Sequence[tuple[str, str, str]]) -> None:
    """Results of a script that reads whole sweeps: figures by file name, a table (CSV), expected numbers (JSON).

    expected: (what, value, source); printed, too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f'{name}.csv').open('w', newline='') as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    expected = [dict(zip(('what', 'value', 'source'), row, strict=True)) for row in expected]
    captions = {stem: figure.get_label() for stem, figure in figures.items()}
    (directory / f'{name}.json').write_text(json.dumps({'captions': captions, 'expected': expected}, indent=1) + '\n')
    for row in expected:
        print(f'{row["what"]}: expected {row["value"]} ({row["source"]})')
    for stem, figure in figures.items():
        print(f'figure: {save_figure(figure, directory, stem)} (and .pdf; numbers: {name}.csv)')


def print_table(name: str, rows: Mapping[str, Mapping[str, str]]) -> None:
    """Prints a Markdown table: row -> {column: cell}; `name` stands above the rows."""
    columns = list(next(iter(rows.values())))
    for cells in ([name, *columns], ['---'] * (len(columns) + 1),
                  *([row, *cells.values()] for row, cells in rows.items())):
        print('| ' + ' | '.join(cells) + ' |')


def one_path(paths: Sequence[str]) -> Path:
    """The only argument of a script, a run or sweep directory."""
    from lingrok.config import ConfigError

    if len(paths) != 1:
        raise ConfigError(f'{len(paths)} directories given; try: python {sys.argv[0]} runs/<name>-<id>')
    return Path(paths[0])


def asked_truncations(asked: Sequence[str], folder: Path, question: str) -> list[str]:
    """The edited models of --truncate, or the one that laser.py has chosen for this model and question, if any."""
    from lingrok.config import ConfigError
    from lingrok.lm import truncation

    path = folder / CHOSEN
    for entry in asked:
        truncation.first_layer(entry, 0)  # reads it
    if asked or not path.is_file():
        if not asked:
            print('only the whole model: no --truncate, and laser.py has not chosen one yet')
        return list(asked)
    try:
        chosen = json.loads(path.read_text()).get(question, '')
    except (ValueError, AttributeError) as error:
        raise ConfigError(f'{path} is damaged; remove it, and run laser.py again or name a --truncate') from error
    return [chosen] if chosen else []


def compare_models(model, question, entries: Sequence[str], seed: int) -> dict:
    """Series of `truncation.compare`; prints what is said behind the first prompt, and a table with intervals."""
    from lingrok.lm import truncation
    from lingrok.log import Series

    study, layers = truncation.study(model, question), model.config.num_layers
    found = truncation.compare(study, entries)
    rows = {}
    for entry in ('', *entries):
        name, params, start = entry or 'whole', truncation.edited(model, entry), truncation.first_layer(entry, layers)
        said = truncation.top_words(study, params, start, 0)
        print(f'{name}: {question.texts[0]!r} -> ' + ', '.join(f'{word!r} {p:.3f}' for word, p in said))
        values = {word: found[f'{name}/p/{word}'] for word in question.words}
        rows[name] = {f'P({word})': interval_text(p_B, seed) for word, p_B in values.items()}
        for word in (question.answer, question.generic):
            rows[name][f'rank of {word}, median'] = f'{np.median(found[f"{name}/rank/{word}"]):g}'
        rows[name]['answer ahead of generic'] = f'{np.mean(values[question.answer] > values[question.generic]):.0%}'
    print_table(f'{len(question.texts)} prompts, 95 % bootstrap intervals', rows)
    return {name: Series(np.zeros(1, int), value[None]) for name, value in found.items()}


def interval_text(values_B: np.ndarray, seed: int = 0) -> str:
    """'.339 [.310, .368]': mean and bootstrap interval over prompts."""
    from lingrok.lm.truncation import bootstrap

    low, high = bootstrap(values_B, seed)
    return f'{np.mean(values_B):.3f} [{low:.3f}, {high:.3f}]'
