"""Marks, seeds and the count of skipped GPU tests, for every test."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from typing import Any

# No test reaches a hub; set before anything imports huggingface_hub.
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import numpy as np
import pytest
import torch

from analysis.results import make_record

# These need the variable from the first import of triton on, so a process of their own.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["kernels_interpreter"]

# The same examples every run, and no deadline: continuous integration shares its cores.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

GPUS_NEEDED = {"cuda": 1, "multi_gpu": 2}
skipped_tests = dict.fromkeys(GPUS_NEEDED, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    skipped_tests.update(dict.fromkeys(GPUS_NEEDED, 0))
    for item in items:
        # multi_gpu first: a test that carries both marks counts once, as the rarer one.
        for marker in ("multi_gpu", "cuda"):
            if item.get_closest_marker(marker) and num_gpus < GPUS_NEEDED[marker]:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: needs {GPUS_NEEDED[marker]}+ GPU, has {num_gpus}"))
                skipped_tests[marker] += 1
                break


def pytest_collection_finish() -> None:
    """What has been imported stays until the end. Out of the collector's sight it costs no collection a second, of
    which the benchmarks make many."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = ", ".join(f"{count} {marker}" for marker, count in skipped_tests.items())
    terminalreporter.write_line(f"skipped for want of GPUs: {counts}")


@pytest.fixture(autouse=True)
def same_random_numbers_every_run() -> Iterator[None]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="session", autouse=True)
def written_text_is_kept_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Text that tiny models write themselves, of subprocesses, too."""
    os.environ["DEJAVU_LAB_CACHE"] = str(tmp_path_factory.mktemp("written_text"))


@pytest.fixture
def sample_records() -> list[dict[str, Any]]:
    """What evaluating and timing one made-up model of four layers would write; no number is measured."""
    environment = {
        "device": "cpu",
        "cpu": "Example CPU <1>",
        "num_cores": 2,
        "date": "2026-01-02T03:04:05+00:00",
    }
    environment |= {"torch": "2.13.0", "triton": "3.7.1", "python": "3.11.7"}
    environment |= {"commit": "0123456789abcdef", "dirty": True}
    shared = {
        "model": "Tiny|<b>model</b>",
        "head_density": 1.0,
        "batch_size": 1,
        "dtype": "float32",
        "seed": 0,
    }
    scored = {**shared, "corpus": "wikitext:test", "phase": "all", "window": 2048, "num_tokens": 4096}
    dense = {"name": "dense", "value": 20.0}

    def record(labels: dict[str, Any], value: float, **more: Any) -> dict[str, Any]:
        return make_record("perplexity", labels, "perplexity", value, "", environment=environment, **more)

    records = [record({**scored, "method": "dense", "mlp_density": 1.0}, 20.0)]
    losses = {"oracle": 0.2, "predictor": 1.0, "cats": 1.4, "teal": 2.0, "static": 6.0, "random": 40.0}
    for method, loss in losses.items():
        for density in (0.7, 0.5, 0.3):
            labels = {"method": method, "mlp_density": density}
            recall = 1 - (1 - density) * min(1.0, loss / 5)
            per_layer = {"recall": [recall - 0.02 * i for i in range(4)], "precision": [recall] * 4}
            value = 20.0 * (1 + loss * (1 - density) ** 2)
            achieved = {
                "mlp_density": density + 0.004, "head_density": 1.0,
                "sparse_calls": 8, "bytes_read_share": density + 0.05,
                "per_layer": {"mlp": [density + 0.01 * i for i in range(4)], "attention": [1.0] * 4},
            }  # fmt: skip
            quality = {
                "recall": recall,
                "precision": recall,
                "per_layer": {"mlp": per_layer, "attention": None},
            }
            records.append(record({**scored, **labels}, value, baseline=dense, achieved=achieved, quality=quality))
            speed = {"baseline": {"name": "dense", "value": 30.0}, "environment": environment}
            if method in ("predictor", "cats"):
                labels = {**shared, **labels, "phase": "decode"}
                rate = 30 / (density + 0.2)
                records.append(make_record("decode", labels, "tokens_per_s", rate, "tokens/s", **speed))
    for layer_idx in range(4):
        labels = {"model": shared["model"], "block": "mlp", "layer_idx": layer_idx}
        records.append(make_record("training", labels, "recall", 0.9, "", environment=environment))
    return records
