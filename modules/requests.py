"""What goes into generation and what comes out, and when a request ends (EOS, stop string, length)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from modules.sampling import SamplingParams

Decode = Callable[[list[int]], str]


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
    `decode`) ends *before* the EOS or the stop string. `prompt_logprobs` (echo): None for the first prompt token,
    then log_softmax(logits[i - 1])[id_i]. `finish_reason`: stop (EOS, stop string), length (max_new_tokens, or the
    context is full) or error (with `error`; nothing was generated).

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
        """Prompt tokens a second (with the first sampled token of each row)."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens a second of the decode steps, over all rows of a batch."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


class RunningRequest:
    """A request while it runs."""

    def __init__(self, request_idx: int, request: GenerationRequest, context: int) -> None:
        self.request_idx = request_idx
        self.request = request
        self.num_prompt = len(request.prompt_token_ids)
        self.room = max(0, min(request.max_new_tokens, context - self.num_prompt))
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: list[float | None] | None = None
        self.started_s = self.first_token_s = 0.0

    @property
    def num_cached(self) -> int:
        """Tokens of this row in the cache: all but the newest generated one."""
        return self.num_prompt + max(0, len(self.token_ids) - 1)

    def ending(self, eos_token_ids: frozenset[int], decode: Decode | None) -> tuple[str | None, str | None]:
        """(finish_reason or None to go on, text) after the newest token."""
        if self.token_ids and self.token_ids[-1] in eos_token_ids:
            return "stop", None if decode is None else decode(self.token_ids[:-1])
        if self.request.stop and decode is not None:
            text = text_before_stop(decode, self.token_ids, self.request.stop)
            if text is not None:
                return "stop", text
        if len(self.token_ids) >= self.room:
            return "length", None if decode is None else decode(self.token_ids)
        return None, None


def text_before_stop(decode: Decode, token_ids: list[int], stop: Sequence[str]) -> str | None:
    """The decoded text before the first stop string, if the newest token completed one; else None.

    The string may span tokens. Only the tail is decoded each time: a token that adds to the text adds a byte at
    least, so a string of n bytes lies in the last n tokens (and a few, since tokenizers treat a first token apart).
    """
    tail = decode(token_ids[-(max(len(text.encode()) for text in stop) + 8) :])
    if not any(text in tail for text in stop):
        return None
    full = decode(token_ids)
    found = [position for position in (full.find(text) for text in stop) if position >= 0]
    return full[: min(found)] if found else None
