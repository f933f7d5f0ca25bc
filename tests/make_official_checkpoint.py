"""Writes a file as torch.save does, without torch: of a random model in the format of the official modular code.

    python tests/make_official_checkpoint.py DIRECTORY      prints the path of the file
"""

import math
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np

STORAGES = {'float32': 'FloatStorage', 'float16': 'HalfStorage', 'bfloat16': 'BFloat16Storage', 'int64': 'LongStorage',
            'float64': 'DoubleStorage', 'bool': 'BoolStorage', 'uint8': 'ByteStorage'}
NAME = ('noembdFalse_paraleTrue_pltask{num_tasks}_rope_decoder_p{p}_base{p}_row{row}_ntask{num_tasks}_nvar2_dsplitTrue'
        '_dfrac{percent:.1f}_{act}_n{width}_h{heads}_d{depth}_lctx64_I{seed}_dI{input_seed}_adamw_bs{batch}_t{step}'
        '_T{steps}_Tw5_lr1.50e-04_wd2.00e+00.pth')


def text(string: str) -> bytes:
    return b'X' + struct.pack('<i', len(string.encode())) + string.encode()


def number(n: int) -> bytes:
    return b'J' + struct.pack('<i', n)


def name(module: str, attribute: str) -> bytes:
    return f'c{module}\n{attribute}\n'.encode()


def numbers(values) -> bytes:
    return b'(' + b''.join(map(number, values)) + b't'


def ordered_dict(entries: dict[str, bytes], *, attributes: bytes = b'') -> bytes:
    filled = b''.join(text(key) + value for key, value in entries.items())
    return name('collections', 'OrderedDict') + b')R(' + filled + b'u' + attributes


def tensor(key: str, shape, strides=None, offset: int = 0, *, count=None, dtype: str = 'float32') -> bytes:
    """The pickle of a view of the storage `key`, which is said to have `count` entries."""
    if strides is None:
        strides = [math.prod(shape[i + 1:]) for i in range(len(shape))]
    count = math.prod(shape) if count is None else count
    where = text('storage') + name('torch', STORAGES[dtype]) + text(key) + text('cuda:0') + number(count)
    args = b'((' + where + b'tQ' + number(offset) + numbers(shape) + numbers(strides) + b'\x89' + ordered_dict({})
    return name('torch._utils', '_rebuild_tensor_v2') + args + b'tR'


def write(path, tree: bytes, storages: dict[str, bytes], *, compression=zipfile.ZIP_STORED, byteorder='little') -> Path:
    """A zip archive with the pickle of `tree` and the bytes of the storages."""
    with zipfile.ZipFile(path, 'w', compression) as archive:
        archive.writestr('archive/data.pkl', b'\x80\x02' + tree + b'.')
        archive.writestr('archive/byteorder', byteorder)
        for key, content in storages.items():
            archive.writestr(f'archive/data/{key}', content)
        archive.writestr('archive/version', '3\n')
    return Path(path)


def state_dict(rng, *, p=5, width=8, heads=2, depth=2, act='relu', tied=True) -> dict[str, np.ndarray]:
    """Random parameters under the names of the official model, far from their initial values."""
    vocab, head = p + 18, width // heads
    draw = lambda *shape: rng.normal(0, 0.5, shape).astype(np.float32)  # noqa: E731
    state = {'transformer.wte.weight': draw(vocab, width)}
    for n in range(depth):
        block = f'transformer.h.{n}'
        state |= {f'{block}.ln_1.weight': 1 + draw(width), f'{block}.ln_1.bias': draw(width),
                  f'{block}.attn.to_qkv.weight': draw(3 * width, width), f'{block}.attn.o.weight': draw(width, width)}
        freqs = 10000.0 ** (-np.arange(0, head, 2) / head)
        state |= {f'{block}.attn.rotary_emb.freqs': freqs.astype(np.float32)}
        state |= {f'{block}.ln_2.weight': 1 + draw(width), f'{block}.ln_2.bias': draw(width)}
        if act == 'swiglu':
            state |= {f'{block}.mlp.w{i}.weight': draw(*((width, 24) if i == 2 else (24, width))) for i in (1, 2, 3)}
        else:
            state |= {f'{block}.mlp.c_fc.weight': draw(4 * width, width),
                      f'{block}.mlp.c_proj.weight': draw(width, 4 * width)}
    state |= {'transformer.ln_f.weight': 1 + draw(width), 'transformer.ln_f.bias': draw(width)}
    return state | {'lm_head.weight': state['transformer.wte.weight'] if tied else draw(vocab, width)}


def save(path, state: dict[str, np.ndarray], *, wrap: str = '') -> Path:
    """A state dict as torch saves it: arrays that are one object share a storage, with the versions of the modules.

    wrap: name of an entry that holds the state dict, beside a step.
    """
    keys, storages, entries = {}, {}, {}
    for entry, value in state.items():
        key = keys.setdefault(id(value), str(len(keys)))
        storages[key] = value.tobytes()
        entries[entry] = tensor(key, value.shape, dtype=str(value.dtype))
    metadata = ordered_dict({'': b'}' + text('version') + number(1) + b's'})
    tree = ordered_dict(entries, attributes=b'}' + text('_metadata') + metadata + b'sb')
    if wrap:
        tree = b'}(' + text(wrap) + tree + text('step') + number(7) + b'u'
    return write(path, tree, storages)


def official_name(*, p=5, width=8, heads=2, depth=2, act='relu', num_tasks=8, percent=60.0, row=6, seed=1,
                  input_seed=0, batch=16, step=20, steps=20) -> str:
    return NAME.format(**locals())


if __name__ == '__main__':
    print(save(Path(sys.argv[1]) / official_name(), state_dict(np.random.default_rng(0))))
