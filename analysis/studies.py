"""Picks the numbers of drift study, ablation and relufication out of records: by model, by block, by look-ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from analysis.comparison import latest_records
from analysis.intervals import Estimate, estimate_of, mean_with_interval, rank_correlation, share_of_gain
from analysis.results import Record, grouped, read_records

STUDY_NAMES = ("drift", "ablation", "relufication")
# The level of OPT, on which Deja Vu works, then Llama's: an effect is the second minus the first.
FACTORS = {"activation": ("relu", "silu gated"), "positions": ("learned", "rotary"), "norm": ("layer", "rms")}
LEVEL_NAMES = {
    "relu": "ReLU", "silu": "SiLU", "silu gated": "gated SiLU", "learned": "learned positions", "rotary": "RoPE",
    "layer": "LayerNorm", "rms": "RMSNorm",
}  # fmt: skip
BLOCKS = {"mlp": "neurons", "attention": "heads"}
DENSITY_LABELS = {"mlp": "mlp_density", "attention": "head_density"}
# Of several densities the one nearest to it speaks for a study.
USUAL_DENSITY = 0.5
# What the predictor of neurons reads (the residual before the MLP's norm), then what the layer reads.
COSINE_POINTS = ("after_attention", "block_input")
COSINE_VARIANTS = ("raw", "centred", "standardised", "no_massive")
CONDITION_LABELS = ("corpus", "dtype", "seed", "window", "tp_size", "pp_size", "dp_size")
Levels = tuple[str, ...]  # one level a factor, in the order of FACTORS
# Numbers by look-ahead, out of records of one study, one rank and one metric.
ByLookahead = Mapping[int, Estimate]
Reader = Callable[[Sequence[Record], str], dict[int, Estimate]]
# Fewer layers say nothing about a rank correlation.
LEAST_LAYERS = 8


def study_records(source: str | None = None) -> list[Record]:
    """The records of the study in a file, or in all .jsonl files of a folder; None: analysis/results.

    A relative path starts at the repository root, wherever a notebook's kernel runs. FileNotFoundError where there is
    nothing to read.
    """
    root = Path(__file__).parents[1]
    path = root / (source or "analysis/results")
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(
            f"DRIFT_RESULTS={source}: {path} is no file of records and no folder of .jsonl files; "
            f"a relative path starts at {root}"
        )
    return [record for record in read_records(*files) if record["name"] in STUDY_NAMES]


def model_of(record: Record) -> str:
    """The model's name, or the name of its shape."""
    return str(record["labels"].get("model") or record["labels"].get("shape") or "")


