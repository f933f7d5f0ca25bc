"""Makes a run directory of a model that the official code of arXiv 2406.03068 trained, so that every script reads it.

    python experiments/recall/import_official.py FILE.pth --table=TABLE.json                   into runs/official-<id>
    python experiments/recall/import_official.py FILE.pth --table=TABLE.json --noise_prob=0.3  other settings

The file says nothing about data and training; flags do, and their defaults are those of the script that the official
code ships. A table of the text that the official code used, Tiny Shakespeare, is made by

    python experiments/make_bigrams.py --text=input.txt --min_count=1 --out=TABLE.json

The file is read without torch, and nothing in it is executed.
"""

import dataclasses
import hashlib
from pathlib import Path

from absl import flags

from lingrok import cli
from lingrok.pretrained.recall import Settings

_DEFINE = {int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string, bool: flags.DEFINE_bool}
_FLAGS = {field.name: _DEFINE[field.type](field.name, field.default, field.metadata['doc'])
          for field in dataclasses.fields(Settings)}
_LENGTH = flags.DEFINE_integer('length', 0, 'tokens of a sequence; 0: the longest that the model can read')
_WORKDIR = flags.DEFINE_string('workdir', '', 'run directory; by default runs/official-<id>')
_NAME = flags.DEFINE_string('name', 'official', 'name of the run')
_EVAL = flags.DEFINE_integer('eval_batch_size', 512, 'sequences of the evaluation that is written')


def main(paths: list[str]) -> None:
    from lingrok import run
    from lingrok.config import require
    from lingrok.pretrained import recall

    require(len(paths) == 1, f'{len(paths)} files given; try: python experiments/recall/import_official.py FILE.pth')
    given = {name: flag.value for name, flag in _FLAGS.items()}
    model, params = recall.official(paths[0], **given)
    cfg = recall.config(Settings(**given), model, length=_LENGTH.value, name=_NAME.value, eval_batch_size=_EVAL.value)
    directory = Path(_WORKDIR.value) if _WORKDIR.value else run.default_directory(cfg)
    origin = {Path(paths[0]).name: hashlib.sha256(Path(paths[0]).read_bytes()).hexdigest()}
    finished = run.write_imported(cfg, {cfg.train.num_steps: params}, recall.task_state(cfg), directory, origin=origin)
    print(f'{finished}\n{finished.summary()}')


if __name__ == '__main__':
    cli.main(main, paths=True)
