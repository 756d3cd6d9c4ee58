"""What goes into generation and what comes out, and when a request ends (EOS, stop string, length)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from os.path import commonprefix
from typing import Protocol

from modules.sampling import SamplingParams, TokenHistory


class Decode(Protocol):
    """Turns token ids into text, spaces as they are."""

    def __call__(self, token_ids: list[int], *, special: bool = False) -> str:
        """The text without special tokens, or (`special`) with what each of them is called."""
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt and how to continue it. `stop` strings need the `decode` of `generate`; `echo` scores the prompt."""

    prompt_token_ids: Sequence[int]
    max_new_tokens: int = 64
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    echo: bool = False
    request_id: str | int | None = None  # names the request in errors that stop the run


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """What a request became.

    `token_ids` are the generated ones, up to and with the EOS or the token that completed a stop string; `logprobs`
    has one entry for each (the model's own distribution, before temperature and truncation). `text` (None without
    `decode`) ends *before* the EOS or the stop string and has no special tokens. `prompt_logprobs` (echo): None for the
    first prompt token, then log_softmax(logits[i - 1])[id_i]. `finish_reason`: stop (EOS, stop string), length
    (max_new_tokens, or the context is full) or error (with `error`; nothing was generated).

    `mlp_density`, `head_density`: mean share of units this row computed in its decode steps (in its prompt, if there
    was no decode step). TEAL has no units: its `mlp_density` is the share of the MLP weights read.
    """

    token_ids: list[int]
    logprobs: list[float]
    text: str | None
    finish_reason: str
    error: str | None = None
    prompt_logprobs: list[float | None] | None = None
    num_prompt_tokens: int
    mlp_density: float = 1.0
    head_density: float = 1.0
    time_to_first_token_ms: float | None = None
    time_per_output_token_ms: float | None = None


@dataclass
class GenerationTimings:
    """Where the time of `generate` went; prompts and decode steps apart. Real tokens, not padding."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second (with the first sampled token of each row)."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second of the decode steps, over all rows of a batch."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


class RunningRequest:
    """A request while it runs."""

    def __init__(
        self, request_idx: int, request: GenerationRequest, context: int, decode: Decode | None = None
    ) -> None:
        self.request_idx = request_idx
        self.decode = decode
        self._stops: StopSearch | None = None
        if request.stop and decode is not None:
            self._stops = StopSearch(decode, request.stop, request.prompt_token_ids)
        self.request = request
        self.num_prompt = len(request.prompt_token_ids)
        self.room = max(0, min(request.max_new_tokens, context - self.num_prompt))
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.history: TokenHistory | None = None
        self.prompt_logprobs: list[float | None] | None = None
        self.started_s = self.first_token_s = 0.0

    @property
    def num_cached(self) -> int:
        """Tokens of this row in the cache: all but the newest generated one."""
        return self.num_prompt + max(0, len(self.token_ids) - 1)

    def start(self) -> None:
        """It has a row from now on."""
        self.started_s = time.perf_counter()
        if self.request.sampling.has_penalties:
            self.history = TokenHistory(self.request.sampling, self.request.prompt_token_ids)

    def add(self, token_id: int, logprob: float) -> None:
        """The next token that was chosen."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if self.history is not None:
            self.history.add(token_id)

    def ending(self, eos_token_ids: frozenset[int]) -> tuple[str | None, str | None]:
        """(finish_reason or None to go on, text) after the newest token; to be asked after each."""
        decode = self.decode
        if self.token_ids and self.token_ids[-1] in eos_token_ids:
            return "stop", None if decode is None else decode(self.token_ids[:-1])
        if self.token_ids and self._stops is not None:
            text = self._stops.text_before(self.token_ids[-1])
            if text is not None:
                return "stop", text
        if len(self.token_ids) >= self.room:
            return "length", None if decode is None else decode(self.token_ids)
        return None, None


class StopSearch:
    """Looks for stop strings in a text that grows by tokens. A string may span tokens.

    It is looked for in the text with its special tokens, decoded behind the prompt's last token (a sentencepiece
    decoder strips the space of what comes first), and in the text that is given out, which has no special tokens. Only
    the tail is decoded with each token: a token that adds to a text adds a byte at least, so a string of n bytes lies
    in the last n tokens (and a few, since tokenizers treat a first token apart).
    """

    def __init__(self, decode: Decode, stop: Sequence[str], prompt_token_ids: Sequence[int]) -> None:
        self._decode, self._stop = decode, stop
        self._num_tail = max(len(text.encode()) for text in stop) + 8
        self._token_ids = [prompt_token_ids[-1]]  # the generated ones follow
        self._plain_ids: list[int] = []  # the generated ones that are not special
        self._one = cache(lambda token_id, special: decode([token_id], special=special))

    def text_before(self, token_id: int) -> str | None:
        """The text to be given out, before the first stop string, if this next token completes one; else None."""
        self._token_ids.append(token_id)
        if not self._is_special(token_id):
            self._plain_ids.append(token_id)
        start = max(1, len(self._token_ids) - self._num_tail)
        plain_ids = self._plain_ids[-self._num_tail :]
        # Away from the prompt both texts are one where no token is special.
        is_plain = start > 1 and plain_ids == self._token_ids[start:]
        if self._find(self._text(start)) is None and (is_plain or self._find(self._decode(plain_ids)) is None):
            return None
        found: list[str] = []
        plain, marked = self._decode(self._plain_ids), self._text(1)
        if (place := self._find(plain)) is not None:
            found.append(plain[:place])
        if (place := self._find(marked)) is not None:
            found.append(self._given_out(plain, marked, place))
        return min(found, key=len, default=None)  # each is the beginning of one text

    def _is_special(self, token_id: int) -> bool:
        return not self._one(token_id, False) and self._one(token_id, True) != ""

    def _find(self, text: str) -> int | None:
        return min((place for place in map(text.find, self._stop) if place >= 0), default=None)

    def _text(self, start: int, stop: int | None = None) -> str:
        """What tokens start .. stop - 1 add, special ones too, to the text of the token before them."""
        before = self._one(self._token_ids[start - 1], True)
        whole = self._decode(self._token_ids[start - 1 : stop], special=True)
        return whole[len(commonprefix([before, whole])) :]  # a character may begin in one token and end in the next

    def _given_out(self, plain: str, marked: str, place: int) -> str:
        """What of `plain`, the text without special tokens, stands before `marked[place]`, the text with them."""
        for count in range(len(self._token_ids), 0, -1):
            start = self._text(1, count)
            if len(start) <= place and marked.startswith(start):
                break  # whole tokens, and then the part of one
        text, rest = self._decode(self._token_ids[1:count]), marked[len(start) : place]
        if rest and self._is_special(self._token_ids[count]):
            rest = ""  # the stop string begins within the name of a special token
        # Where the decoder strips the first space, here is one that `plain` does not have.
        return text + (rest if text or plain.startswith(rest[:1]) else rest[1:])
