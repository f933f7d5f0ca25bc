"""In-context modular arithmetic (arXiv 2406.02550): when does a model solve tasks it was never trained on?

    python experiments/train.py --config=configs/modular.py:demo     36 and 8 of 49 tasks, 3 seeds each, side by side
    python experiments/train.py --config=configs/modular.py:d2       the paper's size (also :d4, :d6, :d1); for a GPU
    python experiments/train.py --config=configs/modular.py:smoke    seconds; tests use it
    python experiments/sweep.py --config=configs/modular.py:d6       the phase diagram: 7 x 7 cells, 3 seeds each
    python experiments/sweep.py --config=configs/modular.py:phase    a small one on a CPU: 4 x 3 cells, 3 seeds each

Paper-scale settings are those of the official code: width 512, 4 heads, 32 examples, AdamW with lr 1.5e-4 and weight
decay 2.0, 200,000 steps of 1,024 rows. The CPU variants use p = 7, a type embedding by slot and Muon, which bring the
effect down to about a minute a replica.

Expected in the demo: with 36 tasks unseen-task accuracy rises to about .9 at the last shot, where ratio matching alone
gives .88 and chance .14; with 8 tasks it stays near chance while the training tasks are solved.
"""

from lingrok import config as lingrok_config
from lingrok.sweep import grid

DEPTHS = {'d1': 1, 'd2': 2, 'd4': 4, 'd6': 6}
VARIANTS = ('demo', 'phase', 'regression', 'smoke', *DEPTHS)
DECAYED = ('embed', 'unembed', *(f'blocks.*.{role}' for role in ('q', 'k', 'v', 'o', 'mlp_in', 'mlp_out')))


def get_sweep(variant: str = ''):
    """Number of pre-training tasks x share of training inputs, each with the seeds of the config."""
    if variant in ('demo', 'smoke'):  # these vary the number of tasks themselves
        return grid({'task.alpha': (0.6, 1.0)})
    if variant == 'phase':
        return grid({'task.num_tasks': (8, 12, 24, 36), 'task.alpha': (0.4, 0.7, 0.85)})
    return grid({'task.num_tasks': (8, 16, 32, 64, 128, 256, 512), 'task.alpha': (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)})


def get_config(variant: str = ''):
    variant = variant or 'd2'
    lingrok_config.require(variant in VARIANTS, f'configs/modular.py has no variant {variant!r}; '
                           + lingrok_config.suggest(variant, VARIANTS))
    config = lingrok_config.defaults('modular')
    config.name = f'modular_{variant}'

    config.task.p = 29
    config.task.num_examples = 32
    config.task.num_tasks = 512
    config.task.alpha = 0.6
    config.task.geometry = 'rectangular'
    config.task.batching = 'shared'

    config.model.num_layers = DEPTHS.get(variant, 2)
    config.model.d_model = 512
    config.model.num_heads = 4
    config.model.d_mlp = 2048
    config.model.position = 'rope'
    config.model.rope_interleaved = True
    config.model.norm = 'layernorm'
    config.model.tied = True
    config.model.init = 'normal'
    config.model.init_std = 0.02
    config.model.embed_std = 0.02
    config.model.init_depth_scaled = ('mlp_out',)

    config.optim.optimizer = 'adamw'
    config.optim.learning_rate = 1.5e-4
    config.optim.weight_decay = 2.0
    config.optim.b1 = 0.9
    config.optim.b2 = 0.98
    config.optim.decay = tuple(role for role in DECAYED if role != 'unembed')
    config.optim.warmup_steps = 10_000
    config.optim.warmup_from = 0.01
    config.optim.schedule = 'cosine'
    config.optim.floor = 0.1

    config.train.num_steps = 200_000
    config.train.batch_size = 1024
    config.train.log_every = 100
    config.train.eval_every = 1000
    config.train.save_count = 30
    config.eval.batch_size = 1024
    config.vary.seed.all = (0, 1, 2)

    if variant in ('demo', 'phase', 'regression', 'smoke'):
        config.task.p = 7
        config.task.num_examples = 16
        config.task.num_tasks = 36
        config.task.alpha = 1.0
        config.task.batching = 'balanced'
        config.task.splits = ('id_train', 'ood_train', 'ood_forced')
        config.model.d_model = 64
        config.model.d_mlp = 256
        config.model.rope_interleaved = False
        config.model.norm = 'rmsnorm'
        config.model.num_types = 3
        config.model.conv_width = 3
        config.model.tied = False
        config.model.init = 'fan_in'
        config.model.embed_std = 1.0
        config.model.init_depth_scaled = ('o', 'mlp_out')
        config.optim.optimizer = 'muon'
        config.optim.learning_rate = 0.02
        config.optim.momentum = 0.95
        config.optim.weight_decay = 0.1
        config.optim.adam_learning_rate = 0.003
        config.optim.adam_weight_decay = 0.3
        config.optim.decay = DECAYED
        config.optim.warmup_steps = 50
        config.optim.warmup_from = 0.0
        config.optim.schedule = 'wsd'
        config.optim.floor = 0.02
        config.optim.decay_share = 0.3
        config.train.num_steps = 900
        config.train.batch_size = 72
        config.train.log_every = 10
        config.train.eval_every = 50
        config.train.save_count = 10
        config.eval.batch_size = 360
        config.vary.seed.all = (0, 0, 1, 1, 2, 2)
        config.vary.task.num_tasks = (36, 8, 36, 8, 36, 8)
    if variant == 'phase':
        config.task.alpha = 0.7
        config.task.splits = ('id_train', 'id_test', 'ood_train', 'ood_test', 'id_mixed', 'ood_mixed', 'ood_forced',
                              'select_test')
        config.train.eval_every = 150
        config.vary.seed.all = (0, 1, 2)
        config.vary.task.num_tasks = ()
    if variant == 'regression':
        config.task.p = 11
        config.task.num_examples = 24
        config.task.num_tasks = 108
        config.task.splits = ('id_train', 'ood_train', 'id_forced', 'ood_forced')
        config.task.weight_unsolvable = 0.0
        config.task.weight_uncovered = 4.0
        config.task.weight_from = 1400
        config.optim.decay_share = 0.45
        config.train.num_steps = 4000
        config.train.batch_size = 108
        config.train.eval_every = 200
        config.train.save_count = 12
        config.eval.batch_size = 1080
        config.vary.seed.all = (0, 1, 2, 3)
        config.vary.task.num_tasks = ()
    if variant == 'smoke':
        config.task.num_examples = 4
        config.model.d_model = 16
        config.model.d_mlp = 32
        config.train.num_steps = 20
        config.train.log_every = 1
        config.train.eval_every = 10
        config.train.save_count = 3
        config.eval.batch_size = 36
        config.vary.seed.all = (0, 0)
        config.vary.task.num_tasks = (36, 8)
    return config
