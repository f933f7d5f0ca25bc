"""Runs a sweep: all points of a config's `get_sweep`, in as few compiled programs as fit.

    python experiments/sweep.py --list_configs                                every config file and its variants
    python experiments/sweep.py --config=configs/recall.py:demo --list        points, programs, parameters, memory
    python experiments/sweep.py --config=configs/recall.py:demo --dry_run     the same, and measured seconds a step
    python experiments/sweep.py --config=configs/recall.py:demo               all programs, one after the other
    python experiments/sweep.py --config=configs/recall.py:demo --index=3     one program
    python experiments/sweep.py ... --launcher=local                          in parallel processes, one a core or GPU
    python experiments/sweep.py ... --launcher=slurm --config.slurm.partition=gpu --config.slurm.gpus=1
    python experiments/sweep.py --workdir=runs/recall_demo-sweep-ID --status  also: --status --index=3, its log
    python experiments/sweep.py --workdir=runs/recall_demo-sweep-ID --collect one table of every point and step

The same command resumes what was interrupted and skips what is finished. Exit codes: 0 all is well; 1 programs have
failed, the last lines say which and why; 2 bad input; 4 finished, but a replica turned NaN; 128 + signal.
"""

import sys
import time
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from lingrok import cli

_CONFIG = config_flags.DEFINE_config_file('config', help_string='configs/<file>.py:<variant>')
_WORKDIR = flags.DEFINE_string('workdir', '', 'sweep directory; by default runs/<name>-sweep-<id>')
_LIST_CONFIGS = flags.DEFINE_bool('list_configs', False, 'show every config file and its variants; run nothing')
_LIST = flags.DEFINE_bool('list', False, 'show points, programs, parameters and memory; run nothing')
_DRY_RUN = flags.DEFINE_bool('dry_run', False, 'as --list, and measure the seconds of a few steps')
_INDEX = flags.DEFINE_integer('index', None, 'run this program alone; with --status, show its log')
_STATUS = flags.DEFINE_bool('status', False, 'show how far every program is')
_COLLECT = flags.DEFINE_bool('collect', False, 'write sweep.csv, a table of every point and step')
_LAUNCHER = flags.DEFINE_enum('launcher', '', ['', 'local', 'slurm'], 'processes of this machine, or a SLURM job array')
_JOBS = flags.DEFINE_integer('jobs', 0, '--launcher=local: processes at once; 0: one a core or GPU', lower_bound=0)
_MAX_REPLICAS = flags.DEFINE_integer('max_replicas', 0, 'most replicas of a program; 0: what fits', lower_bound=0)
_ONE_PROGRAM = flags.DEFINE_bool('one_program', False, 'refuse a sweep that takes more than one program')
_MEMORY_GIB = flags.DEFINE_float('memory_gib', 0, 'memory of a device that a program may take; 0: 80 %', lower_bound=0)

MEASURED_STEPS = 20


def main() -> int:
    if _LIST_CONFIGS.value:
        print(cli.list_configs(Path(__file__).resolve().parent.parent / 'configs'))
        return 0
    if _STATUS.value:
        return _show_status(Path(_existing()))
    if _COLLECT.value:
        from lingrok import sweep

        print(f'table: {sweep.collect(_existing())}')
        return 0
    return _sweep()


def _existing() -> str:
    """The sweep directory of a command that only reads: --workdir, or the default one of --config."""
    from lingrok import sweep
    from lingrok.config import ConfigError

    if _WORKDIR.value:
        return _WORKDIR.value
    if _CONFIG.value is None:
        raise ConfigError('no sweep; try --workdir=<sweep directory>')
    return str(sweep.default_directory(*_asked()))


def _asked() -> tuple[dict, list]:
    """The config as nested dicts, and the points that its file says it sweeps."""
    from lingrok import sweep
    from lingrok.config import ConfigError

    if _CONFIG.value is None:
        raise ConfigError('no config; try --config=configs/recall.py:demo')
    given = cli.config_argument(sys.argv)
    path, _, variant = given.partition(':')
    file = sweep.load_config_file(path)
    return _CONFIG.value.to_dict(), file.get_sweep(variant) if hasattr(file, 'get_sweep') else [{}]


def _sweep() -> int:
    import jax

    from lingrok import sweep

    tree, points = _asked()
    directory = Path(_WORKDIR.value or sweep.default_directory(tree, points)).absolute()
    devices = jax.devices()
    budget = int(_MEMORY_GIB.value * 2**30) or sweep.device_budget(devices)
    # A process of a launcher has one device, one task of an array what `slurm.gpus` says.
    count = {'': len(devices), 'local': 1, 'slurm': max(tree['slurm']['gpus'], 1)}[_LAUNCHER.value]
    planned = sweep.open_sweep(directory, tree, points, devices=devices[:count], budget=budget,
                               max_replicas=_MAX_REPLICAS.value, one_program=_ONE_PROGRAM.value)
    if _LIST.value or _DRY_RUN.value:
        _show(planned, directory, measure=_DRY_RUN.value)
        return 0
    programs = planned.programs if _INDEX.value is None else [planned.program(_INDEX.value)]
    if _LAUNCHER.value:
        return _launch(planned, programs, directory)
    return _run(programs, directory)


