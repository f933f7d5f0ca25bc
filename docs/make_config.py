"""Writes the page of all config keys from the code: python docs/make_config.py > docs/config.md"""

import inspect

import lingrok.tasks  # noqa: F401  registers the tasks
from lingrok.config import SECTIONS, SEED_STREAMS, VARIABLE_OPTIM, documented
from lingrok.config import TASKS as REGISTERED

# Without those that a user, or a test, has registered in this process.
TASKS = {name: cls for name, cls in sorted(REGISTERED.items()) if cls.__module__.startswith('lingrok.')}

HEAD = f"""# Every key of a config

Made by `python docs/make_config.py > docs/config.md` from `lingrok/config.py` and `lingrok/tasks/`; a test compares.

A config file starts from `lingrok.config.defaults(task)`, which holds every key below, and changes what its experiment
changes. On the command line a key is set by `--config.<section>.<key>=<value>`, a tuple in quotes:

    python experiments/train.py --config=configs/recall.py:demo --config.optim.learning_rate=0.03 \\
        --config.model.mlp_kind="('none','mlp')" --config.vary.seed.all="(0,1,2,3)"

`name` is the first part of the name of the run directory, `task.name` is one of {', '.join(TASKS)}. An unknown
key, a wrong type, a value out of range or an impossible combination ends in one line before anything compiles. Bounds
are inclusive and hold for every item of a tuple. `python experiments/train.py --list_configs` lists the config files.
"""


def page() -> str:
    """The page as Markdown."""
    sections = [(f'task, where task.name={name}', cls) for name, cls in TASKS.items()]
    return '\n'.join([HEAD, *(_section(name, cls) for name, cls in (*SECTIONS.items(), *sections)), _vary()])


def _section(name: str, cls) -> str:
    lines = [f'## {name}', '', ' '.join(inspect.getdoc(cls).split()), '',
             '| key | type | default | meaning | allowed |', '|---|---|---|---|---|']
    for entry in documented(cls):
        cells = (f'`{entry.name}`', entry.kind, f'`{entry.default!r}`', entry.doc, entry.allowed)
        lines.append('| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |')
    return '\n'.join([*lines, ''])


def _vary() -> str:
    tasks = ', '.join(f'{key} ({name})' for name, cls in TASKS.items() for key in cls.VARIABLE)
    return f"""## vary

What differs between the replicas of one compiled program: one value a replica, all lists of the same length; an empty
list keeps the value of the key above.

| group | keys |
|---|---|
| `vary.seed` | all (the four streams at once), {', '.join(SEED_STREAMS)} |
| `vary.optim` | {', '.join(VARIABLE_OPTIM)} |
| `vary.task` | {tasks} |"""


if __name__ == '__main__':
    print(page())
