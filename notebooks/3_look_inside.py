# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Look inside one model
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/lingrok/lingrok/blob/main/notebooks/3_look_inside.ipynb)
#
# The tools by which one takes a model apart, each in a few lines, on the two-layer recall model of `1_recall.ipynb`:
# activations by name, hooks, ablation, activation patching, linear probes, truncation of a matrix, and any measurement
# of your own on every seed and checkpoint. By the end you will have traced both of its skills: a target moves from
# where it stands to where it is asked for, through attention, while the noise comes out of a feed-forward, whatever the
# context.

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
import jax.numpy as jnp
import matplotlib
import numpy as np

from lingrok import config, model, names, run
from lingrok.analysis import lowrank
from lingrok.figures import style
from lingrok.metrics import interval

# %matplotlib inline
# %config InlineBackend.figure_format = 'retina'
matplotlib.rcParams.update(style.RC)

jax.config.update('jax_num_cpu_devices', os.cpu_count())  # seeds train side by side, one a core

# %% tags=["parameters"]
NUM_STEPS = 400
SEEDS = (0, 1, 2, 3)
ROWS = 64  # sequences behind a measurement

# %% [markdown]
# ## A model
#
# The run of `1_recall.ipynb`: loaded if it stands in `runs/`, else trained, which takes a minute on two cores. Any
# other run directory will do: `trained = lingrok.load_run(path)`, local or `gs://`.

# %%
cfg = config.defaults('recall')
cfg.name = 'recall_demo'
cfg.task.length, cfg.task.noise_prob, cfg.task.noise_token = 64, 0.5, '!'
cfg.model.num_layers, cfg.model.d_model, cfg.model.d_mlp, cfg.model.query = 2, 64, 256, 'identity'
cfg.optim.learning_rate, cfg.optim.frozen = 0.06, ('embed', 'pos', 'unembed')
cfg.train.num_steps, cfg.train.batch_size = NUM_STEPS, 64
cfg.train.log_every, cfg.train.eval_every, cfg.train.save_count = 10, min(20, NUM_STEPS), 10
cfg.eval.batch_size = ROWS
cfg.eval.truncations = ('blocks.1.mlp_in@0.0', 'blocks.1.mlp_in@0.1')
cfg.vary.seed.all = SEEDS

experiment = config.from_config_dict(cfg)
trained = run.execute(experiment, run.default_directory(experiment))
trained

# %% [markdown]
# ## Activations have names
#
# Every step of the forward pass has a name, that of TransformerLens where there is one. `apply` returns the logits and
# whatever you ask for, by name or pattern. Axes are single letters: B sequences, L positions, D residual width, V
# vocabulary, H heads, F hidden width.

# %%
print(*names.activation_names(trained.config.model), sep='  ')

# %%
batch = trained.sample(jax.random.key(0), split='clean', batch_size=ROWS)
logits_BLV, acts = trained.apply(batch.tokens_BL, capture=('blocks.*.attn.pattern', 'blocks.1.mlp.post', 'final'))
for name, value in {'logits': logits_BLV, **acts}.items():
    print(f'{name:24} {value.shape}')

# %% [markdown]
# ## Hooks replace activations
#
# A hook is a function of an activation, given to one call: nothing to register, nothing to reset. Two checks before
# they are trusted: a hook that returns its input changes nothing, and zeroing what feed-forward 1 adds is the same as
# removing its first matrix. Both differences should be 0, up to rounding.

# %%
same, _ = trained.apply(batch.tokens_BL, hooks={'blocks.1.mlp_out': lambda x: x})
zeroed, _ = trained.apply(batch.tokens_BL, hooks={'blocks.1.mlp_out': jnp.zeros_like})
edited = lowrank.truncate(trained.params(), trained.config.model, 'mlp_in', layer=1, rank_fraction=0.0)
removed, _ = trained.apply(batch.tokens_BL, params=edited)
print('identity hook, largest change of a logit:', float(jnp.abs(same - logits_BLV).max()))
print('zeroed against removed                  :', float(jnp.abs(zeroed - removed).max()))
print('zeroed against the whole model          :', float(jnp.abs(zeroed - logits_BLV).max()))

# %% [markdown]
# ## Ablate: what is needed for what?
#
# `measure` runs a function of one replica, (params, task state, key, config) -> arrays, on all seeds and on any saved
# steps. Here: the probabilities of the noise token and of the target at repeated triggers of clean sequences, when a
# sublayer adds nothing (zero), or always its mean over sequences and positions (mean).
#
# What to look for: P(target) should fall to chance without either attention, for recall takes two of them; P(noise)
# should fall without feed-forward 1 alone. Where zero and mean disagree, the mean itself holds what is asked for: a
# feed-forward that writes the noise token at every position, not at triggers alone, still does so on average.

