"""Noisy in-context recall: bigram text in which the token after a trigger has to be recalled from the context.

Source: arXiv 2406.03068 and its official code (the law of the sequences), on the bigram task of arXiv 2306.00802.
A sequence starts from the unigram law and follows the bigram law of a table. After a trigger comes the trigger's
target of this sequence with probability 1 - noise_prob, else the noise token. `clean` sequences have no noise.

    trigger 'a', target 'x', noise '!':    t h a x e a ! o a x      the answer after the last 'a' is 'x'
    occurrence                             0 0 1 0 0 2 0 0 3        counts the trigger; >= 2 can be recalled
    visible                                0 0 0 0 0 1 0 0 1        the target has been shown before

Position t predicts tokens[t + 1]. The text follows its own law after a target or a noise token, too.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lingrok.config import check_fields, key, register_task, require, suggest
from lingrok.tasks import bigrams
from lingrok.tasks.base import Batch, label_log_probs, masked_mean, previous_token

START = 10  # positions of accuracy_start
MAX_OCCURRENCE = 8  # accuracy is reported for occurrences 1 to this; the last bin holds all later ones


class RecallState(NamedTuple):
    """Laws of one replica: unigram_V, bigram_VV (rows: previous token), their cumulative sums, noise_prob ()."""

    unigram_V: jax.Array
    bigram_VV: jax.Array
    unigram_cdf_V: jax.Array
    bigram_cdf_VV: jax.Array
    noise_prob: jax.Array


@register_task('recall')
@dataclasses.dataclass(frozen=True)
class Recall:
    """The noisy in-context recall task. Variants of the official generator are options; see the fields."""

    SECTION: ClassVar[str] = 'task'
    VARIABLE: ClassVar[tuple[str, ...]] = ('noise_prob',)
    FILES: ClassVar[tuple[str, ...]] = ('table',)
    scored: ClassVar[slice] = slice(None)
    splits: ClassVar[tuple[str, ...]] = ('noisy', 'clean')
    headline: ClassVar[tuple[str, ...]] = ('noisy/loss', 'clean/p_noise', 'clean/p_correct')

    table: str = key('shakespeare', 'unigram and bigram laws: shakespeare (the shipped counts), uniform, synthetic, or '
                     'the path of a table made by experiments/make_bigrams.py')
    table_size: int = key(64, 'vocabulary of the uniform and synthetic tables', low=2)
    zipf_exponent: float = key(1.0, 'synthetic: unigram of rank r is proportional to r to the minus this', low=0.0)
    concentration: float = key(0.2, 'synthetic: bigram rows are Dirichlet draws around the unigram law, with this '
                               'concentration times table_size; large: all rows equal', low=1e-4)
    length: int = key(64, 'tokens of an input sequence', low=1)
    num_triggers: int = key(1, 'trigger tokens k of a sequence', low=1)
    trigger_mode: str = key('fixed', 'the most frequent tokens, or k tokens drawn for each sequence by frequency',
                            choices=('fixed', 'random'))
    trigger_offset: int = key(0, 'fixed triggers: skip this many of the most frequent tokens', low=0)
    target_law: str = key('uniform', 'targets of a trigger: uniform, or from its bigram row',
                          choices=('uniform', 'bigram'))
    targets_exclude: tuple[str, ...] = key(('triggers', 'noise'), 'tokens that are never targets: every trigger of the '
                                           'sequence, only the own one, the noise token',
                                           choices=('triggers', 'own_trigger', 'noise'))
    noise_token: str = key('!', "a symbol of the table ('0', '1', ... in uniform and synthetic ones), or 'extra' for "
                           'an additional symbol that occurs nowhere else')
    noise_prob: float = key(0.5, 'probability that the noise token replaces a target', low=0.0, high=1.0)
    noise_law: str = key('independent', 'the same probability everywhere, or one that depends on the token before the '
                         'trigger: min(1, 2 noise_prob) behind an even id, max(0, 2 noise_prob - 1) behind an odd one, '
                         'or with none before', choices=('independent', 'previous'))
    loss_on: str = key('repeated', 'positions of the loss: triggers from their second occurrence on, triggers whose '
                       'target has been shown, or all', choices=('repeated', 'visible', 'all'))

    def __post_init__(self):
        check_fields(self)
        symbols = self.symbols
        require(self.noise_token == 'extra' or self.noise_token in symbols, f'task.noise_token={self.noise_token!r} is '
                f'not in the table {self.table!r}; {suggest(self.noise_token, ("extra", *symbols))!s}')
        usable = self.table_vocab - (self.noise_token != 'extra')
        require(usable >= 2, f'the table {self.table!r} has 2 tokens, the noise among them; allowed: at least 3; try a '
                'larger table or task.noise_token=extra')
        skipped = self.trigger_offset if self.trigger_mode == 'fixed' else 0
        require(skipped <= usable - 2, f'task.trigger_offset={skipped} skips too many of the {self.table_vocab} tokens '
                f'of the table {self.table!r}; allowed: 0 to {usable - 2}; try a larger table')
        most = usable - 1 - skipped
        require(self.num_triggers <= most, f'task.num_triggers={self.num_triggers} is too many for the '
                f'{self.table_vocab} tokens of the table {self.table!r}; allowed: 1 to {most} (trigger_offset and the '
                'noise token take some, one must be left as a target); try a larger table')
        if self.trigger_mode == 'fixed':
            require(self.noise_id not in self.fixed_triggers, f'task.noise_token={self.noise_token!r} is one of the '
                    f'triggers {[symbols[i] for i in self.fixed_triggers]}; allowed: any other symbol; try extra, or '
                    'another task.trigger_offset')

    def check_batch(self, batch_size: int) -> None:
        """Any batch size will do."""

    @property
    def table_counts(self) -> bigrams.BigramTable | None:
        """The counts of a table of real text, None for the others."""
        return None if self.table in ('uniform', 'synthetic') else bigrams.load_table(self.table)

    @property
    def symbols(self) -> tuple[str, ...]:
        """One string a token, without the extra noise symbol."""
        counts = self.table_counts
        return counts.symbols if counts else tuple(str(i) for i in range(self.table_size))

    @property
    def table_vocab(self) -> int:
        return len(self.symbols)

    @property
    def vocab_size(self) -> int:
        return self.table_vocab + (self.noise_token == 'extra')

    @property
    def seq_len(self) -> int:
        return self.length

    @property
    def noise_id(self) -> int:
        return self.table_vocab if self.noise_token == 'extra' else self.symbols.index(self.noise_token)

    @property
    def fixed_triggers(self) -> tuple[int, ...]:
        """Ids of the fixed triggers: the most frequent tokens after `trigger_offset`; ties go to the lower id."""
        order = np.argsort(-self._unigram(), kind='stable')
        return tuple(int(i) for i in order[self.trigger_offset :][: self.num_triggers])

    def _unigram(self) -> np.ndarray:
        counts = self.table_counts
        if counts is not None:
            return counts.probabilities()[0]
        exponent = self.zipf_exponent if self.table == 'synthetic' else 0.0
        weights = np.arange(1, self.table_size + 1) ** -exponent
        return weights / weights.sum()

    def init(self, key: jax.Array, **variable) -> RecallState:
        """The laws of a replica; a synthetic table is drawn from `key`. `variable`: noise_prob, which may be traced."""
        unigram_V = jnp.asarray(self._unigram(), jnp.float32)
        size = self.table_vocab
        if self.table == 'uniform':
            bigram_VV = jnp.full((size, size), 1 / size)
        elif self.table == 'synthetic':
            bigram_VV = jax.random.dirichlet(key, self.concentration * size * unigram_V, (size,))
        else:
            bigram_VV = jnp.asarray(self.table_counts.probabilities()[1], jnp.float32)
        if self.noise_token == 'extra':
            # The extra symbol occurs only as noise; what follows it is a fresh start, from the unigram law.
            bigram_VV = jnp.concatenate([bigram_VV, unigram_V[None]])
            bigram_VV = jnp.pad(bigram_VV, ((0, 0), (0, 1)))
            unigram_V = jnp.pad(unigram_V, (0, 1))
        noise_prob = jnp.asarray(variable.get('noise_prob', self.noise_prob), jnp.float32)
        return RecallState(unigram_V, bigram_VV, cumulative(unigram_V), cumulative(bigram_VV), noise_prob)

    def target_prior(self, state: RecallState, triggers_Bk: jax.Array) -> jax.Array:
        """Law of the target of each trigger (B, k, V), before anything of the sequence is seen.

        With target_law='bigram', a trigger none of whose successors is allowed draws uniformly from the allowed.
        """
        ids_V = jnp.arange(self.vocab_size)
        allowed_BkV = jnp.broadcast_to(ids_V < self.table_vocab, (*triggers_Bk.shape, self.vocab_size))
        if 'noise' in self.targets_exclude:
            allowed_BkV &= ids_V != self.noise_id
        if 'triggers' in self.targets_exclude:
            allowed_BkV &= ~jnp.any(triggers_Bk[:, :, None] == ids_V, 1, keepdims=True)
        if 'own_trigger' in self.targets_exclude:
            allowed_BkV &= triggers_Bk[:, :, None] != ids_V
        uniform_BkV = allowed_BkV / jnp.sum(allowed_BkV, -1, keepdims=True)
        if self.target_law == 'uniform':
            return uniform_BkV
        weights_BkV = state.bigram_VV[triggers_Bk] * allowed_BkV
        total_Bk1 = jnp.sum(weights_BkV, -1, keepdims=True)
        return jnp.where(total_Bk1 > 0, weights_BkV / jnp.where(total_Bk1 > 0, total_Bk1, 1), uniform_BkV)

    def sample(self, state: RecallState, key: jax.Array, *, split: str, batch_size: int, step=0) -> Batch:
        """A batch of the training law ('train' or 'noisy') or a clean one; with one key they share every other draw.

        groups: occurrence_BL (0 off triggers, else 1, 2, ... within the sequence), visible_BL (the target of this
        trigger has been shown), is_noise_BL (the label is a noise draw), answer_BL (the target of the trigger, -1 off
        triggers), triggers_Bk.

        >>> task = Recall(length=16, num_triggers=2)
        >>> def draw(pool_key, batch_key):
        ...     return task.sample(task.init(pool_key), batch_key, split='clean', batch_size=8)
        >>> batch = jax.jit(draw)(jax.random.key(0), jax.random.key(1))
        >>> batch.tokens_BL.shape, batch.groups['triggers_Bk'].shape
        ((8, 16), (8, 2))
        >>> bool((batch.targets_BL[:, :-1] == batch.tokens_BL[:, 1:]).all())
        True
        """
        state = jax.tree.map(jnp.asarray, state)  # that of a loaded run is numpy, which a scan cannot index
        trigger_key, key = jax.random.split(key)
        # One draw and not five: XLA takes half a second to compile each draw.
        k, length = self.num_triggers, self.length
        uniform = jax.random.uniform(key, (batch_size, k + 1 + 2 * length))
        target_Bk, first_B, text_BL, noise_BL = jnp.split(uniform, (k, k + 1, k + 1 + length), 1)
        if self.trigger_mode == 'fixed':
            triggers_Bk = jnp.broadcast_to(jnp.array(self.fixed_triggers), (batch_size, self.num_triggers))
        else:
            # Gumbel top-k draws without replacement; the noise token is never a trigger.
            weights_V = state.unigram_V.at[self.noise_id].set(0)
            scores_BV = jnp.log(weights_V) + jax.random.gumbel(trigger_key, (batch_size, self.vocab_size))
            triggers_Bk = jax.lax.top_k(scores_BV, self.num_triggers)[1]
        prior_BkV = self.target_prior(state, triggers_Bk)
        outs_Bk = inverse_cdf(cumulative(prior_BkV), target_Bk)
        first_B = inverse_cdf(state.unigram_cdf_V, first_B[:, 0])
        scale = 0.0 if split == 'clean' else 1.0

        def step(carry, draws):
            before_B, token_B, count_Bk, shown_Bk = carry
            uniform_B, noise_B = draws
            noise_B = noise_B < scale * self.noise_probs(state, before_B)
            match_Bk = token_B[:, None] == triggers_Bk
            is_trigger_B = jnp.any(match_Bk, -1)
            answer_B = jnp.sum(match_Bk * outs_Bk, -1)
            next_B = inverse_cdf(state.bigram_cdf_VV[token_B], uniform_B)
            next_B = jnp.where(is_trigger_B, jnp.where(noise_B, self.noise_id, answer_B), next_B)
            count_Bk = count_Bk + match_Bk
            position = {
                'occurrence_BL': jnp.sum(count_Bk * match_Bk, -1),
                'visible_BL': jnp.any(shown_Bk & match_Bk, -1),
                'is_noise_BL': is_trigger_B & noise_B,
                'answer_BL': jnp.where(is_trigger_B, answer_B, -1),
            }
            shown_Bk = shown_Bk | (match_Bk & ~noise_B[:, None])
            return (token_B, next_B, count_Bk, shown_Bk), (token_B, next_B, position)

        start = (jnp.full_like(first_B, -1), first_B, jnp.zeros_like(triggers_Bk), jnp.zeros(triggers_Bk.shape, bool))
        _, by_position = jax.lax.scan(step, start, (text_BL.T, noise_BL.T))
        tokens_BL, targets_BL, groups = jax.tree.map(jnp.transpose, by_position)
        groups['triggers_Bk'] = triggers_Bk
        repeated_BL = groups['occurrence_BL'] >= 2
        mask_BL = {'repeated': repeated_BL, 'visible': groups['visible_BL'], 'all': jnp.ones_like(repeated_BL)}
        return Batch(tokens_BL, targets_BL, mask_BL[self.loss_on].astype(jnp.float32), groups)

    def noise_probs(self, state: RecallState, before: jax.Array) -> jax.Array:
        """Probability of noise behind a trigger, given the tokens before the triggers (-1: none); same shape."""
        alpha = state.noise_prob
        if self.noise_law == 'independent':
            return jnp.broadcast_to(alpha, before.shape)
        return jnp.where(before % 2 == 0, jnp.minimum(2 * alpha, 1), jnp.maximum(2 * alpha - 1, 0))

    def metrics(self, logits_BLV: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Loss on the scored positions, off triggers, and at repeated triggers; recall there.

        p_noise and p_correct are the mean probabilities of the noise token and of the trigger's target where the
        trigger has occurred before; accuracy is the share of those positions whose label is the most likely token,
        accuracy_triggers that at all triggers, accuracy_start that at the first START positions, whatever they are.
        joint_noise (2, 2): shares of the repeated triggers by prediction (row) and label (column), 1: the noise token.
        With noise_law='previous': p_noise_even and p_noise_odd, by the id of the token before the trigger.
        """
        log_probs_BL = label_log_probs(logits_BLV, batch.targets_BL)
        occurrence_BL, answer_BL = batch.groups['occurrence_BL'], batch.groups['answer_BL']
        repeated_BL = occurrence_BL >= 2
        noise_BL = jnp.full_like(batch.targets_BL, self.noise_id)
        predicted_BL = jnp.argmax(logits_BLV, -1)
        hit_BL = predicted_BL == batch.targets_BL
        bins = jnp.arange(1, MAX_OCCURRENCE + 1)
        by_occurrence = jax.vmap(lambda o: masked_mean(hit_BL, jnp.minimum(occurrence_BL, MAX_OCCURRENCE) == o))(bins)
        is_noise = [jnp.stack([x != self.noise_id, x == self.noise_id]) for x in (predicted_BL, batch.targets_BL)]
        joint = jnp.einsum('pbl,cbl,bl->pc', *(x.astype(jnp.float32) for x in (*is_noise, repeated_BL)))
        p_noise_BL = jnp.exp(label_log_probs(logits_BLV, noise_BL))
        by_parity = {}
        if self.noise_law == 'previous':
            before_BL = previous_token(batch.tokens_BL)
            by_parity = {f'p_noise_{name}': masked_mean(p_noise_BL, repeated_BL & (before_BL % 2 == parity))
                         for parity, name in enumerate(('even', 'odd'))}
        return {
            'loss': -masked_mean(log_probs_BL, batch.mask_BL),
            'loss_bigram': -masked_mean(log_probs_BL, occurrence_BL == 0),
            'loss_recall': -masked_mean(log_probs_BL, repeated_BL),
            'accuracy': masked_mean(hit_BL, repeated_BL),
            'accuracy_triggers': masked_mean(hit_BL, occurrence_BL >= 1),
            'accuracy_start': jnp.mean(hit_BL[:, :START]),
            'joint_noise': joint / jnp.maximum(jnp.sum(repeated_BL), 1),
            'p_noise': masked_mean(p_noise_BL, repeated_BL),
            'p_correct': masked_mean(jnp.exp(label_log_probs(logits_BLV, jnp.maximum(answer_BL, 0))), repeated_BL),
            'accuracy_by_occurrence': by_occurrence,
            **by_parity,
        }

    def baselines(self, state: RecallState, batch: Batch) -> dict[str, jax.Array]:
        """Exact losses of two reference predictors on the batch.

        loss/bayes knows the training law, the triggers of the sequence and the context; loss/distribution_only knows
        the law and the triggers, but not what followed them in this sequence. Both follow the noisy law on every
        split, as a model trained on it does.
        """
        bayes_BL, distribution_BL = self.reference_probs(state, batch)
        return {
            'loss/bayes': -masked_mean(jnp.log(bayes_BL), batch.mask_BL),
            'loss/distribution_only': -masked_mean(jnp.log(distribution_BL), batch.mask_BL),
            'loss_bigram/bayes': -masked_mean(jnp.log(bayes_BL), batch.groups['occurrence_BL'] == 0),
            'loss_recall/bayes': -masked_mean(jnp.log(bayes_BL), batch.groups['occurrence_BL'] >= 2),
        }

    def reference_probs(self, state: RecallState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Probability of each label (B, L) under the Bayes and the distribution-only predictor of `baselines`.

        After n noise tokens and no other token behind a trigger, Bayes' rule leaves the noise token itself as the
        target with odds prior(noise) : (1 - prior(noise)) noise_prob^n. One other token behind it gives the target.
        """
        tokens_BL, labels_BL, triggers_Bk = batch.tokens_BL, batch.targets_BL, batch.groups['triggers_Bk']
        alpha_BL = self.noise_probs(state, previous_token(tokens_BL))
        match_BLk = tokens_BL[:, :, None] == triggers_Bk[:, None]
        label_is_noise_BL = labels_BL == self.noise_id
        noise_BLk, other_BLk = (match_BLk & x[:, :, None] for x in (label_is_noise_BL, ~label_is_noise_BL))
        # Log-probability of the noise tokens so far, if they are noise.
        log_noise_BLk = jnp.where(noise_BLk, jnp.log(jnp.maximum(alpha_BL, 1e-30))[:, :, None], 0)
        noises_BL = jnp.sum(jnp.where(match_BLk, jnp.cumsum(log_noise_BLk, 1) - log_noise_BLk, 0), -1)
        known_BL = jnp.any((jnp.cumsum(other_BLk, 1) - other_BLk > 0) & match_BLk, -1)

        prior_BkV = self.target_prior(state, triggers_Bk)
        pick = functools.partial(jnp.einsum, 'blk,bk->bl', match_BLk.astype(jnp.float32))
        prior_noise_BL = pick(prior_BkV[:, :, self.noise_id])
        prior_label_BLk = jnp.take_along_axis(prior_BkV, labels_BL[:, None], 2).transpose(0, 2, 1)
        prior_label_BL = jnp.sum(prior_label_BLk * match_BLk, -1)

        rest_BL = (1 - prior_noise_BL) * jnp.exp(noises_BL)
        is_noise_BL = jnp.where(prior_noise_BL > 0, prior_noise_BL / jnp.maximum(prior_noise_BL + rest_BL, 1e-30), 0)
        share_BL = prior_label_BL / jnp.maximum(1 - prior_noise_BL, 1e-30)
        guess_BL = jnp.where(label_is_noise_BL, is_noise_BL, share_BL * (1 - is_noise_BL))
        target_BL = jnp.where(known_BL, labels_BL == batch.groups['answer_BL'], guess_BL)

        is_trigger_BL = jnp.any(match_BLk, -1)
        text_BL = state.bigram_VV[tokens_BL, labels_BL]
        mix = lambda p_BL: jnp.where(  # noqa: E731
            is_trigger_BL, alpha_BL * label_is_noise_BL + (1 - alpha_BL) * p_BL, text_BL)
        return mix(target_BL), mix(prior_label_BL)


def cumulative(weights):
    """Cumulative sums over the last axis, by a product with a triangle: far quicker to compile than jnp.cumsum."""
    size = weights.shape[-1]
    return jnp.dot(weights, jnp.triu(jnp.ones((size, size))), precision='highest')


def inverse_cdf(cdf, uniform):
    """Index drawn from unnormalised cumulative weights (..., V) by uniform numbers (...) in [0, 1)."""
    return jnp.sum(cdf <= uniform[..., None] * cdf[..., -1:], -1, dtype=jnp.int32)
