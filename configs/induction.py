"""How an induction head is born, matrix by matrix (arXiv 2306.00802), in a model whose other matrices are frozen.

    python experiments/train.py --config=configs/induction.py:simplified   all three memories trained together
    python experiments/sweep.py --config=configs/induction.py:staged       one memory first, the others later
    python experiments/sweep.py --config=configs/induction.py:depth        one and two layers, feed-forwards, triggers
    python experiments/train.py --config=configs/induction.py:bigrams      loss on all tokens, a linear feed-forward
    python experiments/sweep.py --config=configs/induction.py:data         law of the targets, which triggers
    python experiments/sweep.py --config=configs/induction.py:width        memories interfere in few dimensions
    python experiments/train.py --config=configs/induction.py:smoke        seconds; tests use it

These are of CPU size; `:simplified_paper`, `:staged_paper` and so on have that of the official code, for a GPU, and
`configs/induction.py` alone is `:simplified_paper`. Sequences have no noise. In the simplified model embeddings and
positions are random and frozen, as are the value matrices and the output matrix of layer 0; the key matrices and the
output matrix of layer 1 are trained. `:depth` trains everything, with four heads, norms and AdamW.
"""

from lingrok import config as lingrok_config
from lingrok.sweep import chain, grid

SMALL = ('simplified', 'staged', 'depth', 'bigrams', 'data', 'width', 'smoke')
VARIANTS = (*SMALL, *(f'{name}_paper' for name in SMALL if name != 'smoke'))
KEYS, COPY = ('blocks.0.k', 'blocks.1.k'), 'blocks.1.o'


def get_sweep(variant: str = ''):
    """What a variant varies, each point with the seeds of its config."""
    until = get_config(variant).train.num_steps // 3
    first = {'copy': KEYS, 'previous': (KEYS[1], COPY)}
    schedules = tuple(tuple(f'{name}@0-{until}' for name in names) for names in ((), *first.values()))
    sweeps = {
        'simplified': lambda: grid({'optim.learning_rate': (0.03, 0.1, 0.2)}),
        'staged': lambda: grid({'optim.freeze_schedule': schedules}),
        'depth': lambda: grid({'model.num_layers': (1, 2), 'model.mlp_kind': (('mlp',), ('none',)),
                               'task.trigger_mode': ('fixed', 'random')}),
        'bigrams': lambda: grid({'model.mlp_kind': (('none', 'linear'), ('none', 'none'))}),
        'data': lambda: chain([{}], *(grid(axis) for axis in (
            {'task.target_law': ('bigram',)}, {'task.trigger_offset': (5, 15)}, {'task.trigger_mode': ('random',)}))),
        'width': lambda: grid({'model.d_model': (32, 64, 128, 256)}),
        'smoke': lambda: grid({'optim.freeze_schedule': schedules[:2]}),
    }
    return sweeps[(variant or 'simplified').removesuffix('_paper')]()


def get_config(variant: str = ''):
    variant = variant or 'simplified_paper'
    lingrok_config.require(variant in VARIANTS, f'configs/induction.py has no variant {variant!r}; '
                           + lingrok_config.suggest(variant, VARIANTS))
    config = lingrok_config.defaults('recall')
    config.name = f'induction_{variant}'
    kind = variant.removesuffix('_paper')

    config.task.table = 'shakespeare'
    config.task.length = 256
    config.task.num_triggers = 5
    config.task.noise_prob = 0.0
    config.task.targets_exclude = ('own_trigger',)  # every token is a target of some trigger

    config.model.num_layers = 2
    config.model.d_model = 256
    config.model.num_heads = 1
    config.model.query = 'identity'
    config.model.position = 'learned'  # frozen below: random vectors
    config.model.mlp_kind = ('none',)
    config.model.init = 'torch'

    config.optim.optimizer = 'sgd'
    config.optim.learning_rate = 0.03
    config.optim.momentum = 0.9
    config.optim.weight_decay = 1e-4
    config.optim.frozen = ('embed', 'pos', 'unembed', 'blocks.*.v', 'blocks.0.o')

    config.train.num_steps = 1000
    config.train.batch_size = 512
    config.train.log_every = 10
    config.train.eval_every = 10
    config.train.save_count = 20
    config.eval.batch_size = 512
    config.vary.seed.all = (0, 1, 2, 3, 4)

    if kind == 'bigrams':
        config.task.loss_on = 'all'
        config.model.mlp_kind = ('none', 'linear')
    if kind == 'depth':
        config.task.loss_on = 'all'
        config.model.d_model = 128
        config.model.d_mlp = 512
        config.model.num_heads = 4
        config.model.query = 'full'
        config.model.mlp_kind = ('mlp',)
        config.model.norm = 'layernorm'
        config.optim.frozen = ()
        config.optim.optimizer = 'adamw'
        config.optim.learning_rate = 0.01
        config.optim.weight_decay = 0.01
        config.optim.b2 = 0.99
        config.train.batch_size = 64

    if variant in SMALL:
        config.task.length = 64
        config.model.d_model = 64 if kind == 'depth' else 128
        config.model.d_mlp = 256
        config.optim.learning_rate = 0.01 if kind == 'depth' else 0.1
        config.train.num_steps = 500
        config.train.batch_size = 32
        config.train.eval_every = 20
        config.eval.batch_size = 128
    if variant == 'smoke':
        config.task.length = 16
        config.model.d_model = 16
        config.train.num_steps = 20
        config.train.batch_size = 8
        config.train.log_every = 1
        config.train.eval_every = 5
        config.train.save_count = 3
        config.eval.batch_size = 16
        config.vary.seed.all = (0, 1)
    return config
