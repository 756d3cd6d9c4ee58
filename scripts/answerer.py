"""Lists of requests, log-likelihoods or texts to be written, answered by a loaded model, dense or sparse, on all ranks.

Whatever lm-eval's tasks ask comes down to such lists; nothing here needs lm-eval. Of log-likelihoods only the logits
that are needed are made: requests that differ in their last token only (the letters of a multiple choice) are one row
of one batch. `batch_size=auto`: how many rows fit, from what a forward pass was measured to need.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from loguru import logger

from modules.decoder import Decoder
from modules.requests import GenerationRequest, GenerationResult
from modules.scoring import Window, describe_problem, score_rows
from pipeline_parallel.engine import check_same_everywhere, generate_on_mesh
from pipeline_parallel.launch import current_launch
from pipeline_parallel.mesh import ParallelMesh
from scripts.command_line import progress
from scripts.model_loading import LoadedModel
from scripts.run_records import achieved_on_mesh, hash_of
from sparse_predictor.selection import Selection, attach_selection

CPU_ROWS = 8  # more do not make a CPU faster
MOST_ROWS = 64
PROBE_TOKENS = 512
# A masked sparse pass holds scores and masks beside the activations of the dense one that is measured.
ALLOWANCE = 2.0
USABLE = 0.8  # of the free memory: what is left over is for fragments and graphs


class BatchSizes:
    """Rows that run together: a fixed number, or as many as fit, the same on all ranks.

    Making one with `fixed` None is a collective call: each GPU runs two dense passes and keeps what a token took.
    """

    def __init__(self, loaded: LoadedModel, *, fixed: int | None, most: int | None = None) -> None:
        self.fixed, self.most = fixed, MOST_ROWS if most is None else most
        self.taken: set[int] = set()  # what was used, for whoever reports it
        self._loaded = loaded
        self._fitting: dict[tuple[int, int], int] = {}
        self._bytes_per_token = 0.0
        if fixed is None and loaded.model.device.type == "cuda":
            self._bytes_per_token = self._measure() * ALLOWANCE
        elif fixed is None:
            self.fixed = min(CPU_ROWS, self.most)
            logger.info(f"batch size auto: {self.fixed} rows on a CPU")

    def for_scoring(self, num_tokens: int) -> int:
        """Rows of so many tokens in one forward pass (a collective call)."""
        return self._rows(num_tokens, 0)

    def for_generation(self, num_prompt: int, num_tokens: int) -> int:
        """Rows of so many prompt tokens and `num_tokens` in all, whose keys and values are kept (a collective call)."""
        return self._rows(num_prompt, num_tokens)

    def _rows(self, num_passed: int, num_cached: int) -> int:
        if self.fixed is not None:
            self.taken.add(self.fixed)
            return self.fixed
        # In powers of two: ranks have to agree, and not on every batch.
        sizes = (_power_above(num_passed), _power_above(num_cached) if num_cached else 0)
        if sizes not in self._fitting:
            model, device = self._loaded.model, self._loaded.model.device
            cached_bytes = model.new_cache(1, 1).num_bytes
            needed = sizes[0] * self._bytes_per_token + sizes[1] * cached_bytes
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free = torch.cuda.mem_get_info(device)[0] + unused
            fit = min(self._loaded.mesh.gather(int(free * USABLE / needed)))
            rows = max(1, min(fit, self.most))
            self._fitting[sizes] = 1 << (rows.bit_length() - 1)
            logger.info(f"batch size auto: {self._fitting[sizes]} rows of up to {max(sizes)} tokens")
        self.taken.add(self._fitting[sizes])
        return self._fitting[sizes]

    @torch.inference_mode()
    def _measure(self) -> float:
        """Bytes that one more token of a dense pass takes at its peak."""
        model, device = self._loaded.model, self._loaded.model.device
        num_tokens = min(PROBE_TOKENS, model.config.max_position_embeddings)
        peaks = []
        for rows in (3, 1, 3):  # the first sets libraries up, workspaces of the larger size included
            torch.cuda.reset_peak_memory_stats(device)
            token_ids = torch.zeros(rows, num_tokens, dtype=torch.int64, device=device)
            hidden_states = model(token_ids, phase="prefill")
            del hidden_states
            peaks.append(torch.cuda.max_memory_allocated(device))
        return max(1.0, (peaks[2] - peaks[1]) / (2 * num_tokens))


def _power_above(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()


Requests = Sequence[Window] | Sequence[GenerationRequest]
Score = tuple[float, bool]
Row = tuple[tuple[int, ...], int]  # the tokens that are run, and how many of them are context


def score_continuations(
    model: Decoder,
    mesh: ParallelMesh,
    windows: Sequence[Window],
    *,
    batch_size: Callable[[int], int],
    on_scored: Callable[[int], object] | None = None,
) -> list[Score]:
    """(sum of log-probabilities in nats, is every token the model's first choice) of the scored tokens of each window,
    in order, on all ranks. A window's last token conditions nothing: it may be one longer than the model's context.

    A collective call: every rank gives the same windows. `batch_size(num_tokens)` is how many rows of at most so many
    tokens run together. `on_scored(n)` is called after n more requests. ValueError for tokens the model cannot run and
    for logits that are not finite.
    """
    rows: dict[Row, list[int]] = {}
    for idx, one in enumerate(windows):
        conditions, target = list(one.token_ids[:-1]), list(one.token_ids[-1:])
        problem = describe_problem(model, conditions) or describe_problem(model, target)
        if problem or not 0 < one.num_scored < len(one.token_ids):
            problem = (
                problem or f"{one.num_scored} of {len(one.token_ids)} tokens to be scored; one at least stands before"
            )
            raise ValueError(f"request {idx}: {problem}")
        rows.setdefault((tuple(conditions), one.num_context), []).append(idx)
    # Longest first: neighbours are of similar length, and what does not fit in memory fails at once.
    order = sorted(rows, key=lambda row: (-len(row[0]), row))
    found: dict[int, Score] = {}
    place, batch_idx = 0, 0
    while place < len(order):
        batch = order[place : place + batch_size(len(order[place][0]))]
        # Batches are dealt to the replicas, not rows: the same ones run together however many replicas there are.
        if batch_idx % mesh.dp_size == mesh.dp_rank:
            found.update(_score_batch(model, batch, [rows[row] for row in batch], windows))
        place, batch_idx = place + len(batch), batch_idx + 1
        if on_scored is not None:
            on_scored(sum(len(rows[row]) for row in batch))
    if mesh.dp_size > 1:
        current_launch().barrier()
    of_all_ranks: dict[int, Score] = {}
    for part in mesh.gather(found):
        of_all_ranks.update(part)
    return [of_all_ranks[idx] for idx in range(len(windows))]


def _score_batch(
    model: Decoder,
    batch: Sequence[Row],
    requests: Sequence[Sequence[int]],
    windows: Sequence[Window],
) -> dict[int, Score]:
    """Scores of one batch of rows by request; {} on a pipeline stage without the head."""
    asked = [(row, idx) for row, indices in enumerate(requests) for idx in indices]
    targets = [(row, windows[idx].token_ids[windows[idx].num_context :]) for row, idx in asked]
    names = [f"request {idx}" for _, idx in asked]
    found = score_rows(model, [ids for ids, _ in batch], targets, names, [context for _, context in batch])
    return {
        idx: (float(scores.logprobs.double().sum()), bool(scores.greedy.all()))
        for (_, idx), scores in zip(asked, found, strict=model.is_last)
    }


class Answerer:
    """A loaded model that answers lists of requests, and counts what was done and how long it took since `attach`."""

    environment: Mapping[str, Any] | None = None
    """Where answers come from, for records; None: from this machine."""

    def __init__(self, loaded: LoadedModel, batch_sizes: BatchSizes, *, quiet: bool = False) -> None:
        self.loaded, self.sizes, self.quiet = loaded, batch_sizes, quiet
        self._has_warned = False
        self.attach(Selection())

    def attach(self, selection: Selection) -> None:
        """Make the model sparse as `selection` says, and count from zero."""
        self.selection = selection
        self.seconds = 0.0
        """Spent in this model since, on this rank."""
        self.achieved: dict[str, Any] = {}
        """What was done since (see `sparse_predictor.cost.achieved`); of all ranks, as of the last call."""
        self._stats = attach_selection(self.loaded.model, selection)

    def answer(self, title: str, requests: Requests, eos_token_ids: Sequence[int] = ()) -> list[Any]:
        """(log-probability, is greedy) of what each window scores, or each text that a request continues its prompt by,
        up to its stop string or one of `eos_token_ids`; in order, on all ranks (a collective call: every rank asks the
        same)."""
        mesh, device = self.loaded.mesh, self.loaded.model.device
        digest = hash_of(repr((requests, eos_token_ids)).encode())
        check_same_everywhere(mesh, f"what lm-eval asks ({title})", digest)
        windows = [one for one in requests if isinstance(one, Window)]
        texts = [one for one in requests if isinstance(one, GenerationRequest)]
        started = time.perf_counter()
        with progress((), title, quiet=self.quiet, total=len(requests), unit="request") as bar:
            answers = self._write(texts, eos_token_ids, bar) if texts else self._score(windows, bar)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds += time.perf_counter() - started
        self.achieved = achieved_on_mesh(self.loaded, self.selection, self._stats)
        return answers

    def _score(self, windows: Sequence[Window], bar: Any) -> list[Any]:
        is_idle = self.selection.method != "dense" and self.selection.sparse_phases == "decode"
        if is_idle and not self._has_warned:
            self._has_warned = True
            logger.warning("sparse phases decode: a log-likelihood never decodes, so it will be the dense one")
        model, mesh = self.loaded.model, self.loaded.mesh
        return score_continuations(model, mesh, windows, batch_size=self.sizes.for_scoring, on_scored=bar.update)

    def _write(self, requests: Sequence[GenerationRequest], eos_token_ids: Sequence[int], bar: Any) -> list[Any]:
        mesh = self.loaded.mesh
        texts: dict[int, str] = {}

        def finish(idx: int, result: GenerationResult) -> None:
            if result.error is not None:
                raise ValueError(f"request {idx}: {result.error}")
            texts[idx] = result.text or ""
            bar.update(1)

        longest = max(len(request.prompt_token_ids) + request.max_new_tokens for request in requests)
        generate_on_mesh(
            self.loaded.model,
            mesh,
            requests,
            batch_size=self.sizes.for_generation(max(len(one.prompt_token_ids) for one in requests), longest),
            eos_token_ids=eos_token_ids,
            decode=self.loaded.decode,
            on_finish=finish,
        )
        written = mesh.from_rank_0(lambda: texts)
        return [written[idx] for idx in range(len(requests))]
