"""Settings of a sweep of the induction head side by side: layers, order of training, data, width.

    python experiments/sweep.py --config=configs/induction.py:staged
    python experiments/recall/induction_sweep.py runs/induction_staged-sweep-ID

Also for :depth, :data and :width. Prints the last values.
"""

from pathlib import Path

import numpy as np
from absl import flags

from lingrok import cli

_OUT = flags.DEFINE_string('out', '', 'folder of the results; by default the figures folder of the sweep')

EXPECTED = (
    ('depth, two layers against one', 'near 1; one stays far below', 'expected, two layers are needed'),
    ('staged, copy memory first', 'as all together, later', 'expected from the order of the three-step theorem'),
    ('staged, previous-token memory first', 'nothing is learned before the others', 'expected'),
    ('data, targets from the bigrams', 'worse on other laws of targets, see induction.py', 'expected'),
    ('data, rarer triggers', 'slower', 'expected'),
    ('width', 'memories saturate lower in few dimensions', 'expected'),
)


def main(paths: list[str]) -> None:
    from lingrok import sweep
    from lingrok.analysis import settings
    from lingrok.config import require
    from lingrok.figures import induction
    from lingrok.metrics import text

    directory = cli.one_path(paths)
    points = settings.points(sweep.rows(directory), induction.QUANTITIES)
    require(bool(points), f'{directory} has no evaluations of the recall task yet; run it first')
    labels, table = settings.labels(points), {}
    for label in dict.fromkeys(labels):
        own = [point for point, name in zip(points, labels, strict=True) if name == label]
        table[label] = {key: (own[0].steps, np.stack([point.values[key] for point in own], 1))
                        for key in induction.QUANTITIES}
    cli.print_table('setting', {label: {induction.QUANTITIES[key]: text(values[-1]) for key, (_, values) in row.items()}
                                for label, row in table.items()})
    rows = [{'setting': label, **{name: point.values[key][-1] for key, name in induction.QUANTITIES.items()}}
            for label, point in zip(labels, points, strict=True)]
    figure = induction.comparison(table, directory.name)
    cli.write_report(Path(_OUT.value or directory / 'figures'), 'induction_sweep', {'induction_sweep': figure}, rows,
                     EXPECTED)


if __name__ == '__main__':
    cli.main(main, paths=True)
