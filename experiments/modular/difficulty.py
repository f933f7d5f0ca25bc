"""How many training tasks does a larger modulus need? (last page of the appendix, p = 29, 37 and 47)

    python experiments/sweep.py --config=configs/modular.py:p37
    python experiments/modular/difficulty.py runs/SWEEP_29 runs/SWEEP_37 runs/SWEEP_47 --out=runs/difficulty
"""

from pathlib import Path

from absl import flags

from lingrok import cli

_OUT = flags.DEFINE_string('out', '', 'folder of the results; by default the figures folder of the first directory')

QUANTITIES = tuple(f'{part}/{name}' for part in ('id_train', 'ood_train') for name in ('accuracy_last', 'loss'))
EXPECTED = (('training tasks needed before unseen tasks are solved', 'more with larger p',
             'third-party description of the figure, numbers unknown'),)


def main(paths: list[str]) -> None:
    from lingrok import sweep
    from lingrok.analysis import settings
    from lingrok.config import require
    from lingrok.figures import modular

    require(bool(paths), 'no directory given; try: difficulty.py runs/<name>-sweep-<id> ...')
    points = []
    for directory in map(Path, paths):
        base = {key: sweep.base(directory)[key] for key in ('task.p', 'task.num_tasks', 'task.alpha')}
        own = settings.points(sweep.rows(directory), QUANTITIES)
        require(bool(own), f'{directory} has no evaluations of the modular task yet; run it first')
        points += [point._replace(coordinates=base | point.coordinates) for point in own]
    alphas = {point.coordinates['task.alpha'] for point in points}
    require(len(alphas) == 1, f'the directories hold several task.alpha ({sorted(alphas)}); give sweeps of one')
    rows = [{**point.coordinates, **{name: x[-1] for name, x in point.values.items()}} for point in points]
    rows = [{key: row.get(key, '') for key in dict.fromkeys(key for row in rows for key in row)} for row in rows]
    out = Path(_OUT.value or Path(paths[0]) / 'figures')
    cli.write_report(out, 'difficulty', {'difficulty': modular.difficulty(points)}, rows, EXPECTED)


if __name__ == '__main__':
    cli.main(main, paths=True)
