"""Activation patching: where the indirect object stands in a language model, by layer, position and head.

    python experiments/lm/patching.py --model=smollm2           4 minutes on two cores

Activations of the sentence are put into the same sentence with three other names (--corruption=abc) or with IO in
place of S2 (s2); half of what the model computes anew are single heads, the other half positions.
"""

from absl import flags

from lingrok import cli
from lingrok.cli import Expected
from lingrok.figures import circuits as figures
from lingrok.lm import circuits, ioi

COUNT = flags.DEFINE_integer('count', 16, 'sentences with an indirect object', lower_bound=2)
CORRUPTION = flags.DEFINE_enum('corruption', 'abc', circuits.CORRUPTIONS, 'which names the corrupted sentences have')
POSITIONS = flags.DEFINE_enum('positions', 'all', ['all', 'last'], 'where single heads are patched')

EXPECTED = [
    Expected('depth (0 first layer, 1 last) of the head that restores most', 'late, about .8 to .9: name movers',
             'prior knowledge of GPT-2 small, not verified', 'depth/heads'),
]


def measure(model, seed: int, folder) -> dict:
    clean = circuits.cases(model, count=COUNT.value, seed=seed)
    names = list(ioi.names(model.tokenizer).values())
    other = circuits.corrupted(clean, names, kind=CORRUPTION.value, seed=seed)
    found = circuits.patching(model.params, clean, other, cfg=model.config, positions=POSITIONS.value)._asdict()
    return circuits.series(found | circuits.best_heads({'heads': found['heads']}))


if __name__ == '__main__':
    cli.language_model(measure, figures.patching, expected=EXPECTED)
