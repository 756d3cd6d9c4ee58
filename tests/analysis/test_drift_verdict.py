"""The verdict: its answers at both sides of each decision, the numbers that they stand on, what it says is missing."""

from __future__ import annotations

import pytest

from analysis.drift import Answer, answers, judge, study_tables, verdict
from analysis.effects import reported_effects
from analysis.intervals import Estimate
from analysis.results import Record, make_record
from tests.analysis.made_up_drift import ablation, lookahead_record, record

DRIFT = "Does drift explain it?"
FACTORS = [f"Does {factor} explain it?" for factor in ("the activation function", "RoPE", "the norm")]
ACTIVATION, ROPE, NORM = FACTORS
LAYERS, MOST = "Do layers that drift more lose more?", "Which factor moves recall of neurons most?"


def answered(*records: Record) -> dict[str, Answer]:
    return {answer.question: answer for answer in answers(records)}


def text_of(question: str, *records: Record) -> str:
    return answered(*records)[question].text


def rows_of(answer: Answer) -> list[dict[str, str]]:
    (table,) = answer.tables
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def distance(drop: float, half: float | None, *, far: float = 0.1, **labels: object) -> list[Record]:
    """Recall of neurons at look-ahead 0, 1 and 4, 0.2 above the same units always; the loss at 1 so uncertain."""
    recalls = [lookahead_record("recall", at, 0.7 - less, 0.01, **labels) for at, less in ((0, 0), (1, drop), (4, far))]
    return [
        *({**each, "baseline": {"name": "static", "value": 0.5}} for each in recalls),
        lookahead_record("recall_drop", 1, drop, half, **labels),
        lookahead_record("recall_drop", 4, far, 0.02, **labels),
    ]


def recalls_with_true_sets(effect: float = -0.1, noise: float = 0.001, silu: float = 0.5) -> list[Record]:
    """Recall 0.8 with ReLU; 30 % and `silu` of the neurons are true, so precision is 0.48 and 2 * silu * recall."""
    return [
        {**each, "true_density": silu if each["labels"]["activation"] == "silu gated" else 0.3}
        for each in ablation({"activation": effect}, noise=noise)
    ]


def r_precisions(effect: float, noise: float = 0.0, seeds: int = 3) -> list[Record]:
    found = ablation({"activation": effect}, noise=noise, metric="r_precision", seeds=seeds)
    return [{**each, "baseline": {"name": "static", "value": 0.6}} for each in found]


def test_records_of_other_studies_have_no_verdict_and_each_question_says_what_is_missing() -> None:
    assert verdict([]) == "" and answers([]) == []
    assert verdict([make_record("perplexity", {"model": "Small"}, "perplexity", 20.0, "")]) == ""
    cosine = {"point": "block_input", "lookahead": 1, "variant": "raw", "tokens": "all"}
    found = answered(record("drift", "cosine", 0.95, interval=(0.94, 0.96), model="Small", **cosine))
    assert list(found) == [DRIFT, *FACTORS]
    assert all(answer.text.startswith("These records cannot tell: ") for answer in found.values())
    assert "they lack recall_drop of the look-ahead study" in found[DRIFT].text
    assert all("scripts.studies.ablation" in found[factor].text for factor in FACTORS)


@pytest.mark.parametrize(
    ("loss", "share", "judgement"),
    [
        ((0.1, None, None), (0.2, None, None), "these records cannot tell"),
        ((0.01, -0.001, 0.02), (0.1, -0.1, 0.49), "no"),
        ((0.01, 0.0, 0.02), (0.1, 0.0, 0.51), "these records cannot tell"),
        ((-0.01, -0.02, 0.0), (-0.1, -0.2, 0.0), "no"),
        ((-0.01, -0.02, -0.001), (-0.1, -0.2, -0.051), "no"),
        ((0.01, 0.001, 0.02), (0.02, 0.01, 0.04), "no"),
        ((0.01, 0.001, 0.02), (0.02, 0.01, 0.05), "in part"),
        ((0.01, 0.001, 0.02), (0.6, 0.5, 0.7), "in part"),
        ((0.01, 0.001, 0.02), (0.6, 0.51, 0.7), "yes"),
        ((0.01, 0.001, 0.02), None, "in part"),
        ((0.01, -0.001, 0.02), None, "these records cannot tell"),
        ((-0.01, -0.02, -0.001), None, "no"),
    ],
)
def test_a_judgement_is_no_stronger_than_both_intervals(
    loss: tuple[float, float | None, float | None],
    share: tuple[float, float | None, float | None] | None,
    judgement: str,
) -> None:
    def estimate(value: float, low: float | None, high: float | None) -> Estimate:
        return Estimate(value=value, low=low, high=high)

    assert judge(estimate(*loss), None if share is None else estimate(*share)) == judgement


