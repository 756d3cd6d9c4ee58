"""Where precision moves against recall, R-precision settles it: what is said of each way that it can go."""

from __future__ import annotations

import pytest

from analysis.drift_factor_text import factor_text, relufication_text
from analysis.drift_tables import study_tables
from analysis.effects import reported_effects
from analysis.results import Record
from tests.analysis.made_up_drift import ablation, record

# Recall 0.8 with ReLU, 0.7 with SiLU; 30 % and 50 % of the neurons are true: 0.48 and 0.7 of what is picked.
RECALL = "in part, for less than half of what is lost. In precision the other way, +22"
WHY = "the true sets differ in size, and recall at equal picks favours the smaller"
SETTLED = "In R-precision of neurons, look-ahead 1 (of as many picks as each token has neurons to be found): "


def recalls(effect: float = -0.1) -> list[Record]:
    return [
        {**each, "true_density": 0.5 if each["labels"]["activation"] == "silu gated" else 0.3}
        for each in ablation({"activation": effect}, noise=0.001)
    ]


def r_precisions(effect: float, noise: float = 0.0, static: float = 0.6, seeds: int = 3) -> list[Record]:
    found = ablation({"activation": effect}, noise=noise, metric="r_precision", seeds=seeds)
    return [{**each, "baseline": {"name": "static", "value": static}} for each in found]


def told(*records: Record) -> str:
    return factor_text(reported_effects(records), "activation")


@pytest.mark.parametrize(
    ("effect", "noise", "answer"),
    [
        # Half an interval is 2.484 times the noise; of 0.3 that SiLU misses, ReLU misses a third less, of 0.6 two.
        (-0.1, 0.01, "in part, for less than half of what is lost; it goes from 80.0 % to 70.0 %: -10.0 points "
         "[-12.5, -7.5], as recall does"),
        (-0.4, 0.01, "yes, for more than half of what is lost; it goes from 80.0 % to 40.0 %: -40.0 points "
         "[-42.5, -37.5], as recall does"),
        (0.1, 0.01, "no, the change that was measured is an improvement; it goes from 80.0 % to 90.0 %: +10.0 points "
         "[+7.5, +12.5], against recall (chance finds more of the larger true set, too)"),
        (-0.02, 0.01, "no effect was found, and none that is half of what is lost lies within the interval; it goes "
         "from 80.0 % to 78.0 %: no effect found larger than 4.5 points"),
        (0.02, 0.01, "no effect was found, and none that is half of what is lost lies within the interval; it goes "
         "from 80.0 % to 82.0 %: no effect found larger than 4.5 points"),
        (-0.1, 0.06, "these records cannot tell, the interval holds both no effect and half of what is lost; it goes "
         "from 80.0 % to 70.0 %: no effect found larger than 25 points"),
    ],
)  # fmt: skip
def test_r_precision_settles_what_recall_and_precision_leave_open(effect: float, noise: float, answer: str) -> None:
    text = told(*recalls(), *r_precisions(effect, noise))
    assert text.startswith(f"{SETTLED}{answer}. In recall at equal picks: {RECALL}")
    assert f"{WHY}. With gated SiLU instead of ReLU, recall" in text and "do not settle" not in text


def test_where_recall_rises_r_precision_that_falls_goes_against_it() -> None:
    risen = [
        {**each, "true_density": 0.3 if each["labels"]["activation"] == "silu gated" else 0.5} for each in recalls(0.1)
    ]
    assert "-10.0 points [-12.5, -7.5], against recall (chance" in told(*risen, *r_precisions(-0.1, 0.01))
    assert "+10.0 points [+7.5, +12.5], as recall does." in told(*risen, *r_precisions(0.1, 0.01))


def test_r_precision_of_fewer_models_than_recall_says_so() -> None:
    few, as_many = (told(*recalls(), *r_precisions(-0.1, 0.001, seeds=seeds)) for seeds in (2, 3))
    assert few.count("(means over 16 small models, paired over 2 seeds)") == 1
    assert few.count("(means over 24 small models, paired over 3 seeds)") == 1 == as_many.count("(means over")


def test_a_table_of_effects_says_of_each_row_what_it_was_measured_on() -> None:
    effects, models, *_ = study_tables("ablation", [*recalls(), *r_precisions(-0.1, 0.001, seeds=2)])
    measured = {row[0]: row[-1] for row in effects.rows}
    assert effects.columns[-1] == "measured on"
    assert measured["recall of neurons at density 0.5, look-ahead 1"] == "24 models, seeds 0, 1, 2"
    assert measured["R-precision of neurons, look-ahead 1"] == "16 models, seeds 0, 1"
    assert effects.caption.startswith("paired differences") and models.caption.startswith("means over 3 seeds, or")
    assert "R-precision of neurons, look-ahead 1 (%), 2 seeds" in models.columns
    effects, models, *_ = study_tables("ablation", recalls())
    assert "measured on" not in effects.columns and effects.caption.startswith("24 models, seeds 0, 1, 2; paired")
    assert models.caption == "means over 3 seeds"


