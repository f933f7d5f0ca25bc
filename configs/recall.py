"""Noisy in-context recall with a two-layer Transformer (arXiv 2406.03068, section 3).

Claim: the second feed-forward stores the noise token within tens of steps, attention learns to recall the target
later, and removing that feed-forward removes the noise.

    python experiments/train.py --config=configs/recall.py:demo          4 seeds, about a minute on two cores
    python experiments/train.py --config=configs/recall.py:all           trained on all tokens, 5 seeds, three minutes
    python experiments/train.py --config=configs/recall.py               the size of the official script; for a GPU
    python experiments/train.py --config=configs/recall.py:smoke         seconds; tests use it
    python experiments/sweep.py --config=configs/recall.py:components    one of the sweeps below, 5 seeds a setting

`:official` is the paper-scale run with the quirks of the official generator: targets may be the trigger or the noise
token. Sweeps, each of the demo's size, and with `_paper` behind the name of the official script's size:

    components   where the feed-forward sits and of which kind, with truncated attention as the control
    noise        the probability of noise
    triggers     how many, fixed or drawn for each sequence
    robustness   trained tables, positions, width, norms, a gated feed-forward
    freezing     parts frozen throughout, or for the first steps
    budget       parameters shifted between feed-forward and attention at a fixed total, with and without a fixed width
    optimizers   SGD, AdamW, sign descent, Muon
    depth        2, 3, 4 and 6 layers
    context      noise that depends on the token before the trigger

Expected in the demo: the loss falls to the distribution-only plateau within 100 steps, when the noise margin of
feed-forward 1 is already positive; attention finds the targets between steps 100 and 300; at the end P(noise) on clean
data is about the noise probability with the feed-forward, and far below it without.
"""

from lingrok import config as lingrok_config
from lingrok.sweep import chain, grid, product, zipped

SWEEPS = ('components', 'noise', 'triggers', 'robustness', 'freezing', 'budget', 'optimizers', 'depth', 'context')
VARIANTS = ('', 'demo', 'all', 'smoke', 'official', *SWEEPS, *(f'{name}_paper' for name in SWEEPS))
TABLES = ('embed', 'pos', 'unembed')
ATTENTION = ('blocks.*.k', 'blocks.*.v', 'blocks.*.o')


def cuts(*, mlp: tuple[str, ...] = ('mlp_in', 'mlp_in')) -> tuple[str, ...]:
    """Models evaluated beside the whole one: without each feed-forward, and with the attention of the last layer cut.

    mlp: the first matrix of the feed-forward of each layer, '' for none.
    """
    last = len(mlp) - 1
    without = tuple(f'blocks.{layer}.{role}@0.0' for layer, role in enumerate(mlp) if role)
    return (*without, *((f'blocks.{last}.{mlp[last]}@0.1',) if mlp[last] else ()), f'blocks.{last}.ov@0.1')


def point(**settings) -> list[dict]:
    """An axis of one point; 'model__d_model' stands for 'model.d_model'."""
    return zipped({name.replace('__', '.'): (value,) for name, value in settings.items()})


