"""The verdict is made from the numbers: its wording at both sides of each decision, and what it says is missing."""

from __future__ import annotations

import pytest

from analysis.drift_verdict import answers, verdict
from analysis.effects import reported_effects
from analysis.results import Record, make_record
from tests.analysis.made_up_drift import ablation, lookahead_record, record

QUESTIONS = [
    "Does drift explain it?",
    "Does the activation function explain it?",
    "Does RoPE explain it?",
    "Does the norm explain it?",
]


def distance(drop: float, half: float | None, *, recall: float = 0.7, far: float = 0.1) -> list[Record]:
    """Recall of neurons at look-ahead 0, 1 and 4, whose loss at 1 has an interval of so much to either side."""
    return [
        lookahead_record("recall", 0, recall, 0.01),
        lookahead_record("recall", 1, recall - drop, 0.01),
        lookahead_record("recall", 4, recall - far, 0.01),
        lookahead_record("recall_drop", 1, drop, half),
        lookahead_record("recall_drop", 4, far, 0.02),
    ]


def texts(records: list[Record]) -> dict[str, str]:
    return {answer.question: answer.text for answer in answers(records)}


def test_records_of_other_studies_have_no_verdict() -> None:
    assert verdict([]) == "" and answers([]) == []
    assert verdict([make_record("perplexity", {"model": "Small"}, "perplexity", 20.0, "")]) == ""


def test_each_question_has_a_paragraph_that_says_what_is_missing() -> None:
    cosine = {"point": "block_input", "lookahead": 1, "variant": "raw", "tokens": "all"}
    found = texts([record("drift", "cosine", 0.95, interval=(0.94, 0.96), model="Small", **cosine)])
    assert list(found) == QUESTIONS
    assert found[QUESTIONS[0]] == (
        "These records cannot tell: they lack what a predictor loses to look-ahead (recall_drop of the look-ahead "
        "study). Small: Cosine of states one layer apart: raw 0.950 [0.940, 0.960]. A cosine alone does not say what "
        "a predictor loses."
    )
    for question in QUESTIONS[1:]:
        assert found[question] == (
            "These records cannot tell: they lack recall of neurons in models that differ in nothing else "
            "(scripts.studies.ablation makes them)."
        )


@pytest.mark.parametrize(
    ("drop", "half", "told"),
    [
        # 0.3 is missed without distance, as uncertain as the recall at 1: 0.01 / 0.31, 0.008 / 0.318, 0.012 / 0.302.
        (0.01, 0.002, "hardly, 3.2 % [2.5, 4.0] of what is missed there."),
        (0.01, 0.02, "no effect found, at most 3.0 points."),
        # -0.02 / 0.28 is more than a twentieth, its interval is not wholly; -0.1 / 0.2 is.
        (-0.02, 0.01, "no cost found, 2.0 points [1.0, 3.0] more."),
        (-0.10, 0.01, "an improvement, 10.0 points [9.0, 11.0] more."),
        # 0.30 / 0.60, 0.28 / 0.59, 0.32 / 0.61.
        (0.30, 0.02, "in part, perhaps most, 50.0 % [47.4, 52.5] of what is missed there."),
        (0.60, 0.02, "most of it, 66.7 % [65.1, 68.2] of what is missed there."),
        (0.10, 0.20, "these records cannot tell, at most 30 points."),
        (0.01, None, "these records cannot tell, 1 points (no interval) less."),
    ],
)  # fmt: skip
def test_what_distance_costs_decides_whether_drift_explains_it(drop: float, half: float | None, told: str) -> None:
    _, _, text = texts(distance(drop, half))[QUESTIONS[0]].partition("\n\n")
    assert text == (
        "Small, closed-form predictors, for this calibration text. Neurons (density 0.5): recall without distance is "
        f"70.0 % [69.0, 71.0]. One layer back: {told} 4 layers back: in part, 25.0 % [20.5, 29.3] of what is missed "
        "there. Intervals are 95 % each: of many, some miss."
    )


@pytest.mark.parametrize(
    ("drop", "half", "answer"),
    [
        (0.01, 0.002, "No, one layer back; in part, 4 layers back: the largest"),
        (0.01, 0.02, "No, one layer back; in part, 4 layers back: the largest"),
        (0.60, 0.02, "Yes, one layer back; in part, 4 layers back: the largest"),
        (0.10, 0.20, "These records cannot tell, one layer back; in part, 4 layers back: the largest"),
    ],
)
def test_the_answer_begins_with_yes_or_no_at_the_shortest_and_longest_distance(
    drop: float, half: float, answer: str
) -> None:
    assert texts(distance(drop, half))[QUESTIONS[0]].startswith(answer)


