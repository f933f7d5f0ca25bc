"""What a parameter is worth in a feed-forward and in attention, at a fixed total (appendix A, and the reviews).

    python experiments/sweep.py --config=configs/recall.py:budget
    python experiments/recall/budget.py runs/recall_budget-sweep-ID

The model is trained on all positions. With a free width the model becomes narrower as its feed-forward grows; the
control keeps the width and lowers the width of the head instead.
"""

from pathlib import Path

from absl import flags

from lingrok import cli

_OUT = flags.DEFINE_string('out', '', 'folder of the results; by default the figures folder of the sweep')

EXPECTED = (
    ('fewer parameters in the feed-forward', 'higher loss on distributional predictions', 'the reviews'),
    ('fewer parameters in the feed-forward', 'in-context loss less affected, or better', 'the reviews'),
)
SHAPE = ('model.d_model', 'model.d_mlp', 'model.d_head', 'model.query')


def main(paths: list[str]) -> None:
    from lingrok import sweep
    from lingrok.analysis import settings
    from lingrok.config import require
    from lingrok.figures import recall

    directory = cli.one_path(paths)
    points = settings.points(sweep.rows(directory), recall.BUDGET_NAMES)
    sound = bool(points) and all(key in points[0].coordinates for key in SHAPE)
    require(sound, f'{directory} is no sweep over {", ".join(SHAPE)}; try configs/recall.py:budget')
    rows = [{**{key: point.coordinates[key] for key in SHAPE}, 'seed': point.coordinates.get('seed', 0),
             'share': recall.feed_forward_share(point.coordinates),
             **{name: point.values[name][-1] for name in recall.BUDGET_NAMES}} for point in points]
    figure = recall.budget(points, directory.name)
    cli.write_report(Path(_OUT.value or directory / 'figures'), 'budget', {'budget': figure}, rows, EXPECTED)


if __name__ == '__main__':
    cli.main(main, paths=True)