# %%
SUBLAYERS = ('blocks.0.attn_out', 'blocks.0.mlp_out', 'blocks.1.attn_out', 'blocks.1.mlp_out')
LABELS = ('attention 0', 'FF 0', 'attention 1', 'FF 1')
KINDS = {'zero': jnp.zeros_like, 'mean': lambda x: jnp.broadcast_to(x.mean((0, 1)), x.shape)}


def ablate(params, task_state, key, cfg):
    batch = cfg.task.sample(task_state, key, split='clean', batch_size=ROWS)
    found = {}
    for name in ('intact', *SUBLAYERS):
        for kind, replacement in KINDS.items():
            hooks = {} if name == 'intact' else {name: replacement}
            metrics = cfg.task.metrics(model.apply(params, batch.tokens_BL, cfg=cfg.model, hooks=hooks)[0], batch)
            found |= {f'{kind}/{name}/noise': metrics['p_noise'], f'{kind}/{name}/target': metrics['p_correct']}
    return found


ablated = trained.measure(ablate)

# %%
figure, ((axis,),) = style.new_figure(1, 1, width=0.7 * style.TWO_COLUMNS, height=2.6)
for shift, word, color in ((-0.15, 'noise', style.RED), (0.05, 'target', style.GREEN)):
    for more, kind, face in ((0, 'zero', color), (0.1, 'mean', 'white')):
        values = [ablated[f'{kind}/{name}/{word}'].values[-1] for name in ('intact', *SUBLAYERS)]
        mean, half = interval(np.array(values))
        axis.errorbar(np.arange(5) + shift + more, mean, half, fmt='o', color=color, markerfacecolor=face, markersize=4,
                      label=f'P({word}), {kind}')
style.floor(axis, 1 / trained.task.vocab_size, 'chance')
axis.set_xticks(range(5), ['intact', *LABELS])
axis.set_xlabel('sublayer ablated')
axis.set_ylabel('probability, clean data')
axis.set_ylim(-0.02, 1)
axis.legend(loc='lower center', bbox_to_anchor=(0.5, 1.0), ncols=4)
figure.suptitle(style.replicas_note(len(SEEDS)), fontsize=8)
figure


# %% [markdown]
# ## Patch: where does the answer travel?
#
# Two copies of each sequence that differ in the target only: in the second one, another letter stands behind every
# trigger. The question is put at the last trigger. Into the second copy we put the residual stream of the first one, at
# one depth and some positions, and ask how far the answer turns: the difference of the two targets' logits, 0 as in the
# second copy, 1 as in the first.
#
# What to look for: the answer stands at the *targets* at first. Attention 1 should carry it to the *question*; from
# there on the targets no longer matter.

# %%
SITES = ('blocks.0.resid_pre', 'blocks.0.resid_mid', 'blocks.1.resid_pre', 'blocks.1.resid_mid', 'blocks.1.resid_post')
DEPTHS = ('before\nblock 0', 'after\nattention 0', 'before\nblock 1', 'after\nattention 1', 'after\nblock 1')
PLACES = ('targets', 'question', 'all others')


def patch(params, task_state, key, cfg):
    batch = cfg.task.sample(task_state, key, split='clean', batch_size=ROWS)
    tokens_BL, occurrence_BL = batch.tokens_BL, batch.groups['occurrence_BL']
    place_L = jnp.arange(tokens_BL.shape[1])
    ask_B = jnp.argmax(jnp.where(occurrence_BL >= 2, place_L, -1), 1)  # the last repeated trigger
    first_B = jnp.max(batch.groups['answer_BL'], 1)
    other_B = jax.random.randint(jax.random.fold_in(key, 1), first_B.shape, 0, cfg.task.vocab_size)
    usable_B = (jnp.max(occurrence_BL, 1) >= 2) & (first_B != other_B)

    behind_BL = jnp.pad(occurrence_BL[:, :-1] > 0, ((0, 0), (1, 0)))
    second_BL = jnp.where(behind_BL, other_B[:, None], tokens_BL)
    is_ask_BL = place_L == ask_B[:, None]
    places = dict(zip(PLACES, (behind_BL & ~is_ask_BL, is_ask_BL, ~behind_BL & ~is_ask_BL), strict=True))

    def turn(hooks):
        logits_BLV = model.apply(params, second_BL, cfg=cfg.model, hooks=hooks)[0]
        logits_BV = jnp.take_along_axis(logits_BLV, ask_B[:, None, None], 1)[:, 0]
        first, other = (jnp.take_along_axis(logits_BV, word_B[:, None], 1)[:, 0] for word_B in (first_B, other_B))
        return jnp.sum((first - other) * usable_B) / jnp.sum(usable_B)

    _, clean = model.apply(params, tokens_BL, cfg=cfg.model, capture=SITES)
    low, high = turn({}), turn({SITES[0]: lambda x: clean[SITES[0]]})
    found = {}
    for site in SITES:
        for place, where_BL in places.items():
            hook = functools.partial(jnp.where, where_BL[..., None], clean[site])  # elsewhere, what is there
            found[f'{site}/{place}'] = (turn({site: hook}) - low) / (high - low)
    return found