def test_one_seed_of_r_precision_settles_nothing() -> None:
    assert told(*recalls(), *r_precisions(-0.1, seeds=1)).startswith(
        f"{SETTLED}one measurement has no interval, so these records cannot tell; it goes from 80.0 % to 70.0 %: "
        "-10 points (no interval) (means over 8 small models, paired over 1 seed). In recall at equal picks: "
    )


def test_without_r_precision_of_these_models_nothing_is_settled() -> None:
    assert told(*recalls()).startswith(f"In recall: {RECALL}")
    assert f"{WHY}, so these numbers alone do not settle it. With gated SiLU" in told(*recalls())
    of_one_kind = [each for each in r_precisions(-0.1) if each["labels"]["activation"] == "silu gated"]
    assert told(*recalls(), *of_one_kind).startswith(f"In recall: {RECALL}")


def test_where_precision_moves_with_recall_the_answer_is_of_recall() -> None:
    alike = [{**each, "true_density": 0.5} for each in recalls()]
    assert told(*alike, *r_precisions(0.1, 0.01)).startswith("In part, for less than half of what is lost. With gated")


def test_r_precision_and_what_it_gains_are_outcomes_of_the_look_ahead_study() -> None:
    gain = "share of what always the same neurons miss that is found at R picks, look-ahead 1"
    rank_study = [{**each, "labels": {**each["labels"], "study": "rank"}} for each in r_precisions(0.3)]
    found = {each.title: each for each in reported_effects([*recalls(), *r_precisions(-0.1), *rank_study])}
    assert found["R-precision of neurons, look-ahead 1"].effects.level_means("activation") == pytest.approx((0.8, 0.7))
    # (0.8 - 0.6) / 0.4 and (0.7 - 0.6) / 0.4.
    assert found[gain].effects.level_means("activation") == pytest.approx((0.5, 0.25))
    assert (found[gain].unit, found[gain].scale) == ("points", 100.0)
    without = {each.title for each in reported_effects(recalls())}
    assert without == set(found) - {"R-precision of neurons, look-ahead 1", gain}
    assert gain not in {each.title for each in reported_effects(r_precisions(-0.1, static=1.0))}


def test_the_relufied_model_is_told_by_its_r_precision_where_records_have_it() -> None:
    values = {
        ("recall", "lookahead", 1): (0.65, 0.75),
        ("r_precision", "lookahead", 1): (0.50, 0.51),
        ("r_precision", "lookahead", 2): (0.20, 0.90),
        ("r_precision", "rank", 1): (0.20, 0.90),
    }
    records = [
        record("relufication", metric, value, interval=(value - 0.01, value + 0.01),
               variant=variant, study=study, block="mlp", lookahead=lookahead)
        for (metric, study, lookahead), sides in values.items()
        for variant, value in zip(("silu", "relu"), sides, strict=True)
    ]  # fmt: skip
    sentence = (
        "In one model, ReLU in the place of SiLU (both trained on alike): recall of neurons, look-ahead 1: 75.0 % "
        "[74.0, 76.0] instead of 65.0 % [64.0, 66.0]"
    )
    r_precision = "R-precision of neurons, look-ahead 1: 51.0 % [50.0, 52.0] instead of 50.0 % [49.0, 51.0]"
    # hypot(1, 1) = 1.4 is more than 1.
    assert relufication_text(records) == f"{sentence}; {r_precision}, which the intervals do not tell apart."
    assert relufication_text([each for each in records if each["metric"] == "recall"]) == f"{sentence}."


@pytest.mark.parametrize(
    ("effect", "noise", "silu_density"),
    # Recall -2 [-9.5, +5.5] with precision that certainly rises; recall -10 [-12.5, -7.5], precision +1 [-0.8, +2.8].
    [(-0.02, 0.03, 0.5), (-0.1, 0.01, 0.35)],
)
def test_precision_goes_the_other_way_only_where_both_intervals_leave_out_no_change(
    effect: float, noise: float, silu_density: float
) -> None:
    unsure = [
        {**each, "true_density": silu_density if each["labels"]["activation"] == "silu gated" else 0.3}
        for each in ablation({"activation": effect}, noise=noise)
    ]
    means = {each.effects.outcome.metric: each.effects.main["activation"] for each in reported_effects(unsure)}
    assert means["recall"].value < 0 < means["implied_precision"].value
    assert "the other way" not in told(*unsure, *r_precisions(-0.1))
