"""Picks out of records what a predictor gains, and what of it distance takes: by model, by block, by look-ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from analysis.effects import Outcome, outcome_values
from analysis.intervals import Estimate, estimate_of, mean_with_interval
from analysis.results import Record
from analysis.studies import DENSITY_LABELS, at_usual_density, by_label, chosen, usual_density

# Numbers by look-ahead, out of records of one study, one rank and one metric.
ByLookahead = dict[int, Estimate]
Reader = Callable[[Sequence[Record], str], ByLookahead]


@dataclass(frozen=True, kw_only=True)
class LargestRank:
    """What the predictor of the largest rank that was measured loses at its longest look-ahead, and what it gains."""

    rank: int
    lookahead: int
    lost: Estimate
    gain: Estimate


@dataclass(frozen=True, kw_only=True)
class DistanceFacts:
    """What one model, or the mean over the models of the ablation, loses to look-ahead in one kind of block.

    All by look-ahead. `lost`: recall at look-ahead 0 minus recall at that one, on the same tokens and layers. Without
    distance, on those layers: `missed`, one minus recall; `gain`, recall minus that of the same units for every token.
    `loss`: ln(perplexity / dense); `loss_rise`: that minus the one at look-ahead 0, on the same text. `rank` and
    `calibration_tokens`: of the predictors, None where they differ. `largest_rank`: None where no larger rank is known.
    """

    subject: str
    block: str
    density: float | None
    rank: int | None = None
    calibration_tokens: int | None = None
    recall: Mapping[int, Estimate] = field(default_factory=dict)
    static_recall: Mapping[int, float] = field(default_factory=dict)  # of the same units for every token
    lost: Mapping[int, Estimate] = field(default_factory=dict)
    missed: Mapping[int, Estimate] = field(default_factory=dict)
    gain: Mapping[int, Estimate] = field(default_factory=dict)
    loss: Mapping[int, Estimate] = field(default_factory=dict)
    loss_rise: Mapping[int, Estimate] = field(default_factory=dict)
    largest_rank: LargestRank | None = None


def distance_facts(subject: str, records: Sequence[Record], block: str) -> DistanceFacts | None:
    """Of one model's records; None where the look-ahead study is not among them."""
    return _facts(subject, records, block, _of_one_model)


def ablation_distance_facts(records: Sequence[Record], block: str) -> DistanceFacts | None:
    """The mean over all models of the ablation, with an interval over its seeds; None without such records."""
    ablation = [record for record in records if record["name"] == "ablation"]
    num_models = 0

    def of_ablation(found: Sequence[Record], metric: str) -> ByLookahead:
        nonlocal num_models
        means = {}
        for lookahead in by_label(chosen(found, metric), "lookahead"):
            cells = outcome_values(found, Outcome(metric=metric, labels=(("lookahead", lookahead),)))
            kinds = set().union(*cells.values())
            complete = [of_seed for of_seed in cells.values() if set(of_seed) == kinds]
            if complete:
                means[lookahead] = mean_with_interval([mean(of_seed.values()) for of_seed in complete])
                num_models = max(num_models, len(complete) * len(kinds))
        return means

    facts = _facts("", ablation, block, of_ablation)
    if facts is None or not num_models:
        return None
    return DistanceFacts(**{**vars(facts), "subject": f"Mean of the {num_models} models of the ablation"})


def _facts(subject: str, records: Sequence[Record], block: str, read: Reader) -> DistanceFacts | None:
    studied = at_usual_density(records, block)
    if not studied:
        return None
    recall, lost = read(studied, "recall"), read(studied, "recall_drop")
    rank = _only(studied, "predictor_rank")
    return DistanceFacts(
        subject=subject,
        block=block,
        density=usual_density(studied, block),
        rank=rank,
        calibration_tokens=_only(studied, "calibration_tokens"),
        recall=recall,
        static_recall={key: static.value for key, static in read(_against_static(studied), "static").items()},
        lost=lost,
        missed={key: 1 - own for key, own in _without_distance(recall, lost).items()},
        gain=_gains(studied, lost, read),
        loss=read(studied, "perplexity"),
        loss_rise=read(studied, "loss_rise"),
        largest_rank=_largest_rank(records, block, rank, read),
    )


def _of_one_model(records: Sequence[Record], metric: str) -> ByLookahead:
    found = by_label(chosen(records, metric), "lookahead")
    if metric == "perplexity":
        return {lookahead: log_estimate(record) for lookahead, record in found.items() if record.get("baseline")}
    return {lookahead: estimate_of(record) for lookahead, record in found.items()}


def log_estimate(record: Record) -> Estimate:
    """ln(perplexity / dense) of a record; its interval from `ratio_interval`, which is paired, or else `interval`."""
    dense = record["baseline"]["value"]
    low, high = record.get("ratio_interval") or [end / dense for end in record.get("interval") or ()] or (None, None)
    value, *ends = (None if ratio is None else math.log(ratio) for ratio in (record["value"] / dense, low, high))
    assert value is not None
    return Estimate(value=value, low=ends[0], high=ends[1])


def _only(records: Sequence[Record], label: str) -> Any:
    """The value of a label that all of them share, else None."""
    values = {record["labels"].get(label) for record in records}
    return values.pop() if len(values) == 1 else None


def _against_static(records: Sequence[Record]) -> list[Record]:
    """Of recalls that say what the same units for every token have: records of that ("static"), and of what is gained
    ("gain"). Records have no interval of the former, so the gain is as uncertain as the recall."""
    found = []
    for record in chosen(records, "recall"):
        baseline = record.get("baseline") or {}
        if baseline.get("name") == "static":
            static = baseline["value"]
            ends = [end - static for end in record.get("interval") or ()] or None
            found.append({**record, "metric": "static", "value": static, "interval": None})
            found.append({**record, "metric": "gain", "value": record["value"] - static, "interval": ends})
    return found


def _gains(records: Sequence[Record], lost: Mapping[int, Estimate], read: Reader) -> ByLookahead:
    return _without_distance(read(_against_static(records), "gain"), lost)


def _without_distance(found: Mapping[int, Estimate], lost: Mapping[int, Estimate]) -> ByLookahead:
    """What is lost added again, with the interval of what was found: of the same layers at look-ahead 0."""
    return {key: found[key] + less.value for key, less in lost.items() if key in found}


def _largest_rank(records: Sequence[Record], block: str, usual: int | None, read: Reader) -> LargestRank | None:
    """Out of the rank study at the usual density; None unless it has a larger rank than the look-ahead study."""
    studied = chosen(records, "recall", study="rank", block=block) + chosen(
        records, "recall_drop", study="rank", block=block
    )
    density = usual_density(studied, block)
    studied = [record for record in studied if record["labels"].get(DENSITY_LABELS[block]) == density]
    by_rank = by_label(chosen(studied, "recall_drop"), "predictor_rank")
    rank = max(by_rank, default=None)
    if rank is None or usual is None or rank <= usual:
        return None
    of_rank = [record for record in studied if record["labels"].get("predictor_rank") == rank]
    lost = read(of_rank, "recall_drop")
    gains = _gains(of_rank, lost, read)
    if not gains:
        return None
    lookahead = max(gains)
    return LargestRank(rank=rank, lookahead=lookahead, lost=lost[lookahead], gain=gains[lookahead])
