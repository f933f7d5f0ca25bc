"""Mean ablation of every head and every feed-forward of a language model: what the indirect object needs, what " the".

    python experiments/lm/ablation.py --model=smollm2           3 minutes on two cores
"""

from absl import flags

from lingrok import cli
from lingrok.figures import circuits as figures
from lingrok.lm import circuits

COUNT = flags.DEFINE_integer('count', 16, 'sentences with an indirect object', lower_bound=2)


def measure(model, seed: int, folder) -> dict:
    asked = circuits.cases(model, count=COUNT.value, seed=seed)
    found = circuits.ablation(model.params, asked, cfg=model.config)
    read = {'lead': lambda log: log[..., circuits.IO] - log[..., circuits.S],
            **{word: lambda log, w=w: log[..., w] for w, word in enumerate(circuits.WORDS)}}
    values = {f'intact/{name}': of(found['intact']) for name, of in read.items()}
    for part in ('heads', 'mlps'):
        for name, of in read.items():
            intact_B = values[f'intact/{name}']
            values[f'{part}/{name}'] = of(found[part]) - intact_B.reshape(-1, *[1] * (found[part].ndim - 2))
    # A head whose loss costs most is the one with the lowest change.
    return circuits.series(values | circuits.best_heads({f'loss/{name}': -values[f'heads/{name}']
                                                         for name in figures.ABLATED}))


if __name__ == '__main__':
    cli.language_model(measure, figures.ablation)
