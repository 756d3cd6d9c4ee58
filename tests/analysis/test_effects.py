"""Effects of the controlled experiment's factors on made-up outcomes, worked out by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from analysis.effects import factor_effects, reported_effects
from analysis.results import Record
from analysis.studies import FACTORS, Levels, Outcome
from tests.analysis.made_up_drift import ablation_record

KINDS = list(itertools.product(*FACTORS.values()))
RECALL = Outcome(metric="recall", labels=(("study", "lookahead"), ("block", "mlp"), ("lookahead", 1)))


def experiment(value: Callable[[Levels, int], float], *, seeds: int = 3, metric: str = "recall") -> list[Record]:
    """Every kind of model under every seed."""
    labels = {"study": "lookahead", "block": "mlp", "lookahead": 1, "mlp_density": 0.5}
    return [
        ablation_record(metric, kind, seed, value(kind, seed), **labels)
        for seed, kind in itertools.product(range(seeds), KINDS)
    ]


def second(kind: Levels, factor: str) -> int:
    """1 at a factor's second level."""
    i = list(FACTORS).index(factor)
    return int(kind[i] == FACTORS[factor][1])


def test_main_effects_are_paired_over_seeds_and_the_other_factors() -> None:
    def recall(kind: Levels, seed: int) -> float:
        # The seed moves all models alike (which cancels), and SiLU's effect by -1, 0 and 1 points.
        return 0.9 + 0.03 * seed + second(kind, "activation") * (-0.2 + 0.01 * (seed - 1)) + 0.04 * second(kind, "norm")

    found = factor_effects(experiment(recall), RECALL)
    assert found is not None and found.num_models == 24 and found.seeds == (0, 1, 2)
    # Differences by seed -0.21, -0.20, -0.19: standard deviation 0.01, half 4.3027 * 0.01 / sqrt(3) = 0.024842.
    silu = found.main["activation"]
    assert (silu.value, silu.low, silu.high) == pytest.approx((-0.2, -0.224842, -0.175158), abs=1e-6)
    assert found.by_seed("activation") == pytest.approx((-0.21, -0.20, -0.19))
    for factor, effect in (("positions", 0.0), ("norm", 0.04)):
        assert (found.main[factor].low, found.main[factor].high) == pytest.approx((effect, effect))
    # 0.9 + 0.03 + half of the norm's 0.04, and 0.2 less.
    assert found.level_means("activation") == pytest.approx((0.95, 0.75))


def test_the_share_of_what_is_missed_is_paired_over_seeds() -> None:
    def recall(kind: Levels, seed: int) -> float:
        return 0.8 - (0.1 + 0.02 * seed) * second(kind, "positions")

    found = factor_effects(experiment(recall), RECALL)
    assert found is not None
    # 0.1 / 0.3, 0.12 / 0.32, 0.14 / 0.34.
    shares = [1 / 3, 0.375, 7 / 17]
    centre = sum(shares) / 3
    half = 4.302653 * math.sqrt(sum((share - centre) ** 2 for share in shares) / 2 / 3)
    share = found.share_of_missed("positions")
    assert (share.value, share.low, share.high) == pytest.approx((centre, centre - half, centre + half), abs=1e-6)
    perfect = factor_effects(experiment(lambda kind, seed: 1.0), RECALL)
    assert perfect is not None and perfect.share_of_missed("norm").value == 0


def test_the_lead_of_one_factor_over_another_is_of_sizes_and_paired() -> None:
    def recall(kind: Levels, seed: int) -> float:
        return 0.9 - (0.2 + 0.01 * seed) * second(kind, "activation") + (0.1 + 0.01 * seed) * second(kind, "norm")

    found = factor_effects(experiment(recall), RECALL)
    assert found is not None
    lead = found.lead("activation", "norm")
    assert (lead.value, lead.low, lead.high) == pytest.approx((0.1, 0.1, 0.1))


def test_the_largest_interaction_is_how_much_one_effect_depends_on_another_factor() -> None:
    def recall(kind: Levels, seed: int) -> float:
        both = second(kind, "activation") * second(kind, "positions")
        noise = 0.01 * (seed - 1) * both
        return 0.9 - 0.1 * second(kind, "activation") + 0.06 * both + noise + 0.02 * both * second(kind, "norm")

    found = factor_effects(experiment(recall), RECALL)
    assert found is not None
    largest = found.largest_interaction()
    assert largest is not None and largest[0] == ("activation", "positions")
    # SiLU's effect is -0.1 with learned positions, and 0.07 more with RoPE (0.06, and 0.02 for one norm of two);
    # noise of standard deviation 0.01; t at 1 - 0.05 / 6 with 2 degrees of freedom is 7.6488.
    half = 7.6488 * 0.01 / math.sqrt(3)
    assert (largest[1].value, largest[1].low, largest[1].high) == pytest.approx(
        (0.07, 0.07 - half, 0.07 + half), abs=1e-5
    )
    assert found.main["activation"].value == pytest.approx(-0.1 + 0.07 / 2)
    assert found.interactions["activation", "norm"].value == pytest.approx(0.01)


