"""How fast lingrok is on this machine, as shares of what the machine can do: one table, measured in one process.

    python experiments/benchmark.py                      all sizes of this machine's kind, minutes
    python experiments/benchmark.py --only=recall_demo   one size
    python experiments/benchmark.py --gpu                the sizes of a GPU, in bfloat16, with 1, 8 and 64 replicas
    python experiments/benchmark.py --parts=generate     text of SmolLM2, beside transformers where that is

Where PyTorch is installed, the same step is also timed as one would write it there. Writes benchmark.json, the scaling
with batch, replicas and length as a figure, and prints the table. Keep the machine idle: the ratios hold for one run.

A step counts 6 floating-point operations a parameter and token, and attention in full, as if nothing were skipped, so
that work that is left out shows as more than is done. The peak is that of a large float32 matrix product in the same
process, on all cores, or of a bfloat16 one on a GPU.
"""

import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import flags

from lingrok import cli

_ONLY = flags.DEFINE_list('only', [], 'sizes to measure; by default all')
OF_SIZES = ['steps', 'compile', 'torch', 'replicas']
PARTS = [*OF_SIZES, 'scaling', 'run', 'generate']
_PARTS = flags.DEFINE_list('parts', PARTS[:-1], 'what is measured; on request also generate, text of a pretrained '
                           'model')
_GPU = flags.DEFINE_bool('gpu', False, 'the sizes of a GPU, in bfloat16')
_OUT = flags.DEFINE_string('out', 'runs/benchmark', 'folder of the results')
_SECONDS = flags.DEFINE_float('seconds', 3.0, 'length of one timing', lower_bound=0.01)

ROOT = Path(__file__).parent.parent
# Size -> config file and variant, batch on a CPU and on a GPU, replicas on a CPU.
SIZES = {
    'modular_paper': ('modular.py', 'd2', 32, 1024, 1),
    'modular_demo': ('modular.py', 'demo', 72, 1024, 6),
    'recall_paper': ('recall.py', '', 32, 512, 1),
    'recall_demo': ('recall.py', 'demo', 128, 512, 4),
}
GPU_REPLICAS = (1, 8, 64)
REPEATS = 3
WRITTEN, ROWS, TURNS = 64, (1, 8), 11  # tokens of a text, texts at once, and how often each is timed


def main() -> None:
    import jax

    from lingrok.config import require, suggest
    from lingrok.figures import benchmark as figures

    for name in _ONLY.value:
        require(name in SIZES, f'--only={name}; {suggest(name, SIZES)}')
    for name in _PARTS.value:
        require(name in PARTS, f'--parts={name}; {suggest(name, PARTS)}')
    require(not _GPU.value or jax.default_backend() != 'cpu', '--gpu, but jax finds no accelerator here; try without')
    chosen, parts = _ONLY.value or list(SIZES), _PARTS.value
    found = {'machine': machine(), 'peak': peak(), 'sizes': {}}
    say(f'{found["machine"]}; peak {found["peak"] / 1e9:.0f} GF/s')
    for name in chosen if {*parts} & {*OF_SIZES} else ():
        for replicas in GPU_REPLICAS if _GPU.value else (SIZES[name][4],):
            label = f'{name} x {replicas}' if _GPU.value else name
            found['sizes'][label] = row = measure(name, replicas, found['peak'], parts)
            say(f'{label}: ' + ', '.join(f'{key} {value:.4g}' for key, value in row.items()))
    directory = Path(_OUT.value)
    directory.mkdir(parents=True, exist_ok=True)
    if 'run' in parts and not _GPU.value:
        found['run'] = whole_run()
        say('demo: ' + ', '.join(f'{key} {value:.4g}' for key, value in found['run'].items()))
    if 'generate' in parts:
        found['generate'] = generation()
    if 'scaling' in parts:
        found['scaling'] = scaling()
        cli.save_figure(figures.scaling(found['scaling'], found['machine']), directory, 'scaling')
    (directory / 'benchmark.json').write_text(json.dumps(found, indent=1) + '\n')
    print(table(found))
    print(f'numbers: {directory}/benchmark.json')


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def machine() -> str:
    import jax

    from lingrok.launch import cores

    cpu = re.search(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text() if Path('/proc/cpuinfo').exists() else '')
    device = jax.devices()[0].device_kind if jax.default_backend() != 'cpu' else ''
    return f'{device or (cpu.group(1) if cpu else "CPU")}, {len(cores())} cores, jax {jax.__version__}'


