"""Log-likelihoods of continuations, as multiple-choice tasks ask for them, with all ranks and only as many logits as
are needed.

Requests that differ in their last token only (the letters of a multiple choice) are one row of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modules.decoder import Decoder
from modules.scoring import describe_problem, score_rows
from pipeline_parallel.launch import current_launch
from pipeline_parallel.mesh import ParallelMesh

Score = tuple[float, bool]
Row = tuple[tuple[int, ...], int]  # the tokens that are run, and how many of them are context


@dataclass(frozen=True)
class Continuation:
    """Tokens whose last `num_scored` are scored, given all those before each; at least one token stands before them.

    The last token conditions nothing, so `token_ids` may be one longer than the model's context.
    """

    token_ids: Sequence[int]
    num_scored: int


def score_continuations(
    model: Decoder,
    mesh: ParallelMesh,
    continuations: Sequence[Continuation],
    *,
    batch_size: Callable[[int], int],
    on_scored: Callable[[int], object] | None = None,
) -> list[Score]:
    """(sum of log-probabilities in nats, is every token the model's first choice) of each, in order, on all ranks.

    A collective call: every rank hands over the same. `batch_size(num_tokens)` is how many rows of at most so many
    tokens run together. `on_scored(n)` hears of n more requests. ValueError for tokens the model cannot run and for
    logits that are not finite.
    """
    rows: dict[Row, list[int]] = {}
    for idx, one in enumerate(continuations):
        conditions, target = list(one.token_ids[:-1]), list(one.token_ids[-1:])
        problem = describe_problem(model, conditions) or describe_problem(model, target)
        if problem or not 0 < one.num_scored < len(one.token_ids):
            problem = (
                problem or f"{one.num_scored} of {len(one.token_ids)} tokens to be scored; one at least stands before"
            )
            raise ValueError(f"request {idx}: {problem}")
        rows.setdefault((tuple(conditions), len(one.token_ids) - one.num_scored), []).append(idx)
    # Longest first: neighbours are of similar length, and what does not fit in memory fails at once.
    order = sorted(rows, key=lambda row: (-len(row[0]), row))
    found: dict[int, Score] = {}
    place, batch_idx = 0, 0
    while place < len(order):
        batch = order[place : place + batch_size(len(order[place][0]))]
        # Batches are dealt to the replicas, not rows: the same ones run together however many replicas there are.
        if batch_idx % mesh.dp_size == mesh.dp_rank:
            found.update(_score_batch(model, batch, [rows[row] for row in batch], continuations))
        place, batch_idx = place + len(batch), batch_idx + 1
        if on_scored is not None:
            on_scored(sum(len(rows[row]) for row in batch))
    if mesh.dp_size > 1:
        current_launch().barrier()
    everybody: dict[int, Score] = {}
    for part in mesh.gather(found):
        everybody.update(part)
    return [everybody[idx] for idx in range(len(continuations))]


def _score_batch(
    model: Decoder,
    batch: Sequence[Row],
    requests: Sequence[Sequence[int]],
    continuations: Sequence[Continuation],
) -> dict[int, Score]:
    """Scores of one batch of rows by request; {} on a pipeline stage without the head."""
    asked = [(row, idx) for row, indices in enumerate(requests) for idx in indices]
    targets = [(row, continuations[idx].token_ids[-continuations[idx].num_scored :]) for row, idx in asked]
    names = [f"request {idx}" for _, idx in asked]
    found = score_rows(model, [ids for ids, _ in batch], targets, names, [context for _, context in batch])
    return {
        idx: (float(scores.logprobs.double().sum()), bool(scores.greedy.all()))
        for (_, idx), scores in zip(asked, found, strict=model.is_last)
    }
