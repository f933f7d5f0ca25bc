"""Tensors of safetensors files, whole or in shards, each one mapped from the file when it is read.

A file is the length of a header (8 bytes, little endian), the header (JSON: name -> dtype, shape, data_offsets) and the
bytes of the tensors. Every claim of a header is checked against the size of its file before a tensor is touched.
"""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from lingrok.config import require, suggest

DTYPES = {'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': jnp.bfloat16, 'I64': np.int64,
          'I32': np.int32, 'I16': np.int16, 'I8': np.int8, 'U8': np.uint8, 'BOOL': np.bool_}
MAX_HEADER = 10**8  # bytes, the limit of the format


class Stored(NamedTuple):
    """A tensor that is still in its file."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def load_folder(folder: Path) -> dict[str, Stored]:
    """The tensors of model.safetensors, or of the shards that model.safetensors.index.json names, by name."""
    whole, index = folder / 'model.safetensors', folder / 'model.safetensors.index.json'
    if whole.is_file():
        return load(whole)
    require(index.is_file(), f'{folder} has neither model.safetensors nor {index.name}; allowed: weights as '
            'safetensors; convert others with save_pretrained of transformers')
    table = read_json(index).get('weight_map')
    require(isinstance(table, dict) and all(isinstance(name, str) for name in table.values()), f'{index} has no '
            'weight_map of file names')
    found = {}
    for name in sorted(set(table.values())):
        require(Path(name).name == name, f'{index} names the shard {name[:80]!r}; allowed: a file beside it')
        require((folder / name).is_file(), f'{folder} lacks the shard {name!r} that {index.name} names; get it, or '
                'the whole folder, again')
        found |= load(folder / name)
    missing = sorted(set(table) - set(found))
    require(not missing, f'{folder}: no shard holds {missing and missing[0]!r}, which {index.name} names')
    return found


def load(path: Path) -> dict[str, Stored]:
    """The tensors of one file by name. Raises ConfigError for a file that is cut short or damaged."""
    size = path.stat().st_size
    with path.open('rb') as file:
        length = int.from_bytes(file.read(8), 'little')
        require(size >= 8 and length <= min(size - 8, MAX_HEADER), f'{path} has {size:,} bytes and claims a header of '
                f'{length:,}: it is cut short or no safetensors file')
        header = parse_json(file.read(length), f'the header of {path}')
    header.pop('__metadata__', None)
    return {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _stored(path: Path, name: str, entry, start: int, size: int) -> Stored:
    where = f'{path}: the tensor {name[:80]!r}'
    require(isinstance(entry, dict) and {'dtype', 'shape', 'data_offsets'} <= set(entry), f'{where} has no dtype, '
            'shape and data_offsets')
    kind, shape, offsets = entry['dtype'], entry['shape'], entry['data_offsets']
    require(kind in DTYPES, f'{where} has dtype {kind!r}; {suggest(kind, DTYPES)}')
    require(isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 and all(
        type(x) is int and x >= 0 for x in (*shape, *offsets)), f'{where} has shape {shape} and data_offsets {offsets}')
    dtype = np.dtype(DTYPES[kind])
    wanted = math.prod(shape) * dtype.itemsize
    require(offsets[1] - offsets[0] == wanted, f'{where} has {offsets[1] - offsets[0]:,} bytes; its shape {shape} '
            f'needs {wanted:,}')
    require(start + offsets[1] <= size, f'{path} has {size:,} bytes and claims {start + offsets[1]:,}: it is cut '
            'short or damaged; get it again')
    return Stored(tuple(shape), functools.partial(_mapped, path, dtype, start + offsets[0], tuple(shape)))


def _mapped(path: Path, dtype: np.dtype, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.memmap(path, dtype, 'r', offset, shape)


def read_json(path: Path) -> dict:
    require(path.is_file(), f'{path.parent} has no {path.name}; allowed: a folder as save_pretrained of transformers '
            'writes it')
    return parse_json(path.read_bytes(), str(path))


def parse_json(text: bytes, where: str) -> dict:
    """The object that a JSON text holds."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        tree = None
    require(isinstance(tree, dict), f'{where} is no JSON object: it is cut short or damaged')
    return tree
