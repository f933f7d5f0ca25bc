"""What the scripts in `experiments/` share: config flags, one-line errors, compilation cache, writing figures."""

import contextlib
import csv
import difflib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from absl import flags

_MULTIHOST = flags.DEFINE_bool(
    'multihost', False, 'one of several processes, as a rule one a host, that train together: TPU pods, SLURM and Open '
    'MPI are detected; elsewhere set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID')

EXIT_FAILED, EXIT_USAGE, EXIT_NAN = 1, 2, 4  # after a signal: 128 + its number, as a shell expects


def main(run: Callable[[], int | None], argv: list[str] | None = None) -> None:
    """Parses the flags, calls `run` and exits. What a user can mend ends in one line on stderr and exit code 2."""
    import jax

    # One virtual device a core: replicas then train side by side, each on its own core. Settled before jax starts.
    if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
        jax.config.update('jax_num_cpu_devices', len(os.sched_getaffinity(0)))
    if not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
        jax.config.update('jax_compilation_cache_dir', str(Path.home() / '.cache' / 'lingrok' / 'jax'))

    from lingrok.checkpoint import CheckpointError
    from lingrok.config import ConfigError
    from lingrok.run import Interrupted, RunError

    joined = False
    try:
        _parse(sys.argv if argv is None else argv)
        if _MULTIHOST.value:
            joined = True
            _join_processes()
        code = run()
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


def _parse(argv: list[str]) -> None:
    """Parses absl flags. Whatever absl, ml_collections or the config file raise becomes a ConfigError."""
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
    if len(rest) > 1:
        raise ConfigError(f'unexpected argument {rest[1]!r}; flags look like --config=configs/recall.py:demo')
    if path and not isinstance(flags.FLAGS['config'].value, ConfigDict):
        raise ConfigError(f'get_config of {path} returned {flags.FLAGS["config"].value!r}; allowed: a ConfigDict, such '
                          'as lingrok.config.defaults makes')


def config_argument(argv: list[str]) -> str:
    """path:variant of --config=path:variant or --config path:variant."""
    for arg, following in zip(argv, [*argv[1:], ''], strict=True):
        name, equals, value = arg.partition('=')
        if name in ('--config', '-config'):
            return value if equals else following
    return ''


def _problem(error: Exception, argv: list[str]) -> str:
    """What is wrong with the flags, in one line."""
    from lingrok.config import ConfigError, suggest

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
            return f'the config has no key {key!r}; {suggest(key, group or near or keys)}'
    if isinstance(error, flags.Error):
        allowed = {'invalid literal for int': 'a whole number', 'convert string to float': 'one number'}
        hint = next((f'; allowed: {kind}; values that differ between replicas go into config.vary'
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


def write_figure(figure, directory: Path, name: str, series: Mapping) -> Path:
    """Writes name.png, name.pdf and the numbers behind them, name.csv (quantity, step, replica, value)."""
    directory.mkdir(parents=True, exist_ok=True)
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine('none')  # laid out once and not once a file
    figure.savefig(directory / f'{name}.pdf')
    figure.savefig(directory / f'{name}.png', dpi=200)
    with (directory / f'{name}.csv').open('w', newline='') as file:
        rows = csv.writer(file)
        rows.writerow(('quantity', 'step', 'replica', 'value'))
        for quantity, (steps, values) in series.items():
            if values.ndim == 2:
                rows.writerows((quantity, step, replica, f'{value:.6g}')
                               for step, row in zip(steps, values, strict=True) for replica, value in enumerate(row))
    return directory / f'{name}.png'
