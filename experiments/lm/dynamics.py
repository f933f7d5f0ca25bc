"""When in training is the generic word learned, when the answer? Checkpoints, whole and truncated (E12, E13).

    python experiments/lm/dynamics.py --model=EleutherAI/pythia-410m --revisions=step0,step512,step143000
    python experiments/lm/dynamics.py --models=a/step0,a/step512 --prompts=facts --truncate=blocks.20.mlp_in@0.01

One model is in memory at a time, and a killed script goes on with the next one. The truncation is held fixed along
training (the protocol: chosen by `laser.py` on the last checkpoint).
"""

from absl import flags

from lingrok import cli
from lingrok.cli import Expected
from lingrok.figures import language
from lingrok.lm import facts, ioi

PROMPTS = flags.DEFINE_string('prompts', 'ioi', 'ioi, facts, or a CSV with the columns prompt and answer')
COUNT = flags.DEFINE_integer('count', 100, 'IOI sentences', lower_bound=1)
TRUNCATE = flags.DEFINE_list('truncate', [], 'edited models, such as blocks.28.mlp_in@0.01')

EXPECTED = [
    Expected('which is learned first', '"the", within hundreds of steps; IO later', 'arXiv 2406.03068, Fig 5',
             'whole/p/the'),
    Expected('truncated', 'P("the") lower, P(IO) higher', 'arXiv 2406.03068, Fig 5', 'whole/p/io'),
]


def measure(model, seed, folder):
    if PROMPTS.value == 'ioi':
        question = ioi.question(model.tokenizer, count=COUNT.value, seed=seed)
    else:
        asked = facts.FACTS if PROMPTS.value == 'facts' else facts.load(PROMPTS.value)
        question = facts.question(model.tokenizer, asked)
    return cli.compare_models(model, question, TRUNCATE.value, seed)


if __name__ == '__main__':
    cli.language_model(measure, language.dynamics, expected=EXPECTED)
