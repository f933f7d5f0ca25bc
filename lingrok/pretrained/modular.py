"""Models of the official code of arXiv 2406.02550: its state dicts, and the pools that its seeds make.

The official code saves a state dict under a name that carries the settings,

    noembdFalse_paraleTrue_pltask384_rope_decoder_p29_base29_row32_ntask384_nvar2_dsplitTrue_dfrac80.0_relu_n512_h4_d4_
    lctx512_I1_dI0_adamw_bs1536_t200000_T200000_Tw10000_lr1.50e-04_wd2.00e+00.pth

A matrix of torch is (out, in). Queries, keys and values are the three thirds of one matrix, heads are slices of each,
and the rotary embedding turns pairs (2i, 2i + 1). Its vocabulary is longer than p: the digits 0 to p and 17 symbols.

Task list and input split are drawn exactly as there: tasks by the generator of Python's `random`, inputs by the legacy
generator of numpy. Where the official code runs through a set of tasks (unseen tasks, additional random tasks), the
order is that of CPython.
"""

import dataclasses
import itertools
import random
import re
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

import lingrok.tasks  # noqa: F401  registers the tasks
from lingrok.config import Config, ModelConfig, check_fields, from_dict, key, require
from lingrok.pretrained import torch_file
from lingrok.tasks.modular import ModularState

