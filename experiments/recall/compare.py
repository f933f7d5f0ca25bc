"""Settings of a sweep side by side: who holds the noise, who recalls (main text and appendix).

    python experiments/sweep.py --config=configs/recall.py:components
    python experiments/recall/compare.py runs/recall_components-sweep-ID

Prints the table; also for :noise, :triggers, :robustness, :freezing, :optimizers, :depth, :context, and for any run or
sweep of the recall task.
"""

from pathlib import Path

import numpy as np
from absl import flags

from lingrok import cli

_OUT = flags.DEFINE_string('out', '', 'folder of the results; by default the figures folder of the sweep')

# By a key of the config in which the settings of a sweep differ, and a word that is in one of its values.
EXPECTED = {
    ('model.mlp_kind', 'none'): (
        ('components, some feed-forward', 'the noise sits in it, that of layer 1 preferred', 'predicted'),
        ('components, no feed-forward', 'the noise sits in attention, cutting it changes P(noise)', 'predicted'),
        ('components, attention cut', 'recall is destroyed', 'predicted'),
    ),
    ('task.noise_prob', ''): (
        ('noise', 'P(noise) of the whole model is about the noise probability', 'Bayes predictor'),
    ),
    ('task.trigger_mode', 'random'): (
        ('triggers drawn for each sequence', 'weaker separation: no trigger has a noise of its own', 'predicted'),
    ),
    ('optim.frozen', 'blocks.'): (
        ('freezing, attention frozen', 'the distribution is learnt, recall is not', 'predicted'),
        ('freezing, feed-forwards frozen', 'attention learns both, slower', 'the authors, in the reviews'),
    ),
    ('optim.optimizer', 'adamw'): (('optimizers', 'AdamW leaves more noise in attention than SGD', 'one-layer model'),),
}


def main(paths: list[str]) -> None:
    from lingrok import sweep
    from lingrok.analysis import settings
    from lingrok.config import require
    from lingrok.figures import recall
    from lingrok.metrics import text

    directory = cli.one_path(paths)
    points = settings.points(sweep.rows(directory), recall.QUANTITIES)
    require(bool(points), f'{directory} has no evaluations of the recall task yet; run it first')
    labels, found = settings.labels(points), [recall.compared(point) for point in points]
    table = {label: {key: np.array([x[key] for x, own in zip(found, labels, strict=True) if own == label])
                     for key in found[0]} for label in dict.fromkeys(labels)}
    names = {key: ', '.join(key) if len(recall.PANELS[key[0]]) > 1 else key[0] for key in found[0]}
    cli.print_table('setting', {label: {name: text(row[key]) if np.isfinite(row[key]).any() else ''
                                        for key, name in names.items()} for label, row in table.items()})
    rows = [{'setting': label, **{names[key]: value for key, value in x.items()}}
            for label, x in zip(labels, found, strict=True)]
    figure = recall.comparison(table, directory.name)
    expected = settings.about(points, EXPECTED)
    cli.write_report(Path(_OUT.value or directory / 'figures'), 'compare', {'compare': figure}, rows, expected)


if __name__ == '__main__':
    cli.main(main, paths=True)
