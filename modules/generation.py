"""Writing text: `generate` over ragged prompts with an option set for each request, in one process or in many.

What a request gets does not depend on its neighbours: rows are right-padded, each has its own length in the cache,
its own sampling stream and its own end. A finished row's place is taken by the next request. Under tensor and pipeline
parallelism every process runs this same loop over the same requests: all of them get the chosen tokens (through a
`TokenExchange`), so all of them take the same decisions without further messages.

Legend: B batch, T tokens, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import repeat

import torch
from loguru import logger
from torch import Tensor

from modules.cache import Cache
from modules.decoder import Decoder
from modules.graphs import can_capture
from modules.microbatch import BatchStep, Microbatch, densities
from modules.requests import (
    Decode,
    GenerationRequest,
    GenerationResult,
    GenerationTimings,
    RunningRequest,
)
from modules.scoring import describe_problem, pad_right
from modules.sparsity import SparsityStats

OnToken = Callable[[int, int, float], object]


class TokenExchange:
    """Passes chosen tokens between processes that each run a part of the model (see pipeline_parallel.exchange). This
    class is for one process that has the whole model."""

    num_microbatches = 1
    """At most so many groups of rows are worked on one after the other."""

    def __init__(self) -> None:
        self._message: list[float] = []

    def order(self, num_microbatches: int) -> Iterator[int]:
        """The micro-batches in the order in which this process works on them, without end."""
        return repeat(0)

    def publish(self, microbatch: int, message: list[float]) -> None:
        """Send what was chosen to the other processes (called where the head is)."""
        self._message = message

    def receive(self, microbatch: int, size: int) -> list[float]:
        """What was chosen in the micro-batch's last step."""
        return self._message

    def add_up(self, counts: list[float], report: Callable[[list[float]], None]) -> None:
        """Call `report` with the sum of `counts` over processes, now or later."""
        report(counts)

    def barrier(self) -> None:
        """Wait until all processes are here, ready for the first step."""

    def finish(self) -> None:
        """Make the calls of `report` that are still to come."""


def prefill(model: Decoder, prompts: Sequence[Sequence[int]], cache: Cache) -> Tensor:
    """Run ragged prompts (at least one token each) into an empty cache of that many rows -> logits [B, V] of each
    prompt's own last token."""
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("prefill: a prompt has no tokens")
    token_ids, lengths = pad_right(prompts, model.device)
    hidden_states = model(token_ids, cache=cache, num_tokens=lengths, phase="prefill")
    return model.logits(hidden_states[torch.arange(len(prompts), device=lengths.device), lengths - 1])


def decode_one_token(model: Decoder, token_ids: Tensor, cache: Cache) -> Tensor:
    """Append one token per row [B] and return the logits [B, V] of the next."""
    return model.logits(model(token_ids[:, None], cache=cache, phase="decode")[:, 0])


