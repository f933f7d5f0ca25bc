"""Files of torch.save: what is in them is read exactly, and nothing that they ask for is run."""

import pickle
import struct
import sys
import zipfile

import jax.numpy as jnp
import make_official_checkpoint as maker
import numpy as np
import pytest

from lingrok.config import ConfigError
from lingrok.pretrained import torch_file

ENTRIES = np.arange(24, dtype=np.float32)


def write(path, tree, **options):
    return maker.write(path / 'file.pth', tree, {'0': ENTRIES.tobytes()}, **options)


def one(*args, **options):
    """A state dict with the tensor 'x', a view of the storage '0'."""
    return maker.ordered_dict({'x': maker.tensor('0', *args, **options)})


def refusal(path) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(ConfigError) as error:
        torch_file.load(path)
    line = str(error.value)
    assert '\n' not in line and str(path) in line and len(line) < len(str(path)) + 300
    return line.replace(str(path), 'FILE')


@pytest.mark.parametrize('dtype', [np.float32, np.float64, np.float16, jnp.bfloat16, np.int64, np.uint8, np.bool_])
def test_every_dtype_is_read_exactly(dtype, tmp_path):
    value = np.random.default_rng(0).normal(0, 3, (3, 5)).astype(dtype)
    read = torch_file.load(maker.save(tmp_path / 'file.pth', {'x': value}))['x']
    assert read.dtype == value.dtype and read.tobytes() == value.tobytes() and read.shape == (3, 5)


@pytest.mark.parametrize('shape, strides, offset', [
    ((4, 6), (6, 1), 0), ((6, 4), (1, 6), 0), ((2, 3), (12, 2), 1), ((), (), 23), ((0, 7), (7, 1), 0), ((3,), (0,), 5),
    ((1, 24), (10**9, 1), 0),
])
def test_a_tensor_is_the_view_that_torch_means(shape, strides, offset, tmp_path):
    read = torch_file.load(write(tmp_path, one(shape, strides, offset, count=24)))['x']
    expected = np.empty(shape, np.float32)
    for index in np.ndindex(*shape):
        expected[index] = ENTRIES[offset + sum(i * s for i, s in zip(index, strides, strict=True))]
    np.testing.assert_array_equal(read, expected)
    assert read.shape == shape and not read.flags.writeable


def test_tensors_share_a_storage(tmp_path):
    value = np.ones((2, 2), np.float32)
    path = maker.save(tmp_path / 'file.pth', {'a': value, 'b': value, 'c': value.copy()})
    with zipfile.ZipFile(path) as archive:
        assert sum('/data/' in name for name in archive.namelist()) == 2
    read = torch_file.load(path)
    assert np.shares_memory(read['a'], read['b']) and not np.shares_memory(read['a'], read['c'])


def test_the_byte_order_is_that_of_the_writer(tmp_path):
    tree = one((24,))
    path = maker.write(tmp_path / 'file.pth', tree, {'0': ENTRIES.astype('>f4').tobytes()}, byteorder='big')
    np.testing.assert_array_equal(torch_file.load(path)['x'], ENTRIES)


def test_a_state_dict_may_be_an_entry(tmp_path):
    state = maker.state_dict(np.random.default_rng(0))
    for wrap in ('', 'model', 'state_dict'):
        read = torch_file.load(maker.save(tmp_path / 'file.pth', state, wrap=wrap))
        assert list(read) == list(state)
        assert all(np.array_equal(read[name], state[name]) for name in state)


def test_parameters_are_tensors(tmp_path):
    parameter = maker.name('torch._utils', '_rebuild_parameter') + b'(' + maker.tensor('0', (24,)) + b'\x88' + b'NtR'
    np.testing.assert_array_equal(torch_file.load(write(tmp_path, maker.ordered_dict({'x': parameter})))['x'], ENTRIES)


def test_files_of_a_real_torch(tmp_path):
    torch = pytest.importorskip('torch')
    base = torch.arange(24.0).reshape(4, 6)
    state = {'t': base.T, 'slice': base[1:3, ::2], 'bf16': base.bfloat16(), 'scalar': torch.tensor(3.5),
             'empty': torch.zeros(0, 3), 'parameter': torch.nn.Parameter(base), 'int': base.long()}
    for protocol in (2, 4):
        torch.save(state, tmp_path / 'file.pth', pickle_protocol=protocol)
        read = torch_file.load(tmp_path / 'file.pth')
        for name, value in state.items():
            np.testing.assert_array_equal(read[name].astype(np.float32), value.detach().float().numpy())
    torch.save(state, tmp_path / 'old.pth', _use_new_zipfile_serialization=False)
    assert 'torch before 1.6' in refusal(tmp_path / 'old.pth')
    ours = maker.save(tmp_path / 'ours.pth', {'x': ENTRIES})
    assert torch.load(ours, weights_only=True, map_location='cpu')['x'].tolist() == ENTRIES.tolist()


