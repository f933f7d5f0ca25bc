"""The vocabulary of lingrok: axes, activation names, parameter roles. Imports nothing.

Axes are single letters, carried as a suffix by every array that matters (`resid_BLD`, `pattern_BHLM`) and used in
lower case inside einsums. Activation names follow TransformerLens, so that a reader of the field knows them.
"""

AXES = {
    'S': 'replicas (seeds and settings)',
    'B': 'batch (sequences)',
    'L': 'position of the query',
    'M': 'position of the key',
    'D': 'residual width (d_model)',
    'H': 'heads',
    'G': 'key-value heads',
    'K': 'width of a head (d_head)',
    'F': 'hidden width of a feed-forward (d_mlp)',
    'V': 'vocabulary',
    'N': 'layers',
    'R': 'rank, or a list of rank fractions',
    'T': 'saved or logged steps',
}

# One block, in the order of computation. Shapes: q (B, L, H, K); k, v (B, M, G, K); scores, pattern (B, H, L, M);
# z (B, L, H, K) is what a head read, before the output matrix; mlp.pre, mlp.gate and mlp.post (B, L, F); the rest
# (B, L, D). `attn_out` and `mlp_out` are what a sublayer adds to the residual stream.
BLOCK_ACTIVATIONS = (
    'resid_pre', 'attn.q', 'attn.k', 'attn.v', 'attn.scores', 'attn.pattern', 'attn.z', 'attn_out', 'resid_mid',
    'mlp.gate', 'mlp.pre', 'mlp.post', 'mlp_out', 'resid_post',
)

# What each kind of feed-forward has: its parameters and the activations that exist inside it.
MLP_KINDS = {
    'mlp': (('mlp_in', 'mlp_out'), ('mlp.pre', 'mlp.post')),
    'gated': (('mlp_gate', 'mlp_in', 'mlp_out'), ('mlp.gate', 'mlp.pre', 'mlp.post')),
    'linear': (('mlp_linear',), ()),
    'linear_act': (('mlp_linear',), ('mlp.pre',)),
    'none': ((), ()),
}

# Parameter roles. A parameter is `role` outside the blocks and `blocks.N.role` inside; `x @ w` throughout, so a matrix
# is (in, out).
ROLES = {
    'embed': 'token embedding (V, D)',
    'pos': 'additive position table (max_len, D)',
    'type': 'type embedding by slot, position modulo its length (num_types, D)',
    'conv': 'taps of the short causal depthwise convolution on the embeddings (conv_width, D)',
    'unembed': 'unembedding (D, V); absent when tied to the embedding',
    'norm': 'final norm: norm_scale, norm_bias (D)',
    'q': 'query (D, H K); absent when the query is the identity',
    'k': 'key (D, G K); with an identity query this is the merged key-query matrix',
    'v': 'value (D, G K)',
    'o': 'attention output (H K, D)',
    'ov': 'merged value-output matrix, all heads side by side (D, H D); in place of v and o',
    'mlp_in': 'first matrix of a feed-forward (D, F)',
    'mlp_gate': 'gate of a gated feed-forward (D, F)',
    'mlp_out': 'second matrix of a feed-forward (F, D)',
    'mlp_linear': 'the one matrix of a linear feed-forward (D, D)',
    'attn_norm': 'norm before (or after) attention: attn_norm_scale, attn_norm_bias (D)',
    'mlp_norm': 'norm before (or after) the feed-forward: mlp_norm_scale, mlp_norm_bias (D)',
}
MATRIX_ROLES = ('q', 'k', 'v', 'o', 'ov', 'mlp_in', 'mlp_gate', 'mlp_out', 'mlp_linear')


def activation_names(cfg) -> tuple[str, ...]:
    """All names that `model.apply` accepts in `capture` and `hooks` for the model config `cfg`, in order.

    >>> from lingrok.config import ModelConfig
    >>> [name for name in activation_names(ModelConfig(num_layers=2)) if name.startswith('blocks.1.mlp')]
    ['blocks.1.mlp.pre', 'blocks.1.mlp.post', 'blocks.1.mlp_out']
    """
    names = ['embed']
    for layer, kind in enumerate(cfg.mlp_kind):
        inside_mlp = MLP_KINDS[kind][1]
        names += [f'blocks.{layer}.{name}' for name in BLOCK_ACTIVATIONS
                  if (name in inside_mlp if name.startswith('mlp.') else kind != 'none' or name != 'mlp_out')]
    return (*names, 'final', 'logits')


def param_name(path) -> str:
    """The name of a parameter at a path in the tree of parameters.

    >>> param_name(('blocks_1', 'mlp_in'))
    'blocks.1.mlp_in'
    """
    return '.'.join(path).replace('blocks_', 'blocks.')
