"""Made-up accuracy records of one model on five tasks; no number is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from analysis.results import Record, make_record

ENVIRONMENT = {"device": "Example GPU", "num_devices": 1, "date": "2026-03-04T05:06:07+00:00"}
# task, metric, questions, dense value, standard error, what a sparse model loses at density 0
TASKS = (
    ("arc_easy", "acc", 400, 0.62, 0.02, 0.1),
    ("arc_easy", "acc_norm", 400, 0.60, 0.03, 0.1),
    ("winogrande", "acc", 150, 0.60, 0.04, 0.1),
    ("boolq", "acc", 277, 0.55, 0.03, 0.0),
    ("lambada_openai", "acc", 150, 0.40, 0.04, 0.1),
    ("arithmetic_words", "exact_match", 100, 0.10, 0.03, 0.1),
)
LOSSES = {"oracle": 0.2, "predictor": 1.0, "random": 3.0}


@pytest.fixture
def accuracy_record() -> Callable[..., Record]:
    """Makes one record: of the dense model, unless labels say otherwise."""

    def make(task: str, metric: str, value: float, stderr: float | None = None, **changes: Any) -> Record:
        parts = {key: changes.pop(key) for key in ("achieved", "quality", "baseline", "environment") if key in changes}
        labels = {
            "model": "Small", "task": task, "method": "dense", "mlp_density": 1.0, "head_density": 1.0, "phase": "all",
            "num_fewshot": 0, "num_samples": 400, "batch_size": 8, "dtype": "bfloat16", "weights": "trained",
            "seed": 0, "density_budget": None, "execution": "mask",
        } | changes  # fmt: skip
        parts = {"environment": ENVIRONMENT, **parts}
        return make_record("accuracy", labels, metric, value, "", stderr=stderr, **parts)

    return make


@pytest.fixture
def accuracy_records(accuracy_record: Callable[..., Record]) -> list[Record]:
    """A whole sweep: dense, and three methods at two densities, on all tasks; with perplexities and one speed."""
    records = []
    methods = [("dense", 1.0), *((method, density) for method in LOSSES for density in (0.5, 0.3))]
    for task, metric, num_samples, dense, stderr, loss in TASKS:
        for method, density in methods:
            labels = {"num_samples": num_samples, "method": method, "mlp_density": density}
            if method == "dense":
                records.append(accuracy_record(task, metric, dense, stderr, **labels))
                continue
            achieved = {
                "mlp_density": density + 0.01, "head_density": 1.0,
                "sparse_calls": 40, "bytes_read_share": density + 0.08,
                "per_layer": {"mlp": [1.0, density, density], "attention": [1.0] * 3},
            }  # fmt: skip
            quality = {"per_layer": {"mlp": {"recall": [0.8, 0.6], "precision": [0.7, 0.5]}}}
            value = max(0.0, dense - loss * LOSSES[method] * (1 - density))
            parts = {"achieved": achieved, "baseline": {"name": "dense", "value": dense}}
            parts |= {} if method == "random" else {"quality": quality}
            records.append(accuracy_record(task, metric, value, stderr, **labels, **parts))
    dense_labels = dict(records[0]["labels"])
    for method, density in methods:
        labels = {name: setting for name, setting in dense_labels.items() if name not in ("num_fewshot", "num_samples")}
        labels |= {"task": "perplexity:small text", "window": 64, "num_tokens": 640}
        labels |= {"method": method, "mlp_density": density}
        value = 20.0 if method == "dense" else 20.0 * (1 + LOSSES[method] * (1 - density))
        more: dict[str, Any] = {} if method == "dense" else {"baseline": {"name": "dense", "value": 20.0}}
        records.append(make_record("perplexity", labels, "perplexity", value, "", environment=ENVIRONMENT, **more))
        if (method, density) == ("predictor", 0.5):
            labels = {**labels, "batch_size": 1, "num_tokens": 32, "execution": "gather"}
            against = {"name": "dense", "value": 400.0}
            later = {**ENVIRONMENT, "date": "2026-03-04T05:09:00+00:00"}
            speed = ("decode", labels, "tokens_per_s", 500.0, "tokens/s")
            records.append(make_record(*speed, baseline=against, environment=later))
    return records