def test_the_model_that_loses_most_decides() -> None:
    other = [{**each, "labels": {**each["labels"], "model": "Other"}} for each in distance(0.3, 0.02)]
    assert texts([*distance(0.01, 0.002), *other])[QUESTIONS[0]].startswith("In part, one layer back; in part, 4")


def test_the_answer_names_the_predictors_that_it_was_measured_on() -> None:
    answer = texts(distance(0.01, 0.002))[QUESTIONS[0]].partition(".")[0]
    assert answer.endswith("the largest loss of recall found here, of closed-form predictors, decides")


def gaining(*records: Record, static: float = 0.6) -> list[Record]:
    """With the recall of the same units for every token, a rank and an amount of text."""
    baseline = {"name": "static", "value": static}
    settings = {"predictor_rank": 64, "calibration_tokens": 8192}
    return [
        {
            **each,
            "labels": {**settings, **each["labels"]},
            "baseline": baseline if each["metric"] == "recall" else each["baseline"],
        }
        for each in records
    ]


def test_where_the_gain_over_always_the_same_units_is_known_its_share_is_told() -> None:
    ranked = {"study": "rank", "calibration_tokens": 8192}
    more = [
        lookahead_record(metric, 2, value, 0.01, **ranked, predictor_rank=rank)
        for rank, recall, drop in ((16, 0.65, 0.01), (256, 0.75, 0.05))
        for metric, value in (("recall", recall), ("recall_drop", drop))
    ]
    _, _, text = texts(gaining(*distance(0.004, 0.001, far=0.1), *more))[QUESTIONS[0]].partition("\n\n")
    # Of a gain of 0.1: 0.004 / 0.1, 0.003 / 0.11, 0.005 / 0.09, and all of it; 0.05 / 0.2, 0.04 / 0.21, 0.06 / 0.19.
    assert text.startswith(
        "Small, closed-form predictors, for this calibration text (8192 tokens). Their gain is recall above that "
        "of always the same units. Neurons (rank 64, density 0.5): recall without distance is 70.0 % [69.0, 71.0], "
        "60.0 % with always the same. One layer back: in part, 4.0 % [2.7, 5.6] of the gain is lost. "
        "4 layers back: most of it, 100 % [72, 134] of the gain. "
        "2 layers back at rank 256, the largest measured: 25 % [19, 32] of the gain. Intervals"
    )
    small = texts(gaining(*distance(0.004, 0.001), *more[:2]))[QUESTIONS[0]]
    assert "the largest measured" not in small, "no larger rank than the look-ahead study's was measured"
    none = texts(gaining(*distance(0.004, 0.001), static=0.7))[QUESTIONS[0]]
    assert "One layer back: in part, perhaps most, 0.40 points [0.30, 0.50] less." in none, "there may be no gain"


def test_perplexity_is_answered_from_the_paired_rise_of_the_loss() -> None:
    dense = {"name": "dense", "value": 10.0}
    base = lookahead_record("perplexity", 0, 20.0, 1.0)
    own = {**base, "baseline": dense, "ratio": 2.0, "ratio_interval": [1.9, 2.1]}
    rises = [lookahead_record("loss_rise", lookahead, 0.05 * lookahead, 0.02) for lookahead in (1, 8)]
    text = texts([own, *rises])[QUESTIONS[0]]
    # ln 2, ln 1.9 and ln 2.1; then 0.05 / 0.743, 0.03 / 0.772, 0.07 / 0.712.
    assert (
        "Perplexity of sparse neurons (0.69 nats [0.64, 0.75] above dense): one layer back in part, 6.7 % [3.8, 9.9] "
        "of the loss there; 8 layers back in part, 36.6 % [33.8, 39.6] of the loss there."
    ) in text
    without = texts(rises)[QUESTIONS[0]]
    assert "neurons: one layer back in part, perhaps most, 0.050 nats [0.030, 0.070] more; 8" in without


def test_an_improvement_is_no_headline_where_it_is_tiny() -> None:
    own = {**lookahead_record("perplexity", 0, 20.0, 1.0), "baseline": {"name": "dense", "value": 10.0}}
    rises = [lookahead_record("loss_rise", lookahead, -0.02, 0.01) for lookahead in (1, 2)]
    text = texts([own, *rises])[QUESTIONS[0]]
    assert "one layer back no cost found, 0.020 nats [0.010, 0.030] less" in text and "improvement" not in text


