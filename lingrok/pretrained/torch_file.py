"""Tensors of a file that torch.save wrote, read without torch, and without running anything that the file asks for.

The file is a zip archive without compression: NAME/data.pkl is a pickle in which a tensor is a view (offset, shape,
strides) of a storage, and NAME/data/KEY are the bytes of a storage. A pickle is a program. This one is not given to
`pickle`: `_interpret` knows the opcodes that weights need, which make dicts, lists, tuples, numbers and strings, and
the three functions by which torch rebuilds tensors. It refuses everything else by name. No storage is allocated beyond
the bytes that the archive holds.
"""

import math
import pickletools
import zipfile
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from lingrok.config import ConfigError, require

DTYPES = {
    'torch.FloatStorage': np.float32, 'torch.DoubleStorage': np.float64, 'torch.HalfStorage': np.float16,
    'torch.BFloat16Storage': jnp.bfloat16, 'torch.LongStorage': np.int64, 'torch.IntStorage': np.int32,
    'torch.ShortStorage': np.int16, 'torch.CharStorage': np.int8, 'torch.ByteStorage': np.uint8,
    'torch.BoolStorage': np.bool_, 'torch.ComplexFloatStorage': np.complex64,
}
FUNCTIONS = ('collections.OrderedDict', 'torch._utils._rebuild_tensor_v2', 'torch._utils._rebuild_parameter')
OLD_FORMAT = b'\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.'  # a pickled magic number, with which files began before 1.6


def load(path) -> dict[str, np.ndarray]:
    """The tensors of a state dict by name, read-only. It is all of the file, or the one entry that holds tensors.

    Raises ConfigError, in one line, for a file that is damaged, of another format, or that asks for anything to be run.
    """
    path = Path(path)
    require(path.is_file(), f'{path} is not a file')
    with path.open('rb') as file:
        start = file.read(len(OLD_FORMAT))
    require(start != OLD_FORMAT, f'{path} has the format of torch before 1.6; load it and save it again with a newer '
            'torch')
    require(start[:2] == b'PK', f'{path} is no file of torch.save: it begins with {start[:8]!r} and not as a zip '
            'archive')
    try:
        with zipfile.ZipFile(path) as archive:
            tree = _Archive(path, archive).tree()
    except ConfigError:
        raise
    except Exception as error:  # zipfile, pickletools and numpy raise many kinds for a damaged file
        reason = (str(error).splitlines() or [''])[0][:200] or type(error).__name__
        raise ConfigError(f'{path} is cut short or damaged: {reason}') from error
    return _state_dict(path, tree)


def _state_dict(path, tree) -> dict[str, np.ndarray]:
    entries = {'': tree} | (tree if isinstance(tree, dict) else {})
    found = [entry for entry in entries.values()
             if isinstance(entry, dict) and any(isinstance(value, np.ndarray) for value in entry.values())]
    require(len(found) == 1, f'{path} has {len(found)} entries with tensors by name; allowed: one state dict')
    for name, value in found[0].items():
        require(isinstance(name, str) and isinstance(value, np.ndarray), f'{path}: the entry '
                f'{str(name)[:80]!r} of the state dict is no tensor')
    return found[0]


class _Storage(NamedTuple):
    """The one thing that tensors are views of; no opcode makes one."""

    flat: np.ndarray


