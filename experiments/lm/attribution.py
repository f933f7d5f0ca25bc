"""Direct logit attribution: which heads and feed-forwards of a language model write the name of the indirect object.

    python experiments/lm/attribution.py --model=smollm2        15 s on two cores
"""

from absl import flags

from lingrok import cli
from lingrok.cli import Expected
from lingrok.figures import circuits as figures
from lingrok.lm import circuits

COUNT = flags.DEFINE_integer('count', 32, 'sentences with an indirect object', lower_bound=2)

SOURCE = 'prior knowledge of GPT-2 small, not verified'
EXPECTED = [
    Expected('logit difference IO - S (nats)', 'about 3.6', SOURCE, 'total'),
    Expected('depth (0 first layer, 1 last) of the head that adds most', 'late, about .8 to .9: name movers', SOURCE,
             'depth/heads'),
    Expected('what that head adds (nats), on sentences it was not chosen on', 'above 1', SOURCE, 'best/heads'),
]


def measure(model, seed: int, folder) -> dict:
    asked = circuits.cases(model, count=COUNT.value, seed=seed)
    found = circuits.attribution(model.params, asked, cfg=model.config)
    return circuits.series(found | circuits.best_heads({'heads': found['heads']}))


if __name__ == '__main__':
    cli.language_model(measure, figures.attribution, expected=EXPECTED)