def seconds(call, *, compiled: bool = False) -> float:
    """Shortest of some timings of `call`, which is repeated within each until it has taken long enough."""
    if not compiled:
        repeated(call, 1)
    best = repeated(call, 1)
    if best >= _SECONDS.value:
        return best
    return min(best, *in_turn(timing(call, best)))


def timing(call, about: float):
    """A function that times `call`, which takes about so many seconds, as often as is long enough, a call's share."""
    count = max(1, round(_SECONDS.value / REPEATS / about))
    return lambda: repeated(call, count)


def repeated(call, count: int) -> float:
    """Seconds of a call, of so many."""
    import jax

    began = time.perf_counter()
    for _ in range(count):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / count


def in_turn(*timings) -> list[float]:
    """The shortest result of each function, called in turn, so that all meet the same state of the machine."""
    return [min(times) for times in zip(*([measured() for measured in timings] for _ in range(REPEATS)), strict=True)]


def peak() -> float:
    """Floating-point operations a second of large matrix products, on one device at a time and on all at once."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    size, dtype = (8192, jnp.bfloat16) if _GPU.value else (2048, jnp.float32)
    product = jax.jit(lambda a, b: a @ b)
    a = jnp.ones((size, size), dtype)
    rates = [2 * size**3 / seconds(lambda: product(a, a))]
    count = len(jax.devices())
    if count > 1:
        mesh = jax.make_mesh((count,), ('device',))
        x = jax.device_put(jnp.ones((count, size, size), dtype), NamedSharding(mesh, P('device')))
        each = jax.jit(jax.shard_map(lambda x: x @ x, mesh=mesh, in_specs=P('device'), out_specs=P('device')))
        rates.append(2 * count * size**3 / seconds(lambda: each(x)))
    return max(rates)


def config(name: str, replicas: int, **changes):
    """The config of a size; changes: 'task__length' stands for config.task.length."""
    from lingrok import config as lingrok_config
    from lingrok import sweep

    file, variant, cpu_batch, gpu_batch, _ = SIZES[name]
    dictionary = sweep.load_config_file(ROOT / 'configs' / file).get_config(variant)
    dictionary.train.batch_size = gpu_batch if _GPU.value else cpu_batch
    if _GPU.value:
        dictionary.model.dtype = 'bfloat16'
    for key in dictionary.vary.optim:
        dictionary.vary.optim[key] = ()
    for key in dictionary.vary.task:
        dictionary.vary.task[key] = ()
    dictionary.vary.seed.all = tuple(range(replicas))
    if name == 'modular_paper' and not _GPU.value:
        dictionary.task.batching = 'iid'  # a small batch does not hold every task
    for key, value in changes.items():
        section, _, field = key.partition('__')
        dictionary[section][field] = value
    return lingrok_config.from_config_dict(dictionary)


def operations(cfg) -> float:
    """Floating-point operations of one step on one sequence."""
    from lingrok import model

    m, length = cfg.model, cfg.task.seq_len
    lookups = m.vocab_size * m.d_model * (not m.tied) + (m.max_len * m.d_model if m.position == 'learned' else 0)
    attention = 12 * m.num_layers * m.num_heads * m.d_head * length
    return length * (6 * (model.num_parameters(m) - lookups) + attention)


class Step:
    """The compiled training of a config."""

    CAPACITY = 64  # steps of a call, at most

    def __init__(self, cfg, *, evaluation: bool = True):
        import numpy as np

        from lingrok import analysis, train

        self.cfg = cfg
        self.programs = p = train.Programs(cfg, capacity=self.CAPACITY, **analysis.evaluation(cfg.task.NAME))
        self.task_state, self.state = p.init_task(p.settings), p.init(p.settings)
        began = time.perf_counter()
        if evaluation:
            p.compile(self.state, self.task_state)
        else:
            p.train_chunk = p.train_chunk.lower(self.state, self.task_state, p.settings, np.int32(1)).compile()
        self.compile_seconds = time.perf_counter() - began

    def run(self, steps: int) -> float:
        """Seconds of a call of so many steps."""
        import jax
        import numpy as np

        p, began = self.programs, time.perf_counter()
        self.state, losses = p.train_chunk(self.state, self.task_state, p.settings, np.int32(steps))
        jax.block_until_ready(losses)
        return time.perf_counter() - began

    def timing(self):
        """A function that times some steps, and returns the seconds of one."""
        self.run(1)
        steps = min(max(1, round(_SECONDS.value / self.run(1))), self.CAPACITY)
        return lambda: self.run(steps) / steps


def measure(name: str, replicas: int, peak_rate: float, parts) -> dict[str, float]:
    """Everything about one size: seconds, rates, shares."""
    import jax

    from lingrok import run, sweep

    cfg = config(name, replicas)
    row = compile_times(cfg) if 'compile' in parts else {}
    step = Step(cfg)
    batch, work = cfg.train.batch_size, operations(cfg)
    plain = torch_step(cfg) if 'torch' in parts and not _GPU.value else None
    if plain:
        repeated(plain, 1)  # the first is slower
    timings = [step.timing()] + ([timing(plain, repeated(plain, 1))] if plain else [])
    row['step_s'], *theirs = in_turn(*timings)
    row['sequences_per_s'] = replicas * batch / row['step_s']
    row['percent_of_peak'] = 100 * row['sequences_per_s'] * work / peak_rate
    if theirs:
        row['torch_sequences_per_s'] = batch / theirs[0]
        row['torch_gain'] = row['sequences_per_s'] / row['torch_sequences_per_s']
    p = step.programs
    # Of one replica on one device, as in the step, where devices work side by side.
    sample = jax.jit(lambda state, key: cfg.task.sample(state, key, split='train', batch_size=batch))
    state = jax.tree.map(lambda x: x[0], p.fetch(step.task_state))
    rounds = -(-replicas // p.mesh.size) if p.layout == 'map' else 1
    row['sampling_s'] = seconds(lambda: sample(state, jax.random.key(0)))
    row['sampling_percent'] = 100 * row['sampling_s'] * rounds / row['step_s']
    evaluate = lambda: p.evaluate(step.state.params, step.task_state, p.settings)  # noqa: E731
    row['evaluation_s'] = seconds(evaluate, compiled=True)
    row['checkpoint_s'] = checkpoint_seconds(p.fetch(step.state))
    # By the schedule of the config and with its own batch, to which the cost of a step is proportional.
    file, variant, *_ = SIZES[name]
    own_batch = sweep.load_config_file(ROOT / 'configs' / file).get_config(variant).train.batch_size
    steps, evaluations = cfg.train.num_steps, 1 + -(-cfg.train.num_steps // cfg.train.eval_every)
    spent = evaluations * row['evaluation_s'] + len(run.save_steps(cfg.train)) * row['checkpoint_s']
    row['beside_percent'] = 100 * spent / (spent + steps * row['step_s'] * own_batch / batch)
    if 'replicas' in parts and not _GPU.value:
        four, one = in_turn(*(Step(config(name, count), evaluation=False).timing() for count in (4, 1)))
        row['four_replicas_gain'] = 4 * one / four
    return row


def compile_times(cfg) -> dict[str, float]:
    """Seconds to compile training and evaluation together: with an empty cache on disk, and from it."""
    import jax

    found = {}
    old = jax.config.jax_compilation_cache_dir
    with tempfile.TemporaryDirectory() as cache:
        for name in ('compile_cold_s', 'compile_cached_s'):
            jax.clear_caches()
            jax.config.update('jax_compilation_cache_dir', cache)
            _forget_cache()
            found[name] = Step(cfg).compile_seconds
    jax.config.update('jax_compilation_cache_dir', old)
    _forget_cache()
    return found


def _forget_cache() -> None:
    """Makes jax open the cache directory it is now configured to use."""
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def checkpoint_seconds(state) -> float:
    from lingrok.checkpoint import Checkpoints

    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Checkpoints(Path(directory) / 'checkpoints')
        times = []
        for step in range(REPEATS):
            began = time.perf_counter()
            checkpoints.save(step, state.params, state._replace(params=()), {'run_id': '', 'nan_step': []})
            times.append(time.perf_counter() - began)
    return min(times)


def whole_run() -> dict[str, float]:
    """The recall demo as a user starts it, with an empty cache: seconds to the first metrics, to the figure, memory.

    Then, with the cache full, the same again and one that logs, evaluates and saves at the first and last step only.
    """
    bare = [f'--config.train.{key}=100000' for key in ('log_every', 'eval_every', 'save_every')]
    with tempfile.TemporaryDirectory() as directory:
        first, wall, memory = demo(directory, 'cold')
        default_first, default, _ = demo(directory, 'default')
        demo(directory, 'compiles', '--config.train.save=regular', *bare)
        bare_first, least, _ = demo(directory, 'bare', '--config.train.save=regular', *bare)
    spent = (default - default_first) - (least - bare_first)
    return {'first_metrics_s': first, 'to_figure_s': wall, 'peak_memory_gb': memory / 1e9, 'cached_s': default,
            'overhead_percent': 100 * spent / default}


def demo(directory: str, name: str, *changes: str) -> tuple[float, float, int]:
    """A run of the recall demo: seconds to its first metrics and to its figure, and bytes of memory at most."""
    command = [sys.executable, str(ROOT / 'experiments' / 'train.py'), '--config',
               f'{ROOT}/configs/recall.py:demo', f'--workdir={directory}/{name}', *changes]
    env = {**os.environ, 'JAX_COMPILATION_CACHE_DIR': f'{directory}/cache'}
    began, first = time.perf_counter(), None
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines, peak_memory = [], 0
    status = Path(f'/proc/{process.pid}/status')
    for line in process.stdout:
        lines.append(line)
        # Not the resource usage of children, which counts the pages of this process before the other began.
        found = re.search(r'VmHWM:\s*(\d+)', status.read_text() if status.exists() else '')
        peak_memory = max(peak_memory, 1024 * int(found.group(1)) if found else 0)
        if first is None and 'step      0' in line:
            first = time.perf_counter() - began
    if process.wait():
        raise RuntimeError(f'the demo failed: {"".join(lines[-5:])}')
    return first, time.perf_counter() - began, peak_memory


def scaling() -> dict[str, dict[str, list]]:
    """Seconds a step of the recall demo against batch, replicas and length."""
    axes = {'batch': [32, 64, 128, 256, 512], 'replicas': [1, 2, 4, 8, 16], 'length': [32, 64, 128, 256, 512]}
    found = {}
    for axis, values in axes.items():
        times = []
        for value in values:
            changes = {'batch': {'train__batch_size': value}, 'length': {'task__length': value}}.get(axis, {})
            replicas = value if axis == 'replicas' else 1
            times += in_turn(Step(config('recall_demo', replicas, **changes), evaluation=False).timing())
        found[axis] = {'values': values, 'step_s': times}
    return found


def torch_step(cfg):
    """A function that takes a step of one replica, written plainly in PyTorch; None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.manual_seed(0)
    net = torch_model(torch, cfg.model)
    optimizers = torch_optimizers(torch, net, cfg.optim)
    tokens = torch.randint(0, cfg.model.vocab_size, (cfg.train.batch_size, cfg.task.seq_len))
    scored = torch.zeros(tokens.shape, dtype=torch.bool)
    # About as many scored positions as the task has.
    scored[:, cfg.task.scored if cfg.task.scored != slice(None) else slice(None, None, 7)] = True

    def step():
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(tokens)[scored], tokens[scored])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return ()

    return step


