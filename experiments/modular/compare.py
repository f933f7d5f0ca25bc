"""Settings of a sweep side by side: what matters in the recipe, the batch, the model (main text, reviews).

    python experiments/sweep.py --config=configs/modular.py:ingredients
    python experiments/modular/compare.py runs/modular_ingredients-sweep-ID

Prints the table (line: ratio matching, kernel trick on the same rows); also for :batches and :mlp, and for any run or
sweep whose settings differ in a few keys.
"""

from pathlib import Path

import numpy as np
from absl import flags

from lingrok import cli

_OUT = flags.DEFINE_string('out', '', 'folder of the results; by default the figures folder of the sweep')

# By a key of the config in which the settings of a sweep differ, and a word that is in one of its values.
EXPECTED = {
    ('task.geometry', 'random'): (
        ('o.o.d. generalisation without the rectangular rule', 'harder and less stable', 'reviews, p = 29'),
    ),
    ('model.conv_width', '0'): (
        ('without type embedding and convolution', 'stays on the plateau of the task prior',
         'prototype, p = 7, one seed'),
    ),
    ('optim.optimizer', 'adamw'): (
        ('AdamW in place of Muon', 'memorises: unseen tasks .40 at step 2,200', 'prototype, p = 7, one seed'),
    ),
    ('task.batching', 'shared'): (
        ('inputs shared between tasks, no convolution', 'unseen tasks .34 at step 1,000', 'prototype, p = 7, one seed'),
    ),
}
REFERENCES = {'ood_train/accuracy_last': 'ood_train/accuracy_last/ratio',
              'ood_test/accuracy_last': 'ood_test/accuracy_last/ratio',
              'ood_forced/accuracy_last_not_covered': 'ood_forced/accuracy_last_not_covered/kernel'}


def main(paths: list[str]) -> None:
    from lingrok import sweep
    from lingrok.analysis import settings
    from lingrok.config import require
    from lingrok.figures import modular
    from lingrok.metrics import interval, text

    directory = cli.one_path(paths)
    points = settings.points(sweep.rows(directory), (*modular.QUANTITIES, *REFERENCES.values()))
    require(bool(points), f'{directory} has no evaluations of the modular task yet; run it first')
    measured = [name for name in modular.QUANTITIES if any(np.isfinite(p.values[name]).any() for p in points)]
    labels = settings.labels(points)
    rows = [{'setting': label, **{name: point.values[name][-1] for name in measured}}
            for label, point in zip(labels, points, strict=True)]
    table = {label: {name: np.array([row[name] for row in rows if row['setting'] == label]) for name in measured}
             for label in dict.fromkeys(labels)}
    of = {label: [point for point, own in zip(points, labels, strict=True) if own == label] for label in table}
    lines = {label: {name: interval([point.values[REFERENCES[name]][-1] for point in of[label]])[0]
                     for name in measured if name in REFERENCES} for label in table}
    cell = lambda label, name, x: text(x) + (f', line {lines[label][name]:.3f}' if name in lines[label] else '')  # noqa: E731
    cli.print_table('setting', {label: {modular.QUANTITIES[name]: cell(label, name, x) for name, x in row.items()}
                                for label, row in table.items()})
    figure = modular.comparison(table, lines, directory.name)
    cli.write_report(Path(_OUT.value or directory / 'figures'), 'compare', {'compare': figure}, rows,
                     settings.about(points, EXPECTED))


if __name__ == '__main__':
    cli.main(main, paths=True)