def studied_models(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The newest records named "drift" by model.

    Of a model that was measured under several conditions (text, precision) each metric has only those of its newest
    record, so that no curve mixes them.
    """

    def conditions(record: Record) -> tuple[Any, ...]:
        return tuple(record["labels"].get(label) for label in CONDITION_LABELS)

    def newest(of_metric: Sequence[Record]) -> list[Record]:
        return max(grouped(of_metric, conditions).values(), key=newest_date)

    models = grouped(latest_records(record for record in records if record["name"] == "drift"), model_of)
    return {
        model: [
            record for of_metric in grouped(found, lambda each: each["metric"]).values() for record in newest(of_metric)
        ]
        for model, found in models.items()
    }


def newest_date(records: Sequence[Record]) -> str:
    """Of the newest of some records."""
    return max(str(record["environment"].get("date") or "") for record in records)


def compared_models(records: Sequence[Record]) -> dict[str, list[Record]]:
    """What curves of one plot are of: each studied model, the ablation by activation, each side of the relufication.

    Of the ablation only what the effects are of, too: seeds that have all its models.
    """
    groups = studied_models(records)
    ablation = of_complete_seeds(latest_records([record for record in records if record["name"] == "ablation"]))
    sides = latest_records([record for record in records if record["name"] == "relufication"])
    for record, label in [*((one, "activation") for one in ablation), *((one, "variant") for one in sides)]:
        level = str(record["labels"].get(label))
        groups.setdefault(f"{record['name']}, {LEVEL_NAMES.get(level, level)}", []).append(record)
    return groups


def of_complete_seeds(records: Sequence[Record]) -> list[Record]:
    """Of the ablation's records, number by number: those of seeds that have it of every kind of model that any has."""

    def number(record: Record) -> tuple[Any, ...]:
        labels = record["labels"].items()
        return record["metric"], *sorted(
            (name, repr(each)) for name, each in labels if name not in (*FACTORS, "seed", "model")
        )

    complete: set[int] = set()
    for same in grouped(records, number).values():
        by_seed = grouped(same, lambda record: record["labels"].get("seed"))
        kinds = {seed: set(map(levels_of, found)) for seed, found in by_seed.items()}
        every = set().union(*kinds.values())
        complete |= {id(record) for seed, found in by_seed.items() if kinds[seed] == every for record in found}
    return [record for record in records if id(record) in complete]


def levels_of(record: Record) -> tuple[Any, ...]:
    """Of a model of the ablation its level of each factor."""
    return tuple(record["labels"].get(factor) for factor in FACTORS)


def chosen(records: Sequence[Record], metric: str, **labels: Any) -> list[Record]:
    """Records of a metric with these labels; None stands for a label that is not set."""
    return [
        record
        for record in records
        if record["metric"] == metric and all(record["labels"].get(name) == value for name, value in labels.items())
    ]


def by_label(records: Sequence[Record], label: str) -> dict[Any, Record]:
    """The last record for each value of a label, by rising value."""
    found = {record["labels"][label]: record for record in records if record["labels"].get(label) is not None}
    return dict(sorted(found.items()))


def pooled(records: Sequence[Record], label: str) -> dict[Any, Estimate]:
    """By value of a label: a model's own estimate; of several models their mean, with an interval over their seeds."""
    known = [record for record in records if record["labels"].get(label) is not None]
    found = {}
    for value, alike in sorted(grouped(known, lambda record: record["labels"][label]).items()):
        by_seed = grouped(alike, lambda record: record["labels"].get("seed"))
        means = [mean(record["value"] for record in of_seed) for of_seed in by_seed.values()]
        found[value] = estimate_of(alike[0]) if len(alike) == 1 else mean_with_interval(means)
    return found


def at_lowest_density(records: Sequence[Record]) -> list[Record]:
    """Of records at several densities those at the lowest."""
    densities = [record["labels"].get("density") for record in records]
    lowest = min((density for density in densities if density is not None), default=None)
    return [record for record in records if record["labels"].get("density") == lowest]


def usual_density(records: Sequence[Record], block: str) -> float | None:
    """Of the densities in records, the one nearest to the usual."""
    densities = {record["labels"].get(DENSITY_LABELS[block]) for record in records} - {None}
    return min(densities, key=lambda density: abs(density - USUAL_DENSITY), default=None)


def of_study(records: Sequence[Record], block: str, study: str = "lookahead") -> list[Record]:
    """The records of what the predictors of one kind of block do when one thing varies."""
    return [
        record for record in records if (record["labels"].get("study"), record["labels"].get("block")) == (study, block)
    ]


def at_usual_density(records: Sequence[Record], block: str, study: str = "lookahead") -> list[Record]:
    """Of a study of a kind of block, the records at the usual density."""
    studied = of_study(records, block, study)
    density = usual_density(studied, block)
    return [record for record in studied if record["labels"].get(DENSITY_LABELS[block]) == density]


def cosine_records(records: Sequence[Record]) -> list[Record]:
    """Cosines at the first point and of the first kind of token (ordinary, else all) that the records hold."""
    for tokens in ("ordinary", "all"):
        for point in COSINE_POINTS:
            if found := chosen(records, "cosine", point=point, tokens=tokens):
                return found
    return []


def cosines(records: Sequence[Record]) -> dict[str, dict[int, Estimate]]:
    """Mean cosines by variant and look-ahead, of one model's records."""
    found = cosine_records(records)
    by_variant = {
        variant: {
            lookahead: estimate_of(record)
            for lookahead, record in by_label(chosen(found, "cosine", variant=variant), "lookahead").items()
        }
        for variant in COSINE_VARIANTS
    }
    return {variant: by_lookahead for variant, by_lookahead in by_variant.items() if by_lookahead}


def lost_by_layer(records: Sequence[Record], block: str) -> dict[int, list[float | None]]:
    """By look-ahead: at each layer predicted, recall at look-ahead 0 minus that; None where either is unknown."""
    recalls = by_label(chosen(at_usual_density(records, block), "recall"), "lookahead")
    own = (recalls.pop(0, None) or {}).get("per_layer") or []
    return {
        lookahead: [
            None if before is None or after is None else before - after
            for before, after in zip(own, record.get("per_layer") or [], strict=False)
        ]
        for lookahead, record in recalls.items()
    }


def layer_correlation(records: Sequence[Record]) -> tuple[int, int, Estimate] | None:
    """Over layers: Spearman's correlation of 1 - cosine (raw) with the recall of neurons lost, at the longest
    look-ahead that enough layers have.

    Returns (look-ahead, number of layers, correlation with Bonett and Wright's (2000) interval), or None without such
    records. Layers are not independent of each other, so the interval is a guide.
    """
    drifts = by_label(chosen(cosine_records(records), "cosine", variant="raw"), "lookahead")
    for lookahead, lost in sorted(lost_by_layer(records, "mlp").items(), reverse=True):
        # A cosine stands at the layer it starts from, a recall at the layer that is predicted.
        cosines_there = drifts.get(lookahead, {}).get("per_layer") or []
        pairs = [
            (1 - similarity, less)
            for similarity, less in zip(cosines_there, lost[lookahead:], strict=False)
            if similarity is not None and less is not None
        ]
        if len(pairs) >= LEAST_LAYERS:
            return lookahead, len(pairs), rank_correlation(pairs)
    return None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One number that every model of the experiment has: a metric and the labels that tell it from its others."""

    metric: str
    labels: tuple[tuple[str, Any], ...] = ()

    def matches(self, record: Record) -> bool:
        """Whether a record is of this outcome; records of other factor levels and seeds are, too."""
        return record["metric"] == self.metric and all(
            record["labels"].get(name) == setting for name, setting in self.labels
        )

    def value(self, record: Record) -> float:
        """Perplexities are compared as logarithms (nats), of ratios to dense where they have one."""
        if self.metric != "perplexity":
            return float(record["value"])
        return math.log(record["ratio"] if record.get("ratio") is not None else record["value"])


def outcome_values(records: Sequence[Record], outcome: Outcome) -> dict[int, dict[Levels, float]]:
    """The outcome by seed and levels.

    Models trained on different texts are experiments of their own, never one: of several that have the outcome, the
    one with the most models (then the newest).
    """
    ablation = latest_records(record for record in records if record["name"] == "ablation" and outcome.matches(record))
    by_text = grouped(ablation, lambda record: record["labels"].get("text"))
    found: dict[int, dict[Levels, float]] = {}
    for record in max(by_text.values(), key=lambda one: (len(one), newest_date(one)), default=()):
        levels = levels_of(record)
        if not all(level in known for level, known in zip(levels, FACTORS.values(), strict=True)):
            continue
        cells = found.setdefault(int(record["labels"].get("seed") or 0), {})
        if levels in cells:
            told = ", ".join(f"{name} {setting}" for name, setting in record["labels"].items())
            raise ValueError(f"several values of {outcome.metric} for one model of the ablation ({told})")
        cells[levels] = outcome.value(record)
    return found


@dataclass(frozen=True, kw_only=True)
class DistanceFacts:
    """What one model, or the mean over the models of the ablation, loses to look-ahead in one kind of block.

    All by look-ahead. `lost`: recall at look-ahead 0 minus recall at that one, on the same tokens and layers. On those
    layers, at look-ahead 0: `own`, the recall; `gain`, the recall minus `static`, that of the same units for every
    token. `loss`: ln(perplexity / dense); `loss_rise`: that minus the one at look-ahead 0, on the same text. `rank` and
    `calibration_tokens`: of the predictors, None where they differ.
    """

    subject: str
    block: str
    density: float | None
    rank: int | None
    calibration_tokens: int | None
    recall: ByLookahead
    static: ByLookahead
    lost: ByLookahead
    own: ByLookahead
    gain: ByLookahead
    loss: ByLookahead
    loss_rise: ByLookahead

    def share(self, lookahead: int) -> Estimate | None:
        """What distance takes of the gain; None where none is known."""
        return share_of_gain(self.lost[lookahead], self.gain[lookahead]) if lookahead in self.gain else None


def distance_facts(subject: str, records: Sequence[Record], block: str) -> DistanceFacts | None:
    """Of one model's records; None where the look-ahead study is not among them."""
    return _facts(subject, at_usual_density(records, block), block, _of_one_model)


def at_largest_rank(subject: str, records: Sequence[Record], block: str) -> DistanceFacts | None:
    """Of the rank study's predictors of the largest rank; None unless it is larger than the look-ahead study's."""
    studied = at_usual_density(records, block, "rank")
    usual = by_label(at_usual_density(records, block), "predictor_rank")
    largest = max(by_label(chosen(studied, "recall_drop"), "predictor_rank"), default=0)
    of_rank = [record for record in studied if record["labels"].get("predictor_rank") == largest]
    return _facts(subject, of_rank, block, _of_one_model) if largest > max(usual, default=largest) else None


def ablation_distance_facts(records: Sequence[Record], block: str) -> DistanceFacts | None:
    """The mean over all models of the ablation, with an interval over its seeds; None without such records."""
    studied = at_usual_density([record for record in records if record["name"] == "ablation"], block)
    num_models = 0

    def of_ablation(found: Sequence[Record], metric: str) -> dict[int, Estimate]:
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

    facts = _facts("", studied, block, of_ablation)
    if facts is None or not num_models:
        return None
    return DistanceFacts(**{**vars(facts), "subject": f"mean of the {num_models} models of the ablation"})


def _facts(subject: str, studied: Sequence[Record], block: str, read: Reader) -> DistanceFacts | None:
    if not studied:
        return None

    def only(label: str) -> Any:
        values = {record["labels"].get(label) for record in studied}
        return values.pop() if len(values) == 1 else None

    def of_same_layers(found: ByLookahead) -> ByLookahead:
        """What is lost added again, with the interval of what was found."""
        return {key: found[key] + less.value for key, less in lost.items() if key in found}

    recall, lost, against = read(studied, "recall"), read(studied, "recall_drop"), _against_static(studied)
    return DistanceFacts(
        subject=subject,
        block=block,
        density=usual_density(studied, block),
        rank=only("predictor_rank"),
        calibration_tokens=only("calibration_tokens"),
        recall=recall,
        static=read(against, "static"),
        lost=lost,
        own=of_same_layers(recall),
        gain=of_same_layers(read(against, "gain")),
        loss=read(studied, "perplexity"),
        loss_rise=read(studied, "loss_rise"),
    )


def _of_one_model(records: Sequence[Record], metric: str) -> dict[int, Estimate]:
    found = by_label(chosen(records, metric), "lookahead")
    if metric == "perplexity":
        return {lookahead: _log_estimate(record) for lookahead, record in found.items() if record.get("baseline")}
    return {lookahead: estimate_of(record) for lookahead, record in found.items()}


def _log_estimate(record: Record) -> Estimate:
    """ln(perplexity / dense) of a record; its interval from `ratio_interval`, which is paired, or else `interval`."""
    dense = record["baseline"]["value"]
    ends = record.get("ratio_interval") or [end / dense for end in record.get("interval") or ()]
    low, high = map(math.log, ends) if ends else (None, None)
    return Estimate(value=math.log(record["value"] / dense), low=low, high=high)


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