patched = trained.measure(patch)

# %%
figure, ((axis,),) = style.new_figure(1, 1, width=0.7 * style.TWO_COLUMNS, height=2.6)
for place, color in zip(PLACES, style.COLORS, strict=False):
    values = np.array([patched[f'{site}/{place}'].values[-1] for site in SITES])
    style.band(axis, np.arange(len(SITES)), values, color=color, label=place)
for level, label in ((0, 'as in the second copy'), (1, 'as in the first')):
    style.floor(axis, level, label)
axis.set_xticks(range(5), DEPTHS)
axis.set_xlabel('depth of the patch')
axis.set_ylabel('answer turned (share)')
axis.legend(title='patched at', loc='center left')
axis.set_title(style.replicas_note(len(SEEDS)))
figure


# %% [markdown]
# ## Probe: what could be read off?
#
# Patching says what the model uses; a probe says what somebody who may fit a map could read. A ridge regression to
# one-hot classes reads the *target* off the residual stream at repeated triggers, fitted on one half of the sequences
# and tested on the other, in the model before training (step 0) and after. The floor is the most frequent target.
#
# What to look for: nothing before attention 1, nearly all after it. A probe of the untrained model is the control:
# whatever it can read there, nobody has learnt.

# %%
def ridge(x_ND, labels_N, weights_N, test_ND, num_classes, penalty=1.0):
    """Classes that a weighted ridge regression fitted to (x, labels) predicts for the test rows."""
    one_hot_NC = jax.nn.one_hot(labels_N, num_classes)
    mean_D, mean_C = (jnp.average(x, 0, weights_N) for x in (x_ND, one_hot_NC))
    x_ND, test_ND = x_ND - mean_D, test_ND - mean_D
    gram_DD = x_ND.T @ (weights_N[:, None] * x_ND) + penalty * jnp.eye(x_ND.shape[1])
    map_DC = jnp.linalg.solve(gram_DD, x_ND.T @ (weights_N[:, None] * (one_hot_NC - mean_C)))
    return jnp.argmax(test_ND @ map_DC + mean_C, -1)


def probe(params, task_state, key, cfg):
    batch = cfg.task.sample(task_state, key, split='clean', batch_size=4 * ROWS)
    _, acts = model.apply(params, batch.tokens_BL, cfg=cfg.model, capture=SITES)
    fit_N, test_N = (half.ravel() for half in jnp.split(jnp.maximum(batch.groups['answer_BL'], 0), 2))
    used_N, scored_N = (half.ravel() for half in jnp.split((batch.groups['occurrence_BL'] >= 2) * 1.0, 2))
    counts_V = jnp.bincount(test_N, scored_N, length=cfg.task.vocab_size)
    found = {'floor': jnp.max(counts_V) / jnp.sum(counts_V)}
    for site in SITES:
        fit_ND, test_ND = (half.reshape(-1, half.shape[-1]) for half in jnp.split(acts[site], 2))
        hit_N = ridge(fit_ND, fit_N, used_N, test_ND, cfg.task.vocab_size) == test_N
        found[site] = jnp.average(hit_N, weights=scored_N)
    return found


probed = trained.measure(probe, steps=(trained.steps[0], trained.steps[-1]))

# %%
figure, ((axis,),) = style.new_figure(1, 1, width=0.7 * style.TWO_COLUMNS, height=2.6)
for t, color in ((0, style.GREY), (-1, style.BLUE)):
    mean, half = interval(np.array([probed[site].values[t] for site in SITES]))
    axis.errorbar(range(len(SITES)), mean, half, fmt='o-', color=color, markersize=4, label=f'step {trained.steps[t]}')
style.floor(axis, probed['floor'].values.mean(), 'most frequent target', below=True)
axis.set_xticks(range(5), DEPTHS)
axis.set_xlabel('residual stream')
axis.set_ylabel('accuracy of the probe')
axis.set_ylim(-0.1, 1.02)
axis.legend()
axis.set_title(style.replicas_note(len(SEEDS)))
figure


