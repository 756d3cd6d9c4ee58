"""The drift study: what distance costs a predictor, what active sets are like, and the answers to its questions.

The claim under test: Deja Vu, which predicts a layer's active units from an earlier layer, fails on Llama because token
embeddings change from layer to layer (RoPE, SiLU). Each suspect is asked for its share of what a predictor misses. An
answer is one sentence with its numbers and a table, and no stronger than the intervals: yes is more than half of the
whole by the whole interval; no is less than a twentieth, or no loss found and none of half left open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from analysis.formatting import EMPTY_CELL, Table
from analysis.intervals import Estimate, difference, with_interval
from analysis.results import Record
from analysis.studies import (
    BLOCKS,
    FACTORS,
    LEVEL_NAMES,
    STUDY_NAMES,
    DistanceFacts,
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
    table: Table | None = None


def verdict(records: Sequence[Record]) -> str:
    """All answers as Markdown, each after its question; '' where no record is of a study."""
    found = answers(records)
    lines = [f"**{answer.question}** {answer.text}" for answer in found]
    return "\n\n".join([*lines, *(answer.table.to_markdown() for answer in found if answer.table)])


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
    return Answer(question=question, text=_sentence("; ".join(told) + which), table=_gain_table(lookaheads))


def _badness(facts: DistanceFacts, lookahead: int) -> tuple[int, float, float]:
    lost, share = facts.lost[lookahead], facts.share(lookahead)
    return JUDGEMENTS.index(judge(lost, share)), math.inf if share is None else share.value, lost.value


def _origin(lookahead: int) -> str:
    return "one layer back" if lookahead == 1 else f"{lookahead} layers back"


def _gain_table(lines: Sequence[tuple[DistanceFacts, int]]) -> Table:
    """A line per model, kind of unit and distance: what distance takes of what a predictor gains, and of perplexity."""
    rows = []
    for facts, lookahead in lines:
        lost, share = facts.lost[lookahead], facts.share(lookahead)
        rows.append(
            (
                facts.subject,
                BLOCKS[facts.block],
                EMPTY_CELL if facts.rank is None else str(facts.rank),
                str(lookahead),
                _cell(facts.own.get(lookahead), scale=100),
                f"{100 * facts.static[lookahead].value:.1f}" if lookahead in facts.static else EMPTY_CELL,
                _cell(lost, scale=100, signed=True),
                _cell(share, scale=100),
                judge(lost, share),
                _cell(facts.loss.get(0)),
                _cell(facts.loss_rise.get(lookahead), signed=True),
            )
        )
    columns = (
        "measured on", "predictors of", "rank", "layers back", "recall, own layer (%)", "always the same units (%)",
        "lost to distance (points)", "of the gain (%)", "drift explains it", "ln(perplexity / dense), own layer",
        "more with distance",
    )  # fmt: skip
    amounts = sorted({facts.calibration_tokens for facts, _ in lines if facts.calibration_tokens is not None})
    densities = sorted({facts.density for facts, _ in lines if facts.density is not None})
    caption = [
        "closed-form predictors",
        f"density {' and '.join(f'{density:g}' for density in densities)}" if densities else "",
        f"calibrated on {' and '.join(map(str, amounts))} tokens" if amounts else "",
        f"gain: recall above that of always the same units; {INTERVALS}, of many some miss",
    ]
    table = Table(
        title="drift: what it costs a predictor",
        columns=columns,
        rows=tuple(rows),
        caption=", ".join(filter(None, caption)),
    )
    return table.without_empty_columns()


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
    return Answer(question=question, text=_sentence(text), table=_factor_table(varying, factor))


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


def _factor_table(found: Sequence[ReportedEffects], factor: str) -> Table | None:
    """A line per outcome that says how good a prediction is."""
    shown = [each for each in found if each.effects.outcome.metric in ("recall", "r_precision", "implied_precision")]
    rows = []
    for each in shown:
        levels = (f"{100 * level:.1f}" for level in each.effects.level_means(factor))
        change = _cell(each.effects.main[factor], scale=100, signed=True)
        share = _cell(each.effects.share_of_missed(factor), scale=100)
        rows.append((each.title, *levels, change, share, _judged(each.effects, factor), _measured_on(each)))
    levels = (f"{LEVEL_NAMES[level]} (%)" for level in FACTORS[factor])
    return Table(
        title=f"ablation: {FACTOR_NAMES[factor]}",
        columns=("outcome", *levels, "change (points)", "of what is missed (%)", "explains it", "measured on"),
        rows=tuple(rows),
        caption=f"closed-form predictors, means over the other factors, {INTERVALS}",
    )


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
    chosen_records = latest_records([record for record in records if record["name"] == name])
    if name == "ablation":
        effects = reported_effects(chosen_records)
        found = [_effects_table(effects), _models_table(chosen_records, effects), _trait_table(chosen_records, name)]
    elif name == "relufication":
        found = [_relufication_table(chosen_records), _trait_table(chosen_records, name)]
    else:
        found = [_distance_table(model, each) for model, each in studied_models(chosen_records).items()]
        found.append(_trait_table(chosen_records, name))
    return [table for table in found if table is not None]


def _cell(estimate: Estimate | None, *, scale: float = 1.0, signed: bool = False) -> str:
    return EMPTY_CELL if estimate is None else with_interval(estimate, scale=scale, signed=signed)


def _distance_table(model: str, records: Sequence[Record]) -> Table | None:
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
    columns = [column for column in columns if column[1]]
    lookaheads = sorted({lookahead for _, by_lookahead, _, _ in columns for lookahead in by_lookahead})
    if not lookaheads:
        return None
    return Table(
        title=f"{model}: what distance costs",
        columns=("look-ahead", *(title for title, *_ in columns)),
        rows=tuple(
            (
                str(lookahead),
                *(_cell(each.get(lookahead), scale=scale, signed=signed) for _, each, scale, signed in columns),
            )
            for lookahead in lookaheads
        ),
        caption=_caption(records, "lost: on the same tokens and layers as at look-ahead 0"),
    )


def _trait_table(records: Sequence[Record], name: str) -> Table | None:
    """A line per model, of the ablation an activation function: what the sets of active neurons are like."""
    models = compared_models(records)
    columns: list[tuple[str, Callable[[Sequence[Record]], Estimate | None]]] = [
        ("exactly zero (%)", lambda found: _of_models(chosen(found, "exact_zeros"))),
        *(
            (f"energy in the top {100 * share:g} % (%)", _energy(share))
            for share in sorted({record["labels"]["top_share"] for record in chosen(records, "energy_share")})
        ),
        ("near the threshold (%)", lambda found: _of_models(chosen(found, "boundary_margin"))),
        ("shared with the token before (%)", lambda found: _of_models(chosen(found, "reuse_tokens"))),
    ]
    cells = {model: [cell(found) for _, cell in columns] for model, found in models.items()}
    cells = {model: row for model, row in cells.items() if any(cell is not None for cell in row)}
    used = [i for i in range(len(columns)) if any(row[i] is not None for row in cells.values())]
    if not used:
        return None
    return Table(
        title=f"{name}: sets of active neurons",
        columns=("model", *(columns[i][0] for i in used)),
        rows=tuple((model, *(_cell(row[i], scale=100) for i in used)) for model, row in cells.items()),
        caption=_caption(records),
    )


def _energy(share: float) -> Callable[[Sequence[Record]], Estimate | None]:
    return lambda found: _of_models(chosen(found, "energy_share", top_share=share))


def _of_models(records: Sequence[Record]) -> Estimate | None:
    """Of one model its own, of several their mean."""
    found = [{**record, "labels": {**record["labels"], "all": 0}} for record in at_lowest_density(records)]
    return pooled(found, "all").get(0)


def _effects_table(effects: Sequence[ReportedEffects]) -> Table | None:
    """A line per outcome, a column per factor."""
    if not effects:
        return None
    factors = [factor for factor in FACTORS if any(factor in each.effects.main for each in effects)]
    rows = []
    for each in effects:
        cells = [_cell(each.effects.main.get(factor), scale=each.scale, signed=True) for factor in factors]
        largest = each.effects.largest_interaction()
        interaction = EMPTY_CELL
        if largest is not None:
            interaction = f"{' × '.join(largest[0])} {_cell(largest[1], scale=each.scale, signed=True)}"
        rows.append((each.title, each.unit or EMPTY_CELL, *cells, interaction, _measured_on(each)))
    headings = [" instead of ".join(LEVEL_NAMES[level] for level in reversed(FACTORS[factor])) for factor in factors]
    left_out = sorted({seed for each in effects for seed in each.effects.incomplete_seeds})
    columns = ("outcome", "unit", *headings, "largest interaction", "measured on")
    caption = (
        f"paired differences, mean over the other factors, {INTERVALS} (Student's t over seeds; interactions: "
        "Bonferroni over all pairs)"
    )
    if len(same := {row[-1] for row in rows}) == 1:  # a column that says one thing is a caption
        columns, rows = columns[:-1], [row[:-1] for row in rows]
        caption = f"{same.pop()}; {caption}"
    if left_out:
        caption += f"; seeds left out of some rows, as models are missing: {', '.join(map(str, left_out))}"
    return Table(title="ablation: effects", columns=columns, rows=tuple(rows), caption=caption)


def _measured_on(reported: ReportedEffects) -> str:
    effects = reported.effects
    return f"{effects.num_models} models, seeds {', '.join(map(str, effects.seeds))}"


def _models_table(records: Sequence[Record], effects: Sequence[ReportedEffects]) -> Table | None:
    """A line per kind of model: the mean of each outcome over seeds."""
    known_records = with_derived(records)
    values = [outcome_values(known_records, each.effects.outcome) for each in effects]
    kinds = sorted({levels for by_seed in values for cells in by_seed.values() for levels in cells})
    rows = []
    for kind in kinds:
        cells = []
        for each, by_seed in zip(effects, values, strict=True):
            known = [cells_of[kind] for cells_of in by_seed.values() if kind in cells_of]
            cells.append(f"{each.scale * mean(known):.4g}" if known else EMPTY_CELL)
        rows.append((*(LEVEL_NAMES[level] for level in kind), *cells))
    if not rows:
        return None
    headings = [f"{each.title}{f' ({each.unit})' if each.unit else ''}".replace("points", "%") for each in effects]
    counts = [len(each.effects.seeds) for each in effects]
    headings = [
        title if count == max(counts) else f"{title}, {count} seeds"
        for title, count in zip(headings, counts, strict=True)
    ]
    return Table(
        title="ablation: models",
        columns=(*FACTORS, *headings),
        rows=tuple(rows),
        caption=f"means over {max(counts)} seeds" + ("" if len(set(counts)) == 1 else ", or as many as a column says"),
    )


def _relufication_table(records: Sequence[Record]) -> Table | None:
    rows = []
    for pair in relufied_pairs(records):
        cells = [_cell(side, scale=pair.scale) for side in (pair.silu, pair.relu)]
        change = _cell(difference(pair.relu, pair.silu), scale=pair.scale, signed=True)
        rows.append((pair.title, pair.unit or EMPTY_CELL, *cells, change))
    if not rows:
        return None
    return Table(
        title="relufication: ReLU instead of SiLU in one model",
        columns=("number", "unit", "SiLU", "ReLU", "difference"),
        rows=tuple(rows),
        caption=_caption(records, "differences as if the two were not paired (MOVER)"),
    )


def _caption(records: Sequence[Record], *more: str) -> str:
    labels = [record["labels"] for record in records]
    settings = shared_settings(labels, [name for name in CAPTION_LABELS if all(name in each for each in labels)])
    return ", ".join(filter(None, [settings, *more, INTERVALS]))
