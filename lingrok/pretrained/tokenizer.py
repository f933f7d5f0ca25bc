"""Tokenizers of language models, by the `tokenizers` library: from a tokenizer.json, or from the metadata of a GGUF."""

from collections.abc import Mapping
from pathlib import Path

from lingrok.config import ConfigError, require, suggest

# How each kind of byte-pair encoding cuts a text before it merges; kinds as GGUF files name them.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r'\s+(?!\S)|\s+')
KINDS = ('gpt-2', 'smollm', 'llama-bpe')
CONTROL, USER_DEFINED = 3, 4  # token types of GGUF
MIN_SHARE = 0.9  # embeddings are padded to round numbers, never by a tenth


def library():
    try:
        import tokenizers
    except ImportError:
        raise ConfigError("pretrained models need the package tokenizers; try pip install 'lingrok[pretrained]'"
                          ) from None
    return tokenizers


def from_folder(folder: Path):
    """The `tokenizers.Tokenizer` of tokenizer.json, which neither cuts nor pads."""
    path = folder / 'tokenizer.json'
    require(path.is_file(), f'{folder} has no tokenizer.json; convert its tokenizer with save_pretrained of '
            'transformers')
    try:
        tokenizer = library().Tokenizer.from_file(str(path))
    except ConfigError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f'{path} is no tokenizer: {_line(error)}') from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def from_gguf(metadata: Mapping, where: str):
    """The `tokenizers.Tokenizer` that the metadata of a GGUF file describes (byte-pair encodings of bytes)."""
    tokenizers = library()
    model, kind = (metadata.get(f'tokenizer.ggml.{key}') for key in ('model', 'pre'))
    require(model == 'gpt2', f'{where}: the tokenizer {str(model)[:80]!r} is not supported; allowed: gpt2, a byte-pair '
            'encoding of bytes; try the Hugging Face folder of the model')
    require(kind in KINDS, f'{where}: the pre-tokenizer {str(kind)[:80]!r} is not supported; {suggest(kind, KINDS)}')
    tokens, types, merges = (metadata.get(f'tokenizer.ggml.{key}') for key in ('tokens', 'token_type', 'merges'))
    require(all(isinstance(x, list) for x in (tokens, types, merges)) and len(types) == len(tokens)
            and all(isinstance(x, str) for x in (*tokens, *merges)), f'{where}: tokens, token_type and merges of its '
            'tokenizer are no lists that fit each other')
    vocab = {token: place for place, token in enumerate(tokens)}
    require(len(vocab) == len(tokens), f'{where}: its tokenizer has a token twice')
    pairs = [tuple(merge.split(' ')) for merge in merges]
    wrong = [merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2]
    require(not wrong, f'{where}: {wrong and wrong[0][:80]!r} of its tokenizer is no merge of two tokens')
    try:
        bpe = tokenizers.models.BPE(vocab=vocab, merges=pairs, ignore_merges=kind == 'llama-bpe')
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f'{where}: its tokenizer is damaged: {_line(error)}') from error
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = _cuts(tokenizers, kind)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        own = [token for token, number in zip(tokens, types, strict=True) if number == wanted]
        tokenizer.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False) for token in own])
    if metadata.get('tokenizer.ggml.add_bos_token', kind == 'llama-bpe'):
        start = metadata.get('tokenizer.ggml.bos_token_id')
        require(type(start) is int and start < len(tokens), f'{where}: its first token is {start!r}')
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f'{tokens[start]} $A', special_tokens=[(tokens[start], start)])
    return tokenizer


def _cuts(tokenizers, kind: str):
    pre = tokenizers.pre_tokenizers
    first = {'gpt-2': [], 'smollm': [pre.Digits(individual_digits=True)],
             'llama-bpe': [pre.Split(tokenizers.Regex(LLAMA3), 'isolated')]}[kind]
    return pre.Sequence([*first, pre.ByteLevel(add_prefix_space=False, use_regex=kind != 'llama-bpe')])


def check(tokenizer, vocab_size: int, where: str) -> None:
    """Raises unless the ids of a tokenizer fit a model with this vocabulary."""
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    require(MIN_SHARE * vocab_size <= highest <= vocab_size, f'{where}: its tokenizer has {highest:,} tokens and its '
            f'model {vocab_size:,}; allowed: as many, up to padding; try the tokenizer of the same model')


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
