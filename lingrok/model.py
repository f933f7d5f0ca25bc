"""One decoder-only Transformer; every model of the project is a `ModelConfig` of it. The only file that uses flax.

    h = embed(tokens) (+ type) (conv) (+ pos)
    for each block:  h = h + attention(norm(h));  h = h + feed-forward(norm(h))
    logits = norm(h) @ unembed

With norm='none', identity queries, one head and frozen random tables this is the two-layer model of arXiv 2406.03068;
with pre-LayerNorm, rotary positions and a tied unembedding that of arXiv 2406.02550.

Interventions are values: `hooks` maps an activation name to a function of that activation, `capture` names what is
returned. Nothing else is kept, and there is nothing to reset. Edited weights are edited params of the same function.
"""

import fnmatch
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from lingrok import names
from lingrok.config import ConfigError, ModelConfig, require, rotary_width, suggest

Hook = Callable[[jax.Array], jax.Array]

FEW_ROWS = 64  # below, a CPU multiplies a matrix stored by output from the left
SAME_INPUT = (('q', 'k', 'v', 'ov'), ('mlp_gate', 'mlp_in'))
ACTIVATIONS = {
    'relu': jax.nn.relu,
    'gelu': functools.partial(jax.nn.gelu, approximate=False),
    'gelu_tanh': jax.nn.gelu,
    'silu': jax.nn.silu,
    'identity': lambda x: x,
}


def init(key: jax.Array, cfg: ModelConfig) -> dict:
    """Initial parameters (float32): a dict of arrays, the blocks as dicts under 'blocks_0', 'blocks_1', ..."""
    tree = parameter_specs(cfg)
    leaves, form = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, Spec))
    # One draw a law and not one a matrix: XLA takes half a second to compile each draw.
    draws = {'normal': jax.random.normal, 'uniform': lambda k, n: jax.random.uniform(k, n, minval=-1.0) * 3**0.5}
    pools, used = {}, {}
    for law, subkey in zip(draws, jax.random.split(key), strict=True):
        total = sum(math.prod(spec.shape) for spec in leaves if spec.law == law)
        pools[law], used[law] = draws[law](subkey, (total,)) if total else None, 0

    def draw(spec):
        if spec.law == 'constant':
            return jnp.full(spec.shape, spec.scale)
        start, size = used[spec.law], math.prod(spec.shape)
        used[spec.law] = start + size
        return spec.scale * pools[spec.law][start : start + size].reshape(spec.shape)

    return jax.tree.unflatten(form, [draw(spec) for spec in leaves])


def num_parameters(cfg: ModelConfig) -> int:
    """Number of parameters of a model, frozen ones included."""
    leaves = jax.tree.leaves(parameter_specs(cfg), is_leaf=lambda x: isinstance(x, Spec))
    return sum(math.prod(spec.shape) for spec in leaves)


class Spec(NamedTuple):
    """A parameter: its shape and the law of its initial entries, of standard deviation (or constant value) `scale`."""

    shape: tuple[int, ...]
    law: str  # normal, uniform or constant
    scale: float


def parameter_specs(cfg: ModelConfig) -> dict:
    """Every parameter of a model, as a tree of `Spec`. The roles are explained in `names.ROLES`."""
    width = cfg.d_model
    tree = {'embed': Spec((cfg.vocab_size, width), 'normal', cfg.embed_std)}
    if cfg.num_types:
        tree['type'] = Spec((cfg.num_types, width), 'normal', cfg.embed_std)
    if cfg.conv_width:
        tree['conv'] = Spec((cfg.conv_width, width), 'constant', cfg.conv_init)
    if cfg.position == 'learned':
        tree['pos'] = Spec((cfg.max_len, width), 'normal', cfg.pos_std)
    if cfg.norm_position == 'pre':
        tree |= _norm_specs(cfg, 'norm')
    if not cfg.tied:
        tree['unembed'] = _matrix_spec(cfg, 'unembed', (width, cfg.vocab_size))
    return tree | {f'blocks_{layer}': block_specs(cfg, layer) for layer in range(cfg.num_layers)}