# %% [markdown]
# ## Truncate: how many directions hold the noise?
#
# The first matrix of feed-forward 1, cut to its top or bottom singular directions. `spectrum` pays for the
# decomposition once. A single association, "whatever comes in, the noise token", could do with a single direction; if
# it did, P(noise) would be back with the first one. Look where it comes back, and whether the *top* directions hold
# more of it than as many at the *bottom*.

# %%
KEPT = (0, 1, 2, 4, 8, 16, 32, 64)


def truncate(params, task_state, key, cfg):
    batch = cfg.task.sample(task_state, key, split='clean', batch_size=ROWS)
    svd = lowrank.spectrum(params, cfg.model, 'mlp_in', layer=1)
    found = {'share': svd.s**2 / jnp.sum(svd.s**2)}
    for keep in ('top', 'bottom'):
        cut = [lowrank.truncate(params, cfg.model, 'mlp_in', 1, n / KEPT[-1], keep=keep, svd=svd) for n in KEPT]
        metrics = [cfg.task.metrics(model.apply(p, batch.tokens_BL, cfg=cfg.model)[0], batch) for p in cut]
        found |= {f'{keep}/{name}': jnp.stack([m[name] for m in metrics]) for name in ('p_noise', 'p_correct')}
    return found


truncated = trained.measure(truncate)

# %%
figure, ((axis, spectrum),) = style.new_figure(1, 2, height=2.7)
for keep, linestyle in (('top', '-'), ('bottom', '--')):
    for name, word, color in (('p_noise', 'noise', style.RED), ('p_correct', 'target', style.GREEN)):
        values_KS = truncated[f'{keep}/{name}'].values[-1].T
        label = f'{word}, {keep} kept'
        style.band(axis, np.arange(len(KEPT)), values_KS, color=color, linestyle=linestyle, label=label)
style.floor(axis, 1 / trained.task.vocab_size, 'chance')
axis.set_xticks(range(len(KEPT)), KEPT)
axis.set_ylim(-0.02, 1)
axis.set_xlabel('singular directions kept')
axis.set_ylabel('probability, clean data')
axis.legend(loc='lower center', bbox_to_anchor=(0.5, 1.0), ncols=2)
shares_RS = truncated['share'].values[-1].T
style.band(spectrum, np.arange(1, KEPT[-1] + 1), shares_RS, color=style.PURPLE, label='blocks.1.mlp_in')
style.floor(spectrum, 1 / KEPT[-1], 'all equal')
spectrum.set_title(style.replicas_note(len(SEEDS)))
spectrum.set_ylim(bottom=0)
spectrum.set_xlabel('singular direction')
spectrum.set_ylabel('share of the squared norm')
figure


# %% [markdown]
# ## Measure along training
#
# Your own number at every checkpoint of every seed. This model has no norm, so that the logit of the noise token is a
# sum of what the embedding and the sublayers write: who pushes it up at repeated triggers, relative to the mean of all
# tokens, and when?
#
# What to look for: feed-forwards, not attention; and whether both of them share the work before feed-forward 1 takes
# most of it.

# %%
def attribute(params, task_state, key, cfg):
    batch = cfg.task.sample(task_state, key, split='clean', batch_size=ROWS)
    _, acts = model.apply(params, batch.tokens_BL, cfg=cfg.model, capture=SUBLAYERS)
    unembed_DV = params['unembed']
    direction_D = unembed_DV[:, cfg.task.noise_id] - unembed_DV.mean(1)
    repeated_BL = batch.groups['occurrence_BL'] >= 2
    return {name: jnp.sum((acts[name] @ direction_D) * repeated_BL) / jnp.sum(repeated_BL) for name in SUBLAYERS}


attributed = trained.measure(attribute, steps=trained.steps)

# %%
figure, ((axis,),) = style.new_figure(1, 1, width=0.7 * style.TWO_COLUMNS, height=2.6)
for name, label, color in zip(SUBLAYERS, LABELS, (style.SKY, style.ORANGE, style.GREEN, style.PURPLE), strict=True):
    style.band(axis, *attributed[name], color=color, label=label)
axis.axhline(0, color='black', linewidth=0.5)
style.log_steps(axis, trained.steps)
axis.set_xlim(0, NUM_STEPS)
axis.set_xlabel('step (log scale)')
axis.set_ylabel('noise logit from (nats)')
axis.legend()
axis.set_title(style.replicas_note(len(SEEDS)))
figure

# %% [markdown]
# Nothing here is special to this task: `model.apply`, `lowrank` and `measure` take every model of the library, and
# `4_pretrained.ipynb` does the same to one that was trained elsewhere. `lingrok.analysis` has these measurements and
# more as tested functions, `experiments/` as scripts that write a figure and its numbers.
