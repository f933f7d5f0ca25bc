"""One example of a fixed context runs over all p^2 inputs: what a model computes as a function of (x, y) alone.

Source: Fig 6 to 8 of arXiv 2406.02550. Of all rows, B = p^2 in x-major order, only one slot differs. Rows end with the
z of that slot: later examples could not change what the model computes before them.
"""

import jax
import jax.numpy as jnp

from lingrok import model
from lingrok.config import Config, require


def scanned_rows(task, state, key: jax.Array, *, slot: int, vector: tuple[int, int] | None = None) -> jax.Array:
    """Tokens (p^2, 3 slot + 3): `slot` random examples, the same in all rows, then every input with its z.

    vector: the task (a, b); by default the first of the unseen tasks of the replica that has no zero.
    """
    p = task.p
    require(0 <= slot < task.num_examples - 1, f'slot {slot}; allowed: 0 to {task.num_examples - 2}, as rows have '
            f'{task.num_examples} examples, the last without z')
    require(vector is None or (len(vector) == 2 and all(0 <= v < p for v in vector)),
            f'task vector {vector}; allowed: two numbers from 0 to {p - 1}')
    vector_2 = unseen_task(state) if vector is None else jnp.array(vector)
    inputs_B2 = jnp.stack(jnp.divmod(jnp.arange(p * p), p), -1)
    context_K2 = jax.random.randint(key, (slot, 2), 0, p)
    rows_BS2 = jnp.concatenate([jnp.broadcast_to(context_K2, (p * p, slot, 2)), inputs_B2[:, None]], 1)
    batch = task.rows(jnp.broadcast_to(vector_2, (p * p, 2)), rows_BS2)
    return jnp.concatenate([batch.tokens_BL, batch.targets_BL[:, -1:]], -1)


def unseen_task(state) -> jax.Array:
    """The first unseen task without a zero, of those that are reported and not kept for choosing a step."""
    total = state.tasks_T2.shape[0]
    first = state.num_tasks + (total - state.num_tasks) // 4
    wanted_T = (jnp.arange(total) >= first) & jnp.all(state.tasks_T2 > 0, -1)
    return state.tasks_T2[jnp.argmax(wanted_T)]


def scan(params, state, key: jax.Array, cfg: Config, *, slot: int, vector, capture) -> dict[str, jax.Array]:
    """Captured activations (p^2, 3, ...) at the x, y and z token of the scanned slot, in float32.

    Patterns are (p^2, H, 3, M), queries at these tokens.
    """
    tokens_BL = scanned_rows(cfg.task, state, key, slot=slot, vector=vector)
    _, acts = model.apply(params, tokens_BL, cfg=cfg.model, capture=capture)
    cut = {True: lambda x: x[:, :, 3 * slot :], False: lambda x: x[:, 3 * slot :]}
    return {name: cut[name.endswith('attn.pattern')](x).astype(jnp.float32) for name, x in acts.items()}


def parse_vector(text: str, p: int) -> tuple[int, int] | None:
    """The task vector of a flag --task=a,b, None of an empty one.

    >>> parse_vector('6,28', p=29)
    (6, 28)
    """
    if not text:
        return None
    numbers = tuple(int(part) if part.strip().isdecimal() else p for part in text.split(','))
    require(len(numbers) == 2 and max(numbers) < p, f'--task={text}; allowed: two numbers from 0 to {p - 1}; try '
            '--task=1,2')
    return numbers
