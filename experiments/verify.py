"""Checks a run directory, or every run of a sweep directory, from end to end; see `lingrok.verify`.

    python experiments/verify.py runs/recall_demo-ID                     one run
    python experiments/verify.py runs/recall_noise-sweep-ID              every run of a sweep
    python experiments/verify.py runs/recall_demo-A runs/recall_demo-B   several

It reads the config, every checkpoint against its hashes, metrics.jsonl line by line, the arrays and the task state, and
changes nothing. An unfinished run can be sound.

Exit codes: 0 sound; 1 not sound, every problem on a line of stderr; 2 not a run directory.
"""

import sys
from pathlib import Path

from lingrok import cli


def main(paths: list[str]) -> int:
    from lingrok import load_run, sweep, verify

    if not paths:
        return cli.fail('no run directory; try: python experiments/verify.py runs/<name>-<id>')
    code = 0
    for path in map(Path, paths):
        directories = [path]
        if (path / 'sweep.json').exists():
            directories = [path / program['directory'] for program in sweep.read_json(path)['programs']]
        for directory in directories:
            if not (directory / 'config.json').exists():
                code = max(code, cli.fail(f'{directory} is not a run directory: it has no config.json'))
                continue
            found = list(verify.problems(directory))
            for line in found:
                print(f'error: {line}', file=sys.stderr)
            if found:
                code = max(code, cli.EXIT_FAILED)
            else:
                print(f'sound: {load_run(directory)}')
    return code


if __name__ == '__main__':
    cli.main(main, paths=True)
