"""Launchers: the programs of a sweep as processes of this machine, or as tasks of a SLURM job array.

Both start the same command a program, `experiments/sweep.py ... --index=i`, which can be started by hand as well. What
it writes to the screen goes to a log file in the sweep directory.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lingrok.config import ConfigError, SlurmConfig, require
from lingrok.log import write_json

Command = Callable[[int], list[str]]  # index of a program -> argv of the process that trains it
EXIT_NAN = 4  # of a program that finished although a replica turned NaN
SAVE_SECONDS = 120  # a program that was asked to stop has this long to save

_PINNED = ('import os, sys; getattr(os, "sched_setaffinity", lambda *_: None)(0, {int(sys.argv[1])}); '
           'os.execv(sys.argv[2], sys.argv[2:])')


def local(command: Command, indices: Sequence[int], directory: Path, *, gpus: int, jobs: int = 0) -> dict[int, str]:
    """Runs programs in parallel processes, each on a GPU or a core of its own; returns {index: reason} of failed ones.

    Args:
        command: see `Command`.
        indices: the programs to run.
        directory: the sweep directory; logs go to `logs/<index>.log`.
        gpus: GPUs of this machine; 0: cores are used.
        jobs: processes at once, at most; 0: one a GPU or core.
    """
    places = _visible_gpus(gpus) if gpus else [str(core) for core in cores()]
    free, waiting, running, failed = places[: jobs or len(places)], list(indices), {}, {}
    (directory / 'logs').mkdir(exist_ok=True)
    old = _raise_on_sigterm()
    try:
        while waiting or running:
            while waiting and free:
                index, place = waiting.pop(0), free.pop(0)
                running[index] = (_start(command(index), place, bool(gpus), _log(directory, index)), place)
            time.sleep(0.1)
            for index, (process, place) in list(running.items()):
                if process.poll() is not None:
                    del running[index]
                    free.append(place)
                    if process.returncode not in (0, EXIT_NAN):
                        failed[index] = _reason(process.returncode, _log(directory, index))
    finally:
        for process, _ in running.values():
            process.send_signal(signal.SIGTERM)
        for process, _ in running.values():
            process.wait(SAVE_SECONDS)
        if old is not None:
            signal.signal(signal.SIGTERM, old)
    return failed


def cores() -> list[int]:
    """The cores that this process may use; where a system does not tell (macOS), all of them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else list(range(os.cpu_count() or 1))


def _visible_gpus(count: int) -> list[str]:
    visible = os.environ.get('CUDA_VISIBLE_DEVICES', '')
    return visible.split(',') if visible else [str(i) for i in range(count)]


def _raise_on_sigterm():
    def stop(signum, frame):
        raise KeyboardInterrupt

    try:
        return signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        return None


def _log(directory: Path, index: int) -> Path:
    return directory / 'logs' / f'{index:04d}.log'


def _start(command: list[str], place: str, on_gpu: bool, log: Path) -> subprocess.Popen:
    env = dict(os.environ)
    if on_gpu:
        env['CUDA_VISIBLE_DEVICES'] = place
    else:  # jax then makes one virtual device a core it may use: one
        command = [sys.executable, '-c', _PINNED, place, *command]
    with log.open('a') as file:
        # A session of its own: Ctrl-C reaches the launcher alone, which asks each process once to save and stop.
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)


def _reason(code: int, log: Path) -> str:
    """The one line that says why a process failed."""
    lines = log.read_text(errors='replace').strip().splitlines() or ['']
    errors = [line for line in lines if line.startswith('error: ')]
    killed = f'killed by {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'
    return f'{killed}: {(errors or lines)[-1]} ({log})'


class ArrayTask:
    """What submitit pickles: the command of a program. It ends with the command, and is queued again on preemption."""

    def __init__(self, command: list[str]):
        self.command, self._process = command, None

    def __call__(self) -> None:
        self._process = subprocess.Popen(self.command)
        code = self._process.wait()
        if code not in (0, EXIT_NAN):
            raise RuntimeError(f'exit code {code}')

    def checkpoint(self):
        """Called by submitit before the time limit or a preemption: saves, stops, and asks to be queued again."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            _stop(self._process.pid)
        return DelayedSubmission(ArrayTask(self.command))


def _stop(pid: int) -> None:
    """Asks a child to save and stop, and waits until it has.

    Called from a signal handler that has interrupted `Popen.wait`, whose lock forbids every other wait of Popen.
    """
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + SAVE_SECONDS
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None and time.monotonic() < end:
        time.sleep(0.1)


def slurm(command: Command, indices: Sequence[int], directory: Path, options: SlurmConfig) -> str:
    """Submits programs as one job array and returns its id. Raises ConfigError where there is no SLURM."""
    try:
        import submitit
    except ImportError:
        raise ConfigError("--launcher=slurm needs submitit; pip install 'lingrok[slurm]'") from None
    require(shutil.which('sbatch') is not None, '--launcher=slurm needs a machine with sbatch; try --launcher=local')
    executor = submitit.SlurmExecutor(folder=directory / 'slurm', max_num_timeout=1000)
    asked = {
        'partition': options.partition,
        'gpus_per_node': options.gpus,
        'cpus_per_task': options.cpus,
        'mem': f'{options.memory_gb}GB' if options.memory_gb else '',
        'array_parallelism': options.parallel,
        'setup': list(options.setup),
        'additional_parameters': dict(map(_option, options.sbatch)),
    }
    executor.update_parameters(job_name=directory.name, time=options.minutes, stderr_to_stdout=True,
                               signal_delay_s=SAVE_SECONDS, **{name: value for name, value in asked.items() if value})
    try:
        jobs = executor.submit_array([ArrayTask(command(index)) for index in indices])
    except submitit.core.utils.FailedJobError as error:
        raise ConfigError(f'sbatch refused the array: {" ".join(str(error).split())[-300:]}') from None
    submitted = {job.job_id: index for job, index in zip(jobs, indices, strict=True)}
    write_json(directory / 'slurm' / 'submitted.json', _submitted(directory) | submitted)
    return jobs[0].job_id.partition('_')[0]


def _option(option: str) -> tuple[str, str | bool]:
    name, equals, value = option.removeprefix('--').partition('=')
    return name.replace('-', '_'), value if equals else True


def _submitted(directory: Path) -> dict[str, int]:
    path = directory / 'slurm' / 'submitted.json'
    return json.loads(path.read_text()) if path.exists() else {}


def queue(directory: Path) -> dict[int, tuple[str, Path | None]]:
    """What SLURM says of the programs that were submitted: index -> (state in the queue or '', log file)."""
    states = {}
    if shutil.which('squeue') is not None:
        ask = ['squeue', '--me', '-h', '-r', '-o', '%i %T']
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=60)
        states = dict(line.split(None, 1) for line in answer.stdout.splitlines())
    found = {}
    for job, index in _submitted(directory).items():  # later submissions come last
        logs = sorted((directory / 'slurm').glob(f'{job}_*_log.out'))
        found[index] = (states.get(job, '').lower(), logs[-1] if logs else None)
    return found


def log_of(directory: Path, index: int) -> Path | None:
    """The newest log of a program, if it was started by a launcher."""
    logs = [path for path in (_log(directory, index), queue(directory).get(index, ('', None))[1])
            if path is not None and path.exists()]
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)
