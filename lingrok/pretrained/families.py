"""What the files of language models mean: their config as a `ModelConfig`, their tensors as parameters.

GPT-2, GPT-NeoX (Pythia), Llama and its relatives (SmolLM2, Mistral), Phi-3, and GGUF files of the Llama layout. Every
key of a foreign config is handled, or listed as one that changes no logit, or raises; so does every tensor. Nothing is
folded or centred. Fused matrices are cut into those of lingrok, and torch's (out, in) becomes (in, out).
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from lingrok.config import ModelConfig, require, suggest

ACTIVATIONS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu_fast': 'gelu_tanh', 'gelu': 'gelu',
               'silu': 'silu', 'swish': 'silu', 'relu': 'relu'}
# Keys that change no logit of a loaded model.
HARMLESS = frozenset((
    'architectures', '_name_or_path', 'transformers_version', 'transformers.js_config', 'torch_dtype', 'dtype',
    'use_cache', 'bos_token_id', 'eos_token_id', 'pad_token_id', 'unk_token_id', 'sep_token_id', 'auto_map',
    'initializer_range', 'attention_dropout', 'hidden_dropout', 'classifier_dropout', 'resid_pdrop', 'embd_pdrop',
    'attn_pdrop', 'pretraining_tp', 'task_specific_params', 'gradient_checkpointing', 'n_ctx', 'max_sequence_length',
    'id2label', 'label2id', 'num_labels', 'problem_type', 'return_dict', 'output_attentions', 'output_hidden_states',
    'is_decoder', 'is_llama_config', 'reorder_and_upcast_attn', 'tokenizer_class', '_attn_implementation_autoset',
    'original_max_position_embeddings', 'summary_activation', 'summary_first_dropout', 'summary_proj_to_labels',
    'summary_type', 'summary_use_proj',
))
# Keys that may be there with these values only.
FIXED = {'scale_attn_by_inverse_layer_idx': False, 'add_cross_attention': False, 'is_encoder_decoder': False,
         'rope_interleaved': False}
ATTENTION = ('q', 'k', 'v', 'o')
MAX_LAYERS = 10_000


class Part(NamedTuple):
    """Where a parameter is: the name and shape of the tensor that has it, and how to cut it out."""

    name: str
    shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray] = lambda w: w


class Layout(NamedTuple):
    """The tensors of a model: those outside the blocks and those of every block, by role."""

    top: dict[str, Part]
    block: dict[str, Part]
    block_name: str  # with {} for the layer


class Foreign:
    """A foreign config, read key by key; `finish` raises unless all of it was understood."""

    def __init__(self, tree: Mapping, where: str):
        self.left, self.where = dict(tree), where

    def take(self, key: str, kind: type, *default):
        """The value of a key, which leaves the config; an absent or empty one takes the default, if it has one."""
        value = self.left.pop(key, None)
        if value is None:
            require(bool(default), f'{self.where} has no {key!r}, without which the model is not known')
            return default[0]
        value = float(value) if kind is float and type(value) is int else value
        require(type(value) is kind, f'{self.where}: {key}={str(value)[:80]!r}; allowed: {kind.__name__}')
        return value

    def size(self, key: str, *default) -> int:
        """A positive integer."""
        value = self.take(key, int, *default)
        require(value is None or value > 0, f'{self.where}: {key}={value}; allowed: positive')
        return value

    def finish(self) -> None:
        for key, value in self.left.items():
            if key in FIXED:
                require(value == FIXED[key], f'{self.where}: {key}={value!r} is not supported; allowed: {FIXED[key]!r}')
            else:
                require(key in HARMLESS, f'{self.where} has the key {key[:80]!r} ({str(value)[:80]}), of which it is '
                        'not known what it does to the model; refused')


# Configs --------------------------------------------------------------------------------------------------------------


def config(tree: Mapping, where: str, dtype: str) -> tuple[ModelConfig, Layout]:
    """The config of a model and the layout of its tensors from its config.json."""
    foreign = Foreign(tree, where)
    family = foreign.take('model_type', str)
    require(family in FAMILIES, f'{where}: the architecture {family[:80]!r} is not supported; '
            f'{suggest(family, FAMILIES)}')
    read, lay_out = FAMILIES[family]
    fields, unbiased = read(foreign, family)
    foreign.finish()
    cfg = _model_config(fields, where, dtype)
    layout = lay_out(cfg)
    for role in unbiased:
        del layout.block[f'{role}_bias']
    if not cfg.tied:
        layout.top['unembed'] = _linear_part('lm_head', cfg.vocab_size, cfg.d_model)
    return cfg, layout


def _model_config(fields: dict, where: str, dtype: str) -> ModelConfig:
    layers = fields['num_layers']
    require(layers <= MAX_LAYERS, f'{where} claims {layers:,} layers; allowed: at most {MAX_LAYERS:,}')
    return ModelConfig(**fields, dtype=dtype)


def _gpt2(foreign: Foreign, family: str) -> tuple[dict, tuple[str, ...]]:
    """Fields of the model, and the roles whose biases the family lacks while other matrices have some."""
    width = foreign.size('n_embd')
    return {
        'd_model': width, 'num_layers': foreign.size('n_layer'), 'num_heads': foreign.size('n_head'),
        'd_mlp': foreign.size('n_inner', 4 * width), 'vocab_size': foreign.size('vocab_size'),
        'max_len': foreign.size('n_positions'), 'norm': 'layernorm',
        'activation': (_activation(foreign, 'activation_function', 'gelu_new'),),
        'norm_eps': foreign.take('layer_norm_epsilon', float, 1e-5), 'bias': True,
        'scale_scores': foreign.take('scale_attn_weights', bool, True),
        'tied': foreign.take('tie_word_embeddings', bool, True),
    }, ()


def _neox(foreign: Foreign, family: str) -> tuple[dict, tuple[str, ...]]:
    width, heads = foreign.size('hidden_size'), foreign.size('num_attention_heads')
    biased = foreign.take('attention_bias', bool, True)
    share, base = foreign.take('rotary_pct', float, 0.25), foreign.take('rotary_emb_base', float, 10000.0)
    return {
        'd_model': width, 'num_layers': foreign.size('num_hidden_layers'), 'num_heads': heads,
        'd_mlp': foreign.size('intermediate_size'), 'vocab_size': foreign.size('vocab_size'),
        'max_len': foreign.size('max_position_embeddings'), 'activation': (_activation(foreign, 'hidden_act', 'gelu'),),
        'parallel': (foreign.take('use_parallel_residual', bool, True),), 'norm': 'layernorm',
        'norm_eps': foreign.take('layer_norm_eps', float, 1e-5), 'bias': True,
        'tied': foreign.take('tie_word_embeddings', bool, False), **_rope(foreign, width // heads, base, share),
    }, () if biased else ATTENTION


def _llama(foreign: Foreign, family: str) -> tuple[dict, tuple[str, ...]]:
    """Llama, Mistral and Phi-3, which differ in defaults, and in windows of attention."""
    width, heads = foreign.size('hidden_size'), foreign.size('num_attention_heads')
    head_width = foreign.size('head_dim', width // heads)
    # Up to its width, a window leaves attention as it is.
    window = foreign.left.pop('sliding_window', 4096 if family == 'mistral' else None)
    foreign.left['sliding_window'] = window
    max_len = foreign.size('max_position_embeddings', 2048)
    max_len = min(max_len, foreign.size('sliding_window', max_len))
    attention, mlp = foreign.take('attention_bias', bool, False), foreign.take('mlp_bias', bool, False)
    unbiased = (() if attention else ATTENTION) + (() if mlp else ('mlp_gate', 'mlp_in', 'mlp_out'))
    return {
        'd_model': width, 'num_layers': foreign.size('num_hidden_layers'), 'num_heads': heads, 'd_head': head_width,
        'num_kv_heads': foreign.size('num_key_value_heads', 8 if family == 'mistral' else heads),
        'd_mlp': foreign.size('intermediate_size'), 'vocab_size': foreign.size('vocab_size'), 'max_len': max_len,
        'mlp_kind': ('gated',), 'activation': (_activation(foreign, 'hidden_act', 'silu'),), 'norm': 'rmsnorm',
        'norm_eps': foreign.take('rms_norm_eps', float, 1e-5 if family == 'phi3' else 1e-6), 'bias': attention or mlp,
        'tied': foreign.take('tie_word_embeddings', bool, False),
        **_rope(foreign, head_width, 10000.0, foreign.take('partial_rotary_factor', float, 1.0)),
    }, unbiased


def _activation(foreign: Foreign, key: str, default: str) -> str:
    name = foreign.take(key, str, default)
    require(name in ACTIVATIONS, f'{foreign.where}: {key}={name[:80]!r} is not supported; {suggest(name, ACTIVATIONS)}')
    return ACTIVATIONS[name]


def _rope(foreign: Foreign, head_width: int, base: float, share: float) -> dict:
    """Fields of the rotary positions, from `rope_parameters`, or `rope_theta` and `rope_scaling` of older files."""
    base = foreign.take('rope_theta', float, base)
    scaling = foreign.take('rope_scaling', dict, {}) | foreign.take('rope_parameters', dict, {})
    inner = Foreign(scaling, f'{foreign.where}, rotary positions')
    base, share = inner.take('rope_theta', float, base), inner.take('partial_rotary_factor', float, share)
    old = inner.take('type', str, 'default')
    kind = inner.take('rope_type', str, old)
    require(kind in SCALINGS, f'{inner.where}: the scaling {kind[:80]!r} is not supported; {suggest(kind, SCALINGS)}')
    width = int(head_width * share)
    require(base > 0 and width > 0 and width % 2 == 0, f'{inner.where}: base {base} and {width} rotated dimensions of '
            f'{head_width}; allowed: a positive base and a positive even number')
    freqs = base ** (-np.arange(0, width, 2) / width)
    factors = SCALINGS[kind](inner, freqs)
    inner.finish()
    return {'position': 'rope', 'rope_base': base, 'rope_fraction': width / head_width,
            'rope_factors': tuple(map(float, factors))}


def _linear(inner: Foreign, freqs: np.ndarray):
    return np.full(len(freqs), inner.take('factor', float))


def _llama3(inner: Foreign, freqs: np.ndarray):
    """Long wavelengths are stretched by a factor, short ones kept, those between mixed."""
    factor, length = inner.take('factor', float), inner.size('original_max_position_embeddings')
    low, high = inner.take('low_freq_factor', float), inner.take('high_freq_factor', float)
    require(factor > 0 and high > low, f'{inner.where}: factor {factor}, low_freq_factor {low} and high_freq_factor '
            f'{high}; allowed: positive, the last one larger')
    kept = np.clip((length * freqs / (2 * math.pi) - low) / (high - low), 0, 1)
    return 1 / (kept + (1 - kept) / factor)


SCALINGS = {'default': lambda inner, freqs: (), 'linear': _linear, 'llama3': _llama3}


def gguf_config(metadata: Mapping, tensors: Mapping, where: str, dtype: str) -> tuple[ModelConfig, Layout]:
    """The config of a model and the layout of its tensors from the metadata of a GGUF file."""
    outer = Foreign({key: value for key, value in metadata.items() if not key.startswith('tokenizer.')}, where)
    family = outer.take('general.architecture', str)
    require(family == 'llama', f'{where}: the architecture {family[:80]!r} is not supported in GGUF; allowed: llama; '
            'try its Hugging Face folder')
    others = [key for key in outer.left if not key.startswith(('general.', 'quantize.', 'llama.'))]
    require(not others, f'{where} has the key {others and others[0][:80]!r}, of which it is not known what it does to '
            'the model; refused')
    foreign = Foreign({key.removeprefix('llama.'): value for key, value in outer.left.items()
                       if key.startswith('llama.')}, where)
    width, heads = foreign.size('embedding_length'), foreign.size('attention.head_count')
    head_width = foreign.size('attention.key_length', width // heads)
    same = foreign.size('attention.value_length', head_width)
    require(same == head_width, f'{where}: values of width {same}, keys of {head_width}; allowed: equal')
    rotated = foreign.size('rope.dimension_count', head_width)
    scaling, factor = foreign.take('rope.scaling.type', str, 'none'), foreign.take('rope.scaling.factor', float, 1.0)
    require(scaling in ('none', 'linear'), f'{where}: rope.scaling.type={scaling[:80]!r}; allowed: none, linear')
    factors = np.full(rotated // 2, factor) if scaling == 'linear' else ()
    if 'rope_freqs.weight' in tensors:  # the scaling of Llama 3.1
        require(tensors['rope_freqs.weight'].shape == (rotated // 2,), f'{where}: rope_freqs.weight does not have '
                f'{rotated // 2} entries')
        factors = tensors['rope_freqs.weight'].read()
    vocab = foreign.size('vocab_size', len(metadata.get('tokenizer.ggml.tokens', ())))
    fields = {
        'd_model': width, 'num_layers': foreign.size('block_count'), 'num_heads': heads, 'd_head': head_width,
        'num_kv_heads': foreign.size('attention.head_count_kv', heads), 'd_mlp': foreign.size('feed_forward_length'),
        'vocab_size': vocab, 'max_len': foreign.size('context_length'), 'mlp_kind': ('gated',),
        'activation': ('silu',), 'norm': 'rmsnorm', 'norm_eps': foreign.take('attention.layer_norm_rms_epsilon', float),
        'tied': 'output.weight' not in tensors, 'position': 'rope', 'rope_fraction': rotated / head_width,
        'rope_base': foreign.take('rope.freq_base', float, 10000.0), 'rope_factors': tuple(map(float, factors)),
        # The files hold queries and keys in the order of pairs.
        'rope_interleaved': True,
    }
    experts = foreign.take('expert_count', int, 0)
    require(experts == 0, f'{where} has {experts} experts; allowed: 0')
    foreign.finish()
    cfg = _model_config(fields, where, dtype)
    return cfg, _gguf_layout(cfg)


# Tensors --------------------------------------------------------------------------------------------------------------


def _linear_part(name: str, outs: int, ins: int) -> Part:
    """A matrix of torch, (out, in)."""
    return Part(f'{name}.weight', (outs, ins), lambda w: w.T)


def _norm_parts(role: str, name: str, width: int, bias: bool) -> dict[str, Part]:
    parts = {f'{role}_scale': Part(f'{name}.weight', (width,))}
    return parts | ({f'{role}_bias': Part(f'{name}.bias', (width,))} if bias else {})


def _cut(start: int, size: int, axis: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda w: w.T[..., start : start + size] if axis == 0 else w[..., start : start + size]


def _gpt2_layout(cfg: ModelConfig) -> Layout:
    width, hidden = cfg.d_model, cfg.d_mlp
    top = {'embed': Part('wte.weight', (cfg.vocab_size, width)), 'pos': Part('wpe.weight', (cfg.max_len, width)),
           **_norm_parts('norm', 'ln_f', width, True)}
    block = _norm_parts('attn_norm', 'ln_1', width, True) | _norm_parts('mlp_norm', 'ln_2', width, True)
    for place, role in enumerate('qkv'):
        block[role] = Part('attn.c_attn.weight', (width, 3 * width), _cut(place * width, width, axis=1))
        block[f'{role}_bias'] = Part('attn.c_attn.bias', (3 * width,), _cut(place * width, width, axis=1))
    # The matrices of GPT-2 are (in, out) in the file.
    for role, name, ins, outs in (('o', 'attn.c_proj', width, width), ('mlp_in', 'mlp.c_fc', width, hidden),
                                  ('mlp_out', 'mlp.c_proj', hidden, width)):
        block |= {role: Part(f'{name}.weight', (ins, outs)), f'{role}_bias': Part(f'{name}.bias', (outs,))}
    return Layout(top, block, 'h.{}.')


def _neox_layout(cfg: ModelConfig) -> Layout:
    width, hidden, heads, head = cfg.d_model, cfg.d_mlp, cfg.num_heads, cfg.d_head
    top = {'embed': Part('embed_in.weight', (cfg.vocab_size, width)),
           **_norm_parts('norm', 'final_layer_norm', width, True)}
    block = _norm_parts('attn_norm', 'input_layernorm', width, True)
    block |= _norm_parts('mlp_norm', 'post_attention_layernorm', width, True)
    fused = 'attention.query_key_value'
    for place, role in enumerate('qkv'):  # head by head, its query, key and value
        block[role] = Part(f'{fused}.weight', (3 * width, width), lambda w, place=place: (
            w.reshape(heads, 3, head, width)[:, place].reshape(width, width).T))
        block[f'{role}_bias'] = Part(f'{fused}.bias', (3 * width,), lambda w, place=place: (
            w.reshape(heads, 3, head)[:, place].ravel()))
    for role, name, ins, outs in (('o', 'attention.dense', width, width),
                                  ('mlp_in', 'mlp.dense_h_to_4h', width, hidden),
                                  ('mlp_out', 'mlp.dense_4h_to_h', hidden, width)):
        block |= {role: _linear_part(name, outs, ins), f'{role}_bias': Part(f'{name}.bias', (outs,))}
    return Layout(top, block, 'layers.{}.')


def _llama_matrices(cfg: ModelConfig) -> dict[str, tuple[str, int, int]]:
    """Role -> name, inputs and outputs of the matrices of a block."""
    width, queries, keys = cfg.d_model, cfg.num_heads * cfg.d_head, cfg.num_kv_heads * cfg.d_head
    return {'q': ('self_attn.q_proj', width, queries), 'k': ('self_attn.k_proj', width, keys),
            'v': ('self_attn.v_proj', width, keys), 'o': ('self_attn.o_proj', queries, width),
            'mlp_gate': ('mlp.gate_proj', width, cfg.d_mlp), 'mlp_in': ('mlp.up_proj', width, cfg.d_mlp),
            'mlp_out': ('mlp.down_proj', cfg.d_mlp, width)}


def _llama_layout(cfg: ModelConfig) -> Layout:
    top = {'embed': Part('embed_tokens.weight', (cfg.vocab_size, cfg.d_model)),
           **_norm_parts('norm', 'norm', cfg.d_model, False)}
    block = _norm_parts('attn_norm', 'input_layernorm', cfg.d_model, False)
    block |= _norm_parts('mlp_norm', 'post_attention_layernorm', cfg.d_model, False)
    for role, (name, ins, outs) in _llama_matrices(cfg).items():
        block |= {role: _linear_part(name, outs, ins), f'{role}_bias': Part(f'{name}.bias', (outs,))}
    return Layout(top, block, 'layers.{}.')


def _phi3_layout(cfg: ModelConfig) -> Layout:
    layout, matrices = _llama_layout(cfg), _llama_matrices(cfg)
    for name, roles in (('self_attn.qkv_proj.weight', ('q', 'k', 'v')), ('mlp.gate_up_proj.weight',
                                                                        ('mlp_gate', 'mlp_in'))):
        total, start = sum(matrices[role][2] for role in roles), 0
        for role in roles:
            _, ins, outs = matrices[role]
            layout.block[role] = Part(name, (total, ins), _cut(start, outs, axis=0))
            start += outs
    return layout


def _gguf_layout(cfg: ModelConfig) -> Layout:
    top = {'embed': Part('token_embd.weight', (cfg.vocab_size, cfg.d_model)),
           **_norm_parts('norm', 'output_norm', cfg.d_model, False)}
    if not cfg.tied:
        top['unembed'] = _linear_part('output', cfg.vocab_size, cfg.d_model)
    block = _norm_parts('attn_norm', 'attn_norm', cfg.d_model, False)
    block |= _norm_parts('mlp_norm', 'ffn_norm', cfg.d_model, False)
    own = {'q': 'attn_q', 'k': 'attn_k', 'v': 'attn_v', 'o': 'attn_output', 'mlp_gate': 'ffn_gate', 'mlp_in': 'ffn_up',
           'mlp_out': 'ffn_down'}
    block |= {role: _linear_part(own[role], outs, ins) for role, (_, ins, outs) in _llama_matrices(cfg).items()}
    return Layout(top, block, 'blk.{}.')


# model_type -> what reads its config, and what lays out its tensors.
FAMILIES = {'gpt2': (_gpt2, _gpt2_layout), 'gpt_neox': (_neox, _neox_layout), 'llama': (_llama, _llama_layout),
            'mistral': (_llama, _llama_layout), 'phi3': (_llama, _phi3_layout)}
