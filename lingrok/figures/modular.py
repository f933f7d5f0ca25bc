"""Figures of the modular task. Numbers in, Figure out."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from lingrok.config import Config
from lingrok.figures.style import (
    COLORS,
    GREY,
    band,
    finish,
    floor,
    new_figure,
    replicas_note,
    styled,
)
from lingrok.metrics import interval

NAMES = {'id_train': 'training tasks', 'ood_train': 'unseen tasks', 'id_test': 'training tasks, unseen inputs',
         'ood_test': 'unseen tasks, unseen inputs'}


@styled
def training(series: Mapping, cfg: Config) -> Figure:
    """How well seen and unseen tasks are solved along training and along the row, one colour a setting.

    a: accuracy at the last shot on training tasks (dashed) and unseen tasks (solid). b: the same on queries forced out
    of every direction of the context, which need two examples to be combined. c: accuracy on unseen tasks by shot at
    the end. d: loss on training tasks and unseen tasks. Dotted: exact reference predictors on the same rows.
    """
    figure, axes = new_figure(2, 2, height=4.8)
    (accuracy, forced), (shots, loss) = axes
    ood = 'ood_test' if 'ood_test/accuracy_last' in series and cfg.task.alpha < 1 else 'ood_train'
    groups = cfg.groups()

    def draw(axis, name, replicas, color, label, linestyle='-'):
        if name in series:
            steps, values = series[name]
            band(axis, steps, values[:, replicas], color=color, label=label, linestyle=linestyle)

    for color, (setting, replicas) in zip(COLORS, groups.items(), strict=False):
        label = f'{setting}: ' if setting else ''
        draw(accuracy, f'{ood}/accuracy_last', replicas, color, f'{label}unseen')
        draw(accuracy, 'id_train/accuracy_last', replicas, color, f'{label}training', '--')
        draw(forced, 'ood_forced/accuracy_last_not_covered', replicas, color, f'{label}unseen')
        draw(forced, 'id_forced/accuracy_last_not_covered', replicas, color, f'{label}training', '--')
        draw(loss, f'{ood}/loss', replicas, color, f'{label}unseen')
        draw(loss, 'id_train/loss', replicas, color, f'{label}training', '--')
        by_shot = series[f'{ood}/accuracy_by_shot'].values[-1][replicas]
        mean, half = interval(by_shot, 0)
        shots.plot(np.arange(len(mean)), mean, color=color, label=setting or 'model')
        shots.fill_between(np.arange(len(mean)), mean - half, mean + half, color=color, alpha=0.22, linewidth=0)

    for name, label, below in (('ratio', 'ratio matching', False), ('copy', 'copy', False), ('chance', 'chance', True)):
        floor(accuracy, series[f'{ood}/accuracy_last/{name}'].values[-1].mean(), label, below=below)
    if 'ood_forced/accuracy_last_not_covered/kernel' in series:
        floor(forced, np.nanmean(series['ood_forced/accuracy_last_not_covered/kernel'].values[-1]), 'kernel trick')
    for name, label, linestyle in (('ratio', 'ratio matching', ':'), ('bayes_uniform', 'Bayes, all tasks', '--')):
        curve = np.nanmean(series[f'{ood}/accuracy_by_shot/{name}'].values[-1], 0)
        shots.plot(np.arange(len(curve)), curve, color=GREY, linewidth=0.9, linestyle=linestyle, label=label)
    floor(loss, np.log(cfg.task.p), 'guess')

    for axis, label in ((accuracy, 'accuracy, last shot'), (forced, 'accuracy, forced queries'),
                        (shots, 'accuracy on unseen tasks')):
        axis.set_ylabel(label)
        axis.set_ylim(0, 1.02)
    loss.set_ylabel('loss (nats)')
    loss.set_ylim(bottom=0)
    for axis in (accuracy, forced, loss):
        axis.set_xlim(0, cfg.train.num_steps)
    finish(figure, axes, xlabel='step', note=f'{cfg.name}: {replicas_note(min(map(len, groups.values())))}')
    shots.set_xlabel('shots')
    return figure


@styled
def shots(series: Mapping, cfg: Config) -> Figure:
    """Accuracy and loss against the number of examples before the query, on seen and unseen tasks.


    One colour a setting. Dotted and dashed in grey: ratio matching and the Bayes predictor that holds all tasks for
    equally likely, on the same rows. What lies above ratio matching combines examples.
    """
    splits = [split for split in NAMES if f'{split}/accuracy_by_shot' in series]
    figure, axes = new_figure(2, len(splits), height=4.2)
    for split, (accuracy, loss) in zip(splits, axes.T, strict=True):
        for color, (setting, replicas) in zip(COLORS, cfg.groups().items(), strict=False):
            for axis, quantity in ((accuracy, 'accuracy'), (loss, 'loss')):
                values_SK = series[f'{split}/{quantity}_by_shot'].values[-1][replicas]
                band(axis, np.arange(values_SK.shape[1]), values_SK.T, color=color, label=setting or 'model')
        for name, label, linestyle in (('ratio', 'ratio matching', ':'), ('bayes_uniform', 'Bayes, all tasks', '--')):
            curve = np.nanmean(series[f'{split}/accuracy_by_shot/{name}'].values[-1], 0)
            accuracy.plot(np.arange(len(curve)), curve, color=GREY, linewidth=0.9, linestyle=linestyle, label=label)
        floor(loss, np.log(cfg.task.p), 'guess')
        accuracy.set_ylim(0, 1.02)
        accuracy.set_title(NAMES[split], pad=26)
    axes[0, 0].set_ylabel('accuracy')
    axes[1, 0].set_ylabel('loss (nats)')
    finish(figure, axes, xlabel='shots', note=f'{cfg.name}: {replicas_note(min(map(len, cfg.groups().values())))}')
    return figure
