"""Log-probabilities of given tokens: perplexity, echo and log-likelihood tasks share this file.

Scoring runs the model in phase `prefill`: it never decodes, so selectors act here only with `sparse_phases=all`.
Token i is scored by the logits of position i - 1; a sequence's first token has no score.

Legend: B batch, T tokens, D hidden, V vocabulary, P scored positions.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.sampling import greedy

# Logits are made for so many entries at a time (64 MiB of float32): 2048 positions of a 128k vocabulary are 1 GiB.
_LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class TokenScores:
    """Scores of tokens, on the CPU; of a whole sequence its tokens 1 .. T-1, so that entry i belongs to token i + 1.

    `logprobs` float32 (float64 for a float64 model) in nats; `greedy` bool: the token is the model's first choice.
    """

    logprobs: Tensor
    greedy: Tensor


def logprobs_at(model: Decoder, hidden_states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """hidden_states [P, D], the token that follows each [P] -> (log-probability [P], is it the argmax [P])."""
    chunk = max(1, _LOGITS_AT_ONCE // model.config.vocab_size)
    logprobs, firsts = [], []
    for states, ids in zip(hidden_states.split(chunk), targets.split(chunk), strict=True):
        logits = model.logits(states)
        logprobs.append(chosen_logprobs(logits, ids))
        firsts.append(greedy(logits) == ids)
    if not logprobs:
        return hidden_states.new_zeros(0, dtype=_wide(hidden_states.dtype)), targets.new_zeros(0, dtype=torch.bool)
    return torch.cat(logprobs), torch.cat(firsts)


def chosen_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """log_softmax(logits [..., V])[token_ids [...]] in float32 (float64 for float64 logits)."""
    wide = logits.to(_wide(logits.dtype))
    return wide.gather(-1, token_ids[..., None]).squeeze(-1) - wide.logsumexp(-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def pad_right(sequences: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Ragged sequences -> token ids [B, T] padded with 0, and their lengths [B], both int64 on `device`."""
    lengths = [len(sequence) for sequence in sequences]
    padded = torch.zeros(len(sequences), max(lengths), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        padded[row, : lengths[row]] = torch.as_tensor(sequence, dtype=torch.int64)
    return padded.to(device), torch.tensor(lengths, device=device)


@torch.inference_mode()
def score_rows(
    model: Decoder,
    rows: Sequence[Sequence[int]],
    targets: Sequence[tuple[int, Sequence[int]]],
    names: Sequence[str],
    num_context: Sequence[int] | None = None,
) -> list[TokenScores]:
    """Run `rows` of token ids together and score targets: tokens that follow the last positions of a row (its place in
    `rows`), any number of them. [] on a pipeline stage without the head, which does its part of the work.

    `num_context`: a row's first tokens that are only conditioned on, which a method that reads a prompt takes for it
    (`num_prompt`). None, or one token alone: half of the row.

    Raises ValueError for logits that are not finite, with the target's name.
    """
    padded, lengths = pad_right(rows, model.device)
    contexts = [1] * len(rows) if num_context is None else num_context
    prompts = [count if count > 1 else max(1, len(row) // 2) for row, count in zip(rows, contexts, strict=True)]
    num_prompt = torch.tensor(prompts, device=model.device)
    hidden_states = model(padded, num_tokens=lengths, num_prompt=num_prompt, phase="prefill")
    if not model.is_last:
        return []
    ends = [row * padded.shape[1] + len(rows[row]) for row, _ in targets]
    at = torch.cat([torch.arange(end - len(ids), end) for end, (_, ids) in zip(ends, targets, strict=True)])
    following = torch.tensor([token for _, ids in targets for token in ids], device=model.device)
    logprobs, firsts = logprobs_at(model, hidden_states.flatten(0, 1)[at.to(model.device)], following)
    sizes = [len(ids) for _, ids in targets]
    found = [TokenScores(*parts) for parts in zip(logprobs.cpu().split(sizes), firsts.cpu().split(sizes), strict=True)]
    for name, scores in zip(names, found, strict=True):
        if not bool(scores.logprobs.isfinite().all()):
            raise ValueError(
                f"{name}: the model's logits are not finite (NaN or inf): the weights or the activations "
                "overflowed or hold NaN; try --dtype float32, or check the checkpoint"
            )
    return found


@torch.inference_mode()
def score_tokens(
    model: Decoder,
    token_ids: Sequence[Sequence[int]] | Tensor,
    *,
    batch_size: int = 8,
    num_context: Sequence[int] | None = None,
) -> list[TokenScores]:
    """Scores every sequence of `token_ids` ([B, T] or ragged), `batch_size` of similar length at a time; `num_context`
    of each as in `score_rows`.

    Raises ValueError for a sequence that does not fit the context, an id outside the vocabulary, or logits that are
    not finite (the sequence's place in the list is named). A pipeline stage without the head does its part of the
    work and returns empty scores.
    """
    sequences = token_ids.tolist() if isinstance(token_ids, Tensor) else [list(ids) for ids in token_ids]
    for idx, sequence in enumerate(sequences):
        problem = describe_problem(model, sequence)
        if problem:
            raise ValueError(f"sequence {idx}: {problem}")
    empty = TokenScores(torch.zeros(0, dtype=_wide(model.compute_dtype)), torch.zeros(0, dtype=torch.bool))
    scores = [empty] * len(sequences)
    # Longest first: neighbours are of similar length (little padding), and what does not fit in memory fails at once.
    order = sorted((i for i, ids in enumerate(sequences) if len(ids) > 1), key=lambda i: -len(sequences[i]))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        # A sequence's last token conditions nothing that is scored, so it is not run.
        rows, targets = [sequences[i][:-1] for i in batch], [(row, sequences[i][1:]) for row, i in enumerate(batch)]
        contexts = None if num_context is None else [num_context[i] for i in batch]
        found = score_rows(model, rows, targets, [f"sequence {i}" for i in batch], contexts)
        for i, one in zip(batch, found, strict=model.is_last):  # none: on to the next batch, while later stages work
            scores[i] = one
    return scores


def token_logprobs(model: Decoder, token_ids: Sequence[Sequence[int]] | Tensor, *, batch_size: int = 8) -> list[Tensor]:
    """log_softmax(logits[i - 1])[id_i] for i = 1 .. T-1 of every sequence; see `score_tokens`."""
    return [scores.logprobs for scores in score_tokens(model, token_ids, batch_size=batch_size)]


def describe_problem(model: Decoder, token_ids: Sequence[int]) -> str | None:
    """Why this model cannot run a sequence (too long, ids outside the vocabulary), or None if it can."""
    context = model.config.max_position_embeddings
    if len(token_ids) > context:
        return f"{len(token_ids)} tokens do not fit the model's context of {context}"
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.config.vocab_size:
        bad = next(token for token in token_ids if not 0 <= token < model.config.vocab_size)
        return f"token id {bad} lies outside the vocabulary of {model.config.vocab_size}"
    return None


@dataclass(frozen=True)
class Window:
    """A piece of a text; its first `num_context` tokens are only conditioned on, the others are scored."""

    token_ids: list[int]
    num_context: int

    @property
    def num_scored(self) -> int:
        """The others."""
        return len(self.token_ids) - self.num_context


def score_windows(token_ids: Sequence[int], window: int, stride: int | None = None) -> Iterator[Window]:
    """Cuts a text into windows of `window` tokens that begin every `stride` (default: `window`) tokens.

    With stride < window each token after the text's first is scored exactly once, from at least window - stride
    tokens of context (fewer at the beginning). With stride = window the pieces do not overlap and the first token of
    each has no context and is *not scored*: the convention of most published perplexities (GPTQ's, and Hugging
    Face's loss, which shifts labels within a window). The last window may be shorter; no token is dropped.
    """
    stride = window if stride is None else stride
    if window < 2 or not 1 <= stride <= window:
        raise ValueError(f"window must be at least 2 and stride lie in [1, window]; got {window} and {stride}")
    scored_to = 0
    for start in range(0, len(token_ids), stride):
        stop = min(start + window, len(token_ids))
        num_context = max(1, scored_to - start)
        if stop - start > num_context:
            yield Window(list(token_ids[start:stop]), num_context)
        scored_to = stop
        if stop == len(token_ids):
            return


@dataclass(frozen=True)
class Likelihood:
    """Sum of negative log-likelihoods (nats) over `num_tokens` scored tokens; add them up to merge texts."""

    nll_sum: float = 0.0
    num_tokens: int = 0

    def __add__(self, other: "Likelihood") -> "Likelihood":
        return Likelihood(self.nll_sum + other.nll_sum, self.num_tokens + other.num_tokens)

    @property
    def perplexity(self) -> float:
        """exp(mean negative log-likelihood); inf where that overflows. ValueError if nothing was scored."""
        if self.num_tokens == 0:
            raise ValueError("perplexity: no token was scored; the text needs at least two tokens")
        mean = self.nll_sum / self.num_tokens
        return math.exp(mean) if mean < 709.0 else math.inf


def check_window(model: Decoder, window: int) -> None:
    """ValueError if a window of so many tokens does not fit the model's context."""
    if window > model.config.max_position_embeddings:
        raise ValueError(
            f"window {window} does not fit the model's context of {model.config.max_position_embeddings}; "
            "give a smaller --window"
        )


def windows_likelihood(
    model: Decoder,
    windows: Iterable[Window],
    *,
    batch_size: int = 1,
    on_window: Callable[[Window, Likelihood], object] | None = None,
) -> Likelihood:
    """Likelihood of windows of any texts, `batch_size` run together; on a stage without the head that of none."""
    pending, total = iter(windows), Likelihood()
    while batch := list(islice(pending, batch_size)):
        contexts = [piece.num_context for piece in batch]
        found = score_tokens(model, [piece.token_ids for piece in batch], batch_size=batch_size, num_context=contexts)
        for piece, scores in zip(batch, found, strict=True):
            scored = scores.logprobs[piece.num_context - 1 :]
            likelihood = Likelihood(-float(scored.double().sum()), scored.numel())
            total += likelihood
            if on_window is not None:
                on_window(piece, likelihood)
    return total
