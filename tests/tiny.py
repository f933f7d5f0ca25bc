"""A task that compiles in a second, for tests that start many processes; and a run of it killed many times.

    python tests/tiny.py DIRECTORY KILLS SEED      prints one JSON object
"""

import dataclasses
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp

from lingrok import run
from lingrok.config import TASKS, check_fields, defaults, from_config_dict, key, register_task
from lingrok.tasks.base import Batch, label_log_probs, masked_mean

if 'tiny' not in TASKS:

    @register_task('tiny')
    @dataclasses.dataclass(frozen=True)
    class Tiny:
        """The next token is the same token plus `shift` modulo 5."""

        SECTION: ClassVar[str] = 'task'
        VARIABLE: ClassVar[tuple[str, ...]] = ('shift',)
        FILES: ClassVar[tuple[str, ...]] = ()
        scored: ClassVar[slice] = slice(None)
        splits: ClassVar[tuple[str, ...]] = ('train',)
        headline: ClassVar[tuple[str, ...]] = ('train/loss_full',)
        vocab_size: ClassVar[int] = 5
        seq_len: ClassVar[int] = 4

        shift: float = key(1.0, 'added to the token', low=0.0)

        def __post_init__(self):
            check_fields(self)

        def check_batch(self, batch_size):
            pass

        def init(self, key, **variable):
            return {'shift': jnp.asarray(variable.get('shift', self.shift), jnp.float32)}

        def sample(self, state, key, *, split, batch_size, step=0):
            tokens_BL = jax.random.randint(key, (batch_size, self.seq_len), 0, self.vocab_size)
            targets_BL = (tokens_BL + state['shift'].astype(int)) % self.vocab_size
            return Batch(tokens_BL, targets_BL, jnp.ones(tokens_BL.shape), {})

        def metrics(self, logits_BLV, batch):
            loss_BL = -label_log_probs(logits_BLV, batch.targets_BL)
            return {'loss_full': masked_mean(loss_BL, batch.mask_BL), 'loss_by_position': jnp.mean(loss_BL, 0)}

        def baselines(self, state, batch):
            return {}


def get_config(num_steps: int = 300):
    """A ConfigDict of the tiny task: two replicas, a checkpoint every 5 steps."""
    config = defaults('tiny')
    config.model.num_layers, config.model.d_model, config.model.d_mlp = 1, 8, 8
    config.train.num_steps, config.train.batch_size = num_steps, 8
    config.train.log_every, config.train.eval_every = 1, 5
    config.train.save, config.train.save_every = 'regular', 5
    config.eval.batch_size = 8
    config.optim.optimizer = 'adamw'
    config.vary.seed.all = (0, 1)
    return config


def start(directory: Path) -> int:
    """The id of a process that trains from wherever the directory is. Forked before jax starts its threads."""
    pid = os.fork()
    if pid:
        return pid
    with (directory.parent / 'child.log').open('a') as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        run.execute(from_config_dict(get_config()), directory)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def is_writing(directory: Path) -> bool:
    """Whether a checkpoint of the run is half written."""
    try:
        return any(not entry.name.isdigit() for entry in os.scandir(directory / 'checkpoints'))
    except FileNotFoundError:
        return False


def kill_often(directory: Path, kills: int, seed: int) -> dict:
    """Trains `directory/undisturbed`, and `directory/killed` with kills: every third while a checkpoint is written."""
    undisturbed, killed = directory / 'undisturbed', directory / 'killed'
    assert os.waitpid(start(undisturbed), 0)[1] == 0
    rng, inside, to_write = random.Random(seed), 0, []
    for number in range(kills):
        pid, began = start(killed), time.monotonic()
        wait = rng.uniform(0.2, 1.5) * to_write[-1] if number % 3 else 60
        while time.monotonic() - began < wait and not (number % 3 == 0 and is_writing(killed)):
            assert not os.waitpid(pid, os.WNOHANG)[0], f'over before kill {number}: see {directory}/child.log'
            time.sleep(0.0005)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        inside += is_writing(killed)
        if number % 3 == 0:
            to_write.append(time.monotonic() - began)
    return {'kills': kills, 'inside': inside, 'status': os.waitpid(start(killed), 0)[1]}


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 2)
    print(json.dumps(kill_often(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
