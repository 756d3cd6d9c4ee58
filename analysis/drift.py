"""The drift study: what distance costs a predictor, what active sets are like, and the answers to its questions.

The claim under test: Deja Vu, which predicts a layer's active units from an earlier layer, fails on Llama because token
embeddings change from layer to layer (RoPE, SiLU). Each suspect is asked for its share of what a predictor misses. An
answer is one sentence with its numbers and a table, and no stronger than the intervals: yes is more than half of the
whole by the whole interval; no is less than a twentieth, or no loss found and none of half left open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from analysis.comparison import latest_records, shared_settings
from analysis.effects import (
    FactorEffects,
    RelufiedPair,
    ReportedEffects,
    relufied_pairs,
    reported_effects,
    with_derived,
)
from analysis.formatting import EMPTY_CELL, Table, table_of
from analysis.intervals import Estimate, difference, with_interval
from analysis.results import Record
from analysis.studies import (
    BLOCKS,
    FACTORS,
    LEVEL_NAMES,
    STUDY_NAMES,
    DistanceFacts,
    Levels,
    ablation_distance_facts,
    at_largest_rank,
    at_lowest_density,
    chosen,
    compared_models,
    cosines,
    distance_facts,
    layer_correlation,
    outcome_values,
    pooled,
    studied_models,
)

SECTION_TITLES = {
    "drift": "Drift", "ablation": "Activation function, positions and norm, one at a time",
    "relufication": "ReLU for SiLU",
}  # fmt: skip
VERDICT_NAME = "drift_verdict"
VERDICT_TITLE = "Does drift explain why predictors fail?"
FACTOR_NAMES = {"activation": "the activation function", "positions": "RoPE", "norm": "the norm"}
SHOWN_COSINES = ("raw", "standardised")  # the most alike and the least; the plot has the others
CAPTION_LABELS = ("corpus", "num_tokens", "dtype", "seed")
INTERVALS = "in brackets the 95 % interval"
CANNOT_TELL = "these records cannot tell"
HALF, LITTLE = 0.5, 0.05
# Of several judgements the one that comes last counts.
JUDGEMENTS = ("no", CANNOT_TELL, "in part", "yes")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question, the sentence that answers it (plain text without markup), and the numbers that it is made from."""

    question: str
    text: str
    tables: Sequence[Table] = ()


def verdict(records: Sequence[Record]) -> str:
    """All answers as Markdown, each after its question; '' where no record is of a study."""
    found = answers(records)
    lines = [f"**{answer.question}** {answer.text}" for answer in found]
    return "\n\n".join([*lines, *(table.to_markdown() for answer in found for table in answer.tables)])


def answers(records: Sequence[Record]) -> list[Answer]:
    """The answer to each question; what the records cannot answer says which records are lacking."""
    studied = [record for record in records if record["name"] in STUDY_NAMES]
    if not studied:
        return []
    effects = reported_effects(studied)
    found = [_drift_answer(studied), _layers_answer(studied)]
    found += [_factor_answer(effects, factor) for factor in FACTORS]
    found += [_most_answer(effects), _relufication_answer(relufied_pairs(studied))]
    return [answer for answer in found if answer is not None]


