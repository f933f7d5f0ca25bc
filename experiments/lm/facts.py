"""Spain, or "the"? Facts against the generic word that also continues the prompt, whole and truncated (E13).

    python experiments/lm/facts.py --truncate=blocks.28.mlp_in@0.01     half a minute on two cores, SmolLM2
    python experiments/lm/facts.py --facts=mine.csv                     columns: prompt, answer, perhaps generic

Without --truncate, the truncation that `laser.py --prompts=facts` has chosen for this model.
"""

from absl import flags

from lingrok import cli
from lingrok.cli import Expected
from lingrok.figures import language
from lingrok.lm import facts

FACTS = flags.DEFINE_string('facts', '', 'CSV of your own; by default the 40 facts of the project')
TRUNCATE = flags.DEFINE_list('truncate', [], 'edited models, such as blocks.28.mlp_in@0.01, several truncations of one '
                             'model joined by +')
START = flags.DEFINE_string('start', '', 'text before every prompt, such as a start token')

EXPECTED = [
    Expected('P(answer) of the whole model', 'below P(generic word): "the" before "Spain" (Pythia-1B, Madrid)',
             'arXiv 2406.03068, Fig 5; its layer and fraction are not known', 'whole/p/answer'),
    Expected('P(generic word) of the whole model', 'above P(answer)', 'the same', 'whole/p/generic'),
]


def measure(model, seed, folder):
    asked = facts.load(FACTS.value) if FACTS.value else facts.FACTS
    question = facts.question(model.tokenizer, asked, start=START.value)
    left_out = len(asked) - len(question.texts)
    if left_out:
        print(f'{left_out} of {len(asked)} facts are left out: their words are not one token each')
    return cli.compare_models(model, question, cli.asked_truncations(TRUNCATE.value, folder, 'facts'), seed)


if __name__ == '__main__':
    cli.language_model(measure, language.comparison, expected=EXPECTED)
