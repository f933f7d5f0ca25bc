"""The generic word taken out of one feed-forward by a rank-one edit, beside truncation at equal cost on a text.

The open question of arXiv 2406.03068 on pretrained models: truncation removes everything that shares a direction, an
edit one association. What `analysis.editing` does to the noise token of a model trained here, this does to the generic
word (" the" behind " in"). The last matrix of a feed-forward is edited: what its input on the prompts writes towards
the generic word goes, and the input is read in the direction that changes the text least.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from lingrok.analysis import editing
from lingrok.config import require
from lingrok.lm import forward
from lingrok.lm.prompts import Question
from lingrok.lm.truncation import Study

STRENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0)  # 1: the association is gone, 2: reversed
BUDGETS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # nats a token


def without_generic(study: Study, layer: int, rows: np.ndarray, strength: float) -> dict:
    """Params whose feed-forward of a layer says `strength` less of the generic word behind the prompts `rows` (B,)."""
    cfg, params = study.pretrained.config, study.pretrained.params
    require(bool(study.text_streams), 'the edit is to spare a text, and the study has none; give study its windows')
    require(0 <= layer < cfg.num_layers, f'layer {layer}; allowed: 0 to {cfg.num_layers - 1}')
    require(cfg.mlp_kind[layer] in ('mlp', 'gated'), f'layer {layer} has the feed-forward {cfg.mlp_kind[layer]!r}; '
            'allowed: mlp, gated')
    x_BI, text_TI = (_inputs(study, layer, streams) for streams in (study.prompt_streams, study.text_streams))
    key_1I = jnp.mean(x_BI[rows], 0, keepdims=True)
    moments_II = text_TI.T @ text_TI / len(text_TI)
    size = len(moments_II)
    moments_II = moments_II + editing.RIDGE * jnp.trace(moments_II) / size * jnp.eye(size)
    read_1I = jnp.linalg.solve(moments_II, key_1I.T).T
    edited = editing.erase(params[f'blocks_{layer}']['mlp_out'], key_1I, _direction(study), reads_KI=read_1I,
                           strength=strength)
    return {**params, f'blocks_{layer}': {**params[f'blocks_{layer}'], 'mlp_out': edited}}


def _inputs(study: Study, layer: int, streams) -> jnp.ndarray:
    """What arrives at the last matrix: at the last token of every prompt (B, I), or at all positions of the text."""
    cfg, params = study.pretrained.config, study.pretrained.params
    _, acts = forward.block(params, streams[layer], cfg=cfg, layer=layer, capture=('mlp.post',))
    x = acts['mlp.post'].astype(jnp.float32)
    return forward.at(x, study.prompts.last_B) if streams is study.prompt_streams else x.reshape(-1, x.shape[-1])


def _direction(study: Study) -> jnp.ndarray:
    """The direction (D,) of the residual stream that the final norm and the unembedding read as the generic word.

    Against the mean of all words: what all logits share says nothing.
    """
    cfg, params = study.pretrained.config, study.pretrained.params
    word = np.bincount(np.ravel(study.question.words[study.question.generic])).argmax()
    unembed_DV = params['embed'].T if cfg.tied else params['unembed']
    write_D = params.get('norm_scale', 1.0) * (unembed_DV[:, word] - jnp.mean(unembed_DV, 1)).astype(jnp.float32)
    return write_D - jnp.mean(write_D) if cfg.norm == 'layernorm' else write_D  # which takes out the mean itself


def equal_cost(families: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]], whole: Mapping[str, np.ndarray],
               question: Question, choosing: np.ndarray, reporting: np.ndarray) -> dict[str, np.ndarray]:
    """Of each family the model with the least P(generic) within a budget of KL; chosen on `choosing` prompts.

    families: name -> models -> what `truncation.measure` found. 'budget/nats' (1, C);
    'budget/<family>/p/<word>' (B', C) for the B' prompts of `reporting`: the whole model where none is cheap enough.
    """
    found = {'budget/nats': np.array([BUDGETS])}
    for family, models in families.items():
        best = []
        for budget in BUDGETS:
            cheap = {name: x for name, x in models.items() if np.mean(x['kl']) <= budget} | {'whole': whole}
            best.append(min(cheap.values(), key=lambda x: np.mean(x[f'p/{question.generic}'][choosing])))
        for word in question.words:
            found[f'budget/{family}/p/{word}'] = np.stack([x[f'p/{word}'][reporting] for x in best], -1)
    return found | {f'whole/p/{word}': whole[f'p/{word}'][reporting] for word in question.words}
