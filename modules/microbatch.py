"""Requests that run together in the rows of one cache; when one ends, the next takes its place.

A step is the prefill of rows that have just come in, or one more token for every row. What was chosen in a step is
taken in at the beginning of the next: in a pipeline it comes from another process.

Legend: B rows of a step, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.graphs import DecodeGraphs, StepInputs, StepResult
from modules.requests import RunningRequest
from modules.sampling import NoChoiceError, NonFiniteLogitsError, SamplingParams, check_logits, penalised, sample
from modules.scoring import chosen_logprobs, logprobs_at, pad_right
from modules.sparsity import BLOCKS, Block, Phase
from modules.thinned_input import weights_read

# Rows that come in together are run together up to so many tokens, padding included: bounds what a prefill needs.
MAX_PREFILL_TOKENS = 8192


@dataclass(frozen=True)
class BatchStep:
    """One step of the rows [B]. Its message holds B token ids, B log-probabilities, then those of echoed prompts."""

    phase: Phase
    rows: list[int]
    message_size: int


class Microbatch:
    """`num_rows` rows of at most `max_seqlen` tokens. `rows[i]` is the request in row i; there are no gaps."""

    def __init__(self, model: Decoder, num_rows: int, max_seqlen: int, *, counts_units: bool, use_graphs: bool) -> None:
        self.model, self.num_rows, self.counts_units = model, num_rows, counts_units
        self.rows: list[RunningRequest] = []
        self.step: BatchStep | None = None
        if use_graphs:  # a multiple of 64, for the attention kernels
            max_seqlen = min(-(-max_seqlen // 64) * 64, model.config.max_position_embeddings)
        self.cache = model.new_cache(num_rows, max_seqlen)
        self.graphs = DecodeGraphs(model, self.cache) if use_graphs else None
        shape = (len(BLOCKS), 2, num_rows)  # of each kind of block and row: units computed, units in all
        self._counts: dict[Phase, Tensor] = {}
        if counts_units:
            self._counts["prefill"] = torch.zeros(shape, dtype=torch.int64, device=model.device)
            # What a graph has counted comes to the host with the chosen tokens, and stays there.
            device = "cpu" if use_graphs else model.device
            self._counts["decode"] = torch.zeros(shape, dtype=torch.int64, device=device)

    def admit(self, queue: deque[RunningRequest], ended: list[int]) -> None:
        """Let requests in: into the rows of those that have ended, then behind the others; close the gaps that stay.

        Sets `step` to what is to be done next, None if there is nothing.
        """
        gaps, longest = sorted(ended), 0
        fresh: list[int] = []
        while queue and (gaps or len(self.rows) < self.num_rows):
            longest = max(longest, queue[0].num_prompt)
            if fresh and longest * (len(fresh) + 1) > MAX_PREFILL_TOKENS:
                break
            request = queue.popleft()
            request.start()
            row = gaps.pop(0) if gaps else len(self.rows)
            self.rows[row : row + 1] = [request]
            fresh.append(row)
        if fresh:  # an empty index is copied to the device all the same, which waits for the step that runs there
            for counts in self._counts.values():
                counts[..., fresh] = 0
        self._close(gaps)
        self.step = None
        if fresh:
            echoed = sum(self.rows[row].num_prompt - 1 for row in fresh if self.rows[row].request.echo)
            self.step = BatchStep("prefill", fresh, 2 * len(fresh) + echoed)
        elif self.rows:
            self.step = BatchStep("decode", list(range(len(self.rows))), 2 * len(self.rows))

    def _close(self, gaps: list[int]) -> None:
        for gap in reversed(gaps):  # from the end, so that the last row is never a gap itself
            last = len(self.rows) - 1
            if gap != last:
                self.rows[gap] = self.rows[last]
                self.cache.move_row(last, gap, self.rows[gap].num_cached)
                for counts in self._counts.values():
                    counts[..., gap] = counts[..., last]
            del self.rows[last]

    def run(self) -> list[float] | None:
        """Do the step: its message where the head is, None elsewhere. ValueError names a request whose logits are
        not finite."""
        assert self.step is not None
        stats, step = self.model.stats, self.step
        if self.counts_units and stats is not None:
            shape, device = (2, len(step.rows)), self._counts[step.phase].device
            stats.row_counts = {block: torch.zeros(shape, dtype=torch.int64, device=device) for block in BLOCKS}
        logits: Tensor | None = None
        echoed: list[float] = []
        result: StepResult | None = None
        if step.phase == "prefill":
            logits, echoed = self._prefill()
        elif self.graphs is not None:
            result = self._replay(self.graphs)
        else:
            logits = self._decode()
        if self.counts_units and stats is not None:
            found = {**stats.row_counts}
            layers = self.model.layers if self.model.sparsity_hook is not None else ()  # where inputs are thinned out
            for block in BLOCKS:
                parts = [self.model.half_block(layer_idx, block).block.thinned_parts() for layer_idx in layers]
                if (read := weights_read(list(chain(*parts)))) is not None:
                    found[block] = read
            self._counts[step.phase][..., step.rows] += torch.stack([found[block] for block in BLOCKS])
            stats.row_counts = {}
        if result is not None:
            assert self.graphs is not None
            is_greedy = not any(row.request.sampling.temperature for row in self.rows)
            if (self.graphs.chooses or is_greedy) and not self._has_penalties:
                if not all(result.finite):
                    raise self._refusal(
                        NonFiniteLogitsError([row for row, good in enumerate(result.finite) if not good])
                    )
                return [*result.token_ids, *result.logprobs]
            logits = result.logits
        if logits is None:
            return None
        token_ids = self._choose(logits)
        return [*token_ids.tolist(), *chosen_logprobs(logits, token_ids).tolist(), *echoed]

    def _prefill(self) -> tuple[Tensor | None, list[float]]:
        assert self.step is not None
        rows = [self.rows[row] for row in self.step.rows]
        token_ids, lengths = pad_right([row.request.prompt_token_ids for row in rows], self.model.device)
        cache = self.cache.fresh_rows(self.step.rows)
        hidden_states = self.model(token_ids, cache=cache, num_tokens=lengths, phase="prefill")
        if not self.model.is_last:
            return None, []
        echoed: list[float] = []
        for row, states in zip(rows, hidden_states, strict=True):
            if row.request.echo:
                targets = torch.as_tensor(row.request.prompt_token_ids, device=states.device)[1:]
                echoed += logprobs_at(self.model, states[: row.num_prompt - 1], targets)[0].tolist()
        steps = torch.arange(len(rows), device=lengths.device)
        return self.model.logits(hidden_states[steps, lengths - 1]), echoed

    def _decode(self) -> Tensor | None:
        token_ids, lengths = [row.token_ids[-1] for row in self.rows], [row.num_cached for row in self.rows]
        inputs = torch.tensor([token_ids, lengths]).to(self.model.device)
        cache = self.cache.first_rows(len(self.rows), inputs[1], max(lengths))
        hidden_states = self.model(inputs[0][:, None], cache=cache, phase="decode")
        return self.model.logits(hidden_states[:, 0]) if self.model.is_last else None

    def _replay(self, graphs: DecodeGraphs) -> StepResult | None:
        rows, has_penalties = self.rows, self._has_penalties
        inputs = StepInputs(
            token_ids=[row.token_ids[-1] for row in rows],
            lengths=[row.num_cached for row in rows],
            steps=[len(row.token_ids) for row in rows],
            # With penalties the step's own choice is not taken, so the cheapest will do.
            sampling=[SamplingParams() if has_penalties else row.request.sampling for row in rows],
        )
        # Whom this step fills up will not go on; whether another meets its end is not known before it is read.
        ahead = not has_penalties and all(len(row.token_ids) + 1 < row.room for row in rows)
        return graphs.run(inputs, ahead=ahead)

    @property
    def _has_penalties(self) -> bool:
        return any(row.history is not None for row in self.rows)

    def _choose(self, logits: Tensor) -> Tensor:
        assert self.step is not None
        rows = [self.rows[row] for row in self.step.rows]
        try:
            if any(row.history is not None for row in rows):
                check_logits(logits)
                logits = penalised(logits, [row.history for row in rows])
            return sample(logits, [row.request.sampling for row in rows], [len(row.token_ids) for row in rows])
        except NoChoiceError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: NoChoiceError) -> ValueError:
        """`error` of the step's rows, with the names of their requests."""
        assert self.step is not None
        bad = [self.rows[self.step.rows[row]] for row in error.rows]
        ids = [row.request_idx if row.request.request_id is None else row.request.request_id for row in bad]
        return ValueError(f"request {', '.join(map(repr, ids))}: {error}")

    def take_in(self, message: list[float]) -> Iterator[tuple[RunningRequest, int, float]]:
        """Give each row of the step its token; yields (row, token id, log-probability) for those that wanted one."""
        assert self.step is not None
        now_s, count = time.perf_counter(), len(self.step.rows)
        echoed = 2 * count
        for place, idx in enumerate(self.step.rows):
            row = self.rows[idx]
            if self.step.phase == "prefill" and row.request.echo:
                row.prompt_logprobs = [None, *message[echoed : echoed + row.num_prompt - 1]]
                echoed += row.num_prompt - 1
            if row.room == 0:
                continue
            if not row.token_ids:
                row.first_token_s = now_s
            token_id, logprob = int(message[place]), message[count + place]
            row.add(token_id, logprob)
            yield row, token_id, logprob

    def counts(self, row: int) -> list[float]:
        """Numbers that add up over processes, for `densities`: what a row computed here, and what there was."""
        if not self._counts:
            return [0.0] * 8
        decode, prefill = (self._counts[phase][..., row].flatten().tolist() for phase in ("decode", "prefill"))
        return decode + prefill


def densities(counts: list[float]) -> dict[Block, float]:
    """Share of units computed, from added-up `Microbatch.counts`: in decode steps, without any in the prompt."""
    found: dict[Block, float] = {}
    for place, block in enumerate(BLOCKS):
        pairs = [counts[start + 2 * place : start + 2 * place + 2] for start in (0, 4)]
        found[block] = next((active / units for active, units in pairs if units), 1.0)
    return found
