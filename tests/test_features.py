"""Figures of features draw what the measurements return, whatever the model; numbers are random, shapes are theirs."""

import functools

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from test_characters import tiny

from lingrok.analysis import characters, neurons, pca, probes, similarity
from lingrok.figures import features
from lingrok.log import Series

CASES = {
    'characters': (characters.spectra, features.characters, features.characters_frame),
    'pca': (pca.scanned_components, features.pca, features.pca_frame),
    'pca of a sublayer': (functools.partial(pca.scanned_components, part='attn_out'), features.pca, features.pca_frame),
    'cosine': (similarity.similarities, features.cosine, features.cosine_frame),
    'neurons': (neurons.neuron_kinds, features.neurons, features.neurons_frame),
    'probes': (probes.probes, features.probes, features.probes_frame),
}


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('kinds', (('mlp', 'gated'), ('none', 'mlp')))
def test_figures(name, kinds):
    measure, draw, frame = CASES[name]
    cfg, params, state = tiny(mlp_kind=kinds)
    shapes = jax.eval_shape(functools.partial(measure, cfg=cfg), params, state, jax.random.key(0))
    rng = np.random.default_rng(0)
    values = {q: rng.random((1, cfg.num_replicas, *s.shape)) if s.dtype == np.float32 else np.full((1, 1), 2)
              for q, s in shapes.items()}
    figure = draw({q: Series(np.array([7]), v) for q, v in values.items()}, cfg)
    assert cfg.name in figure.get_suptitle() and draw.__doc__
    drawn = [axis for axis in figure.get_axes() if axis.has_data()]
    assert len(drawn) >= 3 and any(axis.get_xlabel() for axis in drawn) and any(axis.get_ylabel() for axis in drawn)
    small = Figure().subplots()
    frame(small, {q: v[0, 0] for q, v in values.items()}, cfg)
    assert small.has_data()