def judge(loss: Estimate, share: Estimate | None) -> str:
    """Whether a cause explains a loss: what it costs (positive where it does harm) and its share of the whole decide.

    The share is None where the whole may be nothing. Nothing is claimed that either interval leaves open.
    """
    if loss.low is None or loss.high is None or (share is not None and (share.low is None or share.high is None)):
        return CANNOT_TELL
    low, high = (-math.inf, math.inf) if share is None else (share.low, share.high)
    assert low is not None and high is not None
    if loss.high < 0:
        return "no"
    if loss.holds_zero:
        return "no" if high < HALF else CANNOT_TELL
    return "no" if high < LITTLE else "yes" if low > HALF else "in part"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _drift_answer(records: Sequence[Record]) -> Answer:
    """At the shortest distance and at the longest; the model and kind of unit that lose most there decide."""
    question = "Does drift explain it?"
    facts, largest = [], []
    for block in BLOCKS:
        for model, found in studied_models(records).items():
            corpus = shared_settings([record["labels"] for record in found], ("corpus",)).removeprefix("corpus ")
            subject = f"{model} on {corpus}" if corpus else model
            facts.append(distance_facts(subject, found, block))
            largest.append(at_largest_rank(subject, found, block))
        facts.append(ablation_distance_facts(records, block))
    known = [each for each in facts if each is not None and each.lost]
    ends = [end for each in known for end in (min(each.lost), max(each.lost))]
    if not known:
        return Answer(
            question=question, text=_sentence(f"{CANNOT_TELL}: they lack recall_drop of the look-ahead study")
        )
    told = []
    for lookahead in dict.fromkeys((min(ends), max(ends))):
        there = [each for each in known if lookahead in each.lost]
        worst = max(there, key=lambda each: _badness(each, lookahead))
        share = worst.share(lookahead)
        size = (
            f"{with_interval(worst.lost[lookahead], 'points', scale=100)} of recall"
            if share is None
            else f"{with_interval(share, '%', scale=100)} of what they gain over always the same units"
        )
        told.append(
            f"{judge(worst.lost[lookahead], share)}, {_origin(lookahead)}: closed-form predictors of "
            f"{BLOCKS[worst.block]} lose {size} ({worst.subject})"
        )
    lookaheads = [(each, end) for each in known for end in dict.fromkeys((min(each.lost), max(each.lost)))]
    lookaheads += [(each, max(each.lost)) for each in largest if each is not None and each.lost]
    which = f"; of {len(known)} losses the largest decides" if len(known) > 1 else ""
    return Answer(question=question, text=_sentence("; ".join(told) + which), tables=_gain_table(lookaheads))


def _badness(facts: DistanceFacts, lookahead: int) -> tuple[int, float, float]:
    lost, share = facts.lost[lookahead], facts.share(lookahead)
    return JUDGEMENTS.index(judge(lost, share)), math.inf if share is None else share.value, lost.value


def _origin(lookahead: int) -> str:
    return "one layer back" if lookahead == 1 else f"{lookahead} layers back"


def _gain_table(lines: Sequence[tuple[DistanceFacts, int]]) -> list[Table]:
    """A line per model, kind of unit and distance: what distance takes of what a predictor gains, and of perplexity."""
    rows = []
    for facts, lookahead in lines:
        lost, share, static = facts.lost[lookahead], facts.share(lookahead), facts.static.get(lookahead)
        rows.append(
            {
                "measured on": facts.subject,
                "predictors of": BLOCKS[facts.block],
                "rank": EMPTY_CELL if facts.rank is None else str(facts.rank),
                "layers back": str(lookahead),
                "recall, own layer (%)": _cell(facts.own.get(lookahead), scale=100),
                "always the same units (%)": EMPTY_CELL if static is None else f"{100 * static.value:.1f}",
                "lost to distance (points)": _cell(lost, scale=100, signed=True),
                "of the gain (%)": _cell(share, scale=100),
                "drift explains it": judge(lost, share),
                "ln(perplexity / dense), own layer": _cell(facts.loss.get(0)),
                "more with distance": _cell(facts.loss_rise.get(lookahead), signed=True),
            }
        )
    amounts = sorted({facts.calibration_tokens for facts, _ in lines if facts.calibration_tokens is not None})
    densities = sorted({facts.density for facts, _ in lines if facts.density is not None})
    caption = [
        "closed-form predictors",
        f"density {' and '.join(f'{density:g}' for density in densities)}" if densities else "",
        f"calibrated on {' and '.join(map(str, amounts))} tokens" if amounts else "",
        f"gain: recall above that of always the same units; {INTERVALS}, of many some miss",
    ]
    return table_of("drift: what it costs a predictor", rows, ", ".join(filter(None, caption)))


def _layers_answer(records: Sequence[Record]) -> Answer | None:
    """Whether layers whose input has drifted more lose more recall, model by model."""
    told = []
    for model, found in studied_models(records).items():
        if (correlation := layer_correlation(found)) is not None:
            lookahead, num_layers, value = correlation
            answer = CANNOT_TELL if value.holds_zero else "yes" if value.value > 0 else "no, less"
            told.append(
                f"{answer}: over {num_layers} layers of {model} the rank correlation of drift and recall of neurons "
                f"lost, {_origin(lookahead)}, is {with_interval(value)}"
            )
    return Answer(question="Do layers that drift more lose more?", text=_sentence("; ".join(told))) if told else None


