"""Logit lens: from which block on a language model knows the indirect object, and from which one " the".

    python experiments/lm/lens.py --model=smollm2               15 s on two cores
"""

from absl import flags

from lingrok import cli
from lingrok.figures import circuits as figures
from lingrok.lm import circuits, forward

COUNT = flags.DEFINE_integer('count', 32, 'sentences with an indirect object', lower_bound=2)


def measure(model, seed: int, folder) -> dict:
    asked = circuits.cases(model, count=COUNT.value, seed=seed)
    stream = forward.residuals(model.params, asked.tokens_BL, cfg=model.config)
    return circuits.series(circuits.logit_lens(model.params, stream, asked, cfg=model.config))


if __name__ == '__main__':
    cli.language_model(measure, figures.lens)
