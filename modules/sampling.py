"""Choosing the next token: greedy, or temperature / top-k / top-p, each row of a batch with its own options.

The draw of token number `step` of a request depends on its logits and (seed, step) only: one uniform number from a
counter-based generator, put through the inverse of the cumulative distribution in order of token id. Batch size,
batch order and device do not enter, so a request repeats.

Penalties (`penalised`) are Hugging Face's logits processors, in their order, the prompt's tokens counting like the
generated ones:

    repetition_penalty p    logit / p of every token that has been, logit * p where it is negative (arXiv 1909.05858)
    no_repeat_ngram_size n  no token that would repeat a run of n tokens
    bad_words_ids           no token that would complete one of these runs

They change what is chosen, not the log-probabilities that are reported.

Legend: B batch, V vocabulary.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Tokens less likely than this share of the likeliest are left out of the sort, if the rest is enough: sorting a
# whole vocabulary costs a CPU more than the model's own step.
_CUTOFFS = (2.0**-8, 2.0**-14, 2.0**-22, 0.0)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request picks its tokens. `temperature` 0: greedy (the rest is then unused).

    `top_k` -1 or 0 (kept as -1): all tokens. `top_p` 1.0: all; otherwise the smallest set of most likely tokens whose
    probability reaches `top_p`, with the token that crosses it. Both: top-k first, top-p within it. `min_p`: and none
    whose probability is below that share of the largest.

    The last three change greedy text, too, and look at the prompt's tokens as at the generated ones (see
    `penalised`): `repetition_penalty` 1.0, `no_repeat_ngram_size` 0 and no `bad_words_ids` change nothing.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature must be a finite number >= 0 (0: greedy), got {self.temperature}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 or 0 (all tokens) or at least 1, got {self.top_k}")
        if self.top_k == 0:
            object.__setattr__(self, "top_k", -1)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise ValueError(f"repetition_penalty must be a finite number > 0, got {self.repetition_penalty}")
        if self.no_repeat_ngram_size < 0:
            raise ValueError(f"no_repeat_ngram_size must be at least 0 (off), got {self.no_repeat_ngram_size}")
        if not all(self.bad_words_ids):
            raise ValueError("bad_words_ids must not hold an empty list")
        object.__setattr__(self, "bad_words_ids", tuple(map(tuple, self.bad_words_ids)))  # JSON has lists

    @property
    def is_limited(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.temperature > 0.0 and (self.top_k != -1 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of a token depends on those before it."""
        return self.repetition_penalty != 1.0 or self.no_repeat_ngram_size > 0 or bool(self.bad_words_ids)


class NoChoiceError(ValueError):
    """Batch rows in which no token can be chosen; the message says why."""

    def __init__(self, rows: list[int], message: str) -> None:
        super().__init__(message)
        self.rows = rows


class NonFiniteLogitsError(NoChoiceError):
    """Logits with NaN or +inf, or with no finite entry: there is no distribution to choose from."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(
            rows,
            f"logits of batch row {', '.join(map(str, rows))} are not finite (NaN or inf): the weights or the "
            "activations overflowed or hold NaN; try --dtype float32, or check the checkpoint",
        )


def mix_seed(seed: int, index: int) -> int:
    """64 well-mixed bits of (seed, index): element `index` of the splitmix64 stream (Steele et al. 2014) that starts
    at the hashed seed. Also how one seed becomes many (a seed for each document, each request)."""
    return _mix(_mix(seed & _MASK_64) + (index + 1) * _GOLDEN & _MASK_64)


def _mix(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK_64
    return bits ^ (bits >> 31)


def uniform(seed: int, step: int) -> float:
    """The number in [0, 1) that decides token `step` of a request with this seed (53 random bits)."""
    return (mix_seed(seed, step) >> 11) * 2.0**-53


def as_int64(bits: int) -> int:
    """64 bits as the int64 that holds them."""
    return bits - (1 << 64) if bits >> 63 else bits


def stream_of(seed: int) -> int:
    """The start of a seed's stream, for `stream_element`: element `index` of it is mix_seed(seed, index)."""
    return as_int64(_mix(seed & _MASK_64))