def primary_effects(found: Sequence[ReportedEffects]) -> ReportedEffects | None:
    """Those on recall of neurons, which the answers are about; None where the records have others only."""
    return next((each for each in found if each.is_of_neurons("recall")), None)


def _factor_answer(found: Sequence[ReportedEffects], factor: str) -> Answer:
    """By recall of neurons; where precision certainly moves against it, by R-precision, if there is any."""
    question = f"Does {FACTOR_NAMES[factor]} explain it?"
    primary = primary_effects(found)
    if primary is None:
        lack = "they lack recall of neurons in models that differ in nothing else (see scripts.studies.ablation)"
        return Answer(question=question, text=_sentence(f"{CANNOT_TELL}: {lack}"))
    if factor not in primary.effects.main:
        return Answer(
            question=question, text=_sentence(f"{CANNOT_TELL}: the models of the ablation do not differ in it")
        )
    varying = [each for each in found if factor in each.effects.main]
    opposed = next((each for each in varying if each.is_of_neurons("implied_precision")), None)
    text = _told(primary, factor)
    if opposed is not None and _go_apart(primary.effects.main[factor], opposed.effects.main[factor]):
        settling = next((each for each in varying if each.is_of_neurons("r_precision")), None)
        recall, precision = (
            with_interval(each.effects.main[factor], "points", scale=100, signed=True) for each in (primary, opposed)
        )
        apart = f"recall, {recall}, and precision, {precision}, go apart, as the true sets differ in size"
        lack = f"{CANNOT_TELL}: {apart}, and R-precision is not among them"
        text = lack if settling is None else f"{_told(settling, factor)}; {apart}, so R-precision decides"
    return Answer(question=question, text=_sentence(text), tables=_factor_table(varying, factor))


def _told(reported: ReportedEffects, factor: str) -> str:
    """The judgement of one outcome, its means at both levels, the change and of how many models it is."""
    effects = reported.effects
    first, second = (LEVEL_NAMES[level] for level in FACTORS[factor])
    before, after = effects.level_means(factor)
    change = with_interval(effects.main[factor], "points", scale=100, signed=True)
    return (
        f"{_judged(effects, factor)}: {reported.title}, is {100 * after:.1f} % with {second} and {100 * before:.1f} % "
        f"with {first}, {change} (closed-form predictors of {effects.num_models} small models, paired over "
        f"{len(effects.seeds)} seed{'s' if len(effects.seeds) > 1 else ''})"
    )


def _judged(effects: FactorEffects, factor: str) -> str:
    """Of a share that is 1 at best: whether the factor explains what is missed."""
    return judge(-effects.main[factor], effects.share_of_missed(factor))


def _go_apart(one: Estimate, other: Estimate) -> bool:
    """Whether two changes certainly have different signs."""
    return one.value * other.value < 0 and not (one.holds_zero or other.holds_zero)


def _factor_table(found: Sequence[ReportedEffects], factor: str) -> list[Table]:
    """A line per outcome that says how good a prediction is."""
    levels = [f"{LEVEL_NAMES[level]} (%)" for level in FACTORS[factor]]
    rows = [
        {
            "outcome": each.title,
            **{
                name: f"{100 * level:.1f}" for name, level in zip(levels, each.effects.level_means(factor), strict=True)
            },
            "change (points)": _cell(each.effects.main[factor], scale=100, signed=True),
            "of what is missed (%)": _cell(each.effects.share_of_missed(factor), scale=100),
            "explains it": _judged(each.effects, factor),
            "measured on": _measured_on(each),
        }
        for each in found
        if each.effects.outcome.metric in ("recall", "r_precision", "implied_precision")
    ]
    caption = f"closed-form predictors, means over the other factors, {INTERVALS}"
    return table_of(f"ablation: {FACTOR_NAMES[factor]}", rows, caption)


def _most_answer(found: Sequence[ReportedEffects]) -> Answer | None:
    """None where fewer than two factors vary."""
    primary = primary_effects(found)
    if primary is None or len(primary.effects.main) < 2:
        return None
    effects = primary.effects
    first, second, *_ = sorted(effects.main, key=lambda factor: -abs(effects.main[factor].value))
    lead = effects.lead(first, second)
    told = with_interval(lead, "points", scale=100)
    text = f"{FACTOR_NAMES[first]}, by {told} more than the next, {FACTOR_NAMES[second]}"
    return Answer(
        question="Which factor moves recall of neurons most?",
        text=_sentence(f"{CANNOT_TELL}: {text}" if lead.holds_zero else text),
    )


