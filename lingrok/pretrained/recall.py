"""Models of the official code of arXiv 2406.03068: the state dict of its two-layer Transformer, and the run it is of.

    tok_embeddings.weight (V, D)                 output.weight (V, D)                pe (max_len, D)
    layers.N.attention.{wk,wv,wo}.weight (D, D)  the query is the identity, so wk is the merged key-query matrix
    layers.N.ff.{w1,w2}.weight                   two matrices; w1 alone: one matrix and a ReLU; layers.N.ff.weight: one
                                                 matrix; nothing: no feed-forward
    freqs_cis                                    rotary frequencies, which follow from the width: left out

A matrix of torch is (out, in). The file does not say how the model was run (rotary positions, scaling of the scores,
ReLU, residual), nor on which data: see `Settings`.
"""

import dataclasses
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import lingrok.tasks  # noqa: F401  registers the tasks
from lingrok.config import Config, ModelConfig, check_fields, from_dict, key, require, task_class
from lingrok.pretrained import torch_file

ATTENTION = {'k': 'wk', 'v': 'wv', 'o': 'wo'}  # role -> official name


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a state dict does not say. Defaults are those of the script that the official code ships."""

    SECTION: ClassVar[str] = 'official'

    use_rope: bool = key(False, 'rotary positions in layer 0 in place of the position table')
    no_sqrtd: bool = key(False, 'scores without the division by the square root of the width')
    relu: bool = key(True, 'activation of the feed-forwards; without it they are linear')
    parallel: bool = key(False, 'the feed-forward of layer 1 reads the same input as its attention')
    no_residual: bool = key(False, 'no residual around the attention of layer 1, if that has no feed-forward')
    tie_output: bool = key(False, 'logits are divided once more by the square root of the width, as the official code '
                           'does with a tied output; also done where output.weight is so tied')
    table: str = key('shakespeare', 'bigram table of the text of the run; its symbols must be those of the model')
    num_triggers: int = key(1, 'trigger tokens of a sequence, k', low=1)
    fixed_triggers: bool = key(True, 'triggers are the most frequent tokens, and not drawn for each sequence')
    trigger_offset: int = key(0, 'skip this many of the most frequent tokens', low=0)
    noise_prob: float = key(0.5, 'probability that the noise token replaces a target', low=0.0, high=1.0)
    noise_id: int = key(2, 'id of the noise token', low=0)
    no_repeat: bool = key(False, 'a trigger is never its own target')
    bigram_outs: bool = key(False, 'targets are drawn from the bigram row of their trigger')
    loss_head_only: bool = key(True, 'loss on repeated triggers, and not on all positions')
    freeze_embeddings: bool = key(True, 'token embeddings stay as they were drawn')
    freeze_output: bool = key(True, 'the unembedding stays as it was drawn')
    num_steps: int = key(5000, 'steps of the training', low=1)
    batch_size: int = key(512, 'sequences of a training batch', low=1)
    learning_rate: float = key(0.03, 'learning rate of SGD', low=0.0)
    weight_decay: float = key(1e-4, 'weight decay of SGD, in the gradient', low=0.0)

    def __post_init__(self):
        check_fields(self)


def official(path, **given) -> tuple[ModelConfig, dict]:
    """Config and parameters (float32) of the model in an official file; `given`: see `Settings`.

    Every tensor of the file is used, or known to hold nothing of its own (freqs_cis); otherwise raises ConfigError.
    """
    options = Settings(**given)
    state = {re.sub(r'^(module\.|_orig_mod\.)+', '', name): value for name, value in torch_file.load(path).items()}

    def take(name, *shape):
        """A tensor of this shape as float32; it leaves the state."""
        require(name in state, f'{path} has no tensor {name!r}')
        value = state.pop(name)
        require(value.shape == shape, f'{path}: {name} has shape {list(value.shape)}; allowed: {list(shape)}')
        require(jnp.issubdtype(value.dtype, jnp.floating), f'{path}: {name} is {value.dtype}; allowed: floating point')
        return np.asarray(value, np.float32)

    embed = state.get('tok_embeddings.weight')
    require(embed is not None and embed.ndim == 2 and embed.size, f'{path} has no matrix tok_embeddings.weight: it is '
            'of another model')
    vocab, width = embed.shape
    numbers = {int(name.split('.')[1]) for name in state if re.match(r'layers\.\d{1,4}\.', name)}
    num_layers = max(numbers, default=-1) + 1
    require(num_layers > 0, f'{path} has no layers layers.N')

    def feed_forward(name) -> tuple[str, dict]:
        """Kind of the feed-forward of a layer, and its matrices (in, out)."""
        if f'{name}.weight' in state:
            return 'linear', {'mlp_linear': take(f'{name}.weight', width, width).T}
        if f'{name}.w2.weight' in state:
            hidden = state[f'{name}.w2.weight'].size // width
            return 'mlp', {'mlp_in': take(f'{name}.w1.weight', hidden, width).T,
                           'mlp_out': take(f'{name}.w2.weight', width, hidden).T}
        if f'{name}.w1.weight' in state:
            return 'linear_act', {'mlp_linear': take(f'{name}.w1.weight', width, width).T}
        return 'none', {}

    params, kinds = {'embed': take('tok_embeddings.weight', vocab, width)}, []
    unembed = take('output.weight', vocab, width).T
    tied = options.tie_output or np.allclose(unembed * width**0.5, params['embed'].T, rtol=1e-5)
    params['unembed'] = unembed / np.float32(width**0.5) if tied else unembed
    table = state.get('pe')
    require(table is not None and table.ndim == 2 and len(table), f'{path} has no position table pe')
    max_len = len(table)
    pos = take('pe', max_len, width)
    params |= {} if options.use_rope else {'pos': pos}
    state.pop('freqs_cis', None)
    for layer in range(num_layers):
        name = f'layers.{layer}'
        attention = {role: take(f'{name}.attention.{official}.weight', width, width).T
                     for role, official in ATTENTION.items()}
        kind, matrices = feed_forward(f'{name}.ff')
        kinds.append(kind)
        params[f'blocks_{layer}'] = attention | matrices
    require(not state, f'{path} has {len(state)} unknown tensors, the first one {next(iter(state), "")[:80]!r}')
    wide = {matrices['mlp_in'].shape[1] for matrices in (params[f'blocks_{n}'] for n in range(num_layers))
            if 'mlp_in' in matrices}
    require(len(wide) <= 1, f'{path} has feed-forwards of widths {sorted(wide)}; lingrok has one width')
    later = [False] + [True] * (num_layers - 1)
    cfg = ModelConfig(
        num_layers=num_layers, d_model=width, num_heads=1, d_mlp=max(wide, default=4 * width), vocab_size=vocab,
        max_len=max_len, query='identity', scale_scores=not options.no_sqrtd, mlp_kind=tuple(kinds),
        activation=('relu' if options.relu else 'identity',), parallel=tuple(options.parallel and x for x in later),
        attn_residual=tuple(not (options.no_residual and x and kind == 'none')
                            for x, kind in zip(later, kinds, strict=True)),
        position='rope' if options.use_rope else 'learned', rope_layers=(0,) if options.use_rope else (),
        rope_interleaved=options.use_rope, init='torch',
    )
    return cfg, params


def config(options: Settings, model: ModelConfig, *, length: int = 0, name: str = 'official',
           eval_batch_size: int = 512) -> Config:
    """The config of the run that an official model comes from. length: of its sequences; 0: the longest possible."""
    fields = {
        'table': options.table, 'num_triggers': options.num_triggers,
        'trigger_mode': 'fixed' if options.fixed_triggers else 'random', 'trigger_offset': options.trigger_offset,
        'target_law': 'bigram' if options.bigram_outs else 'uniform',
        'targets_exclude': ('own_trigger',) if options.no_repeat else (), 'noise_prob': options.noise_prob,
        'loss_on': 'repeated' if options.loss_head_only else 'all', 'length': length or model.max_len,
        'table_size': model.vocab_size,
    }
    symbols = task_class('recall')(**{**fields, 'noise_token': 'extra'}).symbols
    require(len(symbols) == model.vocab_size, f'the model has {model.vocab_size} tokens, the table {options.table!r} '
            f'{len(symbols)}; give --table=FILE.json, made of the text of the run by experiments/make_bigrams.py with '
            '--min_count=1')
    require(options.noise_id < len(symbols), f'official.noise_id={options.noise_id}; allowed: 0 to {len(symbols) - 1}')
    frozen = {'embed': options.freeze_embeddings, 'unembed': options.freeze_output, 'pos': model.position == 'learned'}
    return from_dict({
        'name': name, 'task': {'name': 'recall', **fields, 'noise_token': symbols[options.noise_id]},
        'model': dataclasses.asdict(model),
        'optim': {'optimizer': 'sgd', 'learning_rate': options.learning_rate, 'momentum': 0.9,
                  'weight_decay': options.weight_decay, 'frozen': tuple(role for role, yes in frozen.items() if yes)},
        'train': {'num_steps': options.num_steps, 'batch_size': options.batch_size, 'save': 'final'},
        'eval': {'batch_size': eval_batch_size,
                 'truncations': ('blocks.1.mlp_in@0.0',) if model.mlp_kind[1:2] == ('mlp',) else ()},
    })


def task_state(cfg: Config):
    """The laws of the run as numpy arrays."""
    return jax.tree.map(np.asarray, cfg.task.init(jax.random.key(0)))