@pytest.mark.parametrize(
    ("drop", "half", "answer", "share"),
    [
        # The gain is 0.2, as uncertain as a recall: 0.004 / 0.2, 0.003 / 0.21, 0.005 / 0.19.
        (0.004, 0.001, "No", "2.0 [1.4, 2.7]"),
        (0.01, 0.02, "No", "5 [-6, 16]"),
        (-0.10, 0.01, "No", "-50 [-58, -42]"),
        (0.15, 0.01, "Yes", "75 [66, 85]"),
        (0.10, 0.20, "These records cannot tell", "50 [-53, 158]"),
        (0.01, None, "These records cannot tell", "5 (no interval)"),
    ],
)
def test_the_answer_begins_with_yes_or_no_and_names_what_it_was_measured_on(
    drop: float, half: float | None, answer: str, share: str
) -> None:
    found = answered(*distance(drop, half, predictor_rank=64, calibration_tokens=8192, corpus="a.txt"))[DRIFT]
    value, rest = share.split(" ", 1)
    told = f"closed-form predictors of neurons lose {value} % {rest} of what they gain over always the same units"
    assert found.text.startswith(f"{answer}, one layer back: {told} (Small on a.txt); in part, 4 layers back: closed-")
    near, far = rows_of(found)
    assert (near["measured on"], near["rank"], near["layers back"]) == ("Small on a.txt", "64", "1")
    assert near["of the gain (%)"] == share and near["drift explains it"] == answer.lower()
    assert near["recall, own layer (%)"] == "70.0 [69.0, 71.0]" and near["always the same units (%)"] == "50.0"
    assert far["lost to distance (points)"] == "+10.0 [+8.0, +12.0]" and far["drift explains it"] == "in part"
    assert "density 0.5, calibrated on 8192 tokens" in found.tables[0].caption


def test_the_model_that_loses_most_decides_and_the_largest_rank_has_a_row() -> None:
    ranked = [
        {**each, "labels": {**each["labels"], "study": "rank", "predictor_rank": rank}}
        for rank in (16, 256)
        for each in distance(0.004, 0.001, far=0.05)
    ]
    records = [*distance(0.004, 0.001, predictor_rank=64), *distance(0.06, 0.01, model="Other", predictor_rank=64)]
    found = answered(*records, *ranked)[DRIFT]
    assert found.text.startswith("In part, one layer back: closed-form predictors of neurons lose 30 % ")
    assert "(Other)" in found.text and "of 2 losses the largest decides" in found.text
    assert [(row["measured on"], row["rank"], row["layers back"]) for row in rows_of(found)] == [
        ("Small", "64", "1"), ("Small", "64", "4"), ("Other", "64", "1"), ("Other", "64", "4"), ("Small", "256", "4"),
    ]  # fmt: skip
    smaller = [each for each in ranked if each["labels"]["predictor_rank"] == 16]
    assert {row["rank"] for row in rows_of(answered(*records, *smaller)[DRIFT])} == {"64"}


def test_perplexity_stands_beside_recall_from_the_paired_rise_of_the_loss() -> None:
    own = {**lookahead_record("perplexity", 0, 20.0, 1.0), "baseline": {"name": "dense", "value": 10.0}}
    rises = [lookahead_record("loss_rise", lookahead, 0.05 * lookahead, 0.02) for lookahead in (1, 4)]
    near, far = rows_of(answered(*distance(0.01, 0.002), {**own, "ratio_interval": [1.9, 2.1]}, *rises)[DRIFT])
    # ln 2, ln 1.9 and ln 2.1.
    assert near["ln(perplexity / dense), own layer"] == "0.69 [0.64, 0.75]"
    assert (near["more with distance"], far["more with distance"]) == (
        "+0.050 [+0.030, +0.070]",
        "+0.200 [+0.180, +0.220]",
    )