def _relufication_answer(pairs: Sequence[RelufiedPair]) -> Answer | None:
    """By R-precision, where it is known: it does not favour ReLU's smaller true sets. None without such records."""
    told = [pair for pair in pairs if pair.title.startswith((f"recall of {BLOCKS['mlp']}", "R-precision"))]
    if not told:
        return None
    change = difference(told[-1].relu, told[-1].silu)
    answer = CANNOT_TELL if change.holds_zero else "yes" if change.value > 0 else "no"
    sides = []
    for pair in told:
        silu, relu = (with_interval(side, pair.unit, scale=pair.scale) for side in (pair.silu, pair.relu))
        sides.append(f"{pair.title}, is {relu} with ReLU and {silu} with SiLU")
    text = f"{answer}: {'; '.join(sides)} (closed-form predictors of one model, trained on alike with either)"
    return Answer(question="Does ReLU in the place of SiLU help in one model?", text=_sentence(text))


def study_tables(name: str, records: Sequence[Record]) -> list[Table]:
    """The tables of the records of one name: "drift", "ablation" or "relufication"."""
    found = latest_records([record for record in records if record["name"] == name])
    if name == "ablation":
        effects = reported_effects(found)
        tables = [*_effects_table(effects), *_models_table(found, effects)]
    elif name == "relufication":
        tables = _relufication_table(found)
    else:
        tables = [table for model, each in studied_models(found).items() for table in _distance_table(model, each)]
    return [*tables, *_trait_table(found, name)]


def _cell(estimate: Estimate | None, *, scale: float = 1.0, signed: bool = False) -> str:
    return EMPTY_CELL if estimate is None else with_interval(estimate, scale=scale, signed=signed)


def _distance_table(model: str, records: Sequence[Record]) -> list[Table]:
    """A line per look-ahead: how alike states are, and what a predictor loses."""
    columns: list[tuple[str, Mapping[Any, Estimate], float, bool]] = [
        (f"cosine, {variant.replace('_', ' ')}", by_lookahead, 1.0, False)
        for variant, by_lookahead in cosines(records).items()
        if variant in SHOWN_COSINES
    ]
    for block, units in BLOCKS.items():
        facts = distance_facts(model, records, block)
        if facts is not None:
            columns += [
                (f"recall of {units} (%)", facts.recall, 100.0, False),
                (f"recall of {units} lost (points)", facts.lost, 100.0, True),
                (f"ln(perplexity / dense), sparse {units}", facts.loss, 1.0, False),
                (f"of that due to distance, {units}", facts.loss_rise, 1.0, True),
            ]
    rows = []
    for lookahead in sorted({lookahead for _, found, _, _ in columns for lookahead in found}):
        cells = {
            title: _cell(each.get(lookahead), scale=scale, signed=signed) for title, each, scale, signed in columns
        }
        rows.append({"look-ahead": str(lookahead), **cells})
    caption = _caption(records, "lost: on the same tokens and layers as at look-ahead 0")
    return table_of(f"{model}: what distance costs", rows, caption)


def _trait_table(records: Sequence[Record], name: str) -> list[Table]:
    """A line per model, of the ablation an activation function: what the sets of active neurons are like."""
    shares = sorted({record["labels"]["top_share"] for record in chosen(records, "energy_share")})
    columns: dict[str, tuple[str, dict[str, Any]]] = {
        "exactly zero (%)": ("exact_zeros", {}),
        **{f"energy in the top {100 * share:g} % (%)": ("energy_share", {"top_share": share}) for share in shares},
        "near the threshold (%)": ("boundary_margin", {}),
        "shared with the token before (%)": ("reuse_tokens", {}),
    }
    rows = []
    for model, found in compared_models(records).items():
        cells = {
            title: _cell(_of_models(chosen(found, metric, **labels)), scale=100)
            for title, (metric, labels) in columns.items()
        }
        if set(cells.values()) != {EMPTY_CELL}:
            rows.append({"model": model, **cells})
    return table_of(f"{name}: sets of active neurons", rows, _caption(records))


