"""What the tokens so far forbid or make less likely: repetition penalty, repeated n-grams, bad words.

As Hugging Face's logits processors, in their order, the prompt's tokens counting like the generated ones:

    repetition_penalty p    logit / p of every token that has been, logit * p where it is negative (arXiv 1909.05858)
    no_repeat_ngram_size n  no token that would repeat a run of n tokens
    bad_words_ids           no token that would complete one of these runs

They change what is chosen, not the log-probabilities that are reported.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from modules.sampling import NoChoiceError, SamplingParams

Words = tuple[tuple[int, ...], ...]


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
def _by_last_token(words: Words) -> tuple[frozenset[int], dict[int, list[tuple[tuple[int, ...], int]]]]:
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