def torch_optimizers(torch, net, optim) -> list:
    """The optimiser of a config, as PyTorch has it."""
    for name in optim.frozen:
        getattr(net, name).requires_grad_(False)
    trained = [w for w in net.parameters() if w.requires_grad]
    if optim.optimizer == 'sgd':
        return [torch.optim.SGD(trained, lr=1e-3, momentum=optim.momentum, weight_decay=optim.weight_decay)]
    adam = {'lr': 1e-4, 'betas': (optim.b1, optim.b2)}
    if optim.optimizer == 'adamw':
        return [torch.optim.AdamW(trained, weight_decay=optim.weight_decay, **adam)]
    matrices = [w for w in net.blocks.parameters() if w.ndim == 2]
    others = [w for w in trained if not any(w is matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=1e-3, momentum=optim.momentum, weight_decay=optim.weight_decay),
            torch.optim.AdamW(others, weight_decay=optim.adam_weight_decay, **adam)]


def torch_model(torch, m):
    """The same model in eager PyTorch, as one would write it there; its logits are those of `lingrok.model`."""
    nn, functional = torch.nn, torch.nn.functional
    norm = {'none': lambda: nn.Identity(), 'layernorm': lambda: nn.LayerNorm(m.d_model, eps=m.norm_eps),
            'rmsnorm': lambda: nn.RMSNorm(m.d_model, eps=m.norm_eps)}[m.norm]
    if m.position == 'rope':
        freqs = m.rope_base ** (-torch.arange(0, m.d_head, 2) / m.d_head)
        angles = torch.arange(m.max_len)[:, None] * freqs
        cos, sin = torch.cos(angles), torch.sin(angles)

    def rotate(x):
        if m.position != 'rope':
            return x
        c, s = cos[: x.shape[-2]], sin[: x.shape[-2]]
        a, b = (x[..., ::2], x[..., 1::2]) if m.rope_interleaved else x.chunk(2, -1)
        turned = a * c - b * s, a * s + b * c
        return torch.stack(turned, -1).flatten(-2) if m.rope_interleaved else torch.cat(turned, -1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            width = m.num_heads * m.d_head
            self.attn_norm, self.mlp_norm = norm(), norm()
            self.q = nn.Linear(m.d_model, width, bias=False) if m.query == 'full' else nn.Identity()
            self.k, self.v = (nn.Linear(m.d_model, width, bias=False) for _ in range(2))
            self.o = nn.Linear(width, m.d_model, bias=False)
            self.mlp_in = nn.Linear(m.d_model, m.d_mlp, bias=False)
            self.mlp_out = nn.Linear(m.d_mlp, m.d_model, bias=False)

        def forward(self, h):
            x = self.attn_norm(h)
            q, k, v = (f(x).unflatten(-1, (m.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
            z = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            h = h + self.o(z.transpose(1, 2).flatten(-2))
            return h + self.mlp_out(functional.relu(self.mlp_in(self.mlp_norm(h))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(m.vocab_size, m.d_model)
            self.types = nn.Embedding(m.num_types, m.d_model) if m.num_types else None
            # As a convolution, whose last weight meets the position itself.
            self.conv = (nn.Conv1d(m.d_model, m.d_model, m.conv_width, groups=m.d_model, bias=False)
                         if m.conv_width else None)
            self.pos = nn.Embedding(m.max_len, m.d_model) if m.position == 'learned' else None
            self.blocks = nn.Sequential(*(Block() for _ in range(m.num_layers)))
            self.norm = norm()
            self.unembed = None if m.tied else nn.Linear(m.d_model, m.vocab_size, bias=False)

        def forward(self, tokens):
            h, places = self.embed(tokens), torch.arange(tokens.shape[1])
            if self.types is not None:
                h = h + self.types(places % m.num_types)
            if self.conv is not None:
                h = self.conv(functional.pad(h.transpose(1, 2), (m.conv_width - 1, 0))).transpose(1, 2)
            if self.pos is not None:
                h = h + self.pos(places)
            h = self.norm(self.blocks(h))
            return h @ self.embed.weight.T if self.unembed is None else self.unembed(h)

    return Net()


def generation() -> dict[str, dict[str, float]]:
    """Tokens a second of greedy text by SmolLM2, the reading of the prompt included, and those of transformers."""
    from lingrok.lm import generate, gsm8k
    from lingrok.pretrained.language import load_pretrained

    loaded = load_pretrained('smollm2')._replace(end_ids=())  # nothing ends early
    prompts = [gsm8k.prompt(problem.question, 0) for problem in gsm8k.load()]
    writers = {'lingrok': lambda texts: generate.continued(loaded, texts, max_new_tokens=WRITTEN)}
    theirs = transformers_writer()
    if theirs:
        writers['transformers'] = theirs
    found = {}
    for rows in ROWS:
        texts = prompts[:rows]
        tokens = {name: write(texts) for name, write in writers.items()}  # compiles
        # In turn, and medians of the turns: a machine that others use, too, changes from one second to the next.
        turns = [{name: repeated(functools.partial(write, texts), 1) for name, write in writers.items()}
                 for _ in range(TURNS)]
        found[f'batch {rows}'] = row = {
            f'{name}_per_s': rows * WRITTEN / statistics.median(turn[name] for turn in turns) for name in writers}
        if theirs:
            row['ratio'] = statistics.median(turn['transformers'] / turn['lingrok'] for turn in turns)
            row['same_texts'] = sum(a == b for a, b in zip(*tokens.values(), strict=True)) / rows
        say(f'batch {rows}: ' + ', '.join(f'{key} {value:.4g}' for key, value in row.items()))
    return found


def transformers_writer():
    """texts -> new tokens by transformers, from the same file; None where it, torch or what it needs is missing."""
    from importlib.util import find_spec

    from lingrok.pretrained.language import PACKAGES

    if not all(map(find_spec, ('torch', 'transformers', 'gguf', 'accelerate'))):
        say('without torch, transformers, gguf and accelerate there is nothing to compare text with')
        return None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package, file, _ = PACKAGES['smollm2']
    folder = Path(find_spec(package).origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, padding_side='left')
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # nothing ends early

    def write(texts):
        inputs = tokenizer(texts, return_tensors='pt', padding=True)
        with torch.inference_mode():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=WRITTEN)
        return out[:, inputs['input_ids'].shape[1] :].tolist()

    return write


COLUMNS = {
    'sequences_per_s': ('sequences / s', '{:,.0f}'),
    'percent_of_peak': ('% of peak', '{:.0f}'),
    'torch_gain': ('x PyTorch', '{:.1f}'),
    'sampling_percent': ('sampling, % of step', '{:.1f}'),
    'four_replicas_gain': ('4 replicas / 4 runs', '{:.2f}'),
    'compile_cold_s': ('compile, s', '{:.1f}'),
    'compile_cached_s': ('from disk, s', '{:.1f}'),
    'evaluation_s': ('evaluation, s', '{:.2f}'),
    'checkpoint_s': ('checkpoint, s', '{:.3f}'),
    'beside_percent': ('both by the schedule and batch of the config, % of a run', '{:.1f}'),
}
TEXT_COLUMNS = {
    'lingrok_per_s': 'lingrok, tokens / s',
    'transformers_per_s': 'transformers, tokens / s',
    'ratio': 'x transformers',
    'same_texts': 'share of equal texts',
}


def table(found) -> str:
    """The Markdown table of the README."""
    lines = [f'{found["machine"]}: {found["peak"] / 1e9:,.0f} GF/s']
    if found['sizes']:
        lines += ['', '| size | ' + ' | '.join(title for title, _ in COLUMNS.values()) + ' |',
                  '|---' * (1 + len(COLUMNS)) + '|']
    for name, row in found['sizes'].items():
        cells = [form.format(row[key]) if key in row else '' for key, (_, form) in COLUMNS.items()]
        lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
    if 'generate' in found:
        columns = [TEXT_COLUMNS[name] for name in next(iter(found['generate'].values()))]
        lines += ['', '| text of SmolLM2 | ' + ' | '.join(columns) + ' |', '|---' * (1 + len(columns)) + '|']
        lines += [f'| {name} | ' + ' | '.join(f'{value:.3g}' for value in row.values()) + ' |'
                  for name, row in found['generate'].items()]
    if 'run' in found:
        run = found['run']
        lines += ['', f'recall demo, nothing cached: first metrics after {run["first_metrics_s"]:.0f} s, figure after '
                  f'{run["to_figure_s"]:.0f} s, {run["peak_memory_gb"]:.2f} GB; with cached programs '
                  f'{run["cached_s"]:.0f} s, {run["overhead_percent"]:.0f} % of them to log, evaluate and save']
    return '\n'.join(lines)


if __name__ == '__main__':
    cli.main(main)
