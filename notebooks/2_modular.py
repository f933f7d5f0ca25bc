# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Solving tasks never seen: in-context modular arithmetic
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/lingrok/lingrok/blob/main/notebooks/2_modular.ipynb)
#
# Rows of examples x y z with z = a x + b y mod 7; the task (a, b) has to be found from the examples. You will train
# small models on 36 of the 49 tasks and on 8 of them, three seeds each, in about two minutes: with 36 tasks, tasks that
# were never trained on are solved, with 8 they are not. Then you will see how many examples that takes, which phase
# each model is in, where its heads look, and in which basis it computes. After *Learning to grok* (arXiv 2406.02550),
# at a size that two CPU cores train: this is the first of the paper's skills, matching ratios, not the second.

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
import functools
import os

import jax
import matplotlib
import numpy as np

from lingrok import config, run
from lingrok.analysis import characters, heads, phases, skills
from lingrok.figures import features, modular, style
from lingrok.figures import heads as head_figures
from lingrok.metrics import text

# %matplotlib inline
# %config InlineBackend.figure_format = 'retina'
matplotlib.rcParams.update(style.RC)

jax.config.update('jax_num_cpu_devices', os.cpu_count())  # replicas train side by side, one a core

# %% tags=["parameters"]
NUM_STEPS = 600
SEEDS = (0, 1, 2)
NUM_TASKS = (36, 8)  # of 49
ROWS = 360  # rows behind a measurement, a multiple of both

# %% [markdown]
# ## The experiment
#
# The recipe of `configs/modular.py:demo` with shorter rows and 40 % of the 49 inputs (x, y), so that there are four
# kinds of data: trained or unseen tasks, trained or unused inputs. Number of tasks and seed are replicas of one
# program.

# %%
MATRICES = ('q', 'k', 'v', 'o', 'mlp_in', 'mlp_out')

cfg = config.defaults('modular')
cfg.name = 'modular_notebook'

cfg.task.p = 7
cfg.task.num_examples = 12
cfg.task.num_tasks = NUM_TASKS[0]
cfg.task.alpha = 0.4  # share of the inputs that train
cfg.task.batching = 'balanced'  # equally many rows of every task
cfg.task.splits = (*phases.SETS, 'ood_forced')

cfg.model.num_layers, cfg.model.d_model, cfg.model.d_mlp, cfg.model.num_heads = 2, 64, 256, 4
cfg.model.position, cfg.model.norm = 'rope', 'rmsnorm'
cfg.model.num_types = 3  # whether a token stands for x, y or z
cfg.model.conv_width = 3
cfg.model.init, cfg.model.init_depth_scaled = 'fan_in', ('o', 'mlp_out')

