"""What the scripts in `experiments/` share: config flags, one-line errors, compilation cache, writing figures."""

import csv
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from absl import flags

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

    try:
        _parse(sys.argv if argv is None else argv)
        code = run()
    except Interrupted as interrupt:
        print(interrupt, file=sys.stderr)
        code = 128 + interrupt.signum
    except KeyboardInterrupt:
        print('stopped at once; the last checkpoint stands', file=sys.stderr)
        code = 130
    except (ConfigError, RunError, CheckpointError, flags.Error) as error:
        code = fail(' '.join(str(error).split()))
    except OSError as error:
        where = f'{error.filename}: ' if error.filename else ''
        code = fail(f'{where}{error.strerror or error}; what was saved stays, the same command resumes')
    sys.exit(code or 0)


def fail(message: str) -> int:
    print(f'error: {message}', file=sys.stderr)
    return EXIT_USAGE


def _parse(argv: list[str]) -> None:
    """Parses absl flags; a bad override of a config key becomes a ConfigError that names the nearest key."""
    from lingrok.config import ConfigError, suggest

    try:
        rest = flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:
        # ml_collections says only which part of the dotted key it did not find.
        word = str(error).strip('"\' ').split("'")[0]
        keys = _config_keys(argv)
        raise ConfigError(f'the config has no key {word!r}; {suggest(word, keys)}') from error
    except (TypeError, FileNotFoundError, SyntaxError) as error:
        raise ConfigError(f'{error}; config flags look like --config.optim.learning_rate=0.1') from error
    if len(rest) > 1:
        raise ConfigError(f'unexpected argument {rest[1]!r}; flags look like --config=configs/recall.py:demo')


def _config_keys(argv: list[str]) -> list[str]:
    from lingrok.config import defaults

    path = next((arg.partition('=')[2] for arg in argv if arg.startswith('--config=')), '')
    from lingrok.config import TASKS

    name = Path(path.partition(':')[0]).stem
    tree = defaults(name if name in TASKS else 'recall').to_dict()
    return [f'{group}.{key}' if isinstance(keys, Mapping) else group for group, keys in tree.items()
            for key in (keys if isinstance(keys, Mapping) else [''])]


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
