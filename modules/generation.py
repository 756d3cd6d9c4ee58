"""Writing text: prefill, one token at a time, and `generate` over ragged batches with an option set for each request.

What a request gets does not depend on its neighbours: rows are right-padded, each has its own length in the cache,
its own sampling stream and its own end. Finished rows leave the batch.

Legend: B batch, T tokens, D hidden, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.kv_cache import KVCache
from modules.requests import (
    Decode,
    GenerationRequest,
    GenerationResult,
    GenerationTimings,
    RunningRequest,
)
from modules.sampling import NonFiniteLogitsError, sample
from modules.scoring import chosen_logprobs, describe_problem, logprobs_at, pad_right
from modules.sparsity import BLOCKS, Block, SparsityStats


def prefill(model: Decoder, prompts: Sequence[Sequence[int]], cache: KVCache) -> Tensor:
    """Run ragged prompts (at least one token each) into an empty cache of that many rows -> logits [B, V] of each
    prompt's own last token."""
    hidden_states, lengths = _prefill_states(model, prompts, cache)
    return _last_logits(model, hidden_states, lengths)


def _prefill_states(model: Decoder, prompts: Sequence[Sequence[int]], cache: KVCache) -> tuple[Tensor, Tensor]:
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("prefill: a prompt has no tokens")
    token_ids, lengths = pad_right(prompts, model.device)
    return model(token_ids, cache=cache, num_tokens=lengths, phase="prefill"), lengths


def _last_logits(model: Decoder, hidden_states: Tensor, lengths: Tensor) -> Tensor:
    rows = torch.arange(hidden_states.shape[0], device=hidden_states.device)
    return model.logits(hidden_states[rows, lengths - 1])


def decode_one_token(model: Decoder, token_ids: Tensor, cache: KVCache) -> Tensor:
    """Append one token a row [B] and return the logits [B, V] of the next."""
    return model.logits(model(token_ids[:, None], cache=cache, phase="decode")[:, 0])


def keep_rows(cache: KVCache, rows: Sequence[int], longest: int) -> list[int]:
    """Drop all other rows of the cache; returns which old row each remaining one was.

    Rows move only into holes, and only their `longest` used positions are copied.
    """
    keep = set(rows)
    movers = [row for row in sorted(keep) if row >= len(keep)]
    order = list(range(len(keep)))
    for hole in order:
        if hole not in keep:
            order[hole] = movers.pop()
            for states in (cache.keys, cache.values):
                states[:, hole, :, :longest] = states[:, order[hole], :, :longest]
    cache.keys, cache.values = cache.keys[:, : len(order)], cache.values[:, : len(order)]
    cache.cache_seqlens = cache.cache_seqlens[torch.tensor(order, device=cache.cache_seqlens.device)]
    cache.longest = longest
    return order


