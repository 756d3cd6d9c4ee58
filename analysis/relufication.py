"""What ReLU in the place of SiLU changes in one model: pairs of records that differ in nothing else.

Both sides were trained on alike, so that what training itself changes is not taken for an effect of ReLU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.comparison import latest_records
from analysis.drift_facts import BLOCKS, chosen
from analysis.intervals import Estimate, estimate_of
from analysis.results import Record

NAME = "relufication"
# The sides as records name them: the activation, and whether the model was trained on.
VARIANTS = {
    "silu before training": ("silu", False),
    "relu before training": ("relu", False),
    "silu": ("silu", True),
    "relu": ("relu", True),
}
BEFORE_TRAINING, SIDES = (
    tuple(name for name, (_, is_trained) in VARIANTS.items() if is_trained == wanted) for wanted in (False, True)
)
# Labels that only records of one study, of sparse runs or of another text have.
PLAIN: dict[str, Any] = {"study": None, "method": None, "corpus": None}
SIDE_LABELS = ("variant", "activation", "model")


@dataclass(frozen=True, kw_only=True)
class RelufiedPair:
    """One number of both sides; `scale` turns its values into `unit`."""

    title: str
    unit: str
    scale: float
    silu: Estimate
    relu: Estimate


def relufied_pairs(records: Sequence[Record]) -> list[RelufiedPair]:
    """What is told of it: zeros, energy, held-out perplexity, recall and R-precision one layer ahead, sparse perplexity
    and speed."""
    found = latest_records([record for record in records if record["name"] == NAME])
    pairs = [
        _first(found, "exact zeros", "%", 100.0, metric="exact_zeros"),
        _first(found, "energy in the top tenth of neurons", "%", 100.0, metric="energy_share", top_share=0.1),
        _first(found, "held-out perplexity before training", "", 1.0, BEFORE_TRAINING, metric="perplexity", **PLAIN),
        _first(found, "held-out perplexity", "", 1.0, metric="perplexity", **PLAIN),
    ]
    for metric, title, block in (
        *(("recall", f"recall of {units}", block) for block, units in BLOCKS.items()),
        ("r_precision", "R-precision of neurons", "mlp"),
    ):
        labels: dict[str, Any] = {"metric": metric, "study": "lookahead", "block": block, "lookahead": 1}
        pairs.append(_first(found, f"{title}, look-ahead 1", "%", 100.0, **labels))
    timed = [record for record in found if record["metric"] == "tokens_per_s" and record["labels"].get("mlp_density")]
    for density in sorted({record["labels"]["mlp_density"] for record in timed}, reverse=True):
        sparse = {"mlp_density": density, "study": None}
        pairs.append(_first(found, f"perplexity at density {density:g}", "", 1.0, metric="perplexity", **sparse))
        speeds = [{**record, "value": record["ratio"]} for record in timed if record.get("ratio")]
        pairs.append(
            _first(speeds, f"speed over dense at density {density:g}", "×", 1.0, metric="tokens_per_s", **sparse)
        )
    return [pair for pair in pairs if pair is not None]


def _first(
    records: Sequence[Record],
    title: str,
    unit: str,
    scale: float,
    sides: tuple[str, ...] = SIDES,
    *,
    metric: str,
    **labels: Any,
) -> RelufiedPair | None:
    """The first two records of these labels whose other labels are the same."""
    for silu, relu in _alike(*(chosen(records, metric, variant=side, **labels) for side in sides)):
        return RelufiedPair(title=title, unit=unit, scale=scale, silu=estimate_of(silu), relu=estimate_of(relu))
    return None


def _alike(first: Sequence[Record], second: Sequence[Record]) -> Iterator[tuple[Record, Record]]:
    for one in first:
        for other in second:
            if _conditions(one) == _conditions(other):
                yield one, other


def _conditions(record: Record) -> dict[str, object]:
    """The labels that do not say which side a record is of."""
    return {name: value for name, value in record["labels"].items() if name not in SIDE_LABELS}
