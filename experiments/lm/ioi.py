"""Who gets the thing? The indirect object against generic words, whole and truncated (E1, E12).

    python experiments/lm/ioi.py --truncate=blocks.28.mlp_in@0.01       a minute on two cores, SmolLM2
    python experiments/lm/ioi.py --model=openai-community/gpt2 --truncate=blocks.10.mlp_in@0.01
    python experiments/lm/ioi.py --start='<|endoftext|>'                with a start token before each sentence

Own sentences (lingrok/lm/ioi.py). Without --truncate, the truncation that `laser.py` has chosen for this model.
"""

import numpy as np
from absl import flags

from lingrok import cli
from lingrok.cli import Expected
from lingrok.figures import language
from lingrok.lm import ioi
from lingrok.log import Series

COUNT = flags.DEFINE_integer('count', 100, 'sentences', lower_bound=1)
TRUNCATE = flags.DEFINE_list('truncate', [], 'edited models, such as blocks.28.mlp_in@0.01, several truncations of one '
                             'model joined by +')
START = flags.DEFINE_string('start', '', 'text before every sentence, such as a start token')

EXPECTED = [
    Expected('P(IO), GPT-2 small', 'about .5', 'prior knowledge of the IOI literature, other sentences',
             'whole/p/io'),
    Expected('rank of "the", mean', 'low: generic words stand beside IO', 'the reviews of arXiv 2406.03068',
             'whole/rank/the'),
    Expected('log P(IO) - log P(S), GPT-2 small', 'about 3.6', 'prior knowledge of the IOI literature',
             'whole/lead_over_subject'),
]


def measure(model, seed, folder):
    question = ioi.question(model.tokenizer, count=COUNT.value, seed=seed, start=START.value)
    series = cli.compare_models(model, question, cli.asked_truncations(TRUNCATE.value, folder, 'ioi'), seed)
    lead = series['whole/log_p/io'].values - series['whole/log_p/subject'].values
    return series | {'whole/lead_over_subject': Series(np.zeros(1, int), lead)}


if __name__ == '__main__':
    cli.language_model(measure, language.comparison, expected=EXPECTED)
