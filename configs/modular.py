"""In-context modular arithmetic (arXiv 2406.02550): when does a model solve tasks it was never trained on?

    python experiments/train.py --config=configs/modular.py:demo          36 and 8 of 49 tasks, 3 seeds each
    python experiments/train.py --config=configs/modular.py:regression    queries that need two examples combined
    python experiments/train.py --config=configs/modular.py:smoke         seconds; tests use it
    python experiments/sweep.py --config=configs/modular.py:phase         a phase diagram on a CPU, 12 cells, 3 seeds
    python experiments/sweep.py --config=configs/modular.py:ingredients   which part of the CPU recipe matters
    python experiments/sweep.py --config=configs/modular.py:batches       batch construction x choice of tasks
    python experiments/sweep.py --config=configs/modular.py:mlp           with and without feed-forwards

Of the paper's size, for a GPU: `:d1`, `:d2`, `:d4`, `:d6` (blocks; as a sweep the phase diagram of 7 x 7 cells, 3 seeds
each), `:random` (the same for tasks without the rectangular rule), `:p37` and `:p47` (a larger modulus, number of tasks
swept), `:d2_released` and `:d4_released` (the runs whose checkpoints the authors have released).

Paper-scale settings are those of the official code: width 512, 4 heads, 32 examples, AdamW with lr 1.5e-4 and weight
decay 2.0, 200,000 steps of 1,024 rows. The CPU variants use p = 7 or 11, a type embedding by slot, a short convolution
and Muon, which bring the effect down to about a minute a replica.

Expected in the demo: with 36 tasks unseen-task accuracy rises to about .9 at the last shot, where ratio matching alone
gives .88 and chance .14; with 8 tasks it stays near chance while the training tasks are solved.
"""

from lingrok import config as lingrok_config
from lingrok.sweep import chain, grid, zipped

DEPTHS = {'d1': 1, 'd2': 2, 'd4': 4, 'd6': 6, 'd4_released': 4, 'random': 4, 'p37': 4, 'p47': 4}
LARGE = (*DEPTHS, 'd2_released')
SMALL = ('demo', 'phase', 'regression', 'ingredients', 'batches', 'mlp', 'smoke')
VARIANTS = (*SMALL, *LARGE)
DECAYED = ('embed', 'unembed', *(f'blocks.*.{role}' for role in ('q', 'k', 'v', 'o', 'mlp_in', 'mlp_out')))
ALPHAS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
SETS = ('id_train', 'id_test', 'ood_train', 'ood_test')


def get_sweep(variant: str = ''):
    """What a variant varies, each point with the seeds of its config."""
    adamw = {'optim.optimizer': ('adamw',), 'optim.learning_rate': (0.003,), 'optim.weight_decay': (0.3,)}
    sweeps = {
        'demo': lambda: grid({'task.alpha': (0.6, 1.0)}),  # and the number of tasks, by its vary
        'smoke': lambda: grid({'task.alpha': (0.6, 1.0)}),
        'phase': lambda: grid({'task.num_tasks': (8, 12, 24, 36), 'task.alpha': (0.4, 0.7, 0.85)}),
        'regression': lambda: [{}],
        'ingredients': lambda: chain(  # one thing less each time
            [{}], *(zipped(x) for x in ({'model.num_types': (0,)}, {'model.conv_width': (0,)}, adamw,
                                        {'optim.weight_decay': (0.0,), 'optim.adam_weight_decay': (0.0,)}))),
        'batches': lambda: grid({'task.batching': ('shared', 'balanced', 'iid'),
                                 'task.geometry': ('rectangular', 'random')}),
        'mlp': lambda: grid({'model.mlp_kind': (('mlp', 'mlp'), ('none', 'mlp'), ('mlp', 'none'), ('none', 'none'))}),
        'p37': lambda: grid({'task.num_tasks': (64, 128, 256, 512, 1024)}),
        'p47': lambda: grid({'task.num_tasks': (64, 128, 256, 512, 1024)}),
        'd2_released': lambda: [{}],
        'd4_released': lambda: [{}],
    }
    phase_diagram = lambda: grid({'task.num_tasks': (8, 16, 32, 64, 128, 256, 512), 'task.alpha': ALPHAS})  # noqa: E731
    return sweeps.get(variant, phase_diagram)()


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
    config.task.splits = (*SETS, 'ood_forced', 'select_test')
    config.eval.batch_size = 1024
    config.vary.seed.all = (0, 1, 2)
    if variant in ('d2_released', 'd4_released'):
        config.task.geometry = 'rectangular_official'
        config.vary.seed.all = ()
        config.seed.init = config.seed.task = 2 if variant == 'd2_released' else 1
    if variant == 'd4_released':
        config.task.num_tasks = 384
        config.task.alpha = 0.8
        config.train.batch_size = 1536
        config.eval.batch_size = 1536
    if variant == 'random':
        config.task.geometry = 'random'
        config.optim.learning_rate = 1e-4
    if variant in ('p37', 'p47'):
        config.task.p = int(variant[1:])

    if variant in SMALL:
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
        config.train.eval_every = 100
        config.train.save_count = 10
        config.eval.batch_size = 360
        config.vary.seed.all = (0, 0, 1, 1, 2, 2)
        config.vary.task.num_tasks = (36, 8, 36, 8, 36, 8)
    if variant in ('ingredients', 'batches', 'mlp'):
        config.vary.seed.all = (0, 1, 2)
        config.vary.task.num_tasks = ()
    if variant == 'phase':
        config.task.alpha = 0.7
        config.task.splits = (*SETS, 'id_mixed', 'ood_mixed', 'ood_forced', 'select_test')
        config.train.eval_every = 150
        config.vary.seed.all = (0, 1, 2)
        config.vary.task.num_tasks = ()
    if variant == 'regression':
        config.task.p = 11
        config.task.num_examples = 24
        config.task.num_tasks = 108
        config.task.alpha = 0.7  # repeated inputs bring the first skill sooner, whatever the seed
        config.task.splits = ('id_train', 'ood_train', 'id_forced', 'ood_forced', 'ood_mixed')
        config.task.weight_unsolvable = 0.0
        config.task.weight_uncovered = 4.0
        config.task.weight_from = 1000
        config.optim.decay_share = 0.5
        config.train.num_steps = 3200
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