def test_recall_of_heads_alone_is_not_taken_for_that_of_neurons() -> None:
    heads = ablation({"norm": -0.1}, block="attention", head_density=0.5, mlp_density=None)
    assert texts(heads)[QUESTIONS[3]].startswith("These records cannot tell: they lack recall of neurons in models")
    assert "Which factor moves recall most?" not in texts(heads)


def test_layers_that_drift_more_are_said_to_lose_more_only_where_the_interval_says_so() -> None:
    labels = {"point": "after_attention", "lookahead": 1, "variant": "raw", "tokens": "ordinary"}
    falling = [1 - 0.01 * layer for layer in range(12)]
    own, lost = lookahead_record("recall", 0, 0.7, 0.01), lookahead_record("recall_drop", 1, 0.05, 0.01)
    shaken = [0.5, 0.3, 0.6, 0.2, 0.55, 0.45, 0.1, 0.62, 0.33, 0.5, 0.47]
    for per_layer, words in (
        (
            [0.7 - 0.02 * layer for layer in range(11)],
            "Layers that drift more lose more recall (11 layers, look-ahead 1: rank correlation",
        ),
        (
            [0.5 + 0.01 * layer for layer in range(11)],
            "Layers that drift more lose less recall (11 layers, look-ahead 1: rank correlation",
        ),
        (
            shaken,
            "Whether layers that drift more lose more is open (11 layers, look-ahead 1: rank correlation",
        ),
        (shaken[:7], ""),
    ):
        far = {**lookahead_record("recall", 1, 0.65, 0.01), "per_layer": [None, *per_layer]}
        cosine = record("drift", "cosine", 0.9, per_layer=[*falling[:11], None], model="Small", **labels)
        text = texts([{**own, "per_layer": [0.7] * 12}, lost, far, cosine])[QUESTIONS[0]]
        assert words in text and bool(words) == ("rank correlation" in text)


def test_the_mean_over_the_ablation_answers_beside_the_studied_models() -> None:
    labels = {"lookahead": 1, "metric": "recall_drop"}
    drops = [{**each, "value": 0.02 + 0.001 * (each["labels"]["seed"] - 1)} for each in ablation({}, **labels)]
    text = texts([*ablation({}), *drops, *distance(0.01, 0.002)])[QUESTIONS[0]]
    _, small, mean = text.split("\n\n")
    assert small.startswith("Small, closed-form") and mean.startswith("Mean of the 24 models of the ablation, closed-")
    # Seeds 0.019, 0.020, 0.021: half 4.3027 * 0.001 / sqrt(3) = 0.00248; 0.18 is missed without distance.
    assert "One layer back: in part, 10.0 % [8.8, 11.2] of what is missed there." in mean


@pytest.mark.parametrize(
    ("effect", "noise", "words"),
    [
        (-0.1, 0.01, "In part, for less than half of what is lost. With RoPE instead of learned positions, recall"),
        (-0.05, 0.03, "No effect was found, and none that is half of what is lost lies within the interval. With RoPE"),
        (-0.1, 0.06, "These records cannot tell, the interval holds both no effect and half of what is lost. With"),
        (0.1, 0.01, "No, the change that was measured is an improvement. With RoPE"),
        (-0.5, 0.01, "Yes, for more than half of what is lost. With RoPE"),
        (-0.2, 0.01, "In part; whether for more than half of what is lost, these records cannot tell. With RoPE"),
        (0.0, 0.0, "No effect was found, and none that is half of what is lost lies within the interval. With RoPE"),
    ],
)
def test_a_factor_is_answered_from_the_interval_of_its_effect(effect: float, noise: float, words: str) -> None:
    # 0.2 is missed with learned positions; the interval is 2.484 times the noise to either side.
    assert texts(ablation({"positions": effect}, noise=noise))[QUESTIONS[2]].startswith(words)


def test_a_factor_paragraph_holds_the_effect_its_interval_and_the_largest_interaction() -> None:
    further = ablation({"activation": -0.3}, noise=0.001, lookahead=4, metric="recall_drop")
    found = texts([*ablation({"activation": -0.1, "norm": 0.01}, noise=0.01), *further])
    assert found[QUESTIONS[1]] == (
        "In part, for less than half of what is lost. With gated SiLU instead of ReLU, recall of neurons at density "
        "0.5, look-ahead 1 goes from 80.5 % to 70.5 %: -10.0 points [-12.5, -7.5] (means over 24 small models, paired "
        "over 3 seeds). Of 1 further outcomes, 1 moved by more than chance would explain (95 % intervals; one in "
        "twenty does so by chance): see the table of effects. The largest interaction is of the activation function "
        "with the positions: no effect at all."
    )
    assert "look-ahead 1 goes from 75.0 % to 76.0 %: no effect found larger than 3.5 points" in found[QUESTIONS[3]]
    assert "Of 1 further outcomes, 0 moved by more than chance would explain" in found[QUESTIONS[3]]