def test_the_mean_over_the_ablation_answers_beside_the_studied_models() -> None:
    recalls = [{**each, "baseline": {"name": "static", "value": 0.6}} for each in ablation({})]
    drops = [
        {**each, "value": 0.02 + 0.001 * (each["labels"]["seed"] - 1)}
        for each in ablation({}, lookahead=1, metric="recall_drop")
    ]
    rows = rows_of(answered(*recalls, *drops, *distance(0.004, 0.001))[DRIFT])
    (mean,) = [row for row in rows if row["measured on"] == "mean of the 24 models of the ablation"]
    # Seeds 0.019, 0.020, 0.021: half 4.3027 * 0.001 / sqrt(3) = 0.00248; the gain on those layers is 0.22.
    assert mean["lost to distance (points)"] == "+2.00 [+1.75, +2.25]" and mean["of the gain (%)"] == "9.1 [7.9, 10.3]"


def test_layers_that_drift_more_are_said_to_lose_more_only_where_the_interval_says_so() -> None:
    labels = {"point": "after_attention", "lookahead": 1, "variant": "raw", "tokens": "ordinary"}
    falling = [1 - 0.01 * layer for layer in range(12)]
    own, lost = lookahead_record("recall", 0, 0.7, 0.01), lookahead_record("recall_drop", 1, 0.05, 0.01)
    shaken = [0.5, 0.3, 0.6, 0.2, 0.55, 0.45, 0.1, 0.62, 0.33, 0.5, 0.47]
    for per_layer, answer in (
        ([0.7 - 0.02 * layer for layer in range(11)], "Yes: over 11 layers of Small the rank correlation"),
        ([0.5 + 0.01 * layer for layer in range(11)], "No, less: over 11 layers of Small the rank correlation"),
        (shaken, "These records cannot tell: over 11 layers of Small the rank correlation"),
    ):
        far = {**lookahead_record("recall", 1, 0.65, 0.01), "per_layer": [None, *per_layer]}
        cosine = record("drift", "cosine", 0.9, per_layer=[*falling[:11], None], model="Small", **labels)
        assert text_of(LAYERS, {**own, "per_layer": [0.7] * 12}, lost, far, cosine).startswith(answer)
    far["per_layer"] = [None, *shaken[:7]]
    assert LAYERS not in answered({**own, "per_layer": [0.7] * 12}, lost, far, cosine), "of too few layers"


@pytest.mark.parametrize(
    ("effect", "noise", "answer"),
    [
        (-0.1, 0.01, "In part"),
        (-0.05, 0.03, "No"),
        (-0.1, 0.06, "These records cannot tell"),
        (0.1, 0.01, "No"),
        (-0.5, 0.01, "Yes"),
        (-0.2, 0.01, "In part"),
        (0.0, 0.0, "No"),
    ],
)
def test_a_factor_is_answered_from_the_interval_of_its_effect(effect: float, noise: float, answer: str) -> None:
    # 0.2 is missed with learned positions; the interval is 2.484 times the noise to either side.
    found = text_of(ROPE, *ablation({"positions": effect}, noise=noise))
    assert found.startswith(f"{answer}: recall of neurons")


def test_a_factor_is_told_with_its_levels_the_interval_and_the_models_that_it_was_measured_on() -> None:
    found = answered(*ablation({"activation": -0.1, "norm": 0.01}, noise=0.01))
    assert found[ACTIVATION].text == (
        "In part: recall of neurons at density 0.5, look-ahead 1, is 70.5 % with gated SiLU and 80.5 % with ReLU, "
        "-10.0 points [-12.5, -7.5] (closed-form predictors of 24 small models, paired over 3 seeds)."
    )
    (row,) = rows_of(found[ACTIVATION])
    assert (row["ReLU (%)"], row["gated SiLU (%)"], row["change (points)"]) == ("80.5", "70.5", "-10.0 [-12.5, -7.5]")
    assert row["explains it"] == "in part" and row["measured on"] == "24 models, seeds 0, 1, 2"
    one_seed = text_of(NORM, *ablation({"norm": -0.3}, seeds=1))
    assert one_seed.startswith("These records cannot tell: ") and "-30 points (no interval)" in one_seed
    gated = [each for each in ablation({}) if each["labels"]["activation"] == "silu gated"]
    assert text_of(ACTIVATION, *gated) == "These records cannot tell: the models of the ablation do not differ in it."


