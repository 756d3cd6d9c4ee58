"""Does the activation function, RoPE or the norm explain what a predictor misses? The controlled experiment decides."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.effects import FactorEffects, RelufiedPair, ReportedEffects, relufied_pairs
from analysis.intervals import Estimate, difference
from analysis.results import Record
from analysis.studies import FACTORS, LEVEL_NAMES
from analysis.wording import CANNOT_TELL, headline, no_larger_than, with_interval

FACTOR_NAMES = {"activation": "the activation function", "positions": "the positions", "norm": "the norm"}


def factor_text(found: Sequence[ReportedEffects], factor: str) -> str:
    """The paragraph of one factor: the answer is about recall of neurons, and the further outcomes are counted."""
    return " ".join(_effect_sentences(found, factor))


def primary_effects(found: Sequence[ReportedEffects]) -> FactorEffects | None:
    """Those on recall of neurons, which the answers are about; None where the records have others only."""
    if not found:
        return None
    outcome = found[0].effects.outcome
    is_of_neurons = outcome.metric == "recall" and dict(outcome.labels).get("block") == "mlp"
    return found[0].effects if is_of_neurons else None


def _effect_sentences(found: Sequence[ReportedEffects], factor: str) -> list[str]:
    primary = primary_effects(found)
    if primary is None:
        return [
            f"{CANNOT_TELL}: they lack recall of neurons in models that differ in nothing else "
            "(scripts.studies.ablation makes them)."
        ]
    if factor not in primary.main:
        return [f"{CANNOT_TELL}: the models of the ablation do not differ in {FACTOR_NAMES[factor]}."]
    change = primary.main[factor]
    before, after = primary.level_means(factor)
    first, second = (LEVEL_NAMES[level] for level in FACTORS[factor])
    sentences = [
        _answer(found, factor),
        f"With {second} instead of {first}, {found[0].title} goes from {100 * before:.1f} % to {100 * after:.1f} %: "
        f"{_effect(change, found[0])} ({_counted(primary)}).",
    ]
    return [*sentences, *_further_sentences(found[1:], factor), *_interaction_sentences(primary, factor)]


def _answer(found: Sequence[ReportedEffects], factor: str) -> str:
    """The judgement of recall; where precision certainly moves against it, that of R-precision, if there is any."""
    answer = _judged(found[0].effects, factor)
    recall, opposed = found[0].effects.main[factor], _of_metric(found, "implied_precision", factor)
    if opposed is None or not _go_apart(recall, opposed.effects.main[factor]):
        return f"{answer[0].upper()}{answer[1:]}."
    both = f"{answer}. In precision the other way, {_effect(opposed.effects.main[factor], opposed)}: the true sets "
    both += "differ in size, and recall at equal picks favours the smaller"
    settling = _of_metric(found, "r_precision", factor)
    if settling is None:
        return f"In recall: {both}, so these numbers alone do not settle it."
    change = settling.effects.main[factor]
    before, after = settling.effects.level_means(factor)
    moved = f"{100 * before:.1f} % to {100 * after:.1f} %: {_effect(change, settling)}"
    if settling.effects.num_models != found[0].effects.num_models:
        moved += f" ({_counted(settling.effects)})"
    if not change.holds_zero:
        is_against = _go_apart(recall, change)
        # R random picks of U units find R / U of the true ones, and precision went up because R did.
        moved += (
            ", against recall (chance finds more of the larger true set, too)" if is_against else ", as recall does"
        )
    return (
        f"In {settling.title} (of as many picks as each token has neurons to be found): "
        f"{_judged(settling.effects, factor)}; it goes from {moved}. In recall at equal picks: {both}."
    )


def _counted(effects: FactorEffects) -> str:
    """Of how many models an effect is."""
    plural = "s" if len(effects.seeds) > 1 else ""
    return f"means over {effects.num_models} small models, paired over {len(effects.seeds)} seed{plural}"


def _judged(effects: FactorEffects, factor: str) -> str:
    """Of a share that is 1 at best: whether the factor explains what is missed."""
    return headline(-effects.main[factor], effects.share_of_missed(factor))


def _of_metric(found: Sequence[ReportedEffects], metric: str, factor: str) -> ReportedEffects | None:
    """Effects on a metric of neurons, if the factor varies there."""
    for each in found:
        outcome = each.effects.outcome
        if outcome.metric == metric and dict(outcome.labels).get("block") == "mlp" and factor in each.effects.main:
            return each
    return None


def _go_apart(one: Estimate, other: Estimate) -> bool:
    """Whether two changes certainly have different signs."""
    return one.value * other.value < 0 and not (one.holds_zero or other.holds_zero)


def _further_sentences(found: Sequence[ReportedEffects], factor: str) -> list[str]:
    """How many of the other outcomes have an effect: which, the table of effects says."""
    changes = [each.effects.main[factor] for each in found if factor in each.effects.main]
    if not changes:
        return []
    moved = sum(not change.holds_zero for change in changes)
    return [
        f"Of {len(changes)} further outcomes, {moved} moved by more than chance would explain (95 % intervals; one in "
        "twenty does so by chance): see the table of effects."
    ]


def _effect(change: Estimate, reported: ReportedEffects) -> str:
    if change.low is not None and change.holds_zero:
        return no_larger_than("effect", change, reported.unit, scale=reported.scale)
    return with_interval(change, reported.unit, scale=reported.scale, signed=True)


def _interaction_sentences(primary: FactorEffects, factor: str) -> list[str]:
    """The largest interaction, told in the paragraph of either of its factors."""
    largest = primary.largest_interaction()
    if largest is None or factor not in largest[0] or largest[1].low is None:
        return []
    (first, second), estimate = largest
    if estimate.holds_zero:
        return [
            f"The largest interaction is of {FACTOR_NAMES[first]} with {FACTOR_NAMES[second]}: "
            f"{no_larger_than('effect', estimate, 'points', scale=100)}."
        ]
    low, high = (LEVEL_NAMES[level] for level in FACTORS[second])
    return [
        f"The effect of {FACTOR_NAMES[first]} on recall depends on {FACTOR_NAMES[second]}: with {high} it is "
        f"{with_interval(estimate, 'points', scale=100, signed=True)} from what it is with {low}."
    ]


def relufication_text(records: Sequence[Record]) -> str:
    """What ReLU in the place of SiLU changed in one model; '' without such records."""
    told = [_change(pair) for pair in relufied_pairs(records)]
    return f"In one model, ReLU in the place of SiLU (both trained on alike): {'; '.join(told)}." if told else ""


def _change(pair: RelufiedPair) -> str:
    silu, relu = (with_interval(side, pair.unit, scale=pair.scale) for side in (pair.silu, pair.relu))
    change = difference(pair.relu, pair.silu)
    open_ended = ", which the intervals do not tell apart" if change.low is not None and change.holds_zero else ""
    return f"{pair.title}: {relu} instead of {silu}{open_ended}"


def most_text(found: Sequence[ReportedEffects]) -> str:
    """Which factor moves recall of neurons most; '' where fewer than two vary."""
    primary = primary_effects(found)
    if primary is None or len(primary.main) < 2:
        return ""
    first, second, *_ = sorted(primary.main, key=lambda factor: -abs(primary.main[factor].value))
    lead = with_interval(primary.lead(first, second), "points", scale=100)
    name, other = FACTOR_NAMES[first], FACTOR_NAMES[second]
    if primary.lead(first, second).holds_zero:
        return f"{CANNOT_TELL}: between {name} and {other}, the next, lie {lead}."
    return f"{name[0].upper()}{name[1:]}: it moves recall of neurons {lead} further than {other}, the next."