def test_true_sets_of_different_sizes_are_told_beside_their_recalls() -> None:
    recalls = [
        {**each, "true_density": 0.5 if each["labels"]["activation"] == "silu gated" else 0.3,
         "baseline": {"name": "static", "value": each["value"] - 0.1 * (1 - each["value"]) / 0.9}}
        for each in ablation({"activation": -0.1}, noise=0.001)
    ]  # fmt: skip
    told = texts([*recalls, *ablation({}, metric="precision")])[QUESTIONS[1]]  # a study records that as well
    assert told.startswith("In recall: in part, for less than half of what is lost. In precision the other way, +22")
    # 0.8 * 0.3 / 0.5 = 0.48 and 0.7 * 0.5 / 0.5 = 0.7.
    effects = {each.title: each.effects.main["activation"].value for each in reported_effects(recalls)}
    assert effects["neurons that are to be found"] == pytest.approx(0.2)
    assert effects["precision of neurons at density 0.5, look-ahead 1"] == pytest.approx(0.22)
    # (recall - static) / (1 - static) = 0.1 by construction, whatever the recall.
    share = "share of what always the same neurons miss that is found, look-ahead 1"
    assert effects[share] == pytest.approx(0.0, abs=1e-9)


def test_further_outcomes_are_counted_and_not_named() -> None:
    records = ablation({"activation": -0.1}, noise=0.01)
    for lookahead in (2, 4, 8):  # the largest of recall_drop; perplexity and precision are of other metrics
        records += ablation({}, noise=0.01, lookahead=lookahead, metric="recall_drop")
    for metric in ("perplexity", "cosine", "energy_share", "exact_zeros", "loss"):
        records += ablation({}, noise=0.01, metric=metric)
    many = texts(records)[QUESTIONS[1]]
    assert ", 0 moved by more than chance would explain" in many and "look-ahead 8" not in many


def test_one_seed_or_a_factor_that_does_not_vary_cannot_tell() -> None:
    one_seed = texts(ablation({"norm": -0.3}, seeds=1))
    assert one_seed[QUESTIONS[3]].startswith("One measurement has no interval, so these records cannot tell.")
    assert "-30 points (no interval) (means over 8 small models, paired over 1 seed)" in one_seed[QUESTIONS[3]]
    gated = [each for each in ablation({}) if each["labels"]["activation"] == "silu gated"]
    assert texts(gated)[QUESTIONS[1]] == (
        "These records cannot tell: the models of the ablation do not differ in the activation function."
    )


def test_the_factor_that_moves_recall_most_is_named_where_its_lead_is_certain() -> None:
    question = "Which factor moves recall most?"
    assert texts(ablation({"activation": -0.2, "norm": 0.1}))[question] == (
        "The activation function: it moves recall of neurons 10 points [10, 10] further than the norm, the next."
    )
    close = texts(ablation({"activation": -0.2, "norm": 0.19}, noise=0.02))[question]
    # Sizes 0.22, 0.2, 0.18 against 0.17, 0.19, 0.21.
    assert close == (
        "These records cannot tell: between the activation function and the norm, the next, lie 1 points [-9, 11]."
    )
    assert question not in texts(distance(0.01, 0.002))


def test_relufication_is_told_beside_the_activation_function() -> None:
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
    assert texts(records)[QUESTIONS[1]].endswith(
        "In one model, ReLU in the place of SiLU (both trained on alike): exact zeros: 80 % [80, 80] instead of 0 % "
        "[0, 0]; held-out perplexity before training: 400 [391, 409] instead of 19.00 [18.90, 19.10]; held-out "
        "perplexity: 20.9 [20.4, 21.4] instead of 20.0 [19.5, 20.5]; speed over dense at density 0.5: 1.1 × (no "
        "interval) instead of 1.1 × (no interval); speed over dense at density 0.2: 1.5 × (no interval) instead of "
        "1.3 × (no interval)."
    )
    close = {"silu": 20.0, "relu": 20.6}
    few = [
        record("relufication", "perplexity", value, interval=(value - 0.5, value + 0.5), variant=variant)
        for variant, value in close.items()
    ]
    # hypot(0.5, 0.5) = 0.71 is more than 0.6.
    assert texts(few)[QUESTIONS[1]].endswith("instead of 20.0 [19.5, 20.5], which the intervals do not tell apart.")
