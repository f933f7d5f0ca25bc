"""Measurements: pure functions of (params, config, tokens), to be vmapped over replicas and saved steps.

EVALUATION names what an evaluation measures beyond the metrics of the task: edited variants of the model, for every
task, and the probes of each task (see `train.evaluate`).
"""

from lingrok.analysis import associations, lowrank, memory

PROBES = {'recall': (memory.recall_probe, associations.association_probe)}


def evaluation(task_name: str) -> dict:
    """Arguments of `train.evaluate` for a task."""
    return {'variants': lowrank.truncations, 'probes': PROBES.get(task_name, ())}