def test_recall_of_heads_alone_is_not_taken_for_that_of_neurons() -> None:
    heads = ablation({"norm": -0.1}, block="attention", head_density=0.5, mlp_density=None)
    assert text_of(NORM, *heads).startswith("These records cannot tell: they lack recall of neurons")
    assert MOST not in answered(*heads)


@pytest.mark.parametrize(
    ("effect", "noise", "answer"),
    [
        # Half an interval is 2.484 times the noise; of 0.3 that SiLU misses, ReLU misses a third less, of 0.6 two.
        (-0.1, 0.01, "In part"),
        (-0.4, 0.01, "Yes"),
        (0.1, 0.01, "No"),
        (-0.02, 0.01, "No"),
        (-0.1, 0.06, "These records cannot tell"),
    ],
)
def test_r_precision_decides_where_recall_and_precision_go_apart(effect: float, noise: float, answer: str) -> None:
    text = text_of(ACTIVATION, *recalls_with_true_sets(), *r_precisions(effect, noise))
    assert text.startswith(f"{answer}: R-precision of neurons, look-ahead 1, is ")
    assert "recall, -10.00 points" in text and "precision, +22" in text and "R-precision decides" in text


def test_without_r_precision_of_several_seeds_nothing_is_settled() -> None:
    of_one_kind = [each for each in r_precisions(-0.1) if each["labels"]["activation"] == "silu gated"]
    for more in ([], of_one_kind):
        text = text_of(ACTIVATION, *recalls_with_true_sets(), *more)
        assert text.startswith("These records cannot tell: recall, -10.00 points") and "R-precision is not" in text
    one_seed = text_of(ACTIVATION, *recalls_with_true_sets(), *r_precisions(-0.1, seeds=1))
    assert (
        one_seed.startswith("These records cannot tell: R-precision")
        and "8 small models, paired over 1 seed)" in one_seed
    )


@pytest.mark.parametrize(
    ("effect", "noise", "silu_density"),
    # Precision moves with recall, -4; recall -2 [-9.5, +5.5] with precision that certainly rises; recall -10 [-12.5,
    # -7.5] with precision +1 [-0.8, +2.8].
    [(-0.1, 0.001, 0.3), (-0.02, 0.03, 0.5), (-0.1, 0.01, 0.35)],
)
def test_recall_decides_unless_both_intervals_leave_out_no_change(
    effect: float, noise: float, silu_density: float
) -> None:
    records = recalls_with_true_sets(effect, noise, silu_density)
    assert "R-precision" not in text_of(ACTIVATION, *records, *r_precisions(-0.1))


def test_true_sets_of_different_sizes_are_outcomes_beside_their_recalls() -> None:
    recalls = [
        {**each, "baseline": {"name": "static", "value": each["value"] - 0.1 * (1 - each["value"]) / 0.9}}
        for each in recalls_with_true_sets()
    ]
    rank_study = [{**each, "labels": {**each["labels"], "study": "rank"}} for each in r_precisions(0.3)]
    found = reported_effects([*recalls, *r_precisions(-0.1), *rank_study, *ablation({}, metric="precision")])
    effects = {each.title: each.effects.main["activation"].value for each in found}
    # 0.8 * 0.3 / 0.5 = 0.48 and 0.7 * 0.5 / 0.5 = 0.7; (0.8 - 0.6) / 0.4 and (0.7 - 0.6) / 0.4;
    # (recall - static) / (1 - static) is 0.1 by construction, whatever the recall.
    assert effects["neurons that are to be found"] == pytest.approx(0.2)
    assert effects["precision of neurons at density 0.5, look-ahead 1"] == pytest.approx(0.22)
    assert effects["R-precision of neurons, look-ahead 1"] == pytest.approx(-0.1)
    share = "share of what always the same neurons miss that is found, look-ahead 1"
    assert effects[share] == pytest.approx(0.0, abs=1e-9)
    assert effects[share.replace(" found,", " found at R picks,")] == pytest.approx(-0.25)


