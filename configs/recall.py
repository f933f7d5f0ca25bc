"""Noisy in-context recall with a two-layer Transformer (arXiv 2406.03068, section 3).

Claim: the second feed-forward stores the noise token within tens of steps, attention learns to recall the target
later, and removing that feed-forward removes the noise.

    python experiments/train.py --config=configs/recall.py:demo     4 seeds, about two minutes on two cores
    python experiments/train.py --config=configs/recall.py          the size of the official script; for a GPU
    python experiments/train.py --config=configs/recall.py:smoke    seconds; tests use it
    python experiments/sweep.py --config=configs/recall.py:demo     noise probabilities x learning rates x the seeds

`:official` is the paper-scale run with the quirks of the official generator: targets may be the trigger or the noise
token. Expected in the demo: the loss falls to the distribution-only plateau within 100 steps, when the noise margin of
feed-forward 1 is already positive; attention finds the targets between steps 200 and 400; at the end P(noise) on clean
data is about the noise probability with the feed-forward, and far below it without.
"""

from lingrok import config as lingrok_config
from lingrok.sweep import grid

VARIANTS = ('', 'demo', 'smoke', 'official')


def get_sweep(variant: str = ''):
    """Points of experiments/sweep.py, each with the seeds of the config."""
    if variant == 'smoke':
        return grid({'task.noise_prob': (0.3, 0.7)})
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
    config.optim.frozen = ('embed', 'pos', 'unembed')

    config.train.num_steps = 5000
    config.train.batch_size = 512
    config.train.log_every = 10
    config.train.eval_every = 50
    config.train.save_count = 20
    config.eval.batch_size = 512
    config.eval.truncations = tuple(f'blocks.1.mlp_in@{fraction}' for fraction in (0.0, 0.1))
    config.vary.seed.all = (0, 1, 2, 3, 4)

    if variant == 'official':
        config.task.targets_exclude = ()
    if variant in ('demo', 'smoke'):
        config.task.length = 64
        config.model.d_model = 64
        config.model.d_mlp = 256
        config.train.num_steps = 600
        config.train.batch_size = 64
        config.train.eval_every = 25
        config.train.save_count = 10
        config.eval.batch_size = 128
        config.vary.seed.all = (0, 1, 2, 3)
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
