# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A task of your own, and a sweep of it
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/lingrok/lingrok/blob/main/notebooks/5_own_task.ipynb)
#
# You will write a task in one cell, a small dictionary to be looked up: its data, its metrics, and the exact loss of
# the best predictor. Then twelve models of it, four settings and three seeds, train as one program. The question is
# that of this project: a word has a *usual* meaning, which weights can store, and one in this context, which has to be
# looked up. The more often the usual meaning holds, the less there is to gain from looking. Does the model still learn
# to?

# %%
import importlib.metadata
import importlib.util
import subprocess
import sys

if importlib.util.find_spec('lingrok') is None:
    kept = [f'{x}=={importlib.metadata.version(x)}' for x in ('jax', 'jaxlib') if importlib.util.find_spec(x)]
    url = 'git+https://github.com/lingrok/lingrok'
    subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', url, *kept], check=True)

# %%
import dataclasses
import os
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from lingrok import config, run, sweep
from lingrok.config import check_fields, key
from lingrok.figures import style
from lingrok.tasks.base import Batch, label_log_probs, masked_mean

# %matplotlib inline
# %config InlineBackend.figure_format = 'retina'
matplotlib.rcParams.update(style.RC)

jax.config.update('jax_num_cpu_devices', os.cpu_count())  # replicas train side by side, one a core

# %% tags=["parameters"]
NUM_STEPS = 600
SEEDS = (0, 1, 2)
USUAL = (0.0, 0.5, 0.8, 0.95)  # how often a word has its usual meaning
ROWS = 256  # sequences behind a measurement


# %% [markdown]
# ## The task
#
#     words a b c, meanings x y z         a y  c x  a y  b z  c x  a ?     the answer is y
#     asked for the n-th time             1    1    2    1    2    3       2 and more can be looked up
#
# A task is a frozen dataclass, registered under a name, whose fields are keys of the config with their meaning and
# bounds. It says what a batch is (tokens, targets, and a mask of the positions that are scored), what is measured, and
# what an exact predictor would reach. `VARIABLE` names the fields that replicas of one program may differ in: they live
# in the state as arrays. Everything is written for one replica and a `jax.random` key.

# %%
class DictionaryState(NamedTuple):
    """What training keeps fixed: the usual meaning of each word (W,), and how often it holds ()."""

    meaning_W: jax.Array
    usual: jax.Array


@config.register_task('dictionary')
@dataclasses.dataclass(frozen=True)
class Dictionary:
    """Pairs of a word and its meaning in this sequence: the usual one, or any, drawn once a word and sequence."""

    SECTION: ClassVar[str] = 'task'
    VARIABLE: ClassVar[tuple[str, ...]] = ('usual',)
    FILES: ClassVar[tuple[str, ...]] = ()
    splits: ClassVar[tuple[str, ...]] = ('same', 'unusual')  # the training law, and one without usual meanings
    headline: ClassVar[tuple[str, ...]] = ('same/loss', 'unusual/p_later')
    scored: ClassVar[slice] = slice(0, None, 2)  # where a meaning comes next

    words: int = key(8, 'words', low=2)
    meanings: int = key(8, 'meanings', low=2)
    pairs: int = key(16, 'pairs of a sequence', low=2)
    usual: float = key(0.5, 'probability that a word has its usual meaning', low=0.0, high=1.0)

    def __post_init__(self):
        check_fields(self)

    @property
    def vocab_size(self):
        return self.words + self.meanings

    @property
    def seq_len(self):
        return 2 * self.pairs - 1

    def check_batch(self, batch_size):
        """Any batch size will do."""

    def init(self, key, **variable):
        meaning_W = jax.random.randint(key, (self.words,), 0, self.meanings)
        return DictionaryState(meaning_W, jnp.asarray(variable.get('usual', self.usual), jnp.float32))

    def sample(self, state, key, *, split, batch_size, step=0):
        keys = jax.random.split(key, 3)
        word_BP = jax.random.randint(keys[0], (batch_size, self.pairs), 0, self.words)
        any_BW = jax.random.randint(keys[1], (batch_size, self.words), 0, self.meanings)
        usual = 0.0 if split == 'unusual' else state.usual
        is_usual_BW = jax.random.uniform(keys[2], any_BW.shape) < usual
        meaning_BP = jnp.take_along_axis(jnp.where(is_usual_BW, state.meaning_W, any_BW), word_BP, 1)
        row_BL = jnp.stack([word_BP, self.words + meaning_BP], 2).reshape(batch_size, -1)
        earlier_BPP = (word_BP[:, :, None] == word_BP[:, None]) & jnp.tri(self.pairs, dtype=bool)
        asked_BL = jnp.repeat(jnp.sum(earlier_BPP, -1), 2, 1)[:, :-1]  # for the n-th time
        mask_BL = (jnp.arange(self.seq_len) % 2 == 0).astype(jnp.float32) * jnp.ones((batch_size, 1))
        return Batch(row_BL[:, :-1], row_BL[:, 1:], mask_BL, {'asked_BL': asked_BL})

    def metrics(self, logits_BLV, batch):
        log_p_BL = label_log_probs(logits_BLV, batch.targets_BL)
        first_BL = batch.mask_BL * (batch.groups['asked_BL'] == 1)
        later_BL = batch.mask_BL * (batch.groups['asked_BL'] >= 2)
        return {
            'loss': -masked_mean(log_p_BL, batch.mask_BL),
            'loss_first': -masked_mean(log_p_BL, first_BL),
            'loss_later': -masked_mean(log_p_BL, later_BL),
            'p_first': masked_mean(jnp.exp(log_p_BL), first_BL),
            'p_later': masked_mean(jnp.exp(log_p_BL), later_BL),
        }

    def baselines(self, state, batch):
        """Losses of two exact predictors: who looks up what was said (Bayes), and who knows usual meanings alone."""
        word_BL = jnp.where(batch.mask_BL > 0, batch.tokens_BL, 0)
        is_usual_BL = batch.targets_BL == self.words + state.meaning_W[word_BL]
        stored_BL = state.usual * is_usual_BL + (1 - state.usual) / self.meanings
        bayes_BL = jnp.where(batch.groups['asked_BL'] == 1, stored_BL, 1.0)
        return {'loss/bayes': -masked_mean(jnp.log(bayes_BL), batch.mask_BL),
                'loss/stored': -masked_mean(jnp.log(stored_BL), batch.mask_BL)}


