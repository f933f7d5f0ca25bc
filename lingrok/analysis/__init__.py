"""Measurements: pure functions of (params, config, tokens), to be vmapped over replicas and saved steps.

PROBES names, for each task, what an evaluation measures beyond the metrics of the task itself.
"""

from lingrok.analysis import lowrank, memory

PROBES = {'recall': (lowrank.truncation_probe, memory.recall_probe)}