class _Archive:
    """An opened file; `tree` is what was saved, with arrays for its tensors."""

    def __init__(self, path, archive: zipfile.ZipFile):
        self.path, self.archive = path, archive
        entries = archive.infolist()
        self.sizes = {entry.filename: entry.file_size for entry in entries}
        packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
        require(not packed, f'{path}: {packed and packed[0]!r} is compressed, which torch.save never does')
        total, size = sum(entry.file_size for entry in entries), path.stat().st_size
        require(total <= size, f'{path} has {size:,} bytes and claims to hold {total:,}')
        pickles = [name for name in self.sizes if name.endswith('/data.pkl')]
        require(len(pickles) == 1, f'{path} has {len(pickles)} entries NAME/data.pkl; a file of torch.save has one')
        self.folder = pickles[0].removesuffix('data.pkl')
        order = archive.read(f'{self.folder}byteorder') if f'{self.folder}byteorder' in self.sizes else b'little'
        self.order = {b'little': '<', b'big': '>'}[order]
        self.storages = {}

    def tree(self):
        return _interpret(self.archive.read(f'{self.folder}data.pkl'), self)

    def name(self, module: str, name: str) -> str:
        """A global name, where a file of weights may use it."""
        full = f'{module}.{name}'
        require(full in DTYPES or full in FUNCTIONS, f'{self.path} asks for {full[:80]!r}, which is refused: weights '
                'need no code')
        return full

    def storage(self, kind, dtype, key, location, count):
        """The storage of a persistent id."""
        entry = f'{self.folder}data/{key}'
        require(kind == 'storage' and entry in self.sizes, f'{self.path} has no storage {entry[:80]!r}')
        dtype = np.dtype(DTYPES[dtype])
        if (entry, dtype) not in self.storages:
            held, needed = self.sizes[entry], count * dtype.itemsize
            require(held == needed, f'{self.path}: storage {entry!r} has {held:,} bytes where {needed:,} are needed')
            word = dtype.itemsize // (2 if dtype.kind == 'c' else 1)  # a complex number is two
            words = np.frombuffer(self.archive.read(entry), f'{self.order}u{word}')
            self.storages[entry, dtype] = _Storage(words.astype(f'=u{word}', copy=False).view(dtype))
        return self.storages[entry, dtype]

    def call(self, function: str, args):
        """What one of FUNCTIONS makes of its arguments."""
        if function == 'collections.OrderedDict':
            require(args == (), f'{self.path}: an OrderedDict is made of something, not filled')
            return {}
        if function == 'torch._utils._rebuild_parameter':
            return args[0]
        require(function == 'torch._utils._rebuild_tensor_v2', f'{self.path} calls what is no function')
        return self.tensor(*args[:4])

    def tensor(self, storage, offset, shape, strides):
        """A view of a storage."""
        require(isinstance(storage, _Storage), f'{self.path} has a tensor without a storage')
        numbers = (offset, *shape, *strides)
        sound = len(shape) == len(strides) and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
        require(sound, f'{self.path} has a tensor of impossible shape')
        flat, count = storage.flat, math.prod(shape)
        end = offset + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if count else 0
        require(max(end, count) <= flat.size, f'{self.path} has a tensor that reads {max(end, count):,} entries of a '
                f'storage of {flat.size:,}')
        byte_strides = [stride * flat.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(flat[offset:], shape, byte_strides, writeable=False)


def _interpret(program: bytes, archive: _Archive):
    """Runs the opcodes of a pickle of weights and returns what it makes; raises for every other opcode."""
    stack, marks, memo = [], [], {}

    def since_mark():
        items = stack[marks[-1]:]
        del stack[marks.pop():]
        return items

    for opcode, arg, _ in pickletools.genops(program):
        match opcode.name:
            case 'PROTO' | 'FRAME':
                pass
            case 'STOP':
                return stack.pop()
            case ('BININT' | 'BININT1' | 'BININT2' | 'LONG1' | 'LONG4' | 'BINFLOAT' | 'BINUNICODE' | 'BINUNICODE8'
                  | 'SHORT_BINUNICODE'):
                stack.append(arg)
            case 'NONE' | 'NEWTRUE' | 'NEWFALSE':
                stack.append({'NONE': None, 'NEWTRUE': True, 'NEWFALSE': False}[opcode.name])
            case 'EMPTY_DICT' | 'EMPTY_LIST' | 'EMPTY_TUPLE':
                stack.append({'EMPTY_DICT': dict, 'EMPTY_LIST': list, 'EMPTY_TUPLE': tuple}[opcode.name]())
            case 'MARK':
                marks.append(len(stack))
            case 'TUPLE':
                stack.append(tuple(since_mark()))
            case 'TUPLE1' | 'TUPLE2' | 'TUPLE3':
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case 'APPEND' | 'APPENDS':
                items = [stack.pop()] if opcode.name == 'APPEND' else since_mark()
                stack[-1].extend(items)
            case 'SETITEM' | 'SETITEMS':
                if opcode.name == 'SETITEM':
                    marks.append(len(stack) - 2)
                items = since_mark()
                for key, value in zip(items[::2], items[1::2], strict=True):
                    require(type(key) in (str, int), f'{archive.path} has a dict key that is no name or number')
                    stack[-1][key] = value
            case 'BINPUT' | 'LONG_BINPUT':
                memo[arg] = stack[-1]
            case 'MEMOIZE':
                memo[len(memo)] = stack[-1]
            case 'BINGET' | 'LONG_BINGET':
                stack.append(memo[arg])
            case 'GLOBAL':
                stack.append(archive.name(*arg.split(' ', 1)))
            case 'STACK_GLOBAL':
                name = stack.pop()
                stack.append(archive.name(stack.pop(), name))
            case 'BINPERSID':
                stack.append(archive.storage(*stack.pop()))
            case 'REDUCE':
                args = stack.pop()
                stack.append(archive.call(stack.pop(), args))
            case 'BUILD':  # attributes of an OrderedDict, such as the versions of the modules
                stack.pop()
                require(isinstance(stack[-1], dict), f'{archive.path} sets attributes of what is no dict')
            case other:
                require(False, f'{archive.path} holds the pickle opcode {other}, which weights do not need')