def stream_element(streams: int | Tensor, indices: Tensor) -> Tensor:
    """Element `indices` of the splitmix64 streams that start at `streams`; int64, broadcast."""
    bits = streams + (indices + 1) * as_int64(_GOLDEN)
    bits = (bits ^ _shifted(bits, 30)) * as_int64(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * as_int64(0x94D049BB133111EB)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, places: int) -> Tensor:
    # `>>` copies the sign bit of an int64 into the places that become free; splitmix64 wants zeros there.
    return (bits >> places) & ((1 << (64 - places)) - 1)


def stream_uniforms(streams: Tensor, steps: Tensor) -> Tensor:
    """`uniform` of many rows where they are: `stream_of` their seeds, and token numbers, int64 [B] -> float64 [B]."""
    return _shifted(stream_element(streams, steps), 11).double() * 2.0**-53


def check_logits(logits: Tensor) -> None:
    """Raise NonFiniteLogitsError naming the rows of [B, V] that cannot be sampled. -inf (padding of the
    vocabulary, a banned token) is allowed: such a token is never chosen."""
    good = logits.amax(-1).isfinite()  # NaN and +inf win a maximum; -inf does so only if nothing is finite
    if not bool(good.all()):
        raise NonFiniteLogitsError((~good).nonzero().flatten().tolist())


def greedy(logits: Tensor) -> Tensor:
    """[..., V] -> the most likely token id [...]; of equals the lowest id (torch.argmax promises the first)."""
    return logits.argmax(-1)


