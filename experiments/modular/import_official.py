"""Makes run directories of models that the official code of arXiv 2406.02550 trained, so that every script reads them.

    python experiments/modular/import_official.py FILE.pth                      into runs/official-<id>
    python experiments/modular/import_official.py FILE.pth --workdir=runs/d4    another place
    python experiments/modular/import_official.py FILE.pth --num_tasks=384 --alpha=0.8 --seed=1 --num_heads=4

Settings come from the file name as the official code gives it; flags add what a name does not say, and count before
it. Several files of one training, which differ in their step, make one run with several checkpoints. The file is read
without torch, and nothing in it is executed. Task list and input split are drawn as the official code draws them.

The evaluation that is written, and every script, computes in float32; the official code evaluated in bfloat16. At the
size of the paper it takes minutes on two cores, a quarter of it with --eval_batch_size=256.
"""

import dataclasses
import hashlib
from pathlib import Path

from absl import flags

from lingrok import cli
from lingrok.pretrained.modular import Settings

_DEFINE = {int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string, bool: flags.DEFINE_bool}
_FLAGS = {field.name: _DEFINE[field.type](field.name, None, field.metadata['doc'])
          for field in dataclasses.fields(Settings)}
_WORKDIR = flags.DEFINE_string('workdir', '', 'run directory; by default runs/official-<id>')
_NAME = flags.DEFINE_string('name', 'official', 'name of the run')
_EVAL = flags.DEFINE_integer('eval_batch_size', 1024, 'rows of each set in the evaluation that is written')


def main(paths: list[str]) -> None:
    from lingrok import run
    from lingrok.config import require
    from lingrok.pretrained import modular

    require(bool(paths), 'no file; try: python experiments/modular/import_official.py FILE.pth')
    given = {name: flag.value for name, flag in _FLAGS.items() if flag.value is not None}
    first = modular.settings(paths[0], **given)
    saved, origin = {}, {}
    for path in paths:
        options = modular.settings(path, **given)
        step = options.step or options.num_steps
        same = dataclasses.replace(options, step=first.step) == first
        require(same, f'{path} is of another training than {paths[0]}')
        require(step not in saved, f'{path} is a second file of step {step}')
        model, saved[step] = modular.official(path, **given)
        cfg = modular.config(options, model, name=_NAME.value, eval_batch_size=_EVAL.value)
        origin[Path(path).name] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    directory = Path(_WORKDIR.value) if _WORKDIR.value else run.default_directory(cfg)
    state = modular.task_state(first, cfg.task.p)
    finished = run.write_imported(cfg, saved, state, directory, origin=origin)
    print(f'{finished}\n{finished.summary()}')


if __name__ == '__main__':
    cli.main(main, paths=True)
