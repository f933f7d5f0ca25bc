# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Noise is stored, targets are recalled
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/lingrok/lingrok/blob/main/notebooks/1_recall.ipynb)
#
# A two-layer Transformer reads text in which a *trigger* is followed by a token that has to be recalled from the
# context, or, half of the time, by a *noise* token. You will train four seeds of it in about a minute, see the noise
# learnt first and by a feed-forward, the recall later and by attention, and then remove that feed-forward: the noise
# goes, the recall stays. This is the toy model of *Distributional associations vs in-context reasoning* (arXiv
# 2406.03068), at a size that two CPU cores train.

# %% [markdown]
# The first cell installs what is missing, in Colab as a rule, and leaves the jax that is there alone.

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
import numpy as np

from lingrok import config, figures, run
from lingrok.analysis import attention, lowrank, truncation
from lingrok.figures import editing
from lingrok.metrics import text

# %matplotlib inline
# %config InlineBackend.figure_format = 'retina'

jax.config.update('jax_num_cpu_devices', os.cpu_count())  # seeds train side by side, one a core

# %% [markdown]
# ## The experiment
#
# Every number is a key of the config. Fewer seeds or steps are quicker; with two seeds or more, figures have error
# bars.

# %% tags=["parameters"]
NUM_STEPS = 400
SEEDS = (0, 1, 2, 3)
ROWS = 64  # sequences behind a measurement

# %%
cfg = config.defaults('recall')
cfg.name = 'recall_demo'

cfg.task.length = 64  # tokens of a sequence
cfg.task.noise_prob = 0.5
cfg.task.noise_token = '!'

cfg.model.num_layers = 2
cfg.model.d_model = 64
cfg.model.d_mlp = 256
cfg.model.query = 'identity'  # the key matrix is the merged key-query matrix

cfg.optim.learning_rate = 0.06
cfg.optim.frozen = ('embed', 'pos', 'unembed')  # random vectors

cfg.train.num_steps = NUM_STEPS
cfg.train.batch_size = 64
cfg.train.log_every = 10
cfg.train.eval_every = min(20, NUM_STEPS)
cfg.train.save_count = 10  # checkpoints, log-spaced

cfg.eval.batch_size = ROWS
cfg.eval.truncations = ('blocks.1.mlp_in@0.0', 'blocks.1.mlp_in@0.1')  # also evaluated: without a matrix, a tenth of it
cfg.vary.seed.all = SEEDS

experiment = config.from_config_dict(cfg)  # checked: a wrong key or value ends here, in one line

# %% [markdown]
# What the model reads: letters that follow the bigram law of Shakespeare's text, but for the trigger, in brackets. Its
# successor is the target of this sequence, another one in each, or the noise token `!`.

# %%
task = experiment.task
state = task.init(jax.random.key(0))
batch = task.sample(state, jax.random.key(1), split='noisy', batch_size=4)
symbols = {i: {' ': '_', '\n': '|'}.get(symbol, symbol) for i, symbol in enumerate(task.symbols)}
for tokens, occurrence in zip(np.array(batch.tokens_BL), np.array(batch.groups['occurrence_BL']), strict=True):
    print(''.join(f'[{symbols[t]}]' if o else symbols[t] for t, o in zip(tokens.tolist(), occurrence, strict=True)))

# %% [markdown]
# ## Train
#
# All seeds are one compiled program. The run directory keeps the config, metrics and checkpoints; this cell again
# resumes a run that was interrupted, and returns a finished one as it is. It is the run of `python experiments/train.py
# --config=configs/recall.py:demo`.

# %%
trained = run.execute(experiment, run.default_directory(experiment))
print(trained)
print(trained.summary())

# %% [markdown]
# ## How it was learnt
#
# What to look for. (a) The loss falls to *distribution only*, the best that can be said without the context, and stays
# there before it goes on towards *Bayes*. (b) On clean text, which has no noise, the noise token is nevertheless
# predicted about as often as it occurs in training; without the second feed-forward (dashed) it is not. (c) That
# feed-forward has stored the noise, given the trigger alone, before (d) attention has found the targets.

# %%
series = trained.metrics()
figures.TRAINING['recall'](series, trained.config)


# %% [markdown]
# The same in two numbers a seed: the first evaluation at which the noise margin of feed-forward 1 is above 1 nat, and
# that at which attention puts more than half on targets. If storing is the easier part, the first comes first.

