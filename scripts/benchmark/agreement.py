"""Whether all ranks together write what one rank writes: greedy tokens of a real model, row by row.

A sum over ranks rounds differently, so two candidates that are nearly equal may change places, after which a row is
another text. Such a row is looked at where it first differs: there one rank's two best logits (the head taken in
float32) must lie within `--tolerance`. Up to there log-probabilities are compared, too. With a sparse `--method` a
flipped unit counts as well as a flipped token; only float64 keeps both from happening.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch.nn import functional as F

from analysis.results import Record, append_record, make_record
from data.corpora import iter_documents, token_documents
from modules.checkpoint.load import load_model
from modules.decoder import Decoder
from modules.requests import GenerationRequest, GenerationResult
from pipeline_parallel.engine import generate_on_mesh
from pipeline_parallel.mesh import ParallelMesh
from scripts.command_line import run_stage
from scripts.model_loading import LoadedModel, RunOptions
from scripts.selection_options import SelectionOptions
from scripts.written_text import self_writer

PROMPT_TOKENS = (16, 32, 64, 128)  # taking turns, so that batches are ragged


@dataclass(frozen=True, kw_only=True)
class Options(SelectionOptions, RunOptions):
    """Compare greedy tokens and log-probabilities of all ranks together with those of one."""

    corpus: str
    """Prompts are the beginnings of its documents."""
    output: Path
    """JSON lines; records are appended."""
    num_prompts: int = 64
    """Prompts."""
    new_tokens: int = 64
    """Tokens generated for each."""
    tolerance: float = 0.1
    """How far the two best logits of one rank may lie apart where a row first differs."""


def main(options: Options) -> list[Record]:
    """Append two records: the largest gap at a first difference, and the largest difference of a log-probability before
    one. ValueError if the gap is beyond the tolerance."""
    options.selection(seed=options.seed).check()
    loaded = options.load()
    mesh = loaded.mesh
    requests = read_requests(options, loaded)
    options.attach(loaded.model, seed=options.seed)
    together = answers(loaded.model, mesh, requests, options.batch_size)
    if mesh.rank > 0:
        return []
    whole = load_model(loaded.directory, dtype=loaded.model.compute_dtype, device=mesh.device)
    options.attach(whole, seed=options.seed)
    alone = answers(whole, ParallelMesh.single(mesh.device), requests, options.batch_size)
    gaps, differences, densities = [], [0.0], [0.0]
    for request, ours, theirs in zip(requests, together, alone, strict=True):
        place = first_difference(ours.token_ids, theirs.token_ids)
        if place is not None:
            gaps.append(gap_of_best(whole, [*request.prompt_token_ids, *theirs.token_ids[:place]]))
        pairs = [*zip(ours.prompt_logprobs or [], theirs.prompt_logprobs or [], strict=True)][1:]
        pairs += [*zip(ours.logprobs, theirs.logprobs, strict=True)][:place]
        differences += [abs((here or 0.0) - (there or 0.0)) for here, there in pairs]
        densities.append(abs(ours.mlp_density - theirs.mlp_density) if place is None else 0.0)
    labels: dict[str, Any] = {
        "model": loaded.name,
        "dtype": str(whole.compute_dtype).removeprefix("torch."),
        "method": options.method,
        "tp_size": mesh.tp_size,
        "pp_size": mesh.pp_size,
        "dp_size": mesh.dp_size,
        "batch_size": options.batch_size,
        "num_prompts": options.num_prompts,
        "new_tokens": options.new_tokens,
        "rows_that_differ": len(gaps),
        "largest_density_difference": max(densities),
    }
    records = [
        make_record("agreement", labels, "largest_gap", max(gaps, default=0.0), "logits"),
        make_record("agreement", labels, "largest_logprob_difference", max(differences), "nats"),
    ]
    for record in records:
        append_record(options.output, record)
    largest_gap = records[0]["value"]
    logger.info(
        f"tp {mesh.tp_size} pp {mesh.pp_size} dp {mesh.dp_size} batch {options.batch_size} {options.method} "
        f"{labels['dtype']}: {len(gaps)} of {len(requests)} rows differ; where they first do, the two best logits of "
        f"one rank are at most {largest_gap:.3f} apart; before, log-probabilities differ by {max(differences):.2e}"
    )
    if largest_gap > options.tolerance:
        raise ValueError(f"a row differs where the two best logits are {largest_gap:.3f} apart")
    return records


def read_requests(options: Options, loaded: LoadedModel) -> list[GenerationRequest]:
    """Ragged prompts from the corpus; ValueError if it holds too few."""
    documents = token_documents(
        loaded.tokenizer,
        iter_documents(options.corpus, side="test", self_writer=self_writer(loaded, quiet=options.quiet)),
        vocab_size=loaded.model.config.vocab_size,
        max_tokens=None,
    )
    requests: list[GenerationRequest] = []
    for document in documents:
        length = PROMPT_TOKENS[len(requests) % len(PROMPT_TOKENS)]
        if len(document) >= length:
            requests.append(
                GenerationRequest(prompt_token_ids=document[:length], max_new_tokens=options.new_tokens, echo=True)
            )
        if len(requests) == options.num_prompts:
            return requests
    raise ValueError(f"--corpus {options.corpus} holds {len(requests)} prompts that are long enough")


def answers(
    model: Decoder, mesh: ParallelMesh, requests: list[GenerationRequest], batch_size: int
) -> list[GenerationResult]:
    """Each request's, on rank 0."""
    heard: dict[int, GenerationResult] = {}
    generate_on_mesh(model, mesh, requests, batch_size=batch_size, eos_token_ids=(), on_finish=heard.__setitem__)
    return [heard[idx] for idx in sorted(heard)]


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first token that differs, None if all are equal."""
    return next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)


@torch.inference_mode()
def gap_of_best(model: Decoder, token_ids: list[int]) -> float:
    """Between the two best logits after a text; the head is applied in float32."""
    hidden_states = model(torch.tensor([token_ids], device=model.device))[0, -1].float()
    if model.project_out is not None:
        hidden_states = F.linear(hidden_states, model.project_out.dequantised().float())
    best = F.linear(hidden_states, model.lm_head.dequantised().float()).topk(2).values
    return float(best[0] - best[1])


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
