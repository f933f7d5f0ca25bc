"""Where the heads of a language model look: at the names of a sentence, and back in repeated random tokens.

    python experiments/lm/heads.py --model=smollm2              30 s on two cores
"""

import numpy as np
from absl import flags

from lingrok import cli
from lingrok.cli import Expected
from lingrok.figures import circuits as figures
from lingrok.lm import circuits

COUNT = flags.DEFINE_integer('count', 32, 'sentences with an indirect object', lower_bound=2)
ROWS = flags.DEFINE_integer('rows', 8, 'random sequences, 32 tokens and the same again', lower_bound=2)

SOURCE = 'prior knowledge of GPT-2 small, not verified'
EXPECTED = [
    Expected('depth (0 first layer, 1 last) of the head that looks most from the last position at IO',
             'late, about .8 to .9: name movers', SOURCE, 'depth/IO'),
    Expected('depth of the head that looks most from the last position at S2', 'in the middle, about .6 to .8: '
             'S-inhibition heads', SOURCE, 'depth/S2'),
    Expected('depth of the strongest induction head', 'about .5', SOURCE, 'depth/induction'),
    Expected('depth of the strongest duplicate-token head', 'early, about .0 to .3', SOURCE, 'depth/duplicate'),
    Expected('depth of the strongest previous-token head', 'early, about .2 to .4', SOURCE, 'depth/previous'),
    *(Expected(f'{name} score of the strongest head, on sequences it was not chosen on', 'near 1', SOURCE,
               f'best/{name}') for name in ('induction', 'previous')),
]


def measure(model, seed: int, folder) -> dict:
    cfg, params = model.config, model.params
    asked = circuits.cases(model, count=COUNT.value, seed=seed)
    tokens_BL = circuits.repeated_tokens(cfg, rows=ROWS.value, seed=seed)
    scores = circuits.attention_from_last(circuits.attention(params, asked.tokens_BL, cfg=cfg), asked)
    scores |= circuits.induction(params, tokens_BL, cfg=cfg)
    uniform = {'uniform/sentence': 1 / (np.asarray(asked.last_B) + 1),
               'uniform/repeated': [circuits.uniform_score(tokens_BL.shape[1])]}
    return circuits.series(scores | circuits.best_heads(scores) | uniform)


if __name__ == '__main__':
    cli.language_model(measure, figures.heads, expected=EXPECTED)