# %%
def first_step(name, threshold):
    """The first evaluated step (S,) at which a quantity is above a threshold; infinite if that never happens."""
    steps, values_TS = series[name]
    above_TS = values_TS > threshold
    return np.where(above_TS.any(0), steps[above_TS.argmax(0)], np.inf)


stored = first_step('noise_margin/blocks.1', 1.0)
found = first_step('noisy/attention_target/blocks.1', 0.5)
for seed, steps in zip(SEEDS, zip(stored, found, strict=True), strict=True):
    print(f'seed {seed}: noise stored at step {steps[0]:g}, targets found at step {steps[1]:g}')

# %% [markdown]
# ## Where it looks
#
# Attention of the last layer at the last checkpoint, measured afresh on noisy sequences: the map of one sequence of one
# seed, and statistics of all seeds. Behind an earlier trigger stands its target as often as the noise token. A pattern
# that only knows "look behind the trigger" cannot tell them apart: compare the two shares in the title at the right.

# %%
found = trained.measure(functools.partial(attention.attention, num_rows=ROWS))
editing.attention(found, trained.config)

# %% [markdown]
# `measure` takes any function of one replica, (params, task state, key, config) -> arrays, and any steps. Here along
# training, for the two masses of the right-hand panel:

# %%
along = trained.measure(functools.partial(attention.attention, num_rows=ROWS), steps=trained.steps)
print('step   on targets               on noise')
for t, step in enumerate(trained.steps):
    print(f'{step:4}   {text(along["mass/target"].values[t]):24} {text(along["mass/noise"].values[t])}')

# %% [markdown]
# ## Remove the second feed-forward
#
# Checkpoints are plain nested dicts of arrays, and an edited model is edited params. Before the surgery, one clean
# sequence: what does seed 0 expect behind the last trigger?

# %%
params = trained.params(replica=0)
without = lowrank.truncate(params, trained.config.model, 'mlp_in', layer=1, rank_fraction=0.0)

clean = trained.sample(jax.random.key(2), split='clean', batch_size=ROWS)
occurrence_BL = np.array(clean.groups['occurrence_BL'])
row = int(np.argmax(occurrence_BL.max(1)))
position = int(np.argmax(occurrence_BL[row]))
print('target:', symbols[int(clean.groups['answer_BL'][row, position])])
for name, model in (('whole', params), ('without feed-forward 1', without)):
    logits_BLV, _ = trained.apply(clean.tokens_BL[row : row + 1], params=model)
    p_V = np.array(jax.nn.softmax(logits_BLV[0, position]))
    print(f'{name:24}', '  '.join(f'{symbols[int(i)]} {p_V[i]:.2f}' for i in np.argsort(-p_V)[:4]))

# %% [markdown]
# All seeds, and all of a sequence's repeated triggers; the intervals are 95 % Student intervals over seeds. Chance is
# one over the vocabulary.

# %%
for name, model in (('', 'whole'), ('/blocks.1.mlp_in@0.1', 'a tenth of mlp_in'), ('/blocks.1.mlp_in@0.0', 'without')):
    noise, target = (text(series[f'clean/{quantity}{name}'].values[-1]) for quantity in ('p_noise', 'p_correct'))
    print(f'{model:20} P(noise) {noise}   P(target) {target}')
print(f'{"chance":20} {1 / task.vocab_size:.3f}')

# %% [markdown]
# ## Is it this matrix, and which part of it?
#
# Every matrix, cut down to the top (solid) or bottom (dashed) fraction of its singular directions. What to look for:
# noise goes (a) where little is kept of the first matrix of feed-forward 1 (1 FF in); recall goes (b) where little is
# kept of the values of the last attention (1 ov). The text off triggers (c) was not trained in this run, so that panel
# says little here; `configs/recall.py:all` trains it.

# %%
cuts = trained.measure(functools.partial(truncation.grid, num_rows=ROWS))
editing.truncation(cuts, trained.config)

# %% [markdown]
# ## On
#
# - More noise, other widths, other optimisers: change the config above, or put values that do not change a shape into
#   `cfg.vary` (`cfg.vary.task.noise_prob = (0.3, 0.5, 0.7, 0.9)`, one value a replica).
# - `3_look_inside.ipynb` takes this model apart with hooks, patches and probes.
# - [docs/recall.md](https://github.com/lingrok/lingrok/blob/main/docs/recall.md) has every experiment and its numbers.