def _of_models(records: Sequence[Record]) -> Estimate | None:
    """Of one model its own, of several their mean."""
    found = [{**record, "labels": {**record["labels"], "all": 0}} for record in at_lowest_density(records)]
    return pooled(found, "all").get(0)


def _effects_table(effects: Sequence[ReportedEffects]) -> list[Table]:
    """A line per outcome, a column per factor."""
    headings = {
        factor: " instead of ".join(LEVEL_NAMES[level] for level in FACTORS[factor][::-1]) for factor in FACTORS
    }
    measured = {_measured_on(each) for each in effects}
    rows = []
    for each in effects:
        cells = {
            heading: _cell(each.effects.main.get(factor), scale=each.scale, signed=True)
            for factor, heading in headings.items()
        }
        largest, interaction = each.effects.largest_interaction(), EMPTY_CELL
        if largest is not None:
            interaction = f"{' × '.join(largest[0])} {_cell(largest[1], scale=each.scale, signed=True)}"
        told = {"measured on": _measured_on(each)} if len(measured) > 1 else {}
        rows.append(
            {
                "outcome": each.title,
                "unit": each.unit or EMPTY_CELL,
                **cells,
                "largest interaction": interaction,
                **told,
            }
        )
    left_out = sorted({seed for each in effects for seed in each.effects.incomplete_seeds})
    caption = [
        *(measured if len(measured) == 1 else ()),  # a column that says one thing is a caption
        f"paired differences, mean over the other factors, {INTERVALS} (Student's t over seeds; interactions: "
        "Bonferroni over all pairs)",
        *([f"seeds left out of some rows, as models are missing: {', '.join(map(str, left_out))}"] if left_out else ()),
    ]
    return table_of("ablation: effects", rows, "; ".join(caption))


def _measured_on(reported: ReportedEffects) -> str:
    effects = reported.effects
    return f"{effects.num_models} models, seeds {', '.join(map(str, effects.seeds))}"


def _models_table(records: Sequence[Record], effects: Sequence[ReportedEffects]) -> list[Table]:
    """A line per kind of model: the mean of each outcome over seeds."""
    known_records = with_derived(records)
    most = max((len(each.effects.seeds) for each in effects), default=0)
    values: dict[str, tuple[float, dict[int, dict[Levels, float]]]] = {}
    for each in effects:
        heading = f"{each.title}{f' ({each.unit})' if each.unit else ''}".replace("points", "%")
        count = len(each.effects.seeds)
        heading += "" if count == most else f", {count} seeds"
        values[heading] = each.scale, outcome_values(known_records, each.effects.outcome)
    rows = []
    for kind in sorted({levels for _, by_seed in values.values() for cells in by_seed.values() for levels in cells}):
        row = dict(zip(FACTORS, (LEVEL_NAMES[level] for level in kind), strict=True))
        for heading, (scale, by_seed) in values.items():
            known = [cells[kind] for cells in by_seed.values() if kind in cells]
            row[heading] = f"{scale * mean(known):.4g}" if known else EMPTY_CELL
        rows.append(row)
    as_many = ", or as many as a column says" if any(len(each.effects.seeds) < most for each in effects) else ""
    return table_of("ablation: models", rows, f"means over {most} seeds{as_many}")


def _relufication_table(records: Sequence[Record]) -> list[Table]:
    rows = [
        {
            "number": pair.title,
            "unit": pair.unit or EMPTY_CELL,
            "SiLU": _cell(pair.silu, scale=pair.scale),
            "ReLU": _cell(pair.relu, scale=pair.scale),
            "difference": _cell(difference(pair.relu, pair.silu), scale=pair.scale, signed=True),
        }
        for pair in relufied_pairs(records)
    ]
    caption = _caption(records, "differences as if the two were not paired (MOVER)")
    return table_of("relufication: ReLU instead of SiLU in one model", rows, caption)


def _caption(records: Sequence[Record], *more: str) -> str:
    labels = [record["labels"] for record in records]
    settings = shared_settings(labels, [name for name in CAPTION_LABELS if all(name in each for each in labels)])
    return ", ".join(filter(None, [settings, *more, INTERVALS]))
