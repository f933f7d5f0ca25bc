"""Writes tests/language/: tiny random language models in foreign formats, with the logits of transformers.

    pip install torch transformers accelerate gguf && python tests/make_language_models.py [path of SmolLM2's GGUF file]

Each folder is as save_pretrained of transformers writes it, or an older version did; `reference.npz` beside the files
holds tokens (1, L) and the logits (1, L, V) in float32. With a path, smollm2.json also gets the ten most probable next
tokens of a few prompts, and their log-probabilities.
"""

import json
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
)

FOLDER = Path(__file__).parent / 'language'
VOCAB, LENGTH = 272, 24
TEXT = ['a little more than kin, and less than kind. ' * 9]
COMMON = {'vocab_size': VOCAB, 'num_hidden_layers': 2, 'hidden_size': 24, 'intermediate_size': 40,
          'num_attention_heads': 3, 'max_position_embeddings': 64, 'bos_token_id': 0, 'eos_token_id': 0,
          'pad_token_id': 0}
GROUPED = {'num_attention_heads': 6, 'num_key_value_heads': 2}
LLAMA3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
          'original_max_position_embeddings': 32}
MODELS = {
    'gpt2': GPT2Config(vocab_size=VOCAB, n_layer=2, n_embd=24, n_head=3, n_positions=64),
    'neox': GPTNeoXConfig(**COMMON, rope_parameters={'rope_type': 'default', 'rope_theta': 100.0,
                                                     'partial_rotary_factor': 0.25}),
    'neox_sequential': GPTNeoXConfig(**COMMON, use_parallel_residual=False, attention_bias=False, hidden_act='gelu_new',
                                     rope_parameters={'rope_type': 'default', 'rope_theta': 100.0,
                                                      'partial_rotary_factor': 0.5}),
    'llama': LlamaConfig(**COMMON | GROUPED, head_dim=8, rope_parameters={**LLAMA3, 'rope_theta': 500.0}),
    'llama_tied': LlamaConfig(**COMMON | GROUPED, tie_word_embeddings=True, attention_bias=True, rms_norm_eps=1e-5,
                              rope_parameters={'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 100.0}),
    'mistral': MistralConfig(**COMMON | GROUPED, head_dim=6, sliding_window=32),
    'phi3': Phi3Config(**COMMON | GROUPED, rope_parameters={'rope_type': 'default', 'rope_theta': 100.0}),
}
PROMPTS = ('Madrid is located in', 'When Mary and John went to the store, John gave a drink to',
           'In 1989 the price was $12.50, they\'ve said:\n\n  "It')


def random_model(config):
    """A model whose every parameter is random and large enough that a wrong one shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation='eager').float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if 'norm' in name or 'ln_' in name and name.endswith('weight') else 0.0, scale)
    return model


def logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def make_tokenizer():
    """A byte-pair encoding of bytes with a few merges."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=['<|end|>'], show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXT, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def make_folder(name: str, tokenizer, tokens) -> None:
    folder, model = FOLDER / name, random_model(MODELS[name])
    short = name in ('llama_tied', 'mistral', 'phi3')  # in bfloat16
    if short:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    folder.mkdir()
    np.savez_compressed(folder / 'reference.npz', tokens=tokens, logits=logits(model, tokens))
    model = model.bfloat16() if short else model
    model.save_pretrained(folder, max_shard_size='20KB' if name == 'neox' else '1GB')
    tokenizer.save(str(folder / 'tokenizer.json'))
    (folder / 'generation_config.json').unlink(missing_ok=True)
    config = json.loads((folder / 'config.json').read_text())
    rope = config.get('rope_parameters', {})
    if name == 'llama':  # as files before transformers 5
        del config['rope_parameters']
        config |= {'rope_theta': rope.pop('rope_theta'), 'rope_scaling': rope, 'torch_dtype': config.pop('dtype')}
    if name == 'neox_sequential':
        del config['rope_parameters']
        config |= {'rotary_pct': rope['partial_rotary_factor'], 'rotary_emb_base': rope['rope_theta']}
    (folder / 'config.json').write_text(json.dumps(config, indent=1))


def make_gguf(tokenizer, tokens) -> None:
    """A file of the Llama layout with quantised matrices, whose reference has the expanded matrices."""
    size = {'hidden_size': 32, 'intermediate_size': 64, 'num_attention_heads': 4, 'num_key_value_heads': 2}
    config = LlamaConfig(**COMMON | size, rope_parameters={**LLAMA3, 'rope_theta': 500.0}, tie_word_embeddings=True)
    model = random_model(config)
    folder = FOLDER / 'gguf'
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / 'tiny.gguf', 'llama')
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(500.0)
    writer.add_rope_dimension_count(config.head_dim)
    vocab = json.loads(tokenizer.to_str())['model']
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre('smollm')
    writer.add_token_list(sorted(vocab['vocab'], key=vocab['vocab'].get))
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (VOCAB - 1))
    writer.add_token_merges([' '.join(pair) for pair in vocab['merges']])
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(True)
    freqs = 500.0 ** (-np.arange(0, 8, 2) / 8)
    writer.add_tensor('rope_freqs.weight', (freqs / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    kinds = {'attn_v': 'Q4_1', 'attn_q': 'F16', 'ffn_gate': 'BF16', 'ffn_up': 'Q5_0'}
    for name, parameter in model.named_parameters():
        own = names.get_name(name, try_suffixes=('.weight',))
        value = parameter.detach().numpy()
        kind = kinds.get(own.split('.')[-2], 'Q8_0') if value.ndim == 2 else 'F32'
        heads = {'attn_q': config.num_attention_heads, 'attn_k': config.num_key_value_heads}.get(own.split('.')[-2])
        if heads:  # GGUF rotates pairs, transformers halves
            value = value.reshape(heads, 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        packed = gguf.quants.quantize(value, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(own, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
        value = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
        if heads:
            value = value.reshape(heads, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        with torch.no_grad():
            parameter.copy_(torch.tensor(value.reshape(parameter.shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.savez_compressed(folder / 'reference.npz', tokens=tokens, logits=logits(model, tokens))


def make_smollm2(path: Path) -> None:
    """What transformers makes of the GGUF file of SmolLM2-135M-Instruct."""
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    found = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, add_special_tokens=False)['input_ids']
        law = torch.log_softmax(torch.tensor(logits(model, [tokens])[0, -1]), -1)
        top = torch.topk(law, 10)
        found.append({'prompt': prompt, 'tokens': tokens, 'top': top.indices.tolist(),
                      'log_probabilities': [round(x, 6) for x in top.values.tolist()]})
    (FOLDER / 'smollm2.json').write_text(json.dumps(found, indent=1))


def main() -> None:
    torch.set_num_threads(1)
    kept = (FOLDER / 'smollm2.json').read_text() if (FOLDER / 'smollm2.json').exists() else ''
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    tokens, tokenizer = np.random.default_rng(0).integers(0, VOCAB, (1, LENGTH)), make_tokenizer()
    for name in MODELS:
        make_folder(name, tokenizer, tokens)
    make_gguf(tokenizer, tokens)
    if len(sys.argv) > 1:
        make_smollm2(Path(sys.argv[1]))
    elif kept:
        (FOLDER / 'smollm2.json').write_text(kept)


if __name__ == '__main__':
    main()