def get_sweep(variant: str = ''):
    """Points of experiments/sweep.py, each with the seeds of the config."""
    name, _, paper = variant.partition('_')
    width, steps = (256, 5000) if paper else (64, 400)
    if variant == 'smoke':
        return grid({'task.noise_prob': (0.3, 0.7)})
    if name == 'components':
        kinds = {('mlp', 'mlp'): ('mlp_in', 'mlp_in'), ('none', 'mlp'): ('', 'mlp_in'), ('mlp', 'none'): ('mlp_in', ''),
                 ('none', 'none'): ('', ''), ('linear', 'linear'): ('mlp_linear', 'mlp_linear'),
                 ('linear_act', 'linear_act'): ('mlp_linear', 'mlp_linear')}
        return chain(
            zipped({'model.mlp_kind': tuple(kinds), 'eval.truncations': [cuts(mlp=roles) for roles in kinds.values()]}),
            point(model__activation=('identity', 'identity')),
            point(model__parallel=(False, True)),
        )
    if name == 'noise':
        return grid({'task.noise_prob': (0.1, 0.3, 0.5, 0.7, 0.9)})
    if name == 'triggers':
        return grid({'task.trigger_mode': ('fixed', 'random'), 'task.num_triggers': (1, 3, 5)})
    if name == 'robustness':
        return chain(
            [{}],
            grid({'optim.frozen': (('pos', 'unembed'), ('embed', 'pos'), ('pos',))}),
            point(model__embed_std=width**-0.5, model__pos_std=width**-0.5),
            point(model__position='sinusoidal', optim__frozen=('embed', 'unembed')),
            point(model__position='rope', model__rope_layers=(0,), optim__frozen=('embed', 'unembed')),
            zipped({'model.d_model': (width // 2, 2 * width), 'model.d_mlp': (2 * width, 8 * width)}),
            point(model__scale_scores=False),
            point(model__norm='layernorm'),
            point(model__mlp_kind=('gated', 'gated'), model__activation=('silu', 'silu')),
        )
    if name == 'freezing':
        return chain(
            [{}],
            grid({'optim.frozen': tuple((*TABLES, *more) for more in (
                ('blocks.0.*',), ('blocks.0.*', 'blocks.1.v', 'blocks.1.o'), ('blocks.*.mlp_*',), ATTENTION))}),
            grid({'optim.freeze_schedule': tuple(tuple(f'{role}@0-{steps // 3}' for role in roles)
                                                 for roles in (('blocks.*.mlp_*',), ATTENTION))}),
        )
    if name == 'budget':
        # Trainable parameters of a layer: d^2 (3 + 2 mult), about 11 width^2 throughout; then 4 d d_head + 2 d d_mlp.
        mults = (0.5, 1, 2, 4, 8, 16)
        widths = [round((11 / (3 + 2 * mult)) ** 0.5 * width) for mult in mults]
        hidden = [round(mult * d) for mult, d in zip(mults, widths, strict=True)]
        shares = [width // k for k in (1, 2, 4, 8)]
        return chain(
            zipped({'model.d_model': widths, 'model.d_mlp': hidden}),
            product(point(model__query='full'),
                    zipped({'model.d_head': shares, 'model.d_mlp': [width // 4 + 2 * (width - k) for k in shares]})),
        )
    if name == 'optimizers':
        return chain(
            [{}],
            zipped({'optim.optimizer': ('adamw', 'adamw', 'muon'), 'optim.learning_rate': (0.003, 0.001, 0.01),
                    'optim.b1': (0.9, 0.0, 0.9), 'optim.b2': (0.98, 0.0, 0.98), 'optim.weight_decay': (0.0, 0.0, 0.0)}),
        )
    if name == 'depth':
        counts = (2, 3, 4, 6)
        return zipped({'model.num_layers': counts, 'eval.truncations': [cuts(mlp=('mlp_in',) * n) for n in counts]})
    if name == 'context':
        return grid({'task.noise_law': ('independent', 'previous')})
    return grid({'task.noise_prob': (0.1, 0.3, 0.5, 0.7), 'optim.learning_rate': (0.01, 0.03, 0.1)})


def get_config(variant: str = ''):
    lingrok_config.require(variant in VARIANTS, f'configs/recall.py has no variant {variant!r}; '
                           + lingrok_config.suggest(variant, [v for v in VARIANTS if v]))
    config = lingrok_config.defaults('recall')
    config.name = f'recall_{variant or "paper"}'

    config.task.table = 'shakespeare'
    config.task.length = 256
    config.task.noise_prob = 0.5
    config.task.noise_token = '!'

    config.model.num_layers = 2
    config.model.d_model = 256
    config.model.d_mlp = 1024
    config.model.num_heads = 1
    config.model.query = 'identity'
    config.model.position = 'learned'  # frozen below: random vectors
    config.model.init = 'torch'

    config.optim.optimizer = 'sgd'
    config.optim.learning_rate = 0.03
    config.optim.momentum = 0.9
    config.optim.weight_decay = 1e-4
    config.optim.frozen = TABLES

    config.train.num_steps = 5000
    config.train.batch_size = 512
    config.train.log_every = 10
    config.train.eval_every = 50
    config.train.save_count = 20
    config.eval.batch_size = 512
    config.eval.truncations = tuple(f'blocks.1.mlp_in@{fraction}' for fraction in (0.0, 0.1))
    config.vary.seed.all = (0, 1, 2, 3, 4)

    name, _, paper = variant.partition('_')
    if variant == 'official':
        config.task.targets_exclude = ()
    if name in ('demo', 'all', 'smoke', *SWEEPS) and not paper:
        config.task.length = 64
        config.model.d_model = 64
        config.model.d_mlp = 256
        config.optim.learning_rate = 0.06
        config.train.num_steps = 400
        config.train.batch_size = 64
        config.train.eval_every = 20
        config.train.save_count = 10
        config.eval.batch_size = 128
    if variant == 'demo':
        config.eval.batch_size = 64  # 21 evaluations of three models should not take a third of the time
        config.vary.seed.all = (0, 1, 2, 3)
    if name in ('all', 'budget') and not paper:
        config.train.num_steps = 600
    if name in ('all', 'budget'):
        config.task.loss_on = 'all'
        config.optim.learning_rate = 0.2 if paper else 0.3  # one position in seven is a trigger
    if name in SWEEPS:
        config.eval.truncations = cuts()
        config.train.eval_every = config.train.num_steps // 4
        config.train.save = 'final'
    if name == 'budget':
        config.eval.truncations = ()
    if variant == 'smoke':
        config.task.length = 16
        config.model.d_model = 16
        config.model.d_mlp = 32
        config.train.num_steps = 20
        config.train.batch_size = 8
        config.train.log_every = 1
        config.train.eval_every = 10
        config.train.save_count = 3
        config.eval.batch_size = 16
        config.vary.seed.all = (0, 1)
    return config
