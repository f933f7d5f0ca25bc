"""Phase diagrams over the number of training tasks and the share of inputs (Fig 1b, 3a, 4; random tasks).

    python experiments/sweep.py --config=configs/modular.py:phase
    python experiments/modular/phase_diagram.py runs/modular_phase-sweep-ID

Writes two figures: at the last step, and at the step that is best on unseen tasks kept apart from the reported ones
(early stopping). `phases.csv` has every seed of every cell.
"""

import csv
import json
from pathlib import Path

from absl import flags

from lingrok import cli

_THRESHOLD = flags.DEFINE_float('threshold', 0.75, 'accuracy from which a set counts as solved', 0, 1)
_OUT = flags.DEFINE_string('out', '', 'folder of the results; by default the figures folder of the sweep')

EXPECTED = (
    ('p = 29, six blocks: o.o.d. generalisation from how many tasks on, inputs .4 to .8', '256',
     'Fig 1b, digitised'),
    ('p = 29, six blocks: o.o.d. memorisation', 'inputs .2: 256 and 512 tasks, .3: 256', 'Fig 1b, digitised'),
    ('p = 29, one block', 'no o.o.d. generalisation', 'abstract'),
    ('p = 7, inputs .7: unseen tasks, 8, 24, 36 tasks', '.16, .75, .90', 'prototype, one seed'),
    ('p = 7, inputs .4: unseen tasks, 8, 24, 36 tasks', '.21, .54, .89', 'prototype, one seed'),
)


def main(paths: list[str]) -> None:
    from lingrok import sweep
    from lingrok.analysis import phases
    from lingrok.config import ConfigError, require
    from lingrok.figures import modular

    if len(paths) != 1:
        raise ConfigError(f'{len(paths)} directories given; try one: phase_diagram.py runs/<name>-sweep-<id>')
    directory = Path(paths[0])
    quantities = [f'{part}/accuracy_last' for part in (*phases.SETS, 'id_mixed', 'ood_mixed')]
    quantities += [*phases.SELECT, 'ood_forced/accuracy_last_not_covered', 'ood_test/accuracy_last/ratio']
    points = phases.points(sweep.rows(directory), quantities)
    require(bool(points), f'{directory} has no evaluations of the modular task yet; run it first')
    defaults = sweep.task_defaults(directory)
    points = [point._replace(coordinates=defaults | point.coordinates) for point in points]
    out = Path(_OUT.value) if _OUT.value else directory / 'figures'
    for at in ('final', 'best'):
        figure = modular.phase_diagram(points, _THRESHOLD.value, at=at, name=directory.name)
        print(f'figure: {cli.save_figure(figure, out, f"phase_diagram_{at}")} (and .pdf)')
    with (out / 'phases.csv').open('w', newline='') as file:
        table = csv.writer(file)
        coordinates = list(points[0].coordinates)
        table.writerow((*coordinates, 'at', 'step', *quantities, 'phase', 'transience'))
        for point in points:
            for at, i in (('final', -1), ('best', phases.best(point))):
                row = {name: values[i] for name, values in point.values.items()}
                accuracy = {part: row[f'{part}/accuracy_last'] for part in phases.SETS}
                lost = phases.transience(point, 'ood_test/accuracy_last')
                table.writerow((*point.coordinates.values(), at, point.steps[i], *(f'{x:.6g}' for x in row.values()),
                                phases.phase(accuracy, _THRESHOLD.value), f'{lost:.6g}'))
    rows = [dict(zip(('what', 'value', 'source'), row, strict=True)) for row in EXPECTED]
    (out / 'phases.json').write_text(json.dumps({'threshold': _THRESHOLD.value, 'expected': rows}, indent=1) + '\n')
    for row in rows:
        print(f'{row["what"]}: expected {row["value"]} ({row["source"]})')


if __name__ == '__main__':
    cli.main(main, paths=True)
