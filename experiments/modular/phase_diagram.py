"""Phase diagrams over the number of training tasks and the share of inputs (Fig 1b, 3a, 4; random tasks).

    python experiments/sweep.py --config=configs/modular.py:phase
    python experiments/modular/phase_diagram.py runs/modular_phase-sweep-ID

Two figures: at the last step, and, where the run measured one of the `select` sets, at the step that is best on those
unseen tasks, which are none of the reported ones (early stopping). The table has every seed of every cell.
"""

from pathlib import Path

import numpy as np
from absl import flags

from lingrok import cli

_THRESHOLD = flags.DEFINE_float('threshold', 0.75, 'accuracy from which a set counts as solved', 0, 1)
_OUT = flags.DEFINE_string('out', '', 'folder of the results; by default the figures folder of the sweep')

EXPECTED = (
    ('p = 29, six blocks: o.o.d. generalisation with inputs .4 to .8', 'from 256 tasks on', 'Fig 1b, digitised'),
    ('p = 29, six blocks: o.o.d. memorisation', 'inputs .2: 256 and 512 tasks, .3: 256', 'Fig 1b, digitised'),
    ('p = 29, one block', 'no o.o.d. generalisation', 'abstract'),
    ('p = 7, inputs .7: unseen tasks, 8, 24, 36 tasks', '.16, .75, .90', 'prototype, one seed'),
    ('p = 7, inputs .4: unseen tasks, 8, 24, 36 tasks', '.21, .54, .89', 'prototype, one seed'),
)


def main(paths: list[str]) -> None:
    from lingrok import sweep
    from lingrok.analysis import phases, settings
    from lingrok.config import require
    from lingrok.figures import modular

    directory = cli.one_path(paths)
    quantities = [f'{part}/accuracy_last' for part in (*phases.SETS, 'id_mixed', 'ood_mixed')]
    quantities += [*phases.SELECT, 'ood_forced/accuracy_last_not_covered', 'ood_test/accuracy_last/ratio']
    points = settings.points(sweep.rows(directory), quantities)
    require(bool(points), f'{directory} has no evaluations of the modular task yet; run it first')
    base = {key: sweep.base(directory)[key] for key in ('task.num_tasks', 'task.alpha')}
    points = [point._replace(coordinates=base | point.coordinates) for point in points]
    selected = any(np.isfinite(point.values[name]).any() for point in points for name in phases.SELECT)
    figures = {f'phase_diagram_{at}': modular.phase_diagram(points, _THRESHOLD.value, at=at, name=directory.name)
               for at in (('final', 'best') if selected else ('final',))}
    rows = []
    for point in points:
        for at, i in (('final', -1), ('best', phases.best(point))):
            row = {name: values[i] for name, values in point.values.items()}
            phase = phases.phase({part: row[f'{part}/accuracy_last'] for part in phases.SETS}, _THRESHOLD.value)
            rows.append({**point.coordinates, 'at': at, 'step': point.steps[i], **row, 'phase': phase,
                         'transience': phases.transience(point, 'ood_test/accuracy_last')})
    cli.write_report(Path(_OUT.value or directory / 'figures'), 'phase_diagram', figures, rows, EXPECTED)


if __name__ == '__main__':
    cli.main(main, paths=True)