# %% [markdown]
# ## Try it before you train it
#
# A batch, to look at (letters are words, figures meanings), and the two exact losses against that of a guess.

# %%
task = Dictionary()
state = task.init(jax.random.key(0))
batch = task.sample(state, jax.random.key(1), split='same', batch_size=ROWS)
for tokens in np.array(batch.tokens_BL[:3]):
    print(' '.join(chr(97 + t) if t < task.words else str(t - task.words) for t in tokens))
print({name: round(float(value), 3) for name, value in task.baselines(state, batch).items()},
      'guess', round(float(np.log(task.meanings)), 3))

# %% [markdown]
# ## The sweep
#
# Everything else is the library's: model, optimiser, checkpoints, measurements. Settings and seeds are the *replicas*
# of one compiled program: `grid` makes their combinations, `vary` takes one value a replica. What changes a shape (a
# width, a number of layers) cannot be in one program; `experiments/sweep.py` plans such sweeps as several.

# %%
points = sweep.grid({'usual': USUAL, 'seed': SEEDS})

cfg = config.defaults('dictionary')
cfg.name = 'dictionary'
cfg.model.num_layers, cfg.model.d_model, cfg.model.d_mlp, cfg.model.num_heads = 2, 32, 128, 2
cfg.model.norm, cfg.model.position = 'rmsnorm', 'rope'
cfg.optim.optimizer, cfg.optim.learning_rate = 'adamw', 0.003
cfg.train.num_steps, cfg.train.batch_size = NUM_STEPS, 64
cfg.train.eval_every, cfg.train.save_count = max(1, NUM_STEPS // 20), 8
cfg.eval.batch_size = ROWS
cfg.vary.seed.all = tuple(point['seed'] for point in points)
cfg.vary.task.usual = tuple(point['usual'] for point in points)

experiment = config.from_config_dict(cfg)
trained = run.execute(experiment, run.default_directory(experiment))
print(trained.summary())

# %% [markdown]
# ## What came of it
#
# Probability of the right meaning, where a word is asked for the first time (a), where only weights can help, and later
# (b), where it can be looked up. Panel b is on *unusual* sequences, whose meanings are drawn without any habit: a model
# that only knows usual meanings is at chance there.
#
# What to look for: (a) should rise to the dotted lines, what usual meanings are worth. (b) asks whether looking up is
# learnt later, or less, where usual meanings nearly always hold. (c) shows by how much the loss on the training law is
# above that of the Bayes predictor; the dashed lines are a model that has stored all usual meanings and looks nothing
# up.

# %%
series, groups = trained.metrics(), trained.config.groups()
figure, ((first, later, excess),) = style.new_figure(1, 3, height=2.7)
for (setting, replicas), usual, color in zip(groups.items(), USUAL, style.COLORS, strict=False):
    for axis, name in ((first, 'same/p_first'), (later, 'unusual/p_later')):
        steps, values_TS = series[name]
        style.band(axis, steps, values_TS[:, replicas], color=color, label=setting)
    other = (1 - usual) / task.meanings  # of each meaning that is not the usual one
    first.axhline((usual + other) ** 2 + (task.meanings - 1) * other**2, color=color, linewidth=0.9, linestyle=':')
    loss, bayes, stored = (series[f'same/loss{name}'].values[:, replicas] for name in ('', '/bayes', '/stored'))
    style.band(excess, steps, loss - bayes, color=color, label=setting)
    excess.axhline((stored - bayes)[-1].mean(), color=color, linewidth=0.9, linestyle='--')
style.floor(first, 1 / task.meanings, 'chance')
style.floor(later, 1 / task.meanings, 'chance')
first.set_ylabel('p(meaning), first time')
later.set_ylabel('p(meaning), later, unusual')
excess.set_ylabel('loss above Bayes (nats)')
for axis in (first, later):
    axis.set_ylim(0, 1)
excess.set_ylim(-0.1, np.log(task.meanings))
style.finish(figure, (first, later, excess), xlabel='step', note=style.replicas_note(len(SEEDS)), one_legend=True)
figure