@torch.inference_mode()
def generate(
    model: Decoder,
    requests: Sequence[GenerationRequest],
    *,
    batch_size: int = 8,
    eos_token_ids: Sequence[int] | None = None,
    decode: Decode | None = None,
    on_token: Callable[[int, int, float], object] | None = None,
    on_finish: Callable[[int, GenerationResult], None] | None = None,
    timings: GenerationTimings | None = None,
) -> list[GenerationResult]:
    """Continue every request, `batch_size` at a time; results in the order of the requests.

    `eos_token_ids` None: the model's own; (): none. `decode` turns token ids into text (stop strings need it).
    `timings` is added to.
    `on_token(request_idx, token_id, logprob)` and `on_finish(request_idx, result)` hear of things as they happen.
    A request that cannot run (empty, too long for the context, ids outside the vocabulary) gets finish_reason
    `error` and the others run. Logits that are not finite stop everything: ValueError names the request.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if decode is None and any(request.stop for request in requests):
        raise ValueError("stop strings need a tokenizer: pass `decode`")
    eos = frozenset(model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
    results: dict[int, GenerationResult] = {}

    def finish(request_idx: int, result: GenerationResult) -> None:
        results[request_idx] = result
        if on_finish is not None:
            on_finish(request_idx, result)

    rows = []
    for idx, request in enumerate(requests):
        problem = _problem(model, request)
        if problem is None:
            rows.append(RunningRequest(idx, request, model.config.max_position_embeddings))
        else:
            num_prompt_tokens = len(request.prompt_token_ids)
            finish(
                idx,
                GenerationResult(
                    token_ids=[],
                    logprobs=[],
                    text=None if decode is None else "",
                    finish_reason="error",
                    error=problem,
                    num_prompt_tokens=num_prompt_tokens,
                ),
            )
    timings = GenerationTimings() if timings is None else timings
    for start in range(0, len(rows), batch_size):
        batch = _Batch(model, rows[start : start + batch_size], eos, decode, timings)
        try:
            batch.run(on_token, finish)
        finally:
            batch.close()
    return [results[idx] for idx in range(len(requests))]


def _problem(model: Decoder, request: GenerationRequest) -> str | None:
    if not len(request.prompt_token_ids):
        return "the prompt has no tokens, so there is nothing to continue"
    if request.max_new_tokens < 0:
        return f"max_new_tokens must be at least 0, got {request.max_new_tokens}"
    problem = describe_problem(model, request.prompt_token_ids)
    return None if problem is None else f"prompt: {problem}"


class _Batch:
    """Rows that run together until the last one ends."""

    def __init__(
        self,
        model: Decoder,
        rows: list[RunningRequest],
        eos_token_ids: frozenset[int],
        decode: Decode | None,
        timings: GenerationTimings,
    ) -> None:
        self.model, self.rows, self.timings = model, rows, timings
        self.eos_token_ids, self.decode = eos_token_ids, decode
        self.cache = model.new_cache(len(rows), max(row.num_prompt + row.room for row in rows))
        self.started_s = self.lap_s = time.perf_counter()
        self.own_stats = False
        self.stats: SparsityStats | None = None
        self.prefill_counts: dict[Block, Tensor] = {}
        layers = range(model.config.num_hidden_layers)
        if any(model.half_block(layer_idx, block).block.selector for layer_idx in layers for block in BLOCKS):
            self.own_stats = model.stats is None
            self.stats = model.stats = model.stats or SparsityStats()
            self._reset_counts()

    def _reset_counts(self) -> None:
        assert self.stats is not None
        shape = (2, len(self.rows))
        self.stats.row_counts = {
            block: torch.zeros(shape, dtype=torch.int64, device=self.model.device) for block in BLOCKS
        }

    def close(self) -> None:
        """Leave the model as it was."""
        if self.stats is not None:
            self.stats.row_counts = {}
            if self.own_stats:
                self.model.stats = None

    def run(
        self,
        on_token: Callable[[int, int, float], object] | None,
        finish: Callable[[int, GenerationResult], None],
    ) -> None:
        """Prefill, then a token a row until no row is left."""
        logits = self._drop_finished(self._prefill(), finish)
        while self.rows:
            token_ids = self._sample(logits)
            logprobs = chosen_logprobs(logits, token_ids).tolist()
            self._count_time()
            for row, token_id, logprob in zip(self.rows, token_ids.tolist(), logprobs, strict=True):
                if not row.token_ids:
                    row.first_token_s = self.lap_s
                row.token_ids.append(token_id)
                row.logprobs.append(logprob)
                if on_token is not None:
                    on_token(row.request_idx, token_id, logprob)
            token_ids = self._drop_finished(token_ids, finish)
            if self.rows:
                self.lap_s = time.perf_counter()
                logits = decode_one_token(self.model, token_ids, self.cache)

    def _count_time(self) -> None:
        """Book the time since the last lap, now that the new tokens are on the host."""
        now_s = time.perf_counter()
        if self.rows[0].token_ids:
            self.timings.decode_tokens += len(self.rows)
            self.timings.decode_s += now_s - self.lap_s
        else:
            self.timings.prefill_s += now_s - self.lap_s
        self.lap_s = now_s

    def _prefill(self) -> Tensor:
        prompts = [row.request.prompt_token_ids for row in self.rows]
        hidden_states, lengths = _prefill_states(self.model, prompts, self.cache)
        for row, states in zip(self.rows, hidden_states, strict=True):
            if row.request.echo:
                targets = torch.as_tensor(row.request.prompt_token_ids, device=states.device)[1:]
                logprobs, _ = logprobs_at(self.model, states[: row.num_prompt - 1], targets)
                row.prompt_logprobs = [None, *logprobs.tolist()]
        logits = _last_logits(self.model, hidden_states, lengths)
        if logits.device.type == "cuda":
            torch.cuda.synchronize(logits.device)
        self.timings.prefill_tokens += sum(row.num_prompt for row in self.rows)
        now_s = time.perf_counter()
        self.timings.prefill_s += now_s - self.started_s
        self.lap_s = now_s
        if self.stats is not None:
            self.prefill_counts = self.stats.row_counts
            self._reset_counts()
        return logits

    def _sample(self, logits: Tensor) -> Tensor:
        params = [row.request.sampling for row in self.rows]
        try:
            return sample(logits, params, [len(row.token_ids) for row in self.rows])
        except NonFiniteLogitsError as error:
            bad = [self.rows[row] for row in error.rows]
            ids = [row.request_idx if row.request.request_id is None else row.request.request_id for row in bad]
            names = ", ".join(map(repr, ids))
            raise ValueError(f"request {names}: {error}") from error

    def _drop_finished(self, per_row: Tensor, finish: Callable[[int, GenerationResult], None]) -> Tensor:
        """Hand in the rows that are done and close the gaps; `per_row` [B, ...] keeps the rows that go on."""
        going = []
        for slot, row in enumerate(self.rows):
            reason, text = row.ending(self.eos_token_ids, self.decode)
            if reason is None:
                going.append(slot)
            else:
                finish(row.request_idx, self._result(slot, row, reason, text))
        if len(going) == len(self.rows) or not going:
            self.rows = [self.rows[slot] for slot in going]
            return per_row
        order = keep_rows(self.cache, going, max(self.rows[slot].num_cached for slot in going))
        self.rows = [self.rows[slot] for slot in order]
        slots = torch.tensor(order, device=per_row.device)
        if self.stats is not None:
            self.prefill_counts = {block: counts[:, slots] for block, counts in self.prefill_counts.items()}
            self.stats.row_counts = {block: counts[:, slots] for block, counts in self.stats.row_counts.items()}
        return per_row[slots]

    def _result(self, slot: int, row: RunningRequest, reason: str, text: str | None) -> GenerationResult:
        now_s, count = time.perf_counter(), len(row.token_ids)
        densities = {block: self._density(block, slot) for block in BLOCKS}
        return GenerationResult(
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            text=text,
            finish_reason=reason,
            prompt_logprobs=row.prompt_logprobs,
            num_prompt_tokens=row.num_prompt,
            mlp_density=densities["mlp"] * self._thinned_density(),
            head_density=densities["attention"],
            time_to_first_token_ms=(row.first_token_s - self.started_s) * 1e3 if count else None,
            time_per_output_token_ms=(now_s - row.first_token_s) * 1e3 / (count - 1) if count > 1 else None,
        )

    def _thinned_density(self) -> float:
        num_layers = self.model.config.num_hidden_layers
        return sum(self.model.mlp(layer_idx).thinned_density() for layer_idx in range(num_layers)) / num_layers

    def _density(self, block: Block, slot: int) -> float:
        if self.stats is None:
            return 1.0
        for counts in (self.stats.row_counts, self.prefill_counts):
            active, units = counts[block][:, slot].tolist()
            if units:
                return active / units
        return 1.0
