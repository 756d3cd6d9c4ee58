"""Lists of requests, log-likelihoods or texts to be written, answered by a loaded model, dense or sparse, on all ranks.

Whatever lm-eval's tasks ask comes down to such lists. Nothing here needs lm-eval.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from loguru import logger

from modules.requests import GenerationRequest, GenerationResult
from pipeline_parallel.engine import check_same_everywhere, generate_on_mesh
from scripts.batch_sizes import BatchSizes
from scripts.command_line import progress
from scripts.continuations import Continuation, score_continuations
from scripts.model_loading import LoadedModel
from scripts.run_records import achieved_on_mesh, hash_of
from sparse_predictor.selection import Selection, attach_selection


@dataclass(frozen=True)
class Call:
    """One list of requests: continuations to be scored, or texts to be written (`eos_token_ids` end each)."""

    title: str
    continuations: Sequence[Continuation] = ()
    generations: Sequence[GenerationRequest] = ()
    eos_token_ids: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.continuations) + len(self.generations)

    @cached_property
    def digest(self) -> str:
        """Twelve hex digits that tell what is asked."""
        return hash_of(json.dumps(asdict(self)).encode())


class Answerer:
    """A loaded model that answers calls, and counts what was done and how long it took since `attach`."""

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

    def answer(self, call: Call) -> list[Any]:
        """(log-probability, is greedy) of each continuation, or each text before its stop string, in order, on all
        ranks (a collective call: every rank asks the same)."""
        mesh, device = self.loaded.mesh, self.loaded.model.device
        check_same_everywhere(mesh, f"what lm-eval asks ({call.title})", call.digest)
        started = time.perf_counter()
        with progress((), call.title, quiet=self.quiet, total=len(call), unit="request") as bar:
            answers = self._write(call, bar) if call.generations else self._score(call, bar)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds += time.perf_counter() - started
        self.achieved = achieved_on_mesh(self.loaded, self.selection, self._stats)
        return answers

    def _score(self, call: Call, bar: Any) -> list[Any]:
        is_idle = self.selection.method != "dense" and self.selection.sparse_phases == "decode"
        if is_idle and not self._has_warned:
            self._has_warned = True
            logger.warning("sparse phases decode: a log-likelihood never decodes, so it will be the dense one")
        model, mesh = self.loaded.model, self.loaded.mesh
        return score_continuations(
            model, mesh, call.continuations, batch_size=self.sizes.for_scoring, on_scored=bar.update
        )

    def _write(self, call: Call, bar: Any) -> list[Any]:
        prepared, mesh = call.generations, self.loaded.mesh
        texts: dict[int, str] = {}

        def finish(idx: int, result: GenerationResult) -> None:
            if result.error is not None:
                raise ValueError(f"request {idx}: {result.error}")
            texts[idx] = result.text or ""
            bar.update(1)

        longest = max(len(request.prompt_token_ids) + request.max_new_tokens for request in prepared)
        generate_on_mesh(
            self.loaded.model,
            mesh,
            prepared,
            batch_size=self.sizes.for_generation(max(len(one.prompt_token_ids) for one in prepared), longest),
            eos_token_ids=call.eos_token_ids,
            decode=self.loaded.decode,
            on_finish=finish,
        )
        written = mesh.from_rank_0(lambda: texts)
        return [written[idx] for idx in range(len(prepared))]
