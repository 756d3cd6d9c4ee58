"""Does drift explain what a predictor misses? What it loses with distance decides, model by model; not the cosine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis.drift_facts import (
    BLOCKS,
    DistanceFacts,
    ablation_distance_facts,
    cosines,
    distance_facts,
    layer_correlation,
    studied_models,
)
from analysis.intervals import Estimate, share_of_loss
from analysis.results import Record
from analysis.wording import CANNOT_TELL, headline, no_larger_than, with_interval

# The most alike and the least; the plot has the others.
TOLD_COSINES = ("raw", "standardised")


def drift_text(records: Sequence[Record]) -> str:
    """The paragraph: each studied model, then the mean over the models of the ablation."""
    models = studied_models(records)
    subjects = [([distance_facts(model, found, block) for block in BLOCKS], found) for model, found in models.items()]
    subjects.append(([ablation_distance_facts(records, block) for block in BLOCKS], []))
    told = [text for facts, found in subjects if (text := _subject_text(facts, found))]
    if told:
        return " ".join(told)
    similar = [f"*{model}*. {text}" for model, found in models.items() if (text := _cosine_sentence(found))]
    lack = f"{CANNOT_TELL}: they lack what a predictor loses to look-ahead (recall_drop of the look-ahead study)."
    return " ".join([lack, *similar, *(["A cosine alone does not say what a predictor loses."] if similar else [])])


def _subject_text(facts: Sequence[DistanceFacts | None], records: Sequence[Record]) -> str:
    """Answers by recall and by perplexity at the shortest distance, then at the longest, then the cosine."""
    known = [found for found in facts if found is not None and (found.lost or found.loss_rise)]
    if not known:
        return ""
    sentences = [f"*{known[0].subject}*."]
    for found in known:
        sentences += [_recall_sentence(found), _loss_sentence(found)]
    sentences += [_cosine_sentence(records), _layers_sentence(records)]
    return " ".join(filter(None, sentences))


def _recall_sentence(facts: DistanceFacts) -> str:
    if not facts.lost:
        return ""
    density = "" if facts.density is None else f" (density {facts.density:g})"
    own = facts.recall.get(0)
    start = f"; {with_interval(own, '%', scale=100)} from the layer's own input" if own is not None else ""
    if 0 in facts.static_recall:
        start += f" ({100 * facts.static_recall[0]:.1f} % for the same {BLOCKS[facts.block]} always)"
    changes = _changes(facts.lost, facts.missed, "points", 100.0, "of what is missed there")
    return f"Recall of {BLOCKS[facts.block]}{density}: {_answer(facts.lost, facts.missed)}{start}; {changes}."


def _loss_sentence(facts: DistanceFacts) -> str:
    """In nats a token, ln(perplexity / dense): those at look-ahead 0 are lost without distance."""
    if not facts.loss_rise:
        return ""
    start = facts.loss.get(0)
    without = {lookahead: start for lookahead in facts.loss_rise} if start is not None else {}
    told = f"; {with_interval(start, 'nats')} above dense from the layer's own input" if start is not None else ""
    changes = _changes(facts.loss_rise, without, "nats", 1.0, "of what is lost there", worse="more")
    return f"Perplexity with sparse {BLOCKS[facts.block]}: {_answer(facts.loss_rise, without)}{told}; {changes}."


def _answer(lost: Mapping[int, Estimate], without: Mapping[int, Estimate]) -> str:
    """At the shortest distance."""
    nearest = min(lost)
    if nearest not in without:
        return f"{CANNOT_TELL.lower()}, for want of look-ahead 0"
    return headline(lost[nearest], share_of_loss(lost[nearest], without[nearest]))


def _changes(
    lost: Mapping[int, Estimate],
    without: Mapping[int, Estimate],
    unit: str,
    scale: float,
    of_what: str,
    *,
    worse: str = "less",
) -> str:
    """What is lost at the shortest and at the longest distance, with its share of all that is lost."""
    better = "more" if worse == "less" else "less"
    parts = []
    for lookahead in dict.fromkeys((min(lost), max(lost))):
        change = lost[lookahead]
        origin = "one layer back" if lookahead == 1 else f"{lookahead} layers back"
        if change.low is not None and change.holds_zero:
            told = no_larger_than("change", change, unit, scale=scale)
        else:
            size, word = (change, worse) if change.value > 0 else (-change, better)
            told = f"{with_interval(size, unit, scale=scale)} {word}"
            if lookahead in without and change.value > 0 and change.low is not None:
                share = share_of_loss(change, without[lookahead])
                told += f" ({with_interval(share, '%', scale=100)} {of_what})"
        parts.append(f"from {origin} {told}")
    return ", ".join(parts)


def _cosine_sentence(records: Sequence[Record]) -> str:
    """Over the shortest and the longest distance."""
    told = []
    for variant, by_lookahead in cosines(records).items():
        if variant not in TOLD_COSINES:
            continue
        near, far = min(by_lookahead), max(by_lookahead)
        values = dict.fromkeys((with_interval(by_lookahead[near]), with_interval(by_lookahead[far])))
        told.append(f"{variant.replace('_', ' ')} {' and '.join(values)}")
    if not told:
        return ""
    distances = " and ".join(dict.fromkeys("one" if lookahead == 1 else str(lookahead) for lookahead in (near, far)))
    return f"Cosine of states {distances} layer{'' if far == 1 else 's'} apart: {'; '.join(told)}."


def _layers_sentence(records: Sequence[Record]) -> str:
    """Whether layers whose input has drifted more lose more recall."""
    found = layer_correlation(records)
    if found is None:
        return ""
    lookahead, num_layers, correlation = found
    told = f"rank correlation over {num_layers} layers at look-ahead {lookahead}: {with_interval(correlation)}"
    if correlation.holds_zero:
        return f"Whether layers that drift more lose more recall, these records cannot tell ({told})."
    word = "more" if correlation.value > 0 else "less"
    return f"Layers that drift more lose {word} recall ({told})."
