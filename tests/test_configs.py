import jax
import numpy as np
import pytest
from conftest import ROOT, get_config

import lingrok.tasks  # noqa: F401  registers the tasks
from lingrok import config, figures, model, optim, run, sweep


@pytest.mark.parametrize('name', [pytest.param(path.name, marks=() if path.stem == 'recall' else pytest.mark.slow)
                                  for path in sorted((ROOT / 'configs').glob('*.py'))])
def test_smoke_variant_trains_to_the_end(name, tmp_path):
    """Every config file: seconds, several replicas, sound numbers, the figure of its task."""
    cfg = config.from_config_dict(get_config(f'{name}:smoke'))
    done = run.execute(cfg, tmp_path)
    assert done.finished and done.steps[0] == 0 and done.steps[-1] == cfg.train.num_steps <= 50
    assert config.run_id(done.config) == config.run_id(cfg) and cfg.num_replicas >= 2 and done.nan_replicas() == []
    metrics = done.metrics()
    headline = {name: metrics[name].values for name in done.task.headline}
    assert all(values.shape[1] == cfg.num_replicas and np.isfinite(values).all() for values in headline.values())
    start, end = done.params(0, None), done.params(replica=None)
    moved = [(a != b).any() for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(end), strict=True)]
    assert any(moved) and all(np.isfinite(x).all() for x in jax.tree.leaves(end))
    assert done.task.headline[0] in done.summary()
    assert figures.TRAINING[done.task.NAME](metrics, cfg).axes


SWEPT = [('modular.py', variant) for variant in ('demo', 'phase', 'regression', 'ingredients', 'batches', 'mlp', 'd4',
                                                 'p37', 'random', 'd4_released')]
SWEPT += [('recall.py', variant) for variant in ('demo', *sweep.load_config_file(ROOT / 'configs' / 'recall.py').SWEEPS,
                                                 'components_paper', 'robustness_paper', 'budget_paper')]


@pytest.mark.parametrize('name, variant', SWEPT)
def test_every_point_of_a_sweep_can_train(name, variant):
    """Every program has tasks that fill its batches, and parameters for what its optimiser names."""
    file = sweep.load_config_file(ROOT / 'configs' / name)
    _, points, groups = sweep.resolve(file.get_config(variant).to_dict(), file.get_sweep(variant))
    assert sum(len(group.rows) for group in groups) == len(points)
    for group in groups:
        shapes = jax.eval_shape(lambda cfg=group.config: model.init(jax.random.key(0), cfg.model))
        optim.check_patterns(shapes, group.config.optim)
