"""Attention maps: every head of a language model on one sentence with an indirect object.

    python experiments/lm/attention.py --model=smollm2          20 s on two cores

The four heads shown large are chosen on --count other sentences, and on repeated random tokens.
"""

import numpy as np
from absl import flags

from lingrok import cli
from lingrok.figures import circuits as figures
from lingrok.lm import circuits

COUNT = flags.DEFINE_integer('count', 16, 'sentences that choose the heads shown large', lower_bound=2)


def measure(model, seed: int, folder) -> dict:
    cfg, params = model.config, model.params
    asked = circuits.cases(model, count=COUNT.value + 1, seed=seed)
    pattern_NBHLM = circuits.attention(params, asked.tokens_BL, cfg=cfg)
    repeated = circuits.induction(params, circuits.repeated_tokens(cfg, seed=seed), cfg=cfg)
    # The first sentence is the one that is drawn.
    scores = {name: x[1:] for name, x in circuits.attention_from_last(pattern_NBHLM, asked).items()} | repeated
    means = [np.mean(scores[name], 0) for name in figures.SHOWN]
    shown = [np.unravel_index(np.argmax(mean_NH), mean_NH.shape) for mean_NH in means]
    length = int(asked.last_B[0]) + 1
    places = [circuits.places(asked)[name][0] for name in ('IO', 'S1', 'S2', 'last')]
    return circuits.series({'map/pattern': pattern_NBHLM[:, 0, :, :length, :length][None],
                            'map/tokens': asked.tokens_BL[:1, :length], 'map/places': [places], 'map/heads': [shown]})


if __name__ == '__main__':
    cli.language_model(measure, figures.attention)
