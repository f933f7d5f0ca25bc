"""Word problems by chain of thought after n examples, the whole model against truncated ones (E14, table 2).

    python experiments/lm/gsm8k.py --truncate=blocks.28.mlp_in@0.01 --shots=1,2,4,8       SmolLM2, the ten own problems
    python experiments/lm/gsm8k.py --model=microsoft/Phi-3-mini-4k-instruct --problems=test.jsonl --subsets=3 \
        --max_new_tokens=512 --batch=32                                                  what the paper did; needs a GPU

Every answer is kept in gsm8k_answers.jsonl beside the figure as soon as its batch is written: the same command goes on
there after a kill, and further shots, models or problems cost only what is new. The paper found that truncation helps
with few examples and hurts with eight; its accuracies, layers and fractions are not known.
"""

import functools
import re
import sys
from pathlib import Path

import jax
import numpy as np
from absl import flags
from tqdm.auto import tqdm

from lingrok import cli
from lingrok.config import ConfigError, require
from lingrok.figures import language
from lingrok.lm import chains, gsm8k, truncation
from lingrok.log import Series

PROBLEMS = flags.DEFINE_string('problems', str(gsm8k.PROBLEMS), 'a JSONL file with the fields question and answer, or '
                               'a data set of the hub, owner/name; by default ten problems of the project')
COUNT = flags.DEFINE_integer('count', 0, 'the first so many problems; 0: all', lower_bound=0)
SHOTS = flags.DEFINE_list('shots', ['1', '2', '4', '8'], 'numbers of worked examples before the question')
SUBSETS = flags.DEFINE_integer('subsets', 0, 'random choices of examples beside the first ones', lower_bound=0)
TRUNCATE = flags.DEFINE_list('truncate', [], 'edited models, such as blocks.28.mlp_in@0.01, several truncations of one '
                             'model joined by +')
BATCH = flags.DEFINE_integer('batch', 8, 'problems at once', lower_bound=1)
MAX_NEW_TOKENS = flags.DEFINE_integer('max_new_tokens', 256, 'length of an answer, at most', lower_bound=1)


def measure(model, seed, folder):
    problems = load(PROBLEMS.value, folder)[: COUNT.value or None]
    shots, models = shot_counts(), dict.fromkeys(('', *TRUNCATE.value))
    subsets = [None, *range(seed, seed + SUBSETS.value)]
    for entry in models:  # every mistake shows before anything is computed
        jax.eval_shape(lambda params, entry=entry: truncation.edited(model._replace(params=params), entry),
                       model.params)
    for subset in subsets:
        chains.require_context(model, problems, shots[-1], MAX_NEW_TOKENS.value, subset_seed=subset)
    gold = np.array([gsm8k.gold(problem.answer) for problem in problems])
    kept, series = chains.Kept(folder / 'gsm8k_answers.jsonl'), {}
    with tqdm(total=len(models) * len(shots) * len(subsets) * len(problems), disable=None, unit='problem') as bar:
        for entry in models:
            params = functools.cache(lambda entry=entry: truncation.edited(model, entry))
            for number, subset in ((number, subset) for number in shots for subset in subsets):
                name = f'{entry or "whole"}, {number} shots' + ('' if subset is None else f', subset {subset}')
                bar.set_description(name)
                rows = []
                for row in chains.solve(model, problems, kept, entry=entry, params=params, shots=number,
                                        subset_seed=subset, batch=BATCH.value, max_new_tokens=MAX_NEW_TOKENS.value):
                    rows.append(row)
                    bar.update()
                found = {'strict': [gsm8k.strict(row['text']) for row in rows] == gold,
                         'flexible': [gsm8k.flexible(row['text']) for row in rows] == gold,
                         **{kind: [row[kind] for row in rows] for kind in chains.KINDS}}
                place = f'{number}' if subset is None else f'{number}/subset {subset}'
                series |= {f'{entry or "whole"}/{kind}/{place}': Series(np.zeros(1, int), np.array([values], float))
                           for kind, values in found.items()}
                tqdm.write(f'{name}: {sum(found["strict"])} of {len(problems)} solved', file=sys.stderr)
    compare(series)
    return series


def load(name: str, folder: Path) -> tuple[gsm8k.Problem, ...]:
    """The problems of a file, or of the test split of a data set of the hub, which then is a file in the folder."""
    if Path(name).exists() or not re.fullmatch(r'[\w-][\w.-]*/[\w-]+', name):
        return gsm8k.load(name)
    try:
        import datasets

        datasets.load_dataset(name, 'main', split='test').to_json(folder / 'problems.jsonl')
    except Exception as error:  # many kinds: no package, no network, no such name
        reason = (str(error).splitlines() or [''])[0][:200] or type(error).__name__
        raise ConfigError(f'--problems={name} is no file, and the hub did not give it ({reason}); try pip install '
                          'datasets, or the file test.jsonl of github.com/openai/grade-school-math') from error
    return gsm8k.load(folder / 'problems.jsonl')


def shot_counts() -> list[int]:
    allowed = [str(n) for n in range(len(gsm8k.EXAMPLES) + 1)]
    require(bool(SHOTS.value) and {*SHOTS.value} <= {*allowed}, f'--shots={",".join(SHOTS.value)}; allowed: a list of '
            f'numbers from 0 to {allowed[-1]}, the number of examples')
    return sorted({int(text) for text in SHOTS.value})


def compare(series) -> None:
    """Prints accuracies with Wilson intervals, and the exact test of every truncated model against the whole one."""
    table = {}
    for name in series:
        model, kind, place = name.split('/', 2)
        if kind != 'strict':
            continue
        cells = {}
        for kind in ('strict', 'flexible'):
            solved = series[f'{model}/{kind}/{place}'].values[-1]
            low, high = gsm8k.wilson(int(solved.sum()), len(solved))
            cells[kind] = f'{solved.mean():.0%} ({low:.0%} to {high:.0%})'
        for kind in ('strict', 'flexible'):
            test = gsm8k.mcnemar(*(series[f'{x}/{kind}/{place}'].values[-1] == 1 for x in ('whole', model)))
            cells[f'only whole / only this, p ({kind})'] = ('' if model == 'whole' else
                                                            f'{test.only_first} / {test.only_second}, {test.p:.2g}')
        for kind in chains.KINDS:
            cells[f'log P a token, {kind}'] = f'{np.nanmean(series[f"{model}/{kind}/{place}"].values[-1]):.3f}'
        table[f'{place.replace("/", ", ")}, {model}'] = cells
    cli.print_table('shots, model', dict(sorted(table.items(), key=lambda row: int(re.match(r'\d+', row[0])[0]))))


if __name__ == '__main__':
    cli.language_model(measure, language.shots)