def test_one_seed_has_effects_and_no_intervals() -> None:
    found = factor_effects(experiment(lambda kind, seed: 0.9 - 0.1 * second(kind, "norm"), seeds=1), RECALL)
    assert found is not None and found.main["norm"].value == pytest.approx(-0.1)
    assert found.main["norm"].low is None and found.main["norm"].holds_zero


def test_a_seed_whose_models_are_not_all_there_is_left_out_and_named() -> None:
    records = experiment(lambda kind, seed: 0.9 + seed * second(kind, "norm"))
    found = factor_effects(records[:-1], RECALL)
    assert found is not None
    assert (found.seeds, found.incomplete_seeds, found.num_models) == ((0, 1), (2,), 16)
    assert found.main["norm"].value == pytest.approx(0.5)


def test_a_factor_that_does_not_vary_has_no_effect_and_no_interaction() -> None:
    records = [record for record in experiment(lambda kind, seed: 0.9) if record["labels"]["norm"] == "rms"]
    found = factor_effects(records, RECALL)
    assert found is not None and set(found.main) == {"activation", "positions"}
    assert set(found.interactions) == {("activation", "positions")}
    alone = [record for record in records if record["labels"]["activation"] == record["labels"]["positions"]]
    assert factor_effects(alone, RECALL) is None and factor_effects([], RECALL) is None


def test_perplexities_are_compared_as_logarithms_of_ratios_to_dense() -> None:
    records = experiment(lambda kind, seed: 10 * math.exp(0.3 * second(kind, "activation")), metric="perplexity")
    plain = factor_effects(records, Outcome(metric="perplexity"))
    with_dense = [{**record, "ratio": record["value"] / (10 + record["labels"]["seed"])} for record in records]
    found = factor_effects(with_dense, Outcome(metric="perplexity"))
    for each in (plain, found):
        assert each is not None and each.main["activation"].value == pytest.approx(0.3)


def test_several_values_of_one_model_are_refused() -> None:
    records = experiment(lambda kind, seed: 0.9)
    again = {**records[0], "labels": {**records[0]["labels"], "mlp_density": 0.3}}
    with pytest.raises(ValueError, match="several values of recall for one model of the ablation .*mlp_density 0.3"):
        factor_effects([*records, again], RECALL)


def test_a_measurement_that_was_repeated_counts_once() -> None:
    records = experiment(lambda kind, seed: 0.9)
    stamp = {**records[0]["environment"], "date": "2027-01-01T00:00:00+00:00"}
    again = {**records[0], "value": 0.5, "environment": stamp}
    found = factor_effects([again, *records], RECALL)
    assert found is not None and found.level_means("norm")[0] == pytest.approx((0.5 + 11 * 0.9) / 12)


@pytest.mark.parametrize("repeated_first", [False, True])
def test_a_repeat_on_another_text_is_not_mixed_with_the_experiment_that_has_more_models(repeated_first: bool) -> None:
    records = experiment(lambda kind, seed: 0.9 - 0.1 * second(kind, "norm"))
    repeat = experiment(lambda kind, seed: 0.9 - 0.2 * second(kind, "norm"), seeds=2)
    repeat = [{**record, "labels": {**record["labels"], "text": "another"}} for record in repeat]
    found = factor_effects([*repeat, *records] if repeated_first else [*records, *repeat], RECALL)
    assert found is not None and found.num_models == 24 and found.seeds == (0, 1, 2)
    assert found.main["norm"].value == pytest.approx(-0.1)


def test_recall_is_reported_first_one_layer_ahead_at_the_density_nearest_to_half() -> None:
    records = []
    for metric, block, lookahead, label in (
        ("perplexity", "mlp", 1, "mlp_density"), ("recall_drop", "mlp", 4, "mlp_density"),
        ("recall", "attention", 1, "head_density"), ("recall", "mlp", 0, "mlp_density"),
        ("recall", "mlp", 1, "mlp_density"),
    ):  # fmt: skip
        for kind, seed, density in itertools.product(KINDS, range(2), (0.3, 0.5)):
            labels = {"study": "lookahead", "block": block, "lookahead": lookahead, label: density}
            records.append(ablation_record(metric, kind, seed, 1 - density, **labels))
    found = reported_effects(records)
    assert [each.title for each in found] == [
        "recall of neurons at density 0.5, look-ahead 1",
        "recall of heads at density 0.5, look-ahead 1",
        "recall of neurons lost to look-ahead 4",
        "ln(perplexity / dense) with sparse neurons, look-ahead 1",
    ]
    assert [(each.unit, each.scale) for each in found] == [("points", 100.0)] * 3 + [("nats", 1.0)]
    assert found[0].effects.level_means("norm") == (0.5, 0.5)