@torch.inference_mode()
def generate(
    model: Decoder,
    requests: Sequence[GenerationRequest],
    *,
    batch_size: int = 8,
    eos_token_ids: Sequence[int] | None = None,
    decode: Decode | None = None,
    on_token: OnToken | None = None,
    on_finish: Callable[[int, GenerationResult], None] | None = None,
    timings: GenerationTimings | None = None,
    exchange: TokenExchange | None = None,
    warm_up: bool = False,
) -> list[GenerationResult]:
    """Continue every request, `batch_size` at a time; results in the order of the requests.

    `eos_token_ids` None: the model's own; (): none. `decode` turns token ids into text (stop strings need it).
    `timings` is added to. `warm_up`: run a prefill and capture the CUDA graphs of all batch sizes first, so that the
    first request is as fast as the others.
    `on_token(request_idx, token_id, logprob)` and `on_finish(request_idx, result)` are called as things happen.
    A request that cannot run (empty, too long for the context, ids outside the vocabulary) gets finish_reason
    `error` and the others run. Logits that are not finite stop everything: ValueError names the request.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if decode is None and any(request.stop for request in requests):
        raise ValueError("stop strings need a tokenizer: pass `decode`")
    eos = frozenset(model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
    exchange = TokenExchange() if exchange is None else exchange
    results: dict[int, GenerationResult] = {}

    def finish(request_idx: int, result: GenerationResult) -> None:
        results[request_idx] = result
        if on_finish is not None:
            on_finish(request_idx, result)

    queue: deque[RunningRequest] = deque()
    for idx, request in enumerate(requests):
        problem = _problem(model, request)
        if problem is None:
            queue.append(RunningRequest(idx, request, model.config.max_position_embeddings, decode))
        else:
            finish(idx, _refused(request, problem, decode))
    if queue:
        own_stats = model.stats is None and model.is_sparse
        if own_stats:
            model.stats = SparsityStats()
        try:
            loop = _Loop(model, queue, batch_size, eos, exchange, timings or GenerationTimings())
            if warm_up:
                loop.warm_up()
            exchange.barrier()  # a stage that is ready earlier would count the others' preparations as its waiting
            loop.run(on_token, finish)
        finally:
            if model.stats is not None:
                model.stats.row_counts = {}
            if own_stats:
                model.stats = None
    exchange.finish()
    return [results[idx] for idx in range(len(requests))]


def _problem(model: Decoder, request: GenerationRequest) -> str | None:
    if not len(request.prompt_token_ids):
        return "the prompt has no tokens, so there is nothing to continue"
    if request.max_new_tokens < 0:
        return f"max_new_tokens must be at least 0, got {request.max_new_tokens}"
    problem = describe_problem(model, request.prompt_token_ids)
    return None if problem is None else f"prompt: {problem}"


def _refused(request: GenerationRequest, problem: str, decode: Decode | None) -> GenerationResult:
    return GenerationResult(
        token_ids=[],
        logprobs=[],
        text=None if decode is None else "",
        finish_reason="error",
        error=problem,
        num_prompt_tokens=len(request.prompt_token_ids),
    )


@cache
def _log_penalties() -> None:
    logger.info(
        "repetition_penalty, no_repeat_ngram_size or bad_words_ids: the host chooses each token, since it knows those "
        "before; no decode step runs ahead of it"
    )


class _Loop:
    """The requests of one call of `generate`, until the last one ends."""

    def __init__(
        self,
        model: Decoder,
        queue: deque[RunningRequest],
        batch_size: int,
        eos_token_ids: frozenset[int],
        exchange: TokenExchange,
        timings: GenerationTimings,
    ) -> None:
        self.model, self.queue, self.exchange, self.timings = model, queue, exchange, timings
        self.eos_token_ids = eos_token_ids
        rows = min(batch_size, len(queue))
        num_microbatches = min(exchange.num_microbatches, rows)
        longest = max(row.num_prompt + row.room for row in queue)
        self.is_sparse = model.is_sparse
        use_graphs = can_capture(model)
        if use_graphs and any(row.request.sampling.has_penalties for row in queue):
            _log_penalties()
        self.microbatches = [
            Microbatch(
                model,
                -(-(rows - place) // num_microbatches),
                longest,
                counts_units=self.is_sparse,
                use_graphs=use_graphs,
            )
            for place in range(num_microbatches)
        ]

    def warm_up(self) -> None:
        """Let libraries and communicators set themselves up, and capture every graph that may be needed: a prefill,
        and a decode step of every size and kind. Nothing is counted."""
        stats, self.model.stats = self.model.stats, None
        thinned = [part for part, _ in self.model.thinned_parts()]
        counts = [part.count_from() for part in thinned]
        prompt = self.queue[0].request.prompt_token_ids
        # Of all kinds there are: batches may be all greedy, and are to the graphs where the host applies penalties.
        options = [row.request.sampling for row in self.queue]
        kinds = {
            (one.temperature > 0.0, one.is_limited) if not one.has_penalties else (False, False) for one in options
        }
        for microbatch in self.microbatches:
            token_ids, lengths = pad_right([prompt], self.model.device)
            cache = microbatch.cache.fresh_rows([0])
            hidden_states = self.model(token_ids, cache=cache, num_tokens=lengths, phase="prefill")
            if self.model.is_last:
                self.model.logits(hidden_states[:, -1])
            if microbatch.graphs is not None:
                for num_rows in range(1, microbatch.num_rows + 1):
                    for samples, limited in kinds:
                        microbatch.graphs.prepare(num_rows, samples=samples, limited=limited)
            elif len(prompt) < microbatch.cache.max_seqlen:
                cache = microbatch.cache.first_rows(1, lengths, len(prompt))
                hidden_states = self.model(token_ids[:, -1:], cache=cache, phase="decode")
                if self.model.is_last:
                    self.model.logits(hidden_states[:, -1])
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self.model.stats = stats
        for part, before in zip(thinned, counts, strict=True):
            part.count_from(before)

    def run(self, on_token: OnToken | None, finish: Callable[[int, GenerationResult], None]) -> None:
        """Step after step, until nothing is left."""
        since_s = time.perf_counter()
        for place in self.exchange.order(len(self.microbatches)):
            microbatch = self.microbatches[place]
            step = microbatch.step
            ended: list[int] = []
            if step is not None:
                for row, token_id, logprob in microbatch.take_in(self.exchange.receive(place, step.message_size)):
                    self.timings.decode_tokens += step.phase == "decode"
                    if on_token is not None:
                        on_token(row.request_idx, token_id, logprob)
                ended = [idx for idx in step.rows if self._end(microbatch, idx, finish)]
                since_s = self._count_time(since_s, step)
            microbatch.admit(self.queue, ended)
            if microbatch.step is not None:
                message = microbatch.run()
                if message is not None:
                    self.exchange.publish(place, message)
                if microbatch.step.phase == "prefill":
                    self.timings.prefill_tokens += sum(microbatch.rows[row].num_prompt for row in microbatch.step.rows)
                since_s = self._count_time(since_s, microbatch.step)
            if not self.queue and not any(other.rows for other in self.microbatches):
                return

    def _count_time(self, since_s: float, step: BatchStep) -> float:
        """Add the time since `since_s` to that of a step's phase: doing it, or waiting for its result. The time now."""
        now_s = time.perf_counter()
        if step.phase == "prefill":
            self.timings.prefill_s += now_s - since_s
        else:
            self.timings.decode_s += now_s - since_s
        return now_s

    def _end(self, microbatch: Microbatch, idx: int, finish: Callable[[int, GenerationResult], None]) -> bool:
        """Whether a row is done after its newest token; then its result is made."""
        row = microbatch.rows[idx]
        reason, text = row.ending(self.eos_token_ids)
        if reason is None:
            return False
        now_s, count = time.perf_counter(), len(row.token_ids)

        def report(counts: list[float]) -> None:
            found = densities(counts)
            result = GenerationResult(
                token_ids=row.token_ids,
                logprobs=row.logprobs,
                text=text,
                finish_reason=reason,
                prompt_logprobs=row.prompt_logprobs,
                num_prompt_tokens=row.num_prompt,
                mlp_density=found["mlp"],
                head_density=found["attention"],
                time_to_first_token_ms=(row.first_token_s - row.started_s) * 1e3 if count else None,
                time_per_output_token_ms=(now_s - row.first_token_s) * 1e3 / (count - 1) if count > 1 else None,
            )
            finish(row.request_idx, result)

        if self.is_sparse:
            self.exchange.add_up(microbatch.counts(idx), report)
        else:
            report(microbatch.counts(idx))
        return True