def sample(logits: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> Tensor:
    """logits [B, V], one `SamplingParams` and one token number per row -> token ids int64 [B].

    Raises NonFiniteLogitsError rather than choose from a broken distribution.
    """
    if not len(params) == len(steps) == logits.shape[0]:
        raise ValueError(f"sample: {logits.shape[0]} rows of logits, {len(params)} params, {len(steps)} steps")
    check_logits(logits)
    rows = [row for row, row_params in enumerate(params) if row_params.temperature > 0.0]
    if not rows:
        return greedy(logits)
    if len(rows) == len(params):
        return _draw(logits, params, steps)
    token_ids = greedy(logits)
    token_ids[rows] = _draw(logits[rows], [params[row] for row in rows], [steps[row] for row in rows])
    return token_ids


def _draw(logits: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> Tensor:
    device = logits.device
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    temperature = torch.tensor([row.temperature for row in params], dtype=wide.dtype, device=device)[:, None]
    # Relative to the largest, so that a tiny temperature cannot overflow.
    weights = ((wide - wide.amax(-1, keepdim=True)) / temperature.clamp(min=torch.finfo(wide.dtype).tiny)).exp()
    draws = [uniform(row.seed, step) for row, step in zip(params, steps, strict=True)]
    uniforms = torch.tensor(draws, dtype=torch.float64, device=device)
    limited = [row for row, options in enumerate(params) if options.top_k != -1 or options.top_p < 1.0]
    if len(limited) == len(params):
        kept, token_ids = kept_tokens(weights, params)
        return token_ids.gather(-1, _inverse_cdf(kept, uniforms)[:, None]).squeeze(-1)
    likely = weights
    if any(row.min_p for row in params):
        likely = weights.masked_fill(weights < _min_p(params, weights), 0.0)
    drawn = _inverse_cdf(likely, uniforms)
    if not limited:
        return drawn
    kept, token_ids = kept_tokens(weights[limited], [params[row] for row in limited])
    drawn[limited] = token_ids.gather(-1, _inverse_cdf(kept, uniforms[limited])[:, None]).squeeze(-1)
    return drawn


def _min_p(params: Sequence[SamplingParams], weights: Tensor) -> Tensor:
    return torch.tensor([row.min_p for row in params], dtype=torch.float64).to(weights)[:, None]


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Index of the entry of weights [B, n] (>= 0, not normalised) in which uniforms [B] of the total falls."""
    # Summed in float64: over a long vocabulary float32 would lose the rare tokens.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    indices = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    # Rounding may put the target onto the total itself; then the last entry that has any weight is meant.
    return torch.minimum(indices, torch.searchsorted(cumulative, total.contiguous())).squeeze(-1)


def kept_tokens(weights: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """What top-k, top-p and min-p keep of unnormalised probabilities [B, V], each row's largest being 1.

    Returns weights and token ids [B, C], most likely first, of equals the lowest id first; entries beyond a row's
    kept set have weight 0. C varies: tokens too unlikely to be kept by any row are not sorted at all.
    """
    batch, vocab_size = weights.shape
    device = weights.device
    top_k = torch.tensor([vocab_size if row.top_k == -1 else min(row.top_k, vocab_size) for row in params])
    top_k = top_k.to(device)[:, None]
    top_p = torch.tensor([row.top_p for row in params], dtype=torch.float64, device=device)[:, None]
    everything = weights.sum(-1, keepdim=True, dtype=torch.float64)
    for cutoff in _CUTOFFS:
        likely = weights >= cutoff
        count = likely.sum(-1, keepdim=True)
        mass = (weights * likely).sum(-1, keepdim=True, dtype=torch.float64)
        # A row's kept set lies within its likely tokens once these are k, or (without k) hold the nucleus.
        if bool(((count >= top_k) | ((top_k == vocab_size) & (mass >= top_p * everything))).all()):
            break
    rows, token_ids = likely.nonzero(as_tuple=True)
    slots = torch.arange(rows.shape[0], device=device) - (count.cumsum(0) - count).squeeze(-1)[rows]
    values = weights.new_zeros(batch, int(count.max()))
    values[rows, slots] = weights[rows, token_ids]
    ids = token_ids.new_zeros(values.shape)
    ids[rows, slots] = token_ids
    values, order = values.sort(dim=-1, descending=True, stable=True)
    values = values.masked_fill(torch.arange(values.shape[1], device=device) >= top_k, 0.0)
    cumulative = values.cumsum(-1, dtype=torch.float64)
    total = torch.where(top_k == vocab_size, everything, cumulative[:, -1:])
    # A token stays if those before it fall short of top_p: the one that crosses the threshold is kept.
    before = cumulative - values
    values = values.masked_fill((before >= top_p * total) & (top_p < 1.0), 0.0)
    return values.masked_fill(values < _min_p(params, weights), 0.0), ids.gather(-1, order)


def sample_on_device(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    *,
    limited: bool = True,
) -> Tensor:
    """`sample` of logits [B, V] in fixed shapes and without a host read, so that a CUDA graph can hold it.

    Options as `SamplingParams` has them: temperature, top_p, min_p and uniforms float64 [B], top_k int64 [B] -> token
    ids int64 [B]. Logits that are not finite give some id of the vocabulary: it is for the caller to refuse them.
    `limited` False promises that no row has a top_k, top_p or min_p: then the vocabulary is not sorted.
    """
    vocab_size = logits.shape[-1]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    cooled = temperature.to(wide.dtype)[:, None].clamp(min=torch.finfo(wide.dtype).tiny)
    weights = ((wide - wide.amax(-1, keepdim=True)) / cooled).exp()
    if not limited:
        drawn = _inverse_cdf(weights, uniforms).clamp(max=vocab_size - 1)
        return torch.where(temperature > 0.0, drawn, greedy(logits))
    # Rows with a limit draw in order of likelihood, the others in order of token id, as in `_draw`.
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    ids = torch.arange(vocab_size, device=logits.device)
    has_limit = ((top_k != -1) | (top_p < 1.0))[:, None]
    order = torch.where(has_limit, order, ids)
    count = torch.where(top_k == -1, vocab_size, top_k.clamp(max=vocab_size))[:, None]
    values = torch.where(has_limit, ordered, weights).masked_fill(ids >= count, 0.0)
    cumulative = values.cumsum(-1, dtype=torch.float64)
    everything = weights.sum(-1, keepdim=True, dtype=torch.float64)
    total = torch.where(count == vocab_size, everything, cumulative[:, -1:])
    share = top_p[:, None]
    kept = values.masked_fill((cumulative - values >= share * total) & (share < 1.0), 0.0)
    kept = kept.masked_fill(kept < min_p.to(wide.dtype)[:, None], 0.0)
    # NaN compares to nothing and would be found beyond the end, where a gather stops the device for good.
    drawn = order.gather(-1, _inverse_cdf(kept, uniforms)[:, None].clamp(max=vocab_size - 1)).squeeze(-1)
    return torch.where(temperature > 0.0, drawn, greedy(logits))


class TokenHistory:
    """The tokens of one text so far, prompt included, kept so that a step costs no look at all of them."""

    def __init__(self, params: SamplingParams, token_ids: Sequence[int]) -> None:
        self.params = params
        self._token_ids = array("q")
        self._followers: dict[tuple[int, ...], set[int]] = {}  # of each run of n - 1 tokens
        self._words = _by_last_token(params.bad_words_ids)
        for token_id in token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """The next token of the text."""
        self._token_ids.append(token_id)
        size = self.params.no_repeat_ngram_size
        if 0 < size <= len(self._token_ids):
            *run, last = self._token_ids[-size:]
            self._followers.setdefault(tuple(run), set()).add(last)

    @property
    def token_ids(self) -> Tensor:
        """Int64 [T], on the CPU."""
        return torch.frombuffer(self._token_ids, dtype=torch.int64).clone()  # which may grow and move

    def forbidden(self) -> set[int]:
        """The tokens that must not come next."""
        alone, completions = self._words
        found = set(alone)
        for run, last in completions.get(self._token_ids[-1], ()) if self._token_ids else ():
            if tuple(self._token_ids[-len(run) :]) == run:
                found.add(last)
        if size := self.params.no_repeat_ngram_size:
            run = tuple(self._token_ids[len(self._token_ids) - size + 1 :]) if len(self._token_ids) >= size - 1 else ()
            found |= self._followers.get(run, set())
        return found


@lru_cache(maxsize=8)
def _by_last_token(
    words: tuple[tuple[int, ...], ...],
) -> tuple[frozenset[int], dict[int, list[tuple[tuple[int, ...], int]]]]:
    """Tokens that are forbidden anywhere, and (run, token that must not follow it) by the run's last token."""
    completions: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for *run, last in words:
        if run:
            completions.setdefault(run[-1], []).append((tuple(run), last))
    return frozenset(word[0] for word in words if len(word) == 1), completions


def penalised(logits: Tensor, histories: Sequence[TokenHistory | None]) -> Tensor:
    """Logits [B, V], float32 at least, after the penalties of each row (None: it has none).

    Raises NoChoiceError for rows in which every token is forbidden.
    """
    found = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    places: list[tuple[int, int]] = []
    for row, history in enumerate(histories):
        if history is None:
            continue
        if (penalty := history.params.repetition_penalty) != 1.0:
            token_ids = history.token_ids.to(found.device)
            values = found[row, token_ids]
            found[row, token_ids] = torch.where(values < 0, values * penalty, values / penalty)  # once per token
        places += [(row, token_id) for token_id in history.forbidden()]
    if places:
        row_idx, token_idx = torch.tensor(places).T.to(found.device)
        found[row_idx, token_idx] = -torch.inf
        left = found.amax(-1) > -torch.inf
        if not bool(left.all()):
            bad = (~left).nonzero().flatten().tolist()
            raise NoChoiceError(bad, "no_repeat_ngram_size or bad_words_ids forbid every token of the vocabulary")
    return found
