"""Metadata and tensors of a GGUF file (versions 2 and 3); quantised tensors are expanded by the `gguf` package.

The header is read here, and not by that package, because every length it claims has to be checked against the size of
the file before memory is taken for it.
"""

import functools
import math
import mmap
import struct
from pathlib import Path

import numpy as np

from lingrok.config import ConfigError, require
from lingrok.pretrained.safetensors_file import Stored

# Types of values, as struct calls them.
NUMBERS = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q', 11: 'q', 12: 'd'}
STRING, ARRAY = 8, 9
ROWS = 2048  # expanded at once


def load(path: Path) -> tuple[dict, dict[str, Stored]]:
    """Metadata (numbers, strings, lists of them) and tensors by name. A damaged file raises ConfigError."""
    try:
        import gguf
    except ImportError:
        raise ConfigError('GGUF files need the package gguf; try pip install gguf') from None
    with path.open('rb') as file:
        require(file.read(4) == b'GGUF', f'{path} is no GGUF file: it does not begin with GGUF')
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data, gguf)


class _Reader:
    """A position in the bytes of a file; nothing is read beyond their end."""

    def __init__(self, path: Path, data):
        self.path, self.data, self.at = path, data, 4

    def claim(self, size: int) -> None:
        if self.at + size > len(self.data):  # a vocabulary has 10^5 strings: no message is made in vain
            raise ConfigError(f'{self.path} has {len(self.data):,} bytes and claims {self.at + size:,}: it is cut '
                              'short or damaged; get it again')

    def take(self, size: int) -> bytes:
        self.claim(size)
        self.at += size
        return self.data[self.at - size : self.at]

    def numbers(self, kind: str, count: int) -> list:
        return list(struct.unpack(f'<{count}{kind}', self.take(struct.calcsize(f'<{kind}') * count)))

    def number(self, kind: str):
        return self.numbers(kind, 1)[0]

    def string(self) -> str:
        return self.take(self.number('Q')).decode('utf-8', 'replace')

    def value(self, kind: int):
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            require(kind in NUMBERS, f'{self.path} holds a value of the unknown type {kind}: it is damaged')
            return self.number(NUMBERS[kind])
        kind, count = self.number('I'), self.number('Q')
        if kind == STRING:
            self.claim(8 * count)
            return [self.string() for _ in range(count)]
        require(kind in NUMBERS, f'{self.path} holds a list of the type {kind}; allowed: numbers and strings')
        return self.numbers(NUMBERS[kind], count)


def _parse(path: Path, data, gguf) -> tuple[dict, dict[str, Stored]]:
    reader = _Reader(path, data)
    version = reader.number('I')
    require(version in (2, 3), f'{path} has GGUF version {version}; allowed: 2 and 3, little endian')
    num_tensors, num_keys = reader.number('Q'), reader.number('Q')
    reader.claim(24 * num_tensors + 12 * num_keys)
    metadata = {}
    for _ in range(num_keys):
        key = reader.string()
        require(key not in metadata, f'{path} has the key {key[:80]!r} twice')
        metadata[key] = reader.value(reader.number('I'))
    entries = {}
    for _ in range(num_tensors):
        name, axes = reader.string(), reader.number('I')
        require(0 < axes <= 4 and name not in entries, f'{path}: the tensor {name[:80]!r} has {axes} axes or is there '
                'twice')
        shape = tuple(reader.number('Q') for _ in range(axes))[::-1]
        entries[name] = shape, reader.number('I'), reader.number('Q')
    align = metadata.get('general.alignment', 32)
    require(type(align) is int and 0 < align <= 2**16, f'{path} has general.alignment={align!r}')
    start = -(-reader.at // align) * align
    return metadata, {name: _stored(path, name, entry, start, len(data), gguf) for name, entry in entries.items()}


def _stored(path: Path, name: str, entry, start: int, size: int, gguf) -> Stored:
    shape, number, offset = entry
    known = {int(kind): kind for kind in gguf.GGML_QUANT_SIZES}
    require(number in known, f'{path}: the tensor {name[:80]!r} has the unknown type {number}; try a newer gguf')
    block, bytes_of_block = gguf.GGML_QUANT_SIZES[known[number]]
    require(shape[-1] % block == 0, f'{path}: the tensor {name[:80]!r} has rows of {shape[-1]}; allowed: a multiple of '
            f'{block}')
    packed = (*shape[:-1], shape[-1] // block * bytes_of_block)
    end = start + offset + math.prod(packed)
    require(end <= size, f'{path} has {size:,} bytes and claims {end:,}: it is cut short or damaged; get it again')
    return Stored(shape, functools.partial(_expanded, path, shape, packed, start + offset, known[number]))


def _expanded(path: Path, shape, packed, offset: int, kind) -> np.ndarray:
    import gguf

    data = np.asarray(np.memmap(path, np.uint8, 'r', offset, packed))
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        return data.view(np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.float16)
    rows, out = data.reshape(-1, packed[-1]), np.empty((math.prod(shape[:-1]), shape[-1]), np.float32)
    try:
        for row in range(0, len(rows), ROWS):
            out[row : row + ROWS] = gguf.quants.dequantize(rows[row : row + ROWS], kind)
    except NotImplementedError:
        raise ConfigError(f'{path} has tensors of type {kind.name}, which the gguf package cannot expand; try a file '
                          'with Q8_0, Q4_1 or F16') from None
    return out.reshape(shape)
