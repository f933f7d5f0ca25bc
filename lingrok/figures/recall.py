"""Figures of the recall task. Numbers in, Figure out."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from lingrok.config import Config
from lingrok.figures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    band,
    finish,
    floor,
    new_figure,
    replicas_note,
    styled,
)


@styled
def training(series: Mapping, cfg: Config) -> Figure:
    """How noise and recall are learned, in four panels.

    FF: feed-forward. a: loss at the scored positions of noisy data, with the losses of two exact predictors. b: mean
    probability of the noise token and of the target at repeated triggers of clean data. c: noise logit minus the best
    other logit when a feed-forward sees the embedding of the trigger alone. d: attention of repeated triggers on what
    followed the same trigger earlier.

    series: the metrics of a run, name -> (steps (T,), values (T, S)). Lines are means over replicas, bands 95 %
    Student intervals of the mean. A curve that was not measured stays out.
    """
    layer = cfg.model.num_layers - 1
    figure, axes = new_figure(2, 2, height=4.8)
    (loss, clean), (margin, attention) = axes

    def draw(axis, name, color, label, linestyle='-'):
        if name in series:
            band(axis, *series[name], color=color, label=label, linestyle=linestyle)

    draw(loss, 'noisy/loss', BLUE, 'model')
    floor(loss, series['noisy/loss/bayes'].values[-1].mean(), 'Bayes', below=True)
    floor(loss, series['noisy/loss/distribution_only'].values[-1].mean(), 'distribution only')
    loss.set_ylabel('loss (nats)')
    loss.set_ylim(bottom=0)

    without = f'blocks.{layer}.mlp_in@0.0'
    draw(clean, 'clean/p_noise', RED, 'noise')
    draw(clean, 'clean/p_correct', GREEN, 'target')
    draw(clean, f'clean/p_noise/{without}', RED, f'noise, no FF {layer}', '--')
    draw(clean, f'clean/p_correct/{without}', GREEN, f'target, no FF {layer}', '--')
    clean.axhline(cfg.task.noise_prob, color=GREY, linewidth=0.9, linestyle=':', label='noise probability')
    clean.set_ylabel('probability on clean data')
    clean.set_ylim(0, 1)

    for number, color in zip(range(layer + 1), (ORANGE, PURPLE, BLUE, GREEN, RED, SKY), strict=False):
        draw(margin, f'noise_margin/blocks.{number}', color, f'FF {number}')
    margin.axhline(0, color='black', linewidth=0.5)
    margin.set_ylabel('noise margin (nats)')

    draw(attention, f'noisy/attention_target/blocks.{layer}', GREEN, 'on targets')
    draw(attention, f'noisy/attention_noise/blocks.{layer}', RED, 'on noise')
    draw(attention, f'noisy/attention_uniform/blocks.{layer}', GREY, 'on targets if uniform', ':')
    attention.set_ylabel(f'attention, layer {layer}')
    attention.set_ylim(0, 1)

    for axis in axes.flat:
        axis.set_xlim(0, cfg.train.num_steps)
    count = series['noisy/loss'].values.shape[1]
    finish(figure, axes, xlabel='step', note=f'{cfg.name}: {replicas_note(count)}')
    return figure