cfg.optim.optimizer, cfg.optim.learning_rate, cfg.optim.momentum, cfg.optim.weight_decay = 'muon', 0.02, 0.95, 0.1
cfg.optim.adam_learning_rate, cfg.optim.adam_weight_decay = 0.003, 0.3
cfg.optim.decay = ('embed', 'unembed', *(f'blocks.*.{role}' for role in MATRICES))
cfg.optim.warmup_steps = min(50, NUM_STEPS // 2)
cfg.optim.schedule, cfg.optim.decay_share, cfg.optim.floor = 'wsd', 0.3, 0.02

cfg.train.num_steps, cfg.train.batch_size = NUM_STEPS, 72
cfg.train.eval_every, cfg.train.save_count = min(100, NUM_STEPS), 8
cfg.eval.batch_size = ROWS
cfg.vary.seed.all = tuple(seed for seed in SEEDS for _ in NUM_TASKS)
cfg.vary.task.num_tasks = NUM_TASKS * len(SEEDS)

experiment = config.from_config_dict(cfg)

# %% [markdown]
# The data: (a) the plane of tasks (a, b) with the 36 that train, chosen as corners of rectangles; (b) the table of one
# task, unused inputs in black; (c) rows as the model reads them.

# %%
task = experiment.task
state = task.init(jax.random.key(0))
batch = task.sample(state, jax.random.key(1), split='train', batch_size=cfg.train.batch_size)
modular.illustration(task, state, batch)

# %% [markdown]
# ## Train
#
# This cell again resumes an interrupted run, and returns a finished one as it is.

# %%
trained = run.execute(experiment, run.default_directory(experiment))
print(trained.summary())

# %% [markdown]
# ## What was learnt
#
# Accuracy at the last query of a row, along training. What to look for. Training tasks (a) are learnt in both settings,
# 8 of them sooner. On unseen tasks (c) models of 36 tasks rise from chance towards *ratio matching*, the exact
# predictor that finds an example with (x, y) = r (x', y') and answers r z', while those of 8 stay near chance. Unused
# inputs (b, d) are harder: nothing in training says what such a pair of tokens means.

# %%
series = trained.metrics()
titles = ('training tasks,\ntraining inputs', 'training tasks,\nunused inputs', 'unseen tasks,\ntraining inputs',
          'unseen tasks,\nunused inputs')
figure, axes = style.new_figure(1, 4, height=2.5)
for axis, name, title in zip(axes[0], phases.SETS, titles, strict=True):
    steps, values_TS = series[f'{name}/accuracy_last']
    for color, (setting, replicas) in zip(style.COLORS, trained.config.groups().items(), strict=False):
        style.band(axis, steps, values_TS[:, replicas], color=color, label=setting)
    style.floor(axis, np.mean(series[f'{name}/accuracy_last/ratio'].values[-1]), 'ratio matching')
    style.floor(axis, 1 / task.p, 'chance', below=True)
    axis.set_ylim(0, 1.02)
    axis.set_title(title)
axes[0, 0].set_ylabel('accuracy, last query')
style.finish(figure, axes, xlabel='step', note=style.replicas_note(len(SEEDS)), one_legend=True)
figure

# %% [markdown]
# The numbers at the end. Last line of a setting: unseen tasks with queries that are a multiple of no example
# (*forced*), which ratio matching cannot answer, beside the *kernel trick*, a guess of 0 that is right too often for
# chance. Above that line would be the second skill of the paper, combining two examples; it takes more training
# (`configs/modular.py:regression`).

# %%
for setting, replicas in trained.config.groups().items():
    for name in phases.SETS:
        print(f'{setting:13} {name:11} {text(series[f"{name}/accuracy_last"].values[-1, replicas])}')
    forced, kernel = (series[f'ood_forced/accuracy_last_not_covered{x}'].values[-1, replicas] for x in ('', '/kernel'))
    print(f'{setting:13} forced      {text(forced)}   kernel trick {text(kernel)}')
print(f'{"chance":25} {1 / task.p:.3f}')

# %% [markdown]
# ## Phases
#
# The paper sorts models by which of the four sets they solve, here from an accuracy of .75 on. *I.d. memorisation*:
# training tasks and inputs alone; *o.o.d. memorisation*: unseen tasks, on training inputs alone; *o.o.d.
# generalisation*, unseen tasks and inputs, needs more inputs than these models have seen.


# %%
def history(replica):
    """(step, phase) of every evaluation that finds a replica in another phase than the one before."""
    steps = series['id_train/accuracy_last'].steps
    numbers = [int(phases.phase({name: series[f'{name}/accuracy_last'].values[t, replica] for name in phases.SETS}))
               for t in range(len(steps))]
    before = [-1, *numbers[:-1]]
    return [(step, phases.PHASES[now]) for step, now, last in zip(steps, numbers, before, strict=True) if now != last]


for setting, replicas in trained.config.groups().items():
    for seed, replica in zip(SEEDS, replicas, strict=True):
        print(f'{setting:13} seed {seed}', '; '.join(f'{name} from step {step}' for step, name in history(replica)))

# %% [markdown]
# ## How many examples it takes
#
# Accuracy and loss against the number of examples before the query, measured on rows of their own, training inputs.
# What to look for: on unseen tasks (b) the models of 36 tasks follow the dotted line of ratio matching, while *Bayes,
# all tasks*, who can combine two examples, needs only two or three. Where models of 8 tasks are wrong on unseen tasks,
# they are sure of it (d).

# %%
by_shot = trained.measure(functools.partial(skills.by_shot, splits=('id_train', 'ood_train'), num_rows=ROWS))
modular.shots(by_shot, trained.config)

# %% [markdown]
# ## Where the heads look
#
# Maps of one row for every head, and how much the best head of a layer puts on the token so far back (a head that looks
# at the token before is what the paper reports of its first block; these small models have a convolution for that).

# %%
looked = trained.measure(functools.partial(heads.attention, num_rows=ROWS))
head_figures.attention(looked, trained.config)

# %% [markdown]
# ## In which basis
#
# Multiplying residues is adding their discrete logarithms, so a model that multiplies can work in Fourier modes over
# the logarithm (multiplicative characters). What to look for: in (d), how much of the power of a head's output lies in
# a single frequency, against the grey line of random numbers. With p = 7 there are three frequencies only, so that the
# line is high, and three seeds leave wide intervals: is there more than a tendency?

# %%
spectra = trained.measure(characters.spectra)
features.characters(spectra, trained.config)

# %% [markdown]
# ## On
#
# Every script of `experiments/modular/` does the same for a run of any size: label noise, mixtures of exact predictors,
# ablation, patching, principal components, neurons, probes.
# [docs/modular.md](https://github.com/lingrok/lingrok/blob/main/docs/modular.md) says what was found.
