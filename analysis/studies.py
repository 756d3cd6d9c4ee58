"""Picks the numbers of drift study, ablation and relufication out of records: by model, by block, by look-ahead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from analysis.comparison import latest_records
from analysis.intervals import Estimate, estimate_of, mean_with_interval, rank_correlation
from analysis.results import Record, read_records

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
    models: dict[str, dict[str, dict[tuple[Any, ...], list[Record]]]] = {}
    for record in latest_records([record for record in records if record["name"] == "drift"]):
        conditions = tuple(record["labels"].get(label) for label in CONDITION_LABELS)
        by_conditions = models.setdefault(model_of(record), {}).setdefault(record["metric"], {})
        by_conditions.setdefault(conditions, []).append(record)
    return {
        model: [record for groups in metrics.values() for record in max(groups.values(), key=_newest_date)]
        for model, metrics in models.items()
    }


def _newest_date(records: Sequence[Record]) -> str:
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
    kinds: dict[tuple[Any, ...], dict[Any, set[tuple[Any, ...]]]] = {}

    def place(record: Record) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
        labels = record["labels"]
        other = sorted((name, repr(each)) for name, each in labels.items() if name not in (*FACTORS, "seed", "model"))
        return (record["metric"], *other), labels.get("seed"), tuple(labels.get(factor) for factor in FACTORS)

    for outcome, seed, kind in map(place, records):
        kinds.setdefault(outcome, {}).setdefault(seed, set()).add(kind)
    complete = {
        (outcome, seed)
        for outcome, by_seed in kinds.items()
        for seed, found in by_seed.items()
        if found == set().union(*by_seed.values())
    }
    return [record for record in records if place(record)[:2] in complete]


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
    values: dict[Any, dict[Any, list[Record]]] = {}
    for record in records:
        if (value := record["labels"].get(label)) is not None:
            values.setdefault(value, {}).setdefault(record["labels"].get("seed"), []).append(record)
    found = {}
    for value, by_seed in sorted(values.items()):
        alone = [record for of_seed in by_seed.values() for record in of_seed]
        means = [mean(record["value"] for record in of_seed) for of_seed in by_seed.values()]
        found[value] = estimate_of(alone[0]) if len(alone) == 1 else mean_with_interval(means)
    return found


def usual_density(records: Sequence[Record], block: str) -> float | None:
    """Of the densities in records, the one nearest to the usual."""
    densities = {record["labels"].get(DENSITY_LABELS[block]) for record in records} - {None}
    return min(densities, key=lambda density: abs(density - USUAL_DENSITY), default=None)


def is_of_lookahead_study(record: Record, block: str) -> bool:
    """Whether a record says what the predictor of a kind of block loses to look-ahead."""
    return record["labels"].get("study") == "lookahead" and record["labels"].get("block") == block


def at_usual_density(records: Sequence[Record], block: str) -> list[Record]:
    """Of the look-ahead study of a kind of block, the records at the usual density."""
    studied = [record for record in records if is_of_lookahead_study(record, block)]
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


def layer_correlation(records: Sequence[Record], block: str = "mlp") -> tuple[int, int, Estimate] | None:
    """Over layers: Spearman's correlation of 1 - cosine (raw) with the recall lost, at the longest look-ahead that
    enough layers have.

    Returns (look-ahead, number of layers, correlation with Bonett and Wright's (2000) interval), or None without such
    records. Layers are not independent of each other, so the interval is a guide.
    """
    drifts = by_label(chosen(cosine_records(records), "cosine", variant="raw"), "lookahead")
    for lookahead, lost in sorted(lost_by_layer(records, block).items(), reverse=True):
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
