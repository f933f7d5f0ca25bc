"""Configs: frozen dataclasses with every number of an experiment. The untyped config ends here.

A config file starts from `defaults(task)`, which holds every key there is, and changes what the experiment changes;
`from_config_dict` turns it into a `Config`, checking keys, types, ranges and combinations, so that an impossible
experiment ends in one line before anything compiles. `to_dict` and `from_dict` are the JSON form kept in a run
directory. Numbers that may differ between the replicas of one compiled program are listed by `vary`.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from lingrok import names

FORMAT_VERSION = 1  # of config.json and of the run directory
EXPLAINED = 'docs/config.md explains every key'


class ConfigError(ValueError):
    """What a user asked for is impossible. The message is one line: what was found, what is allowed, what to try."""


def suggest(word: str, allowed) -> str:
    """The tail of an error about an unknown word: the nearest allowed one, and all of them."""
    near = difflib.get_close_matches(str(word), list(allowed), 1)
    shown = (repr(x) if not x.isprintable() or x in ' ,' else x for x in allowed)
    return (f'did you mean {near[0]!r}? ' if near else '') + f'Allowed: {", ".join(shown)}'


def unknown_key(where: str, name: str, allowed) -> str:
    """The error about a key that does not exist."""
    return f'{where} has no key {name!r}; {suggest(name, allowed)}; {EXPLAINED}'


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def key(default, doc: str, *, low=None, high=None, choices=None):
    """A dataclass field with its meaning and what it may hold. Bounds are inclusive and apply to items of a tuple."""
    return dataclasses.field(default=default, metadata={'doc': doc, 'low': low, 'high': high, 'choices': choices})


def check_fields(config) -> None:
    """Raises unless every field of a dataclass made of `key` fields has its type and lies within its bounds."""
    for field, kind in _fields(type(config)):
        where = f'{config.SECTION}.{field.name}'
        value = _coerce(getattr(config, field.name), kind, where)
        object.__setattr__(config, field.name, value)
        low, high, choices = (field.metadata.get(k) for k in ('low', 'high', 'choices'))
        for item in value if isinstance(value, tuple) else (value,):
            if choices is not None and item not in choices:
                raise ConfigError(f'{where}={item!r} is unknown; {suggest(item, choices)}; {EXPLAINED}')
            if (low is not None and item < low) or (high is not None and item > high):
                raise ConfigError(f'{where}={item!r} is out of range; allowed: {_bounds(low, high)}; {EXPLAINED}')


class Documented(NamedTuple):
    """A key of the config for a reader: what it is called, holds by default, means, and may hold."""

    name: str
    kind: str
    default: Any
    doc: str
    allowed: str


def documented(cls) -> list[Documented]:
    """Every key of a dataclass made of `key` fields, in order.

    >>> documented(SlurmConfig)[0][:3]
    ('minutes', 'int', 60)
    >>> documented(SlurmConfig)[0].allowed
    'at least 1'
    """
    found = []
    for field, kind in _fields(cls):
        items = typing.get_args(kind)
        text = f'tuple of {items[0].__name__}' if items else kind.__name__
        low, high, choices = (field.metadata[k] for k in ('low', 'high', 'choices'))
        bounds = '' if low is None and high is None else _bounds(low, high)
        allowed = ', '.join(map(repr, choices)) if choices else bounds
        found.append(Documented(field.name, text, field.default, field.metadata['doc'], allowed))
    return found


def _bounds(low, high) -> str:
    return f'at least {low}' if high is None else f'from {low} to {high}'


def _fields(cls):
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def _coerce(value, kind, where: str):
    """`value` as type `kind` (bool, int, float, str or a tuple of one of them); raises on what is not exactly that."""
    if typing.get_origin(kind) is tuple:
        require(isinstance(value, (tuple, list)), f'{where}={value!r} is not a tuple; try ({value!r},)')
        return tuple(_coerce(item, typing.get_args(kind)[0], f'{where}[{i}]') for i, item in enumerate(value))
    if kind is float and type(value) is int:
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    require(type(value) is kind, f'{where}={value!r} has type {type(value).__name__}; allowed: {kind.__name__}; '
            f'{EXPLAINED}')
    require(kind is not float or math.isfinite(value), f'{where}={value!r} is not finite; give a finite number')
    return value


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only Transformer. Per-layer keys are tuples: one entry for all layers, or one a layer."""

    SECTION: ClassVar[str] = 'model'

    num_layers: int = key(2, 'number of blocks', low=1)
    d_model: int = key(64, 'residual width D', low=1)
    num_heads: int = key(1, 'query heads H', low=1)
    num_kv_heads: int = key(0, 'key-value heads G; 0: as many as query heads', low=0)
    d_head: int = key(0, 'width K of a head; 0: d_model / num_heads', low=0)
    d_mlp: int = key(256, 'hidden width F of mlp and gated feed-forwards', low=1)
    vocab_size: int = key(0, 'vocabulary V; 0: the task decides', low=0)
    max_len: int = key(0, 'longest input, the length of a position table; 0: the task decides', low=0)
    query: str = key('full', 'query matrix, or the input itself (the key matrix is then the merged key-query matrix)',
                     choices=('full', 'identity'))
    value_output: str = key('factored', 'value and output matrices apart, or one merged matrix a head',
                            choices=('factored', 'merged'))
    scale_scores: bool = key(True, 'divide attention scores by the square root of the head width')
    mlp_kind: tuple[str, ...] = key(('mlp',), 'feed-forward of each layer: two matrices, gated, one matrix without or '
                                    'with activation, none', choices=tuple(names.MLP_KINDS))
    activation: tuple[str, ...] = key(('relu',), 'activation of each feed-forward',
                                      choices=('relu', 'gelu', 'gelu_tanh', 'silu', 'identity'))
    parallel: tuple[bool, ...] = key((False,), 'feed-forward reads the same input as attention, in each layer')
    attn_residual: tuple[bool, ...] = key((True,), 'keep the residual around attention, in each layer')
    position: str = key('learned', 'additive table (random when frozen), additive sinusoids, rotary, or none',
                        choices=('learned', 'sinusoidal', 'rope', 'none'))
    rope_layers: tuple[int, ...] = key((), 'layers that rotate queries and keys; () : all', low=0)
    rope_base: float = key(10000.0, 'base of the rotary frequencies', low=1.0)
    rope_fraction: float = key(1.0, 'share of the head width that is rotated', low=0.0, high=1.0)
    rope_interleaved: bool = key(False, 'rotate pairs (2i, 2i+1) rather than (i, i + half)')
    rope_factors: tuple[float, ...] = key((), 'rotary frequencies are divided by these, one a frequency (the rope '
                                          'scaling of Llama 3.1 and others); (): undivided', low=1e-6)
    norm: str = key('none', 'normalisation', choices=('layernorm', 'rmsnorm', 'none'))
    norm_position: str = key('pre', 'before each sublayer and at the end, or after each residual addition',
                             choices=('pre', 'post'))
    norm_eps: float = key(1e-5, 'added to the variance', low=0.0)
    bias: bool = key(False, 'biases in attention and feed-forward')
    tied: bool = key(False, 'unembed with the transposed embedding')
    num_types: int = key(0, 'type embeddings by slot: position modulo this; 0: none', low=0)
    conv_width: int = key(0, 'width of the short causal depthwise convolution on the embeddings; 0: none', low=0)
    init: str = key('torch', 'matrices: uniform of std 1/sqrt(3 fan_in), normal of std 1/sqrt(fan_in), or normal of '
                    'std init_std', choices=('torch', 'fan_in', 'normal'))
    init_std: float = key(0.02, 'standard deviation of init=normal', low=0.0)
    init_depth_scaled: tuple[str, ...] = key((), 'roles divided by sqrt(2 num_layers) at initialisation',
                                             choices=('o', 'mlp_out'))
    embed_std: float = key(1.0, 'standard deviation of token and type embeddings', low=0.0)
    pos_std: float = key(1.0, 'standard deviation of the position table', low=0.0)
    conv_init: float = key(0.5, 'initial taps of the convolution')
    dtype: str = key('float32', 'of activations and matrix products; parameters, softmax, norms, logits are float32',
                     choices=('float32', 'bfloat16'))

    def __post_init__(self):
        check_fields(self)
        layers, heads, width = self.num_layers, self.num_heads, self.d_model
        for name in ('mlp_kind', 'activation', 'parallel', 'attn_residual'):
            value = getattr(self, name)
            require(len(value) in (1, layers), f'model.{name}={value!r} has {len(value)} entries; allowed: 1 or '
                    f'num_layers={layers}')
            object.__setattr__(self, name, value * layers if len(value) == 1 else value)
        if not self.d_head:
            require(width % heads == 0, f'model.num_heads={heads} does not divide model.d_model={width}; allowed: a '
                    f'divisor; try {_nearest_divisor(width, heads)}, or set model.d_head')
            object.__setattr__(self, 'd_head', width // heads)
        groups = self.num_kv_heads or heads
        require(heads % groups == 0, f'model.num_kv_heads={groups} does not divide model.num_heads={heads}; allowed: '
                f'a divisor; try {_nearest_divisor(heads, groups)}')
        object.__setattr__(self, 'num_kv_heads', groups)
        if self.query == 'identity':
            require(heads * self.d_head == width, f'model.query=identity needs num_heads * d_head = d_model, found '
                    f'{heads} * {self.d_head} and {width}; try model.query=full or model.d_head=0')
        if self.value_output == 'merged':
            require(groups == heads and not self.bias, 'model.value_output=merged needs num_kv_heads = num_heads and '
                    f'bias=False, found {groups}, {heads}, {self.bias}; try model.value_output=factored')
        if self.position == 'rope':
            rotated = rotary_width(self)
            require(rotated > 0 and rotated % 2 == 0, f'model.rope_fraction={self.rope_fraction} of d_head='
                    f'{self.d_head} rotates {rotated} dimensions; allowed: a positive even number; try '
                    'model.rope_fraction=1.0 with an even head width')
            require(len(self.rope_factors) in (0, rotated // 2), f'model.rope_factors has {len(self.rope_factors)} '
                    f'entries; allowed: none, or one for each of the {rotated // 2} frequencies')
        for layer in self.rope_layers:
            require(layer < layers, f'model.rope_layers names layer {layer}; allowed: 0 to {layers - 1}')


def rotary_width(cfg: ModelConfig) -> int:
    """Number of dimensions of a head that are rotated."""
    return round(cfg.d_head * cfg.rope_fraction)


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Optimiser and schedule. Rates, momentum and weight decays are traced: a sweep over them compiles once."""

    SECTION: ClassVar[str] = 'optim'

    optimizer: str = key('sgd', 'SGD with momentum and L2 in the gradient, AdamW with decoupled decay, or Muon on the '
                         'matrices of the blocks beside AdamW on the rest', choices=('sgd', 'adamw', 'muon'))
    learning_rate: float = key(0.03, 'peak learning rate', low=0.0)
    momentum: float = key(0.9, 'SGD and Muon: buffer = momentum * buffer + gradient', low=0.0, high=1.0)
    b1: float = key(0.9, 'AdamW: decay of the first moment', low=0.0, high=1.0)
    b2: float = key(0.98, 'AdamW: decay of the second moment', low=0.0, high=1.0)
    eps: float = key(1e-8, 'AdamW: added to the root of the second moment', low=0.0)
    weight_decay: float = key(1e-4, 'SGD: added to the gradient times the parameter; AdamW: decoupled', low=0.0)
    adam_learning_rate: float = key(0.003, 'Muon: peak learning rate of AdamW on the rest', low=0.0)
    adam_weight_decay: float = key(0.3, 'Muon: decoupled decay of AdamW on the rest', low=0.0)
    decay: tuple[str, ...] = key(('*',), 'parameters that decay: patterns of names such as blocks.*.mlp_in')
    frozen: tuple[str, ...] = key((), 'parameters that stay at their initial values: patterns of names')
    freeze_schedule: tuple[str, ...] = key((), "parameters frozen for some of the steps: 'blocks.0.k@0-300' until step "
                                           "300, 'blocks.*.mlp_*@100-' from step 100 to the end")
    warmup_steps: int = key(0, 'linear rise of the learning rate from warmup_from to 1', low=0)
    warmup_from: float = key(0.0, 'multiplier of the learning rate at step 0 of the warm-up', low=0.0, high=1.0)
    schedule: str = key('constant', 'after the warm-up: constant, cosine to the floor, or constant and then linear to '
                        'the floor (warm-up-stable-decay)', choices=('constant', 'cosine', 'wsd'))
    floor: float = key(0.1, 'cosine, wsd: multiplier of the learning rate at the last step', low=0.0, high=1.0)
    decay_share: float = key(0.3, 'wsd: share of the steps in which the learning rate falls', low=0.0, high=1.0)

    def __post_init__(self):
        check_fields(self)
        for entry in self.freeze_schedule:
            parse_freeze(entry)


def parse_freeze(entry: str) -> tuple[str, int, float]:
    """(pattern, first frozen step, first step after them) of 'blocks.0.k@0-300'; the last is infinite if left out."""
    pattern, _, steps = entry.partition('@')
    start, dash, stop = steps.partition('-')
    sound = pattern and dash and start.isdecimal() and (stop.isdecimal() or not stop)
    if sound and (not stop or int(start) < int(stop)):
        return pattern, int(start), int(stop) if stop else math.inf
    raise ConfigError(f'optim.freeze_schedule holds {entry!r}; allowed: <parameters>@<step>-<later step> or '
                      "<parameters>@<step>-, for example 'blocks.0.k@0-300'")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of training, what is logged and saved when."""

    SECTION: ClassVar[str] = 'train'

    num_steps: int = key(600, 'updates', low=1)
    batch_size: int = key(128, 'sequences an update', low=1)
    log_every: int = key(10, 'steps between logged training losses', low=1)
    eval_every: int = key(50, 'steps between evaluations', low=1)
    loss: str = key('softmax', 'cross-entropy of the softmax as every framework computes it, which is exactly 0 in '
                    'float32 once the target leads by 17; the same to full precision (exact), which is not; or with '
                    'stablemax (arXiv 2501.04697) for the exponential', choices=('softmax', 'exact', 'stablemax'))
    loss_mean: str = key('scored', 'mean over all scored positions, or over those whose loss is positive, as the '
                         'official modular code does', choices=('scored', 'positive'))
    save: str = key('log', 'steps of the checkpoints: log-spaced, regular, or listed, the first and last step '
                    'being always among them; or the last one alone', choices=('log', 'regular', 'listed', 'final'))
    save_count: int = key(10, 'save=log: number of checkpoints after step 0', low=1)
    save_every: int = key(1000, 'save=regular: steps between checkpoints', low=1)
    save_steps: tuple[int, ...] = key((), 'save=listed: the steps', low=0)
    save_optimizer: str = key('all', 'optimiser state in every checkpoint, or only in the two newest: enough to '
                              'resume, and analysis needs none', choices=('all', 'last'))
    save_minutes: float = key(10.0, 'most minutes of training that a kill can cost: where scheduled checkpoints are '
                              'further apart, there is one more, replaced by the next', low=0.0)
    layout: str = key('auto', 'replicas of one device side by side (vmap) or one after the other (map); auto: map on '
                      'a CPU, vmap elsewhere. Never changes what a replica computes',
                      choices=('auto', 'vmap', 'map'))
    parallel: str = key('replicas', 'what is spread over several devices: the replicas, or each batch of every replica '
                        '(for models too large to have several on a device; the same numbers up to rounding)',
                        choices=('replicas', 'batch'))

    def __post_init__(self):
        check_fields(self)
        late = [step for step in self.save_steps if step > self.num_steps]
        require(not late, f'train.save_steps holds {late} beyond train.num_steps={self.num_steps}; drop them')


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What is measured at an evaluation, always on the same sequences (drawn from seed.eval)."""

    SECTION: ClassVar[str] = 'eval'

    batch_size: int = key(256, 'sequences', low=1)
    truncations: tuple[str, ...] = key((), 'models also evaluated with one matrix cut down to its top singular '
                                       "directions: 'blocks.1.mlp_in@0.1' keeps a tenth of the rank, @0 removes it, "
                                       '@0.1@bottom keeps the lowest tenth')

    def __post_init__(self):
        check_fields(self)
        for entry in self.truncations:
            parse_truncation(entry)


def parse_truncation(entry: str, where: str = 'eval.truncations') -> tuple[int, str, float, str]:
    """(layer, role, rank fraction, which end of the spectrum is kept) of an entry of `where`, which errors name.

    >>> parse_truncation('blocks.1.mlp_in@0.1'), parse_truncation('blocks.0.ov@0.5@bottom')
    ((1, 'mlp_in', 0.1, 'top'), (0, 'ov', 0.5, 'bottom'))
    """
    try:
        name, fraction, *keep = entry.split('@')
        blocks, layer, role = name.split('.')
        parsed = int(layer), role, float(fraction), keep[0] if keep else 'top'
        require(blocks == 'blocks' and 0 <= parsed[2] <= 1 and parsed[0] >= 0, '')
        require(len(keep) < 2 and parsed[3] in ('top', 'bottom'), '')
        return parsed
    except ValueError:
        raise ConfigError(
            f'{where} holds {entry!r}; allowed: blocks.<layer>.<role>@<fraction in [0, 1]> or the same with '
            "@bottom behind it, for example 'blocks.1.mlp_in@0.1'"
        ) from None


@dataclasses.dataclass(frozen=True)
class SlurmConfig:
    """What a task of a SLURM job array asks for; used by experiments/sweep.py --launcher=slurm alone."""

    SECTION: ClassVar[str] = 'slurm'

    minutes: int = key(60, 'time limit of a task; a program that needs longer is queued again and goes on', low=1)
    partition: str = key('', 'partition; empty: that of the cluster')
    gpus: int = key(0, 'GPUs a task', low=0)
    cpus: int = key(1, 'cores a task', low=1)
    memory_gb: int = key(0, 'host memory a task, GB; 0: that of the cluster', low=0)
    parallel: int = key(0, 'tasks that run at once, at most; 0: as many as the cluster lets', low=0)
    sbatch: tuple[str, ...] = key((), "more options of sbatch, such as '--account=mine'")
    setup: tuple[str, ...] = key((), "shell lines before the program starts, such as 'module load cuda'")

    def __post_init__(self):
        check_fields(self)
        for option in self.sbatch:
            require(option.startswith('--'), f'slurm.sbatch holds {option!r}; allowed: --option=value or --option')


@dataclasses.dataclass(frozen=True)
class SeedConfig:
    """Four independent streams of random numbers. No stream ever reads another's seed."""

    SECTION: ClassVar[str] = 'seed'

    init: int = key(0, 'initial parameters', low=0, high=2**31 - 1)
    task: int = key(0, 'pools of the task: task vectors, input split, synthetic tables', low=0, high=2**31 - 1)
    batch: int = key(0, 'training batches', low=0, high=2**31 - 1)
    eval: int = key(0, 'evaluation batches', low=0, high=2**31 - 1)

    def __post_init__(self):
        check_fields(self)


TASKS: dict[str, type] = {}  # filled by register_task


CONTRACT = ('SECTION', 'VARIABLE', 'FILES', 'scored', 'splits', 'headline', 'vocab_size', 'seq_len', 'init', 'sample',
            'check_batch', 'metrics', 'baselines')


def register_task(name: str):
    """Class decorator: makes a frozen task dataclass available as `config.task.name = name`.

    The dataclass has `SECTION = 'task'`, fields made with `key`, a tuple `VARIABLE` of the fields that may differ
    between the replicas of one program, and a tuple `FILES` of those that may hold a path. Its contract is
    `tasks.base.Task`; raises ConfigError for a class that lacks a part of it.
    """

    def add(cls):
        missing = [member for member in CONTRACT if not hasattr(cls, member)]
        require(not missing, f'the task {name!r} has no {", ".join(missing)}; lingrok/tasks/base.py says what they are')
        cls.NAME = name
        TASKS[name] = cls
        return cls

    return add


SECTIONS = {'model': ModelConfig, 'optim': OptimConfig, 'train': TrainConfig, 'eval': EvalConfig, 'seed': SeedConfig,
            'slurm': SlurmConfig}
VARIABLE_OPTIM = ('learning_rate', 'momentum', 'weight_decay', 'adam_learning_rate', 'adam_weight_decay')
# Keys of train that change no number beyond rounding.
NOT_HASHED = ('layout', 'parallel', 'save_optimizer', 'save_minutes')
SEED_STREAMS = tuple(field.name for field in dataclasses.fields(SeedConfig))


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole experiment. `vary` maps 'optim.learning_rate' and the like to one value a replica."""

    name: str
    task: Any
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
    eval: EvalConfig
    seed: SeedConfig
    slurm: SlurmConfig
    vary: Mapping[str, tuple]

    @property
    def num_replicas(self) -> int:
        return max([1, *(len(values) for values in self.vary.values())])

    def groups(self) -> dict[str, list[int]]:
        """Replicas that differ in seeds only, by their common setting; '' where all do.

        >>> import lingrok.tasks
        >>> vary = {'seed': {'all': (0, 1, 0, 1)}, 'task': {'noise_prob': (0.3, 0.3, 0.7, 0.7)}}
        >>> from_dict({'name': 'mine', 'task': {'name': 'recall'}, 'vary': vary}).groups()
        {'noise_prob=0.3': [0, 1], 'noise_prob=0.7': [2, 3]}
        """
        own = {name: values for name, values in self.vary.items() if name.partition('.')[0] != 'seed'}
        found: dict[str, list[int]] = {}
        for replica in range(self.num_replicas):
            label = ', '.join(f'{name.partition(".")[2]}={values[replica]:g}' for name, values in own.items())
            found.setdefault(label, []).append(replica)
        return found

    def task_of(self, replica: int):
        """The task with the values that this replica has."""
        own = {name: self.vary[f'task.{name}'][replica] for name in self.task.VARIABLE if f'task.{name}' in self.vary}
        return dataclasses.replace(self.task, **own)

    def coordinates(self) -> dict[str, tuple]:
        """Every variable setting of every replica: name -> S values (seed streams, optimiser and task values)."""
        num = self.num_replicas
        base = {f'seed.{stream}': getattr(self.seed, stream) for stream in SEED_STREAMS}
        base |= {f'optim.{name}': getattr(self.optim, name) for name in VARIABLE_OPTIM}
        base |= {f'task.{name}': getattr(self.task, name) for name in self.task.VARIABLE}
        table = {name: (value,) * num for name, value in base.items()}
        for stream in SEED_STREAMS:
            if 'seed' in self.vary:
                table[f'seed.{stream}'] = self.vary['seed']
        return table | {name: values for name, values in self.vary.items() if name != 'seed'}


def defaults(task: str):
    """A locked ConfigDict that holds every key of an experiment on `task`, at its default."""
    import ml_collections

    cls = task_class(task)
    sections = {name: _as_dict(section) for name, section in SECTIONS.items()}
    variable = {'seed': {'all': (), **dict.fromkeys(SEED_STREAMS, ())}}
    variable |= {'optim': dict.fromkeys(VARIABLE_OPTIM, ()), 'task': dict.fromkeys(cls.VARIABLE, ())}
    config = ml_collections.ConfigDict(
        {'name': task, 'task': {'name': task, **_as_dict(cls)}, **sections, 'vary': variable}
    )
    return config.lock()


def _as_dict(config) -> dict:
    source = config if isinstance(config, type) else type(config)
    return {field.name: field.default if config is source else getattr(config, field.name)
            for field in dataclasses.fields(source)}


def task_class(name) -> type:
    require(isinstance(name, str) and name in TASKS, f'task.name={name!r} is unknown; {suggest(name, TASKS)}')
    return TASKS[name]


def from_config_dict(config) -> Config:
    """A checked `Config` from a ConfigDict; raises ConfigError on anything unknown, mistyped or impossible.

    >>> import lingrok.tasks
    >>> config = defaults('recall')
    >>> config.model.num_heads = 4
    >>> from_config_dict(config).model.d_head  # of 64 / 4, as it is 0 in the defaults
    16
    >>> config.model.num_heads = 3
    >>> from_config_dict(config)
    Traceback (most recent call last):
    lingrok.config.ConfigError: model.num_heads=3 ...
    """
    return from_dict(config.to_dict())


def from_dict(tree: Mapping) -> Config:
    """A checked `Config` from nested dicts. A key that is absent takes its default; an unknown one raises."""
    _check_keys(tree, ('name', 'task', *SECTIONS, 'vary', 'format_version'), 'config')
    version = tree.get('format_version', FORMAT_VERSION)
    require(version == FORMAT_VERSION, f'config of format version {version!r}; this lingrok reads {FORMAT_VERSION}')
    name = _coerce(tree.get('name', ''), str, 'name')
    require(name.replace('-', '').replace('_', '').isalnum(), f'name={name!r}; allowed: letters, digits, - and _')
    task_tree = dict(_section(tree, 'task'))
    task = _build(task_class(task_tree.pop('name', None)), task_tree)
    parts = {section: _build(cls, _section(tree, section)) for section, cls in SECTIONS.items()}
    model = parts['model']
    for field, needed in (('vocab_size', task.vocab_size), ('max_len', task.seq_len)):
        given = getattr(model, field)
        require(given == 0 or given >= needed, f'model.{field}={given} is smaller than the {needed} of the task; '
                f'allowed: 0 (the task decides) or at least {needed}')
        model = dataclasses.replace(model, **{field: given or needed})
    parts['model'] = model
    config = Config(name=name, task=task, vary=_vary(_section(tree, 'vary'), task, parts), **parts)
    own = [values for name, values in config.vary.items() if name.startswith('task.')]
    different = {values: replica for replica, values in enumerate(zip(*own, strict=True))} if own else {(): 0}
    for replica in different.values():
        config.task_of(replica).check_batch(config.train.batch_size)
    for entry in config.optim.freeze_schedule:
        start = parse_freeze(entry)[1]
        require(start < config.train.num_steps, f'optim.freeze_schedule: {entry!r} begins at step {start}; allowed: '
                f'before train.num_steps={config.train.num_steps}; drop it')
    for layer, role, *_ in map(parse_truncation, config.eval.truncations):
        require(layer < model.num_layers, f'eval.truncations names layer {layer}; allowed: 0 to {model.num_layers - 1}')
        allowed = truncatable_roles(model, layer)
        require(role in allowed, f'eval.truncations names the role {role!r} in layer {layer}; {suggest(role, allowed)}')
    return config


def truncatable_roles(cfg: ModelConfig, layer: int) -> tuple[str, ...]:
    """Roles of `layer` that can be truncated: its matrices, and `ov`, the product of the value and output matrices.

    Heads that share a value matrix have no `ov`: the products cannot be truncated apart.
    """
    factored = ('v', 'o', 'ov') if cfg.num_kv_heads == cfg.num_heads else ('v', 'o')
    attention = ('ov',) if cfg.value_output == 'merged' else factored
    return (*(('q',) if cfg.query == 'full' else ()), 'k', *attention, *names.MLP_KINDS[cfg.mlp_kind[layer]][0])


def _section(tree: Mapping, name: str) -> Mapping:
    section = tree.get(name, {})
    require(isinstance(section, Mapping), f'{name}={section!r} is not a group of keys')
    return section


def _check_keys(tree: Mapping, allowed, where: str) -> None:
    for name in tree:
        require(name in allowed, unknown_key(where, name, allowed))


def _build(cls, tree: Mapping):
    _check_keys(tree, [field.name for field in dataclasses.fields(cls)], f'config.{cls.SECTION}')
    return cls(**tree)


def _vary(tree: Mapping, task, parts: dict) -> dict[str, tuple]:
    """Flat, checked 'section.key' -> values; 'seed' stands for all four streams."""
    allowed = {'seed': ('all', *SEED_STREAMS), 'optim': VARIABLE_OPTIM, 'task': task.VARIABLE}
    _check_keys(tree, allowed, 'config.vary')
    flat = {}
    for section, keys in tree.items():
        _check_keys(_section(tree, section), allowed[section], f'config.vary.{section}')
        for name, values in keys.items():
            where = f'vary.{section}.{name}'
            require(isinstance(values, (tuple, list)), f'{where}={values!r} is not a tuple; try ({values!r},)')
            base = task if section == 'task' else parts[section]
            field = 'init' if name == 'all' else name
            # Each value passes the same checks as the key it replaces, in combination with the rest of its section.
            different = {repr(value): value for value in values}  # 10^5 replicas have few different values
            different = {text: getattr(dataclasses.replace(base, **{field: value}), field)
                         for text, value in different.items()}
            checked = tuple(different[repr(value)] for value in values)
            if checked:
                flat['seed' if name == 'all' else f'{section}.{name}'] = checked
    lengths = {name: len(values) for name, values in flat.items()}
    require(len(set(lengths.values())) <= 1, f'vary holds lists of different lengths: {lengths}; give every one the '
            'same length, one value a replica')
    return flat


def to_dict(config: Config) -> dict:
    """Nested plain dicts (JSON), the inverse of `from_dict`."""
    tree = {'format_version': FORMAT_VERSION, 'name': config.name}
    tree['task'] = {'name': config.task.NAME, **_as_dict(config.task)}
    tree |= {section: _as_dict(getattr(config, section)) for section in SECTIONS}
    tree['vary'] = {}
    for name, values in config.vary.items():
        section, _, field = name.partition('.')
        tree['vary'].setdefault(section, {})[field or 'all'] = values
    return json.loads(json.dumps(tree))


def run_id(config: Config) -> str:
    """Eight hex digits that change with every number of the config that changes a result, and with nothing else."""
    tree = to_dict(config)
    del tree['name'], tree['format_version'], tree['slurm']
    for name in NOT_HASHED:
        del tree['train'][name]
    for field in config.task.FILES:
        path = Path(tree['task'][field])
        if path.is_file():  # the content counts, not the place
            tree['task'][field] = hashlib.sha256(path.read_bytes()).hexdigest()
    # A key that a later version adds has changed nothing where it keeps its default.
    for section, cls in {'task': type(config.task), **SECTIONS}.items():
        default = json.loads(json.dumps(_as_dict(cls)))
        if section in tree:
            tree[section] = {name: x for name, x in tree[section].items() if name not in default or x != default[name]}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:8]
