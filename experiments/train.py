"""Trains one config and draws its figure: config in, run directory out.

    python experiments/train.py --config=configs/recall.py:demo [--workdir=DIR] [--config.optim.learning_rate=0.1]
    python experiments/train.py --list_configs                                every config file and its variants

The same command resumes an interrupted run and skips a finished one. The last lines on stdout name the figure and sum
up the run. Exit codes: 0 finished; 2 bad input; 4 finished, but a replica turned NaN; 128 + signal when interrupted.
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from lingrok import cli

_CONFIG = config_flags.DEFINE_config_file('config', help_string='configs/<file>.py:<variant>')
_WORKDIR = flags.DEFINE_string('workdir', '', 'run directory; by default runs/<name>-<id>')
flags.declare_key_flag('multihost')  # --help shows it
_LIST_CONFIGS = flags.DEFINE_bool('list_configs', False, 'show every config file and its variants; run nothing')


def main() -> int:
    import jax

    from lingrok import figures, run
    from lingrok.config import ConfigError, from_config_dict

    if _LIST_CONFIGS.value:
        print(cli.list_configs(Path(__file__).resolve().parent.parent / 'configs'))
        return 0
    if _CONFIG.value is None:
        raise ConfigError('no config; try --config=configs/recall.py:demo, or --list_configs')
    cfg = from_config_dict(_CONFIG.value)
    directory = Path(_WORKDIR.value) if _WORKDIR.value else run.default_directory(cfg)
    finished = run.execute(cfg, directory)
    if jax.process_index():  # of several processes, the first one reports
        return cli.EXIT_NAN if finished.nan_replicas() else 0
    series = finished.metrics()
    if cfg.task.NAME in figures.TRAINING:
        figure = figures.TRAINING[cfg.task.NAME](series, cfg)
        path = cli.write_figure(figure, directory / 'figures', 'training', series)
        print(f'figure: {path} (and .pdf, .csv)')
    print(finished.summary())
    return cli.EXIT_NAN if finished.nan_replicas() else 0


if __name__ == '__main__':
    cli.main(main)
