"""Which queries does a model answer after k examples, and does ratio matching explain them? (Fig 5 and appendix)

    python experiments/modular/kshot_grid.py runs/modular_demo-ID
    python experiments/modular/kshot_grid.py runs/modular_d4-ID --shots=1,2,13,31 --task=6,6
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import skills
from lingrok.analysis.scan import parse_vector
from lingrok.cli import Expected
from lingrok.config import require
from lingrok.figures import skills as figures

SHOTS = flags.DEFINE_list('shots', [], 'lengths of the context, such as 1,2,13,31; by default about those')
TASK = flags.DEFINE_string('task', '', 'task vector a,b of the pictures; by default an unseen task of the run')
NUM_TASKS = flags.DEFINE_integer('num_tasks', 32, 'most unseen and most training tasks of the means', lower_bound=1)

# Read off the picture of Fig 5 in the official repository: task (6, 6), one context, 841 queries.
FIG_5 = {
    'd = 4': {1: (30, 29, 1, 0), 2: (72, 57, 15, 0), 13: (814, 253, 561, 0), 31: (814, 533, 308, 27)},
    'd = 2': {1: (60, 29, 31, 0), 13: (277, 253, 52, 28), 31: (482, 533, 40, 91)},
}
EXPECTED = [
    Expected(f'{name} of 841, {shots} shots', str(count), f'Fig 5, p = 29, {depth}, one context of one task, read off '
             'a picture of the official repository', f'grid/{name}_of_841/{shots}_shots')
    for depth, table in FIG_5.items() for shots, counts in table.items()
    for name, count in zip(('model', 'ratio', 'gained', 'lost'), counts, strict=True)
]
CURVES = ('ood/accuracy_covered', 'ood/accuracy_uncovered', 'id/accuracy_uncovered')


def measure(run, **at):
    require(all(part.strip().isdecimal() for part in SHOTS.value), f'--shots={",".join(SHOTS.value)}; allowed: whole '
            'numbers such as 1,2')
    shots = sorted({*map(int, SHOTS.value)}) or skills.default_shots(run.task)
    task = parse_vector(TASK.value, run.task.p)
    fn = functools.partial(skills.kshot_grid, shots=shots, task=task, num_tasks=NUM_TASKS.value)
    return run.measure(fn, **at)


if __name__ == '__main__':
    cli.experiment(measure, figures.kshot_grid, task='modular', expected=EXPECTED, frame=figures.grid_frame,
                   curves=CURVES)