def _show(planned, directory: Path, *, measure: bool) -> None:
    from lingrok import sweep

    print('\t'.join(('index', 'replica', *planned.columns)))
    for program in planned.programs:
        for replica, row in enumerate(program.rows):
            print('\t'.join(map(str, (program.index, replica, *planned.points[row]))))
    print()
    total, known = 0.0, {}
    for program in planned.programs:
        steps, replicas = program.config.train.num_steps, program.config.num_replicas
        line = (f'program {program.index}: {replicas} replicas of {sweep.num_parameters(program):,} parameters, '
                f'{steps} steps, {program.memory / 2**20:,.1f} MiB a device, {program.name}')
        if measure:
            shape = (program.memory, replicas, steps)
            if shape not in known:
                known[shape] = _seconds_a_step(program)
            line += f', {known[shape]:.4f} s a step, {known[shape] * steps / 60:,.1f} min'
            total += known[shape] * steps
        print(line)
    what = f', {total / 3600:,.2f} hours of this machine without evaluations' if measure else ''
    print(f'{len(planned.points)} points in {len(planned.programs)} program(s){what}; nothing was run\n{directory}')


def _seconds_a_step(program) -> float:
    """Measured on a few steps of the compiled program, after as many to warm up."""
    import jax
    import numpy as np

    from lingrok import sweep

    programs = sweep.make_programs(program.config)
    task_state, state = programs.init_task(programs.settings), programs.init(programs.settings)
    steps = np.int32(min(MEASURED_STEPS, programs.capacity))
    for _ in range(2):
        began = time.monotonic()
        state, losses = programs.train_chunk(state, task_state, programs.settings, steps)
        jax.block_until_ready(losses)
        seconds = time.monotonic() - began
    return seconds / int(steps)


def _run(programs, directory: Path) -> int:
    """Programs one after the other in this process; one that fails does not keep the others from running."""
    from lingrok import run
    from lingrok.checkpoint import CheckpointError
    from lingrok.config import ConfigError

    failed, code = {}, 0
    for program in programs:
        try:
            finished = run.execute(program.config, directory / program.name)
            print(f'{program.name}: {finished.summary()}', flush=True)
            code = cli.EXIT_NAN if finished.nan_replicas() else code
        except (ConfigError, run.RunError, CheckpointError, OSError) as error:
            if len(programs) == 1:
                raise
            failed[program.index] = ' '.join(str(error).split())
    return _end(failed) or code


def _launch(planned, programs, directory: Path) -> int:
    import jax

    from lingrok import launch, sweep

    states = [state for state, _, _ in sweep.status(directory)]
    indices = [program.index for program in programs if states[program.index] not in ('finished', 'running')]
    print(f'{len(indices)} of {len(programs)} program(s) to run in {directory}')
    if not indices:
        return 0
    if _LAUNCHER.value == 'slurm':
        options = planned.programs[0].config.slurm
        array = launch.slurm(lambda index: _command(directory, index), indices, directory, options)
        print(f'array job {array}; see it by: python experiments/sweep.py --workdir={directory} --status')
        return 0
    gpus = jax.local_device_count() if jax.default_backend() == 'gpu' else 0
    failed = launch.local(lambda index: _command(directory, index), indices, directory, gpus=gpus, jobs=_JOBS.value)
    return _end(failed)


def _command(directory: Path, index: int) -> list[str]:
    """The command that runs one program of this sweep."""
    config = [arg for arg in sys.argv[1:] if arg.startswith('--config')]
    return [sys.executable, str(Path(__file__).absolute()), *config, f'--workdir={directory}', f'--index={index}']


def _end(failed: dict[int, str]) -> int:
    for index, reason in sorted(failed.items()):
        print(f'error: program {index}: {reason}', file=sys.stderr)
    return cli.EXIT_FAILED if failed else 0


def _show_status(directory: Path) -> int:
    from lingrok import launch, sweep

    if _INDEX.value is not None:
        from lingrok.config import require

        log = launch.log_of(directory, _INDEX.value)
        require(log is not None, f'program {_INDEX.value} has no log: no launcher has started it')
        print(f'{log}:\n{log.read_text(errors="replace")}')
        return 0
    queued = launch.queue(directory)
    for index, (state, step, steps) in enumerate(sweep.status(directory)):
        slurm_state, log = queued.get(index, ('', None))
        parts = [f'{index:4d}  {state:<11}  step {step} of {steps}', slurm_state and f'SLURM: {slurm_state}', log or '']
        print('  '.join(str(part) for part in parts if part))
    return 0


if __name__ == '__main__':
    cli.main(main)
