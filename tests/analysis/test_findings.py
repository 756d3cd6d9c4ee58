"""What was found, in plain sentences that follow from the records."""

from __future__ import annotations

from typing import Any

from analysis.results import Record, make_record
from analysis.rivals import findings

SCORED = {"model": "Small", "task": "own text", "head_density": 1.0, "phase": "all"}
TIMED = {"model": "Small", "head_density": 1.0, "phase": "decode", "batch_size": 1}


def scored(method: str, ratio: float, density: float = 0.5, share: float = 0.5) -> Record:
    labels = {**SCORED, "method": method, "mlp_density": density}
    achieved = {"mlp_density": density, "head_density": 1.0, "sparse_calls": 1, "bytes_read_share": share}
    dense = {"name": "dense", "value": 10.0}
    return make_record("perplexity", labels, "perplexity", 10 * ratio, "", baseline=dense, achieved=achieved)


def timed(speed: float, density: float = 0.5) -> Record:
    labels: dict[str, Any] = {**TIMED, "method": "predictor", "mlp_density": density}
    return make_record("decode", labels, "tokens_per_s", speed, "tokens/s", baseline={"name": "dense", "value": 25.0})


def test_a_predictor_that_is_behind_and_slower_is_said_to_be() -> None:
    others = [scored("teal", 1.57), scored("cats", 1.33, share=0.67), scored("static", 9.0), scored("oracle", 1.02)]
    assert findings([scored("predictor", 1.65, share=0.58), scored("predictor", 3.0, 0.3), *others, timed(21.0)]) == [
        "Small, own text: with 50% of the neurons the predictor's perplexity is 1.65 times dense, reading 58% of the "
        "MLPs. It is behind CATS (1.33 times dense, reading 67% of the MLPs) and TEAL (1.57 times dense, reading 50% "
        "of the MLPs). Decoding with it is slower than dense: 21.0 tokens/s against 25.0, 0.84 times the speed."
    ]


def test_one_that_is_between_its_rivals_and_faster_is_said_to_be() -> None:
    (told,) = findings([scored("predictor", 1.2), scored("cats", 1.3), scored("teal", 1.1), timed(30.0)])
    assert "It is behind TEAL (1.10 times dense, reading 50% of the MLPs), ahead of CATS (1.30" in told
    assert told.endswith("Decoding with it is faster than dense: 30.0 tokens/s against 25.0, 1.20 times the speed.")


def test_only_what_is_known_is_told_at_a_density_that_the_others_have() -> None:
    (told,) = findings([scored("predictor", 1.65), scored("predictor", 3.0, 0.3), scored("cats", 4.0, 0.3)])
    assert told.startswith("Small, own text: with 30% of the neurons") and "ahead of CATS" in told
    assert findings([scored("predictor", 1.65)]) == [
        "Small, own text: with 50% of the neurons the predictor's perplexity is 1.65 times dense, reading 50% of the "
        "MLPs."
    ]
    assert findings([scored("cats", 1.3)]) == [] and findings([]) == []
