"""Figures of the recall task. Numbers in, Figure out."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from lingrok.config import Config
from lingrok.figures.style import BLUE, GREEN, ORANGE, PURPLE, RED, band, floor, new_figure


def training(series: Mapping, cfg: Config) -> Figure:
    """How noise and recall are learned: loss with its floors, predictions on clean data, noise margin, attention.

    series: the metrics of a run, name -> (steps (T,), values (T, S)). Lines are means over replicas, bands 95 %
    Student intervals of the mean. Panels whose quantities were not measured stay out.
    """
    num_layers = cfg.model.num_layers
    last = f'blocks.{num_layers - 1}'
    figure, axes = new_figure(2, 2, height=4.4)
    (loss, clean), (margin, attention) = axes
    replicas = series['noisy/loss'].values.shape[1]

    def draw(axis, name, color, label, linestyle='-'):
        if name in series:
            band(axis, *series[name], color=color, label=label, linestyle=linestyle)

    draw(loss, 'noisy/loss', BLUE, 'model')
    for name, label in (('bayes', 'Bayes'), ('distribution_only', 'distribution only')):
        floor(loss, series[f'noisy/loss/{name}'].values[-1].mean(), label)
    loss.set_ylabel('loss at repeated triggers (nats)')
    loss.set_ylim(bottom=0)

    without = f'{last}.mlp_in@0.0'
    draw(clean, 'clean/p_noise', RED, 'noise token, full model')
    draw(clean, f'clean/p_noise/{without}', RED, f'noise token, no feed-forward {num_layers - 1}', '--')
    draw(clean, 'clean/p_correct', GREEN, 'target, full model')
    draw(clean, f'clean/p_correct/{without}', GREEN, f'target, no feed-forward {num_layers - 1}', '--')
    floor(clean, cfg.task.noise_prob, 'noise probability in training')
    clean.set_ylabel('probability on clean data')
    clean.set_ylim(0, 1)

    for layer, color in zip(range(num_layers), (ORANGE, PURPLE, BLUE, GREEN, RED), strict=False):
        draw(margin, f'noise_margin/blocks.{layer}', color, f'feed-forward {layer}')
    margin.axhline(0, color='black', linewidth=0.5)
    margin.set_ylabel('noise logit − best other (nats)')

    draw(attention, f'noisy/attention_target/{last}', GREEN, 'on targets')
    draw(attention, f'noisy/attention_noise/{last}', RED, 'on noise')
    draw(attention, f'noisy/attention_uniform/{last}', GREEN, 'on targets, if uniform', ':')
    attention.set_ylabel(f'attention of triggers, layer {num_layers - 1}')
    attention.set_ylim(0, 1)

    for letter, axis in zip('abcd', axes.flat, strict=True):
        axis.set_title(letter, loc='left', fontweight='bold')
        axis.set_xlabel('step')
        axis.set_xlim(left=0)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    note = f'{replicas} seeds, 95 % intervals' if replicas > 1 else 'one seed, no error bars'
    figure.suptitle(f'{cfg.name}: {note}', fontsize=8)
    return figure