def block_specs(cfg: ModelConfig, layer: int) -> dict[str, Spec]:
    """The parameters of one block."""
    width, queries, keys = cfg.d_model, cfg.num_heads * cfg.d_head, cfg.num_kv_heads * cfg.d_head
    shapes = {
        'q': (width, queries),
        'k': (width, keys),
        'v': (width, keys),
        'o': (queries, width),
        'ov': (width, cfg.num_heads * width),
        'mlp_in': (width, cfg.d_mlp),
        'mlp_gate': (width, cfg.d_mlp),
        'mlp_out': (cfg.d_mlp, width),
        'mlp_linear': (width, width),
    }
    query = ('q',) if cfg.query == 'full' else ()
    value = ('v', 'o') if cfg.value_output == 'factored' else ('ov',)
    roles = (*query, 'k', *value, *names.MLP_KINDS[cfg.mlp_kind[layer]][0])
    specs = {role: _matrix_spec(cfg, role, shapes[role]) for role in roles}
    if cfg.bias:
        specs |= {f'{role}_bias': Spec(shapes[role][1:], 'constant', 0.0) for role in roles}
    specs |= _norm_specs(cfg, 'attn_norm')
    return specs | (_norm_specs(cfg, 'mlp_norm') if cfg.mlp_kind[layer] != 'none' else {})


def _matrix_spec(cfg: ModelConfig, role: str, shape) -> Spec:
    law = 'uniform' if cfg.init == 'torch' else 'normal'
    std = {'torch': (3 * shape[0]) ** -0.5, 'fan_in': shape[0] ** -0.5, 'normal': cfg.init_std}[cfg.init]
    return Spec(shape, law, std * ((2 * cfg.num_layers) ** -0.5 if role in cfg.init_depth_scaled else 1.0))


def _norm_specs(cfg: ModelConfig, name: str) -> dict[str, Spec]:
    scale, bias = (Spec((cfg.d_model,), 'constant', value) for value in (1.0, 0.0))
    both = {f'{name}_scale': scale, f'{name}_bias': bias}
    return {'none': {}, 'rmsnorm': {f'{name}_scale': scale}, 'layernorm': both}[cfg.norm]


def apply(params, tokens_BL: jax.Array, *, cfg: ModelConfig, hooks: Mapping[str, Hook] | None = None,
          capture: str | Sequence[str] = ()) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Logits (B, L, V) in float32, and the captured activations by name.

    capture: names or patterns ('blocks.*.attn.pattern') from `names.activation_names(cfg)`; captured values include
    the effect of hooks. hooks: name -> function that returns the activation to use instead, of the same shape and
    dtype. An unknown name, a pattern without a match and a changed shape raise ConfigError.
    """
    length = tokens_BL.shape[-1]
    require(tokens_BL.ndim == 2, f'tokens have shape {tokens_BL.shape}; allowed: (batch, length); try tokens[None]')
    require(0 < length <= cfg.max_len, f'tokens of length {length}; allowed: 1 to max_len={cfg.max_len}')
    tap = _Tap(hooks or {}, (capture,) if isinstance(capture, str) else capture, cfg)
    logits_BLV = Transformer(cfg).apply({'params': params}, tokens_BL, tap)
    unused = set(tap.hooks) - tap.fired
    require(not unused, f'hooks on {sorted(unused)} were never reached')
    return logits_BLV, tap.captured


def trunk(params, tokens_BL: jax.Array, *, cfg: ModelConfig, queries: slice = slice(None)
          ) -> tuple[jax.Array, jax.Array]:
    """The input of the last block (B, L, D) and what its heads read, z (B, L, H, K). `tail` makes logits of them.

    queries: positions at which both are wanted; the last block reads with no others.
    """
    return Transformer(cfg).apply({'params': params}, tokens_BL, _Tap({}, (), cfg), queries, method='trunk')


def embed(params, tokens_BL: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """The residual stream before the first block (B, L, D)."""
    return Transformer(cfg).apply({'params': params}, tokens_BL, _Tap({}, (), cfg), method='embed')


def block(block_params, h_BLD: jax.Array, *, cfg: ModelConfig, layer: int, hooks: Mapping[str, Hook] | None = None,
          capture: Sequence[str] = ()) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One block: the residual stream behind it (B, L, D), and what is captured.

    block_params: params['blocks_<layer>']. hooks and capture as in `apply`, with names without their 'blocks.N.'.
    """
    prefix = f'blocks.{layer}.'
    tap = _Tap({prefix + name: hook for name, hook in (hooks or {}).items()}, [prefix + name for name in capture], cfg)
    h_BLD = Block(cfg, layer).apply({'params': block_params}, h_BLD, tap)
    require(set(tap.hooks) == tap.fired, f'hooks on {sorted(set(tap.hooks) - tap.fired)} were never reached')
    return h_BLD, {name.removeprefix(prefix): value for name, value in tap.captured.items()}