def test_a_table_of_effects_says_of_each_row_what_it_was_measured_on() -> None:
    recalls = recalls_with_true_sets()
    effects, models, *_ = study_tables("ablation", [*recalls, *r_precisions(-0.1, 0.001, seeds=2)])
    measured = {row[0]: row[-1] for row in effects.rows}
    assert measured["recall of neurons at density 0.5, look-ahead 1"] == "24 models, seeds 0, 1, 2"
    assert measured["R-precision of neurons, look-ahead 1"] == "16 models, seeds 0, 1"
    assert models.caption.startswith("means over 3 seeds, or")
    assert "R-precision of neurons, look-ahead 1 (%), 2 seeds" in models.columns
    effects, models, *_ = study_tables("ablation", recalls)
    assert "measured on" not in effects.columns and effects.caption.startswith("24 models, seeds 0, 1, 2; paired")
    assert models.caption == "means over 3 seeds"


def test_the_factor_that_moves_recall_most_is_named_where_its_lead_is_certain() -> None:
    clear = text_of(MOST, *ablation({"activation": -0.2, "norm": 0.1}))
    assert clear == "The activation function, by 10 points [10, 10] more than the next, the norm."
    # Sizes 0.22, 0.2, 0.18 against 0.17, 0.19, 0.21.
    close = text_of(MOST, *ablation({"activation": -0.2, "norm": 0.19}, noise=0.02))
    assert close.startswith("These records cannot tell: ") and "1 points [-9, 11]" in close
    assert MOST not in answered(*distance(0.01, 0.002))


def test_relufication_is_judged_by_r_precision_of_the_look_ahead_study_one_layer_ahead() -> None:
    values = {
        ("recall", "lookahead", 1): (0.65, 0.75),
        ("recall", "lookahead", 2): (0.60, 0.61),
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
    question = "Does ReLU in the place of SiLU help in one model?"
    recall = "recall of neurons, look-ahead 1, is 75.0 % [74.0, 76.0] with ReLU and 65.0 % [64.0, 66.0] with SiLU"
    # hypot(1, 1) = 1.4 is more than 1.
    assert text_of(question, *records).startswith(f"These records cannot tell: {recall}; R-precision of neurons, ")
    assert text_of(question, *records[:4]).startswith(f"Yes: {recall} (closed-form predictors of one model")
    fallen = [{**each, "value": 1 - each["value"], "interval": None} for each in records[:4]]
    assert text_of(question, *fallen).startswith("These records cannot tell: "), "there is no interval"
    assert question not in answered(*ablation({}))


def test_pairs_of_the_relufication_differ_in_nothing_else() -> None:
    sides = {"silu": (20.0, 0.5), "relu": (20.9, 0.5), "silu before training": (19.0, 0.1)}
    sides["relu before training"] = (400.0, 9.0)
    records = [
        record("relufication", "perplexity", value, interval=(value - half, value + half), variant=variant, **labels)
        for variant, (value, half) in sides.items()
        for labels in ({"corpus": "other"}, {}, {"study": "lookahead", "block": "mlp", "lookahead": 1})
    ]
    for variant, zeros in (("silu", 0.0), ("relu", 0.8)):
        records.append(record("relufication", "exact_zeros", zeros, interval=(zeros, zeros), variant=variant))
        for density, ratio in ((0.5, 1.1), (0.2, 1.5 if variant == "relu" else 1.3)):
            baseline = {"name": "dense", "value": 100.0}
            labels = {"variant": variant, "mlp_density": density, "method": "predictor"}
            records.append(record("relufication", "tokens_per_s", 100 * ratio, baseline=baseline, **labels))
    pairs, *_ = study_tables("relufication", records)
    assert [row[0::2][:1] + row[2:4] for row in pairs.rows] == [
        ("exact zeros", "0 [0, 0]", "80 [80, 80]"),
        ("held-out perplexity before training", "19.00 [18.90, 19.10]", "400 [391, 409]"),
        ("held-out perplexity", "20.0 [19.5, 20.5]", "20.9 [20.4, 21.4]"),
        ("speed over dense at density 0.5", "1.1 (no interval)", "1.1 (no interval)"),
        ("speed over dense at density 0.2", "1.3 (no interval)", "1.5 (no interval)"),
    ]
