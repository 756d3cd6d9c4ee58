"""Tables of the drift study: what distance costs, what active sets are like, effects of factors, the relufication."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from analysis.comparison import latest_records, shared_settings
from analysis.drift_distance_facts import distance_facts
from analysis.drift_distance_text import TOLD_COSINES
from analysis.effects import ReportedEffects, outcome_values, relufied_pairs, reported_effects, with_derived
from analysis.formatting import EMPTY_CELL, Table
from analysis.intervals import Estimate, difference
from analysis.results import Record
from analysis.studies import BLOCKS, FACTORS, LEVEL_NAMES, chosen, compared_models, cosines, pooled, studied_models
from analysis.wording import with_interval

SECTION_TITLES = {
    "drift": "Drift", "ablation": "Activation function, positions and norm, one at a time",
    "relufication": "ReLU for SiLU",
}  # fmt: skip
VERDICT_NAME = "drift_verdict"
VERDICT_TITLE = "Does drift explain why predictors fail?"
CAPTION_LABELS = ("corpus", "num_tokens", "dtype", "seed")
INTERVALS = "in brackets the 95 % interval"


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
        if variant in TOLD_COSINES
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
    """Of one model its own, of several their mean; at the lowest density, where there are several."""
    densities = {record["labels"].get("density") for record in records}
    lowest = min((density for density in densities if density is not None), default=None)
    found = [{**record, "labels": {**record["labels"], "all": 0}} for record in records]
    return pooled([record for record in found if record["labels"].get("density") == lowest], "all").get(0)


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