class Attack:
    """Pickles as a call of something."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.parametrize('protocol', [0, 1, 2, 4, 5])
@pytest.mark.parametrize('called', ['posix.system', 'builtins.eval', 'builtins.getattr', 'subprocess.Popen'])
def test_nothing_is_executed(called, protocol, tmp_path):
    module, name = called.split('.')
    trace = tmp_path / 'trace'
    args = {'posix.system': (f'touch {trace}',), 'builtins.eval': (f'open({str(trace)!r}, "w").close()',),
            'builtins.getattr': ('', 'join'), 'subprocess.Popen': (['touch', str(trace)],)}[called]
    __import__(module)
    attack = pickle.dumps({'x': Attack(getattr(sys.modules[module], name), *args)}, protocol)
    line = refusal(maker.write(tmp_path / 'file.pth', attack[2 if protocol > 1 else 0:-1], {}))
    assert not trace.exists()
    if protocol > 1:
        assert f'.{name}\'' in line and 'refused' in line
    else:  # other opcodes
        assert 'refused' in line or 'opcode' in line
    if called == 'builtins.eval':  # the attack is one
        pickle.loads(attack)
        assert trace.exists()


FLOATS = maker.name('torch', 'FloatStorage')


def storage(kind='storage', dtype=FLOATS):
    return b'(' + maker.text(kind) + dtype + maker.text('0') + maker.text('cpu') + maker.number(24) + b'tQ'


def rebuilt(first: bytes, offset=0, shape=(24,), strides=(1,)):
    args = b'(' + first + maker.number(offset) + maker.numbers(shape) + maker.numbers(strides) + b'tR'
    return maker.ordered_dict({'x': maker.name('torch._utils', '_rebuild_tensor_v2') + args})


NEW = maker.name('collections', 'OrderedDict')
BAD = {
    'a longer storage is claimed': (one((5, 5)), '96 bytes where 100'),
    'a shorter storage is claimed': (one((20,)), '96 bytes where 80'),
    'another dtype is claimed': (one((24,), dtype='float64'), '96 bytes where 192'),
    'a storage is missing': (maker.ordered_dict({'x': maker.tensor('1', (24,))}), "no storage 'archive/data/1'"),
    'a storage outside': (maker.ordered_dict({'x': maker.tensor('../../../etc/passwd', (24,))}), 'no storage'),
    'another kind of reference': (rebuilt(storage(kind='module')), 'no storage'),
    'strides lead beyond the storage': (one((2, 3), (22, 1), count=24), 'reads 25 entries of a storage of 24'),
    'the offset leads beyond the storage': (one((5,), (1,), 20, count=24), 'reads 25 entries of a storage of 24'),
    'an offset before the storage': (one((1,), (1,), -1, count=24), 'impossible shape'),
    'a negative stride': (one((2,), (-1,), 3, count=24), 'impossible shape'),
    'a negative size': (one((-2,), (1,), count=24), 'impossible shape'),
    'strides of another rank': (one((4, 6), (1,), count=24), 'impossible shape'),
    'more entries than the storage': (one((1000, 1000, 1000), (0, 0, 0), count=24), 'reads 1,000,000,000 entries'),
    'a tensor as a storage': (rebuilt(maker.tensor('0', (2, 12)), 1), 'without a storage'),
    'a name as a storage': (rebuilt(maker.text('0')), 'without a storage'),
    'no number': (maker.ordered_dict({'x': b'N'}), '0 entries with tensors'),
    'no dict': (maker.tensor('0', (24,)), '0 entries with tensors'),
    'two state dicts': (maker.ordered_dict({'a': one((24,)), 'b': one((24,))}), '2 entries with tensors'),
    'something beside tensors': (maker.ordered_dict({'x': maker.tensor('0', (24,)), 'lr': maker.number(1)}),
                                 "'lr' of the state dict is no tensor"),
    'a number as a name': (b'}' + maker.number(3) + maker.tensor('0', (24,)) + b's', "'3' of the state dict"),
    'a tuple as a name': (b'})' + maker.tensor('0', (24,)) + b's', 'no name or number'),
    'nested tuples as a name': (b'})' + b'\x85' * 200_000 + b'Ns', 'no name or number'),
    'nested lists': (b']' * 200_000 + b'a' * 199_999, '0 entries with tensors'),
    'a dict in itself': (b'}q\x00' + maker.text('x') + b'h\x00s', '0 entries with tensors'),
    'memo of huge index': (b'}r\xff\xff\xff\x7f', '0 entries with tensors'),
    'attributes of a string': (maker.text('x') + b'}b', 'attributes of what is no dict'),
    'attributes of a class': (NEW + b'}b', 'attributes of what is no dict'),
    'an object made without a call': (NEW + b')\x81', 'opcode NEWOBJ'),
    'an instance': (b'(iposix\nsystem\n', 'opcode INST'),
    'an extension': (b'\x82\x01', 'opcode EXT1'),
    'a string that is called': (maker.text('posix.system') + b')R', 'no function'),
    'a storage class that is called': (maker.name('torch', 'FloatStorage') + b')R', 'no function'),
    'a dict made of something': (NEW + b'(' + maker.text('x') + b'tR', 'OrderedDict'),
    'a name with a newline': (b'\x8c\x03o\ns\x8c\x01x\x93', 'refused'),
    'a stack that is empty': (b'0', 'opcode POP'),
    'too few on the stack': (b'R', 'damaged'),
    'a mark that is missing': (b't', 'damaged'),
    'no such opcode': (b'\xff', 'damaged'),
    'text beyond the end': (b'X\xff\xff\xff\x7fabc', 'damaged'),
    'an impossible dtype': (rebuilt(storage(dtype=maker.text('torch.FloatStorage '))), 'damaged'),
}


@pytest.mark.parametrize('case', BAD)
def test_what_no_file_of_weights_holds_is_refused(case, tmp_path):
    tree, message = BAD[case]
    assert message in refusal(write(tmp_path, tree))


def test_huge_numbers_are_refused_quickly(tmp_path):
    huge = b'\x8b' + struct.pack('<i', 2**20) + b'\x7f' * 2**20
    shape = b'(' + (huge + b'q\x00') + b'h\x00' * 100 + b't'
    args = b'(' + storage() + maker.number(0) + shape + shape + b'tR'
    tree = maker.ordered_dict({'x': maker.name('torch._utils', '_rebuild_tensor_v2') + args})
    assert 'impossible shape' in refusal(write(tmp_path, tree))


def test_compressed_entries_are_refused(tmp_path):
    path = maker.write(tmp_path / 'file.pth', one((2**20,)), {'0': bytes(2**22)}, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2**16
    assert 'compressed' in refusal(path)


def test_entries_that_overlap_are_refused(tmp_path):
    """A directory that lists the same bytes many times claims more than the file has."""
    path = write(tmp_path, one((24,)))
    with zipfile.ZipFile(path, 'a') as archive:
        entry = archive.getinfo('archive/data/0')
        for number in range(1, 2000):
            copy = zipfile.ZipInfo(f'archive/data/{number}')
            copy.header_offset, copy.CRC = entry.header_offset, entry.CRC
            copy.file_size = copy.compress_size = entry.file_size
            archive.filelist.append(copy)
        archive._didModify = True
    assert zipfile.is_zipfile(path)
    assert 'claims to hold' in refusal(path)


def test_other_files_are_refused(tmp_path):
    def make(content):
        (tmp_path / 'file').write_bytes(content)
        return tmp_path / 'file'

    assert 'not a file' in refusal(tmp_path / 'nothing.pth') and 'not a file' in refusal(tmp_path)
    assert 'no file of torch.save' in refusal(make(b'step\tloss\n1\t3.4\n'))
    assert 'no file of torch.save' in refusal(make(b''))
    assert 'no file of torch.save' in refusal(make(pickle.dumps({'x': 1})))
    assert 'torch before 1.6' in refusal(make(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + b'\x80\x02M\xe9\x03.'))
    with zipfile.ZipFile(tmp_path / 'file', 'w') as archive:
        archive.writestr('readme.txt', 'hello')
    assert '0 entries NAME/data.pkl' in refusal(tmp_path / 'file')


def test_a_file_cut_anywhere_is_refused(tmp_path):
    content = maker.save(tmp_path / 'whole.pth', maker.state_dict(np.random.default_rng(0))).read_bytes()
    for length in range(2, len(content), 137):
        (tmp_path / 'cut.pth').write_bytes(content[:length])
        assert 'cut short or damaged' in refusal(tmp_path / 'cut.pth')


def test_a_changed_byte_is_noticed_or_changes_nothing(tmp_path):
    path = write(tmp_path, one((4, 6)))
    content, rng = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for place in rng.choice(len(content), 400, replace=False):
        changed = bytearray(content)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        try:
            np.testing.assert_array_equal(torch_file.load(path)['x'].reshape(-1), ENTRIES)
        except ConfigError:
            refused += 1
    assert refused > 200
