"""Made-up records of the drift study: drift, ablation, relufication. No number is measured; all come from a seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.results import Record, make_record
from analysis.studies import FACTORS

ENVIRONMENT = {"device": "Example GPU", "num_devices": 1, "date": "2026-03-04T05:06:07+00:00"}
COMMON = {"num_tokens": 4096, "dtype": "float32", "seed": 0}
LOOKAHEADS = tuple(range(9))
DENSITIES = {"mlp": {"mlp_density": 0.5}, "attention": {"head_density": 0.5}}


def record(
    name: str,
    metric: str,
    value: float,
    *,
    interval: Sequence[float] | None = None,
    per_layer: Sequence[float | None] | None = None,
    baseline: Mapping[str, Any] | None = None,
    unit: str = "",
    **labels: Any,
) -> Record:
    """One record with the labels that all of the study have."""
    extras: dict[str, Any] = {"interval": interval, "per_layer": per_layer}
    return make_record(name, labels, metric, value, unit, baseline=baseline, environment=ENVIRONMENT, **extras)


def lookahead_record(metric: str, lookahead: int, value: float, half: float | None, **more: Any) -> Record:
    """One of the look-ahead study of neurons at density 0.5, its interval so much to either side."""
    labels: dict[str, Any] = {"model": "Small", **COMMON, "study": "lookahead", "block": "mlp", "lookahead": lookahead}
    labels |= {"mlp_density": 0.5, **more}
    name = labels.pop("name", "drift")
    interval = None if half is None else [value - half, value + half]
    return record(name, metric, value, interval=interval, **labels)


def ablation_record(metric: str, levels: Sequence[str], seed: int, value: float, **labels: Any) -> Record:
    """One of a model of the ablation: its levels in the order activation, positions, norm."""
    factors = dict(zip(FACTORS, levels, strict=True))
    model = {"model": "-".join(levels), **COMMON, **factors, "seed": seed}
    return record("ablation", metric, value, interval=[value - 0.01, value + 0.01], **{**model, **labels})


def ablation(
    effects: Mapping[str, float], *, noise: float = 0.0, seeds: int = 3, metric: str = "recall", **labels: Any
) -> list[Record]:
    """0.8 plus the effect of each factor at its second level; effects move by the noise from seed to seed."""
    records = []
    for seed, kind in itertools.product(range(seeds), itertools.product(*FACTORS.values())):
        value = 0.8
        for level, (factor, levels) in zip(kind, FACTORS.items(), strict=True):
            value += (effects.get(factor, 0.0) + noise * (seed - 1)) * (level == levels[1])
        settings = {"study": "lookahead", "block": "mlp", "lookahead": 1, "mlp_density": 0.5, **labels}
        records.append(ablation_record(metric, kind, seed, value, **settings))
    return records


def whole_study(*, num_layers: int = 12, seeds: int = 3) -> list[Record]:
    """Everything a full study would write of one model, an ablation of eight small ones, and a relufication."""
    source = random.Random(0)
    records = list(_drift("drift", COMMON | {"model": "Small-135M"}, num_layers, source))
    for levels, seed in itertools.product(itertools.product(*FACTORS.values()), range(seeds)):
        labels = {"model": "-".join(levels), **COMMON, **dict(zip(FACTORS, levels, strict=True)), "seed": seed}
        records += _drift("ablation", labels, min(8, num_layers), source)
        loss = 3.1 - 0.05 * (levels[0] != "relu") + source.gauss(0, 0.01)
        records.append(record("ablation", "loss", loss, interval=[loss - 0.02, loss + 0.02], unit="nats", **labels))
    for variant in ("silu", "relu"):
        labels = {
            "model": "Small-135M",
            **COMMON,
            "variant": variant,
            "activation": "relu" if variant == "relu" else "silu gated",
        }
        records += _drift("relufication", labels, num_layers, source)
    return records


def _drift(name: str, labels: dict[str, Any], num_layers: int, source: random.Random) -> Iterator[Record]:
    is_relu = labels.get("activation") == "relu"

    def of(metric: str, values: Sequence[float | None], half: float, baseline: Any = None, **more: Any) -> Record:
        known = [value for value in values if value is not None]
        value = sum(known) / len(known)
        interval = [value - half, value + half]
        return record(name, metric, value, interval=interval, per_layer=values, baseline=baseline, **labels, **more)

    level = source.gauss(0, 0.004)
    # Their `variant` would be the cosine's.
    for point, lookahead, variant, tokens in itertools.product(
        ("block_input", "after_attention"), LOOKAHEADS[1:],
        ("raw", "centred", "standardised", "no_massive"), ("all", "ordinary"),
    ):  # fmt: skip
        if lookahead >= num_layers or name == "relufication":
            continue
        steepness = {"raw": 0.04, "centred": 0.07, "standardised": 0.12, "no_massive": 0.08}[variant]
        values = [
            math.exp(-steepness * lookahead * (1 + 1.5 * (layer == 0))) - 0.01 * source.random()
            if layer + lookahead < num_layers
            else None
            for layer in range(num_layers)
        ]
        yield of("cosine", values, 0.01, point=point, lookahead=lookahead, variant=variant, tokens=tokens)
        if tokens == "ordinary" and variant != "centred":
            yield of("cka", values, 0.02, point=point, lookahead=lookahead, variant=variant, tokens=tokens)
    for point in ("after_attention", "after_mlp"):
        values = [0.1 + 0.3 * math.exp(-layer) for layer in range(num_layers)]
        yield of("relative_update", values, 0.01, point=point, tokens="ordinary")
    for block, density in DENSITIES.items():
        start = (0.88 if is_relu else 0.68) + level + (0.1 if block == "attention" else 0)
        own = [start + 0.02 * source.random() for _ in range(num_layers)]
        static = {"name": "static", "value": 0.57}
        for lookahead in LOOKAHEADS[:num_layers]:
            study = {"study": "lookahead", "block": block, "lookahead": lookahead, "predictor_rank": 64, **density}
            lost = [0.008 * lookahead * (1 + 0.2 * source.random()) for _ in own[lookahead:]]
            values = [None] * lookahead + [before - less for before, less in zip(own[lookahead:], lost, strict=True)]
            yield of("recall", values, 0.006, static, **study)
            yield of("precision", values, 0.006, **study)
            if block == "mlp":
                yield of("r_precision", values, 0.006, static, **study)
            if lookahead:
                yield of("recall_drop", lost, 0.002, **study)
            if lookahead in (0, 1, 4, 8):
                dense, start_perplexity = {"name": "dense", "value": 20.0}, 30 + 10 * (not is_relu) + 50 * level
                yield of("perplexity", [start_perplexity + 1.2 * lookahead], 2.0, dense, **study)
                if lookahead:
                    yield of("loss_rise", [math.log(1 + 1.2 * lookahead / start_perplexity)], 0.01, **study)
        for rank in (8, 32, 128, 256):
            study = {
                "study": "rank",
                "block": block,
                "lookahead": 0,
                "predictor_rank": rank,
                "calibration_tokens": 8192,
            }
            yield of("recall", [start - 0.3 / rank**0.5], 0.006, **study, **density)
        for tokens in (1024, 4096, 16384):
            study = {"study": "calibration_tokens", "block": block, "lookahead": 0, "predictor_rank": 64}
            yield of("recall", [start - 3 / tokens**0.5], 0.006, **study, calibration_tokens=tokens, **density)
    for share in (0.01, 0.05, 0.1, 0.2, 0.3, 0.5):
        energy = share ** (0.15 if is_relu else 0.35)
        yield of("energy_share", [energy + 0.01 * source.random() for _ in range(num_layers)], 0.01, top_share=share)
    yield of("exact_zeros", [0.9 if is_relu else 0.0] * num_layers, 0.0)
    yield of("boundary_margin", [0.03 if is_relu else 0.08] * num_layers, 0.002, density=0.3)
    chance = {"name": "chance", "value": 0.3}
    yield of("reuse_tokens", [0.55 + 0.02 * source.random() for _ in range(num_layers)], 0.01, chance, density=0.3)
    for lookahead in (1, 2, 4):
        values = [0.31 + 0.02 * source.random() for _ in range(num_layers)]
        yield of("reuse_layers", values, 0.01, chance, density=0.3, lookahead=lookahead)
    if name == "relufication":
        value = 21.5 if is_relu else 20.7
        yield of("perplexity", [value], 0.4)
        yield of("perplexity", [value + 9], 0.4, corpus="another text")
        sparse = {"method": "predictor", "mlp_density": 0.2}
        yield of("perplexity", [value + (2 if is_relu else 20)], 0.4, **sparse)
        timed = record(name, "tokens_per_s", 120, baseline={"name": "dense", "value": 100}, **labels, **sparse)
        yield {**timed, "interval": None}
