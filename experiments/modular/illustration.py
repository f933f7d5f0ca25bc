"""The data in pictures: the plane of tasks, the table of a task with hidden inputs, a batch (Fig 1a, 2a, 2b).

    python experiments/modular/illustration.py runs/modular_demo-ID

Drawn from the pools of the first replica of a run: it shows what this run was trained on.
"""

from pathlib import Path

import jax
from absl import flags

from lingrok import cli

_OUT = flags.DEFINE_string('out', '', 'folder of the results; by default the figures folder of the run')

EXPECTED = (('corners of rectangles', 'bases with three more corners each', 'official code'),
            ('inputs of a batch', 'the same for all tasks', 'official code; task.batching=shared'))


def main(paths: list[str]) -> None:
    from lingrok import load_run
    from lingrok.figures import modular

    run = load_run(cli.one_path(paths))
    task, state = run.config.task_of(0), run.task_state(0)
    size = run.config.train.batch_size
    draw = jax.jit(lambda state, key: task.sample(state, key, split='train', batch_size=size))
    batch = draw(state, jax.random.key(0))
    rows = [{'pool': name, 'place': i, 'first': int(a), 'second': int(b)}
            for name, pool, count in (('tasks (a, b)', state.tasks_T2, state.num_tasks),
                                      ('inputs (x, y)', state.inputs_T2, state.num_inputs))
            for i, (a, b) in enumerate(pool[: int(count)])]
    figure = modular.illustration(task, state, jax.device_get(batch))
    cli.write_report(Path(_OUT.value or Path(run.path) / 'figures'), 'illustration', {'illustration': figure}, rows,
                     EXPECTED)


if __name__ == '__main__':
    cli.main(main, paths=True)