def head(params, h: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """Logits (..., V) of the residual stream behind the last block (..., D)."""
    return Transformer(cfg).apply({'params': params}, h, _Tap({}, (), cfg), method='head')


class Cache(NamedTuple):
    """What a model keeps of the tokens it has read, for `step`: B rows of M slots.

    keys: one array (B G, K, M) a block, with which XLA on a CPU is faster. values: (B G, M, K). filled: slots in use.
    first_B: first slot of a row that is no padding.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    filled: jax.Array
    first_B: jax.Array


def empty_cache(cfg: ModelConfig, first_B: jax.Array, slots: int) -> Cache:
    """A cache for `slots` tokens a row, the first `first_B` (B,) of which will be padding."""
    require(0 < slots <= cfg.max_len, f'{slots} tokens; allowed: 1 to max_len={cfg.max_len}')
    require(not cfg.conv_width and not cfg.num_types, 'a model with model.conv_width or model.num_types reads whole '
            'sequences only; use apply')
    rows = first_B.shape[0] * cfg.num_kv_heads
    width = cfg.d_model if cfg.value_output == 'merged' else cfg.d_head
    shapes = (rows, cfg.d_head, slots), (rows, slots, width)
    arrays = [tuple(jnp.zeros(shape, cfg.dtype) for _ in range(cfg.num_layers)) for shape in shapes]
    return Cache(*arrays, jnp.int32(0), first_B)


def step(params, tokens_BL: jax.Array, cache: Cache, *, cfg: ModelConfig, by_output: bool = False
         ) -> tuple[jax.Array, Cache]:
    """Logits (B, V) behind the last of L further tokens of every row, and the cache with them.

    Those of `apply` on the whole row without its padding, up to rounding. Rows are padded on the left, so that all end
    in the same slot; a position is counted from the first token that is none. by_output: params are of that form.
    """
    memory = _Memory(cache, tokens_BL.shape[1], cfg)
    model = Transformer(cfg, by_output)
    logits_B1V = model.apply({'params': params}, tokens_BL, _Tap({}, (), cfg), memory, method='step')
    return logits_B1V[:, 0], memory.extended()


def by_output(params) -> dict:
    """Parameters for `step(..., by_output=True)`: a row of a matrix holds the weights of one output.

    Matrices that read the same input are one, named 'q+k+v'. On a CPU, XLA multiplies a few vectors by such a matrix
    up to twice as fast.
    """
    tree = {role: by_output(leaf) for role, leaf in params.items() if isinstance(leaf, Mapping)}
    leaves = {role: leaf for role, leaf in params.items() if role not in tree}
    for group in _groups(leaves):
        tree['+'.join(group)] = _stacked([leaves.pop(role) for role in group])
    return tree | leaves


@jax.jit
def _stacked(matrices):
    """Matrices from the same inputs as one, a row an output."""
    return jnp.concatenate([w.T for w in matrices])


def _groups(leaves) -> list[tuple[str, ...]]:
    """The matrices from inputs to outputs among parameters (or their Specs), those of the same input together."""
    matrices = [role for role in leaves if role in (*names.MATRIX_ROLES, 'unembed')]
    groups = [tuple(role for role in group if role in matrices) for group in SAME_INPUT]
    alone = [(role,) for role in matrices if not any(role in group for group in groups)]
    return [group for group in groups if group] + alone


def tail(params, h: jax.Array, z: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """Logits (..., V) from the outputs of `trunk` at any selection of positions: h (..., D) and z (..., H, K)."""
    return Transformer(cfg).apply({'params': params}, h, z, _Tap({}, (), cfg), method='tail')


def feed_forward(params, x_BLD: jax.Array, *, cfg: ModelConfig, layer: int) -> jax.Array:
    """What the feed-forward of a layer adds to the residual stream for inputs x (B, L, D), its pre-norm included."""
    require(cfg.mlp_kind[layer] != 'none', f'layer {layer} has no feed-forward')
    return Transformer(cfg).apply({'params': params}, x_BLD, _Tap({}, (), cfg), layer, method='feed_forward')


def unembed(params, h_BLD: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """Logits (B, L, V) of residual vectors, without the final norm."""
    return Transformer(cfg).apply({'params': params}, h_BLD, _Tap({}, (), cfg), method='unembedded')


class _Tap:
    """Applies hooks and keeps captured activations during one forward pass."""

    def __init__(self, hooks: Mapping[str, Hook], capture: Sequence[str], cfg: ModelConfig):
        allowed = names.activation_names(cfg)
        for name in hooks:
            require(name in allowed, f'hook on unknown activation {name!r}; {suggest(name, allowed)}')
        self.hooks, self.fired, self.captured, self.wanted = dict(hooks), set(), {}, set()
        for pattern in capture:
            matches = fnmatch.filter(allowed, pattern)
            require(bool(matches), f'capture of unknown activation {pattern!r}; {suggest(pattern, allowed)}')
            self.wanted.update(matches)

    def __call__(self, name: str, value: jax.Array) -> jax.Array:
        if name in self.hooks:
            old, value = value, jnp.asarray(self.hooks[name](value))
            if (value.shape, value.dtype) != (old.shape, old.dtype):
                raise ConfigError(
                    f'hook on {name!r} returned {value.dtype}{list(value.shape)}; allowed: the same as its input, '
                    f'{old.dtype}{list(old.shape)}'
                )
            self.fired.add(name)
        if name in self.wanted:
            self.captured[name] = value
        return value


class _Memory:
    """Where the new tokens stand in a cache, and the keys and values of each block as it is reached."""

    def __init__(self, cache: Cache, length: int, cfg: ModelConfig):
        self.cache, self.keys, self.values = cache, [], []
        self.slot_L = cache.filled + jnp.arange(length)
        self.position_BL = jnp.maximum(self.slot_L - cache.first_B[:, None], 0)
        self.turns = _turns(self.position_BL, cfg) if cfg.position == 'rope' else None

    def __call__(self, k, v):
        """All keys and values (B G, M, K) of the next block, from those of the new tokens (B G, L, K)."""
        news = ((self.keys, self.cache.keys, k.transpose(0, 2, 1), 2), (self.values, self.cache.values, v, 1))
        for pool, old, new, axis in news:
            pool.append(jax.lax.dynamic_update_slice_in_dim(old[len(pool)], new, self.cache.filled, axis))
        return self.keys[-1].transpose(0, 2, 1), self.values[-1]

    def visible_BLM(self, queries: slice):
        """Which slots a query reads: those up to its own that are no padding. Padding reads itself, not to be NaN."""
        slot_L1, slot_M = self.slot_L[queries, None], jnp.arange(self.cache.keys[0].shape[2])
        return (slot_M <= slot_L1) & (slot_M >= self.cache.first_B[:, None, None]) | (slot_M == slot_L1)

    def extended(self) -> Cache:
        return Cache(tuple(self.keys), tuple(self.values), self.cache.filled + self.slot_L.size, self.cache.first_B)


class Transformer(nn.Module):
    """The whole model; use it through the functions above."""

    cfg: ModelConfig
    by_output: bool = False

    def setup(self):
        specs = parameter_specs(self.cfg)
        self.w = _declare(self, {role: spec for role, spec in specs.items() if isinstance(spec, Spec)})
        self.blocks = [Block(self.cfg, layer, self.by_output) for layer in range(self.cfg.num_layers)]

    def __call__(self, tokens_BL, tap):
        return self.tail(*self.trunk(tokens_BL, tap), tap)

    def trunk(self, tokens_BL, tap, queries=slice(None), memory=None):
        """Everything up to what the heads of the last block read: its input (B, L, D) and z (B, L, H, K)."""
        h_BLD = self.embed(tokens_BL, tap, memory)
        for block in self.blocks[:-1]:
            h_BLD = block(h_BLD, tap, memory)
        return self.blocks[-1].attend(h_BLD, tap, queries, memory)

    def embed(self, tokens_BL, tap, memory=None):
        return tap('embed', self._embed(tokens_BL, memory).astype(self.cfg.dtype))

    def tail(self, h, z, tap):
        """Logits from what `trunk` returns. No position reads another one: any selection of positions will do."""
        return self.head(self.blocks[-1].finish(h, z, tap), tap)

    def head(self, h, tap):
        return self.unembedded(tap('final', self._final_norm(h)), tap)

    def step(self, tokens_BL, tap, memory):
        return self.tail(*self.trunk(tokens_BL, tap, slice(-1, None), memory), tap)

    def unembedded(self, h, tap):
        unembed = self.w['unembed'] if not self.cfg.tied else self.w['embed'] if self.by_output else self.w['embed'].T
        return tap('logits', _dot(h, unembed, self.by_output).astype(jnp.float32))

    def feed_forward(self, x, tap, layer: int):
        return self.blocks[layer].mlp(x, tap)

    def _final_norm(self, h):
        return _norm(self.cfg, self.w, 'norm', h) if self.cfg.norm_position == 'pre' else h

    def _embed(self, tokens_BL, memory=None):
        cfg, length = self.cfg, tokens_BL.shape[1]
        x_BLD = self.w['embed'][tokens_BL]
        if cfg.num_types:
            x_BLD = x_BLD + self.w['type'][jnp.arange(length) % cfg.num_types][None]
        if cfg.conv_width:
            taps, back = self.w['conv'], cfg.conv_width - 1
            padded = jnp.pad(x_BLD, ((0, 0), (back, 0), (0, 0)))
            # taps[j] weighs the embedding j positions back.
            x_BLD = sum(taps[j] * padded[:, back - j :][:, :length] for j in range(cfg.conv_width))
        if cfg.position == 'learned':
            # A slice where it will do: the gradient of a gather is slow.
            x_BLD = x_BLD + (self.w['pos'][memory.position_BL] if memory else self.w['pos'][None, :length])
        elif cfg.position == 'sinusoidal':
            x_BLD = x_BLD + _sinusoids(memory.position_BL if memory else jnp.arange(length)[None], cfg.d_model)
        return x_BLD


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    cfg: ModelConfig
    layer: int
    by_output: bool = False

    def setup(self):
        self.specs = block_specs(self.cfg, self.layer)
        self.w = _declare(self, self.specs)

    def __call__(self, h_BLD, tap, memory=None):
        return self.finish(*self.attend(h_BLD, tap, memory=memory), tap)

    def attend(self, h_BLD, tap, queries=slice(None), memory=None):
        """The input of the block and what its heads read, z (B, L, H, K), at the positions `queries`."""
        cfg, tap = self.cfg, self._named(tap)
        heads, groups, width = cfg.num_heads, cfg.num_kv_heads, cfg.d_head
        batch, length, _ = h_BLD.shape
        h_BLD = tap('resid_pre', h_BLD)
        x_BLD = self._norm('attn_norm', h_BLD, 'pre')
        q_BLD = x_BLD[:, queries]
        q_BLHK = (q_BLD if cfg.query == 'identity' else self._linear('q', q_BLD)).reshape(batch, -1, heads, width)
        k_BMGK = self._linear('k', x_BLD).reshape(batch, length, groups, width)
        value = 'ov' if cfg.value_output == 'merged' else 'v'
        v_BMGK = self._linear(value, x_BLD).reshape(batch, length, groups, -1)
        if cfg.position == 'rope' and (not cfg.rope_layers or self.layer in cfg.rope_layers):
            turns = memory.turns if memory else _turns(jnp.arange(length)[None], cfg)
            q_BLHK = _rotate(q_BLHK, [turn[:, queries] for turn in turns], cfg)
            k_BMGK = _rotate(k_BMGK, turns, cfg)
        q_BLHK, k_BMGK, v_BMGK = tap('attn.q', q_BLHK), tap('attn.k', k_BMGK), tap('attn.v', v_BMGK)
        # One matrix product a key-value head and sequence, which XLA runs faster than any other form of the einsum:
        # query head h reads key-value head h // (H / G), and the J = H / G queries of one head follow each other.
        num_queries = q_BLHK.shape[1]
        q = q_BLHK.reshape(batch, num_queries, groups, -1, width).transpose(0, 2, 3, 1, 4)
        q = q.reshape(batch * groups, -1, width)
        k, v = (x.transpose(0, 2, 1, 3).reshape(batch * groups, length, -1) for x in (k_BMGK, v_BMGK))
        k, v = memory(k, v) if memory else (k, v)
        scores = jnp.einsum('nqk,nmk->nqm', q, k, preferred_element_type=jnp.float32)
        if cfg.scale_scores:
            scores = scores / jnp.sqrt(jnp.float32(width))
        scores_BHLM = tap('attn.scores', scores.reshape(batch, heads, num_queries, -1))
        causal_BLM = memory.visible_BLM(queries) if memory else (
            jnp.arange(length)[queries, None] >= jnp.arange(length))[None]
        pattern_BHLM = jax.nn.softmax(jnp.where(causal_BLM[:, None], scores_BHLM, -jnp.inf), -1).astype(x_BLD.dtype)
        pattern_BHLM = tap('attn.pattern', pattern_BHLM)
        z = jnp.einsum('nqm,nmk->nqk', pattern_BHLM.reshape(batch * groups, -1, pattern_BHLM.shape[-1]), v)
        z_BLHK = z.reshape(batch, heads, num_queries, -1).transpose(0, 2, 1, 3)
        return h_BLD[:, queries], tap('attn.z', z_BLHK)

    def finish(self, h, z, tap):
        """The output of the block (..., D), position by position, from its input (..., D) and z (..., H, K)."""
        cfg, tap = self.cfg, self._named(tap)
        merged = cfg.value_output == 'merged'
        attn = tap('attn_out', jnp.sum(z, -2) if merged else self._linear('o', z.reshape(*z.shape[:-2], -1)))
        mid = h + attn if cfg.attn_residual[self.layer] else attn
        mid = tap('resid_mid', self._norm('attn_norm', mid, 'post'))
        if cfg.mlp_kind[self.layer] == 'none':
            return tap('resid_post', mid)
        x = self._norm('mlp_norm', h if cfg.parallel[self.layer] else mid, 'pre')
        out = mid + tap('mlp_out', self._mlp(x, tap))
        return tap('resid_post', self._norm('mlp_norm', out, 'post'))

    def mlp(self, x, tap):
        """What the feed-forward (with its pre-norm) adds to the residual stream for an input x (..., D)."""
        return self._mlp(self._norm('mlp_norm', x, 'pre'), self._named(tap))

    def _mlp(self, x, tap):
        kind, act = self.cfg.mlp_kind[self.layer], ACTIVATIONS[self.cfg.activation[self.layer]]
        if kind == 'linear':
            return self._linear('mlp_linear', x)
        if kind == 'linear_act':
            return act(tap('mlp.pre', self._linear('mlp_linear', x)))
        gate = tap('mlp.gate', self._linear('mlp_gate', x)) if kind == 'gated' else None
        pre = tap('mlp.pre', self._linear('mlp_in', x))
        return self._linear('mlp_out', tap('mlp.post', act(pre) if gate is None else act(gate) * pre))

    def _linear(self, role: str, x):
        if self.by_output:  # of equal products XLA computes one
            group = next(group for group in _groups(self.specs) if role in group)
            start = sum(self.specs[other].shape[1] for other in group[: group.index(role)])
            out = _dot(x, self.w['+'.join(group)], True)[..., start : start + self.specs[role].shape[1]]
        else:
            out = _dot(x, self.w[role])
        return out + self.w[f'{role}_bias'].astype(out.dtype) if self.cfg.bias else out

    def _norm(self, name: str, x, position: str):
        return _norm(self.cfg, self.w, name, x) if self.cfg.norm_position == position else x

    def _named(self, tap):
        return lambda name, value: tap(f'blocks.{self.layer}.{name}', value)


def _declare(module: nn.Module, specs: dict[str, Spec]) -> dict:
    """The parameters of a module; values come from `init`, so that flax only checks the shapes."""
    if module.by_output:
        specs = jax.eval_shape(by_output, {role: jax.ShapeDtypeStruct(spec.shape, jnp.float32)
                                           for role, spec in specs.items()})
    # Those of a loaded run are numpy, which traced tokens cannot index.
    return {role: jnp.asarray(module.param(role, lambda key, shape: jnp.zeros(shape), spec.shape))
            for role, spec in specs.items()}


def _norm(cfg: ModelConfig, weights, name: str, x):
    """LayerNorm or RMSNorm of x (..., D) in float32."""
    if cfg.norm == 'none':
        return x
    y = x.astype(jnp.float32)
    if cfg.norm == 'layernorm':
        y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + cfg.norm_eps) * weights[f'{name}_scale']
    return (y + weights[f'{name}_bias'] if cfg.norm == 'layernorm' else y).astype(x.dtype)


def _dot(x, w, by_output: bool = False):
    """x @ w or x @ w.T in the dtype of x, leading axes flat: on a CPU, XLA is slow on the gradient of a 3-D operand."""
    flat, w = x.reshape(-1, x.shape[-1]), w.astype(x.dtype)
    if by_output and flat.shape[0] < FEW_ROWS:
        out = jax.lax.optimization_barrier(w @ flat.T).T  # or XLA swaps the two back
    else:
        out = flat @ (w.T if by_output else w)
    return out.reshape(*x.shape[:-1], -1)


def _sinusoids(position_BL, width: int):
    """Sine and cosine position vectors (B, L, D) with wavelengths 2 pi to 20000 pi (arXiv 1706.03762)."""
    angles = position_BL[..., None] * 10000.0 ** (-2 * (jnp.arange(width)[None] // 2) / width)
    return jnp.where(jnp.arange(width)[None] % 2 == 0, jnp.sin(angles), jnp.cos(angles))


def _turns(position_BL, cfg: ModelConfig):
    """Cosines and sines (B, L, 1, K / 2) of the angles of rotary positions, in float32."""
    width = rotary_width(cfg)
    freqs = cfg.rope_base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    if cfg.rope_factors:
        freqs = freqs / jnp.array(cfg.rope_factors)
    angles = (position_BL.astype(jnp.float32)[..., None] * freqs)[:, :, None]
    # Or XLA computes them anew for every head and sequence.
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def _rotate(x_BLHK, turns, cfg: ModelConfig):
    """Rotary position embedding (arXiv 2104.09864) of the first `rope_fraction` of the head width, in float32."""
    width, (cos, sin) = rotary_width(cfg), turns
    rotated, rest = x_BLHK[..., :width].astype(jnp.float32), x_BLHK[..., width:]
    if cfg.rope_interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = jnp.split(rotated, 2, -1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    if cfg.rope_interleaved:
        rotated = jnp.stack(turned, -1).reshape(rotated.shape)
    else:
        rotated = jnp.concatenate(turned, -1)
    return jnp.concatenate([rotated.astype(x_BLHK.dtype), rest], -1)
