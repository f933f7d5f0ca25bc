"""Figures: numbers in, matplotlib Figure out. No model, no files.

TRAINING names, for each task, the figure that a finished run ends with: (metrics of the run, config) -> Figure.
"""

from lingrok.figures import modular, recall, text
from lingrok.figures import style as style

TRAINING = {'modular': modular.training, 'recall': recall.training, 'text': text.training}
