"""What a model of the modular task can do, from the outside: accuracy by shot, by query, under label noise.

Source: arXiv 2406.02550. Every function measures one replica, (params, task_state, key, cfg) -> {quantity: array}; see
`Run.measure`. Rows are drawn afresh, from the pools of the run.
"""


from lingrok import model
from lingrok.config import Config

BY_SHOT = ('accuracy_by_shot', 'loss_by_shot')


def by_shot(params, task_state, key, cfg: Config, *, splits: tuple[str, ...], num_rows: int = 512) -> dict:
    """Accuracy and loss of every shot on rows of each split, and exact baselines on the same rows (Fig 1c, 3c)."""
    found = {}
    for split in splits:
        batch = cfg.task.sample(task_state, key, split=split, batch_size=num_rows)
        logits_BLV, _ = model.apply(params, batch.tokens_BL, cfg=cfg.model)
        values = cfg.task.metrics(logits_BLV, batch)
        found |= {f'{split}/{name}': values[name] for name in BY_SHOT}
        baselines = cfg.task.baselines(task_state, batch)
        found |= {f'{split}/{name}': value for name, value in baselines.items() if name.startswith(BY_SHOT)}
    return found