NUM_SYMBOLS = 18  # of the vocabulary beyond 0 to p - 1
MAX_DRAWS = 10_000  # of the corners of a rectangle; the official code would try for ever
KINDS = {  # activation in the name -> feed-forward of lingrok, its activation, official name of each matrix
    'relu': ('mlp', 'relu', {'mlp_in': 'c_fc', 'mlp_out': 'c_proj'}),
    'gelu': ('mlp', 'gelu_tanh', {'mlp_in': 'c_fc', 'mlp_out': 'c_proj'}),
    'swiglu': ('gated', 'silu', {'mlp_gate': 'w1', 'mlp_in': 'w3', 'mlp_out': 'w2'}),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a state dict does not say. Defaults are those of the official code; 0 and -1: not known."""

    SECTION: ClassVar[str] = 'official'

    p: int = key(0, 'the modulus; 0: from the vocabulary', low=0)
    num_examples: int = key(32, 'examples of a row', low=2)
    num_tasks: int = key(0, 'pre-training tasks, all of them', low=0)
    num_rectangular: int = key(-1, 'pre-training tasks that are corners of rectangles, the others being random; -1: '
                               'all of them', low=-1)
    rectangles: bool = key(True, 'without it, the tasks of num_rectangular are drawn at random, before the others')
    alpha: float = key(0.0, 'share of the inputs that are training inputs', low=0.0, high=1.0)
    activation: str = key('relu', 'feed-forward', choices=tuple(KINDS))
    num_layers: int = key(0, 'blocks, checked against the file; 0: as many as it has', low=0)
    d_model: int = key(0, 'residual width, checked against the file; 0: what it is', low=0)
    num_heads: int = key(0, 'heads; 0: from the rotary frequencies', low=0)
    max_len: int = key(0, 'longest input; 0: that of the task', low=0)
    seed: int = key(-1, 'seed of the tasks and of the initial parameters', low=-1)
    input_seed: int = key(0, 'seed of the input split', low=0)
    batch_size: int = key(1024, 'rows of a training batch', low=1)
    step: int = key(0, 'step of the file; 0: the last one', low=0)
    num_steps: int = key(200_000, 'steps of the training', low=1)
    warmup_steps: int = key(10_000, 'steps of the warm-up', low=0)
    learning_rate: float = key(1.5e-4, 'peak learning rate', low=0.0)
    weight_decay: float = key(2.0, 'decoupled weight decay', low=0.0)

    def __post_init__(self):
        check_fields(self)
        require(self.step <= self.num_steps, f'official.step={self.step} is beyond official.num_steps='
                f'{self.num_steps}')


def _yes(text: str) -> bool:
    return {'True': True, 'False': False}[text]


# In the name: letters -> what the number after them is, and how it is read.
TOKENS = {
    'p': ('p', int), 'row': ('num_examples', int), 'ntask': ('num_tasks', int), 'pltask': ('num_rectangular', int),
    'parale': ('rectangles', _yes), 'dfrac': ('alpha', lambda text: float(text) / 100), 'd': ('num_layers', int),
    'n': ('d_model', int), 'h': ('num_heads', int), 'lctx': ('max_len', int), 'I': ('seed', int),
    'dI': ('input_seed', int), 'bs': ('batch_size', int), 't': ('step', int), 'T': ('num_steps', int),
    'Tw': ('warmup_steps', int), 'lr': ('learning_rate', float), 'wd': ('weight_decay', float),
}


def settings(path, **given) -> Settings:
    """The settings in the name of an official file. What is given beside it counts before the name."""
    name, found, fixed = Path(path).name.removesuffix('.pth'), {}, {}
    require('encoder' not in name, f'{path} is an encoder; lingrok has decoders')
    for part in name.split('_'):
        match = re.fullmatch(r'([A-Za-z]+)(\d[\d.e+-]*|True|False)', part)
        if match and match[1] in TOKENS:
            field, read = TOKENS[match[1]]
            try:
                found[field] = read(match[2])
            except (ValueError, KeyError):
                require(False, f'{path}: cannot read {part!r} in the name; rename the file and give --{field}')
        elif match:
            fixed[match[1]] = match[2]
        elif part in KINDS:
            found['activation'] = part
    require(fixed.get('nvar', '2') == '2', f'{path} has tasks of {fixed.get("nvar")} variables; lingrok has 2')
    require('base' not in fixed or 'p' not in found or int(fixed['base']) == found['p'], f'{path} writes numbers in '
            f'base {fixed.get("base")}; lingrok has one token a number')
    return Settings(**(found | given))


def official(path, **given) -> tuple[ModelConfig, dict]:
    """Config and parameters (float32) of the model in an official file; `given`: see `Settings`.

    Every tensor of the file is used, or known to hold nothing of its own (the rotary frequencies); otherwise raises.
    """
    options = settings(path, **given)
    state = {re.sub(r'^(module\.|_orig_mod\.)+', '', name): value for name, value in torch_file.load(path).items()}
    kind, activation, matrices = KINDS[options.activation]

    def take(name, *shape):
        """A tensor (out, in) as (in, out); it leaves the state."""
        require(name in state, f'{path} has no tensor {name!r}')
        value = state.pop(name)
        require(value.shape == shape, f'{path}: {name} has shape {list(value.shape)}; allowed: {list(shape)}')
        require(jnp.issubdtype(value.dtype, jnp.floating), f'{path}: {name} is {value.dtype}; allowed: floating point')
        return value.astype(np.float32).T

    def norm(name, role):
        return {f'{role}_scale': take(f'{name}.weight', width), f'{role}_bias': take(f'{name}.bias', width)}

    embed = state.get('transformer.wte.weight')
    require(embed is not None and embed.ndim == 2 and embed.size, f'{path} has no matrix '
            'transformer.wte.weight: it is of another model')
    vocab, width = embed.shape
    p = options.p or vocab - NUM_SYMBOLS
    require(vocab == p + NUM_SYMBOLS, f'{path} has {vocab} embeddings; allowed: {p + NUM_SYMBOLS} for p={p}')
    numbers = {int(name.split('.')[2]) for name in state if re.match(r'transformer\.h\.\d{1,4}\.', name)}
    num_layers = max(numbers, default=-1) + 1
    require(num_layers > 0, f'{path} has no blocks transformer.h.N')
    for field, value in (('num_layers', num_layers), ('d_model', width)):
        told = getattr(options, field)
        require(told in (0, value), f'{path} has {field}={value}, and its name or a flag says {told}')
    hidden = state.get(f'transformer.h.0.mlp.{matrices["mlp_in"]}.weight', embed).size // width
    freqs = state.get('transformer.h.0.attn.rotary_emb.freqs')
    heads = options.num_heads or (width // (2 * freqs.size) if freqs is not None and freqs.size else 0)
    require(heads > 0, f'{path} does not say how many heads it has; give --num_heads')
    cfg = ModelConfig(
        num_layers=num_layers, d_model=width, num_heads=heads, d_mlp=hidden, vocab_size=vocab,
        max_len=max(options.max_len, 3 * options.num_examples - 1), mlp_kind=(kind,), activation=(activation,),
        position='rope', rope_interleaved=True, norm='layernorm', tied=True, init='normal', init_std=0.02,
        embed_std=0.02, init_depth_scaled=('mlp_out',),
    )

    params = {'embed': take('transformer.wte.weight', vocab, width).T, **norm('transformer.ln_f', 'norm')}
    unembed = take('lm_head.weight', vocab, width)
    if not np.array_equal(unembed.T, params['embed']):
        cfg, params['unembed'] = dataclasses.replace(cfg, tied=False), unembed
    expected = cfg.rope_base ** (-np.arange(0, cfg.d_head, 2) / cfg.d_head)
    for layer in range(num_layers):
        name = f'transformer.h.{layer}'
        q, k, v = np.split(take(f'{name}.attn.to_qkv.weight', 3 * width, width), 3, axis=1)
        shapes = {role: (width, hidden) if role == 'mlp_out' else (hidden, width) for role in matrices}
        params[f'blocks_{layer}'] = {
            'q': q, 'k': k, 'v': v, 'o': take(f'{name}.attn.o.weight', width, width),
            **{role: take(f'{name}.mlp.{matrices[role]}.weight', *shapes[role]) for role in matrices},
            **norm(f'{name}.ln_1', 'attn_norm'), **norm(f'{name}.ln_2', 'mlp_norm'),
        }
        if f'{name}.attn.rotary_emb.freqs' in state:
            freqs = take(f'{name}.attn.rotary_emb.freqs', cfg.d_head // 2)
            require(np.allclose(freqs, expected, rtol=1e-2), f'{path}: {name}.attn.rotary_emb.freqs are not those of '
                    f'base {cfg.rope_base:g}')
    require(not state, f'{path} has {len(state)} unknown tensors, the first one {next(iter(state), "")[:80]!r}')
    return cfg, params


def config(options: Settings, model: ModelConfig, *, name: str = 'official', eval_batch_size: int = 1024) -> Config:
    """The config of the run that an official model comes from."""
    decayed = tuple(f'blocks.*.{role}' for role in ('q', 'k', 'v', 'o', *KINDS[options.activation][2]))
    task = {
        'name': 'modular', 'p': model.vocab_size - NUM_SYMBOLS, 'num_examples': options.num_examples,
        'num_tasks': options.num_tasks, 'alpha': options.alpha,
        'geometry': 'rectangular_official' if _counts(options)[1] else 'random',
    }
    optimizer = {
        'optimizer': 'adamw', 'learning_rate': options.learning_rate, 'weight_decay': options.weight_decay,
        'decay': (*decayed, 'embed' if model.tied else 'unembed'), 'warmup_steps': options.warmup_steps,
        'warmup_from': 0.01, 'schedule': 'cosine', 'floor': 0.1,
    }
    training = {
        'num_steps': options.num_steps, 'batch_size': options.batch_size, 'loss_mean': 'positive', 'log_every': 1000,
        'eval_every': 1000, 'save': 'final',
    }
    return from_dict({
        'name': name, 'task': task, 'model': dataclasses.asdict(model), 'optim': optimizer, 'train': training,
        'eval': {'batch_size': eval_batch_size}, 'seed': {'init': options.seed, 'task': options.seed},
    })


def task_state(options: Settings, p: int) -> ModularState:
    """The pools of an official run, as numpy arrays."""
    tasks_T2 = np.array(official_tasks(options, p), np.int32)
    order_T = np.random.RandomState(options.input_seed).permutation(p * p)
    inputs_T2 = np.stack(np.divmod(order_T, p), -1).astype(np.int32)
    return ModularState(tasks_T2, inputs_T2, np.int32(options.num_tasks), np.int32(round(options.alpha * p * p)))


def _counts(options: Settings) -> tuple[int, int, int]:
    """Numbers of tasks drawn first, of rectangles made of them, and of random tasks drawn after that."""
    for name, unknown in (('num_tasks', 0), ('alpha', 0), ('seed', -1)):
        require(getattr(options, name) != unknown, f'the file name does not say {name}; give --{name}')
    first = options.num_tasks if options.num_rectangular < 0 else options.num_rectangular
    require(first <= options.num_tasks, f'official.num_rectangular={first} is more than official.num_tasks='
            f'{options.num_tasks}')
    require(not options.rectangles or first % 4 == 0, f'{first} tasks are no whole number of rectangles; allowed: a '
            'multiple of 4')
    num_rectangles = first // 4 if options.rectangles else 0
    return num_rectangles or first, num_rectangles, options.num_tasks - first


def official_tasks(options: Settings, p: int) -> list[tuple[int, int]]:
    """All p^2 tasks: first the pre-training tasks in the official order, then the unseen ones.

    The official code evaluates the first 256 unseen tasks of its order. Here they are the last ones, because the tasks
    by which a step is chosen (`select`) come first.
    """
    num_first, num_rectangles, num_random = _counts(options)
    everything = list(itertools.product(range(p), repeat=2))
    require(options.num_tasks < len(everything), f'official.num_tasks={options.num_tasks} leaves no unseen task of the '
            f'{len(everything)} modulo {p}')
    rng = random.Random(options.seed)
    tasks = rng.sample(everything, num_first)
    for a, b in tasks[:num_rectangles]:
        require(p >= 5, f'modulo {p} the official code draws no rectangles; allowed: p of at least 5')
        for _ in range(MAX_DRAWS):
            x = rng.choice([i for i in range(p) if i not in (a, b)])
            y = rng.choice([i for i in range(p) if i not in (a, b, x)])
            corners = [(a, y), (x, b), (x, y)]
            if not set(corners) & set(tasks):
                break
        else:
            require(False, f'no rectangle is left at the task {(a, b)}; try fewer tasks')
        tasks += corners
    tasks += rng.sample(list(set(everything) - set(tasks)), num_random)
    unseen = list(set(everything) - set(tasks))
    rng.shuffle(unseen)
    return tasks + unseen[::-1]
