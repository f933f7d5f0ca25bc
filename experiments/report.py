"""One HTML page of a run or a sweep: its numbers and figures beside the expected ones, its config, what is wrong.

    python experiments/report.py runs/recall_demo-ID                      writes runs/recall_demo-ID/report.html
    python experiments/report.py runs/recall_noise-sweep-ID --out=noise.html
    python experiments/report.py runs/theory                              a folder of figures

The page is one file that loads nothing. It shows the figures of the folder `figures`, which the scripts of experiments/
write; those run with --steps=all can be seen step by step. A run that is unfinished, broken or of another version is
shown as far as it can be read, with what is wrong at the top. Every checkpoint is read against its hashes; of a large
run that takes a while, --nocheck leaves it out.
"""

import sys
from pathlib import Path

from absl import flags

from lingrok import cli

_OUT = flags.DEFINE_string('out', '', 'the page; by default report.html in the directory')
_CHECK = flags.DEFINE_bool('check', True, 'read every checkpoint against its hashes')


def main(paths: list[str]) -> None:
    from lingrok import report
    from lingrok.config import require
    from lingrok.log import write_atomically

    directory = cli.one_path(paths)
    require(directory.is_dir(), f'{directory} is not a directory; try a run or sweep directory such as '
            'runs/<name>-<id>')
    if (directory / 'sweep.json').exists():
        page, notes = report.sweep_page(directory, check=_CHECK.value)
    elif any((directory / name).exists() for name in ('config.json', 'metrics.jsonl', 'checkpoints', 'figures')):
        page, notes = report.run_page(directory, check=_CHECK.value)
    else:
        require(any(directory.glob('*.png')), f'{directory} holds no run, no sweep and no figures; try a directory '
                'such as runs/<name>-<id>')
        page, notes = report.folder_page(directory)
    out = Path(_OUT.value or directory / 'report.html')
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page.encode())
    for note in notes:
        print(f'warning: {note}', file=sys.stderr)
    print(f'report: {out}')


if __name__ == '__main__':
    cli.main(main, paths=True)
