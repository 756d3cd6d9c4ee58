"""Does drift explain what a predictor misses? What it loses with distance decides, model by model; not the cosine."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.drift_distance_facts import DistanceFacts, ablation_distance_facts, distance_facts
from analysis.intervals import Estimate, share_of_gain, share_of_loss
from analysis.results import Record
from analysis.studies import BLOCKS, cosines, layer_correlation, studied_models
from analysis.wording import ANSWER_ORDER, CANNOT_TELL, SHORT_ANSWERS, WORDS, at_most, judge, with_interval

# The most alike and the least; the plot has the others.
TOLD_COSINES = ("raw", "standardised")


def drift_text(records: Sequence[Record]) -> str:
    """A paragraph each: the studied models, then the mean over the models of the ablation."""
    models = studied_models(records)
    subjects = [([distance_facts(model, found, block) for block in BLOCKS], found) for model, found in models.items()]
    subjects.append(([ablation_distance_facts(records, block) for block in BLOCKS], []))
    told = [text for facts, found in subjects if (text := _subject_text(facts, found))]
    if told:
        return "\n\n".join(filter(None, [_headline([each for facts, _ in subjects for each in facts if each]), *told]))
    similar = [f"{model}: {text}" for model, found in models.items() if (text := _cosine_sentence(found))]
    lack = f"{CANNOT_TELL}: they lack what a predictor loses to look-ahead (recall_drop of the look-ahead study)."
    return " ".join([lack, *similar, *(["A cosine alone does not say what a predictor loses."] if similar else [])])


def _headline(facts: Sequence[DistanceFacts]) -> str:
    """Yes or no at the shortest distance and at the longest, by what recall loses there; '' where none is known.

    The model and kind of unit that lose most decide.
    """
    told = {}
    distances = [lookahead for each in facts for lookahead in each.lost]
    for lookahead in sorted({min(distances, default=0), max(distances, default=0)} - {0}):
        found = [judge(each.lost[lookahead], _share(each, lookahead)[0]) for each in facts if lookahead in each.lost]
        told[lookahead] = max((SHORT_ANSWERS[judgement] for judgement in found), key=ANSWER_ORDER.index)
    answers = "; ".join(f"{answer}, {_origin(lookahead).lower()}" for lookahead, answer in told.items())
    decides = "the largest loss of recall found here, of closed-form predictors, decides."
    return f"{answers[0].upper()}{answers[1:]}: {decides}" if told else ""


def _share(facts: DistanceFacts, lookahead: int) -> tuple[Estimate | None, str]:
    """What share of which whole a distance takes: of the gain over the same units always, else of what is missed."""
    lost = facts.lost[lookahead]
    if lookahead in facts.gain:
        return share_of_gain(lost, facts.gain[lookahead]), "the gain"
    if lookahead in facts.missed:
        return share_of_loss(lost, facts.missed[lookahead]), "what is missed there"
    return None, ""


def _subject_text(facts: Sequence[DistanceFacts | None], records: Sequence[Record]) -> str:
    """Which predictors; by recall and by perplexity what the shortest and the longest distance cost; then drift."""
    known = [found for found in facts if found is not None and (found.lost or found.loss_rise)]
    if not known:
        return ""
    amounts = {found.calibration_tokens for found in known}
    amount = amounts.pop() if len(amounts) == 1 else None
    told = "" if amount is None else f" ({amount} tokens)"
    sentences = [f"{known[0].subject}, closed-form predictors, for this calibration text{told}."]
    if any(found.gain for found in known):
        sentences.append("Their gain is recall above that of always the same units.")
    for found in known:
        sentences += [*_recall_sentences(found), _loss_sentence(found)]
    sentences += [_cosine_sentence(records), _layers_sentence(records)]
    return " ".join([*filter(None, sentences), "Intervals are 95 % each: of many, some miss."])


def _recall_sentences(facts: DistanceFacts) -> list[str]:
    """What distance takes of what a predictor gains over the same units always; else, of what it misses."""
    if not facts.lost:
        return []
    units, own = BLOCKS[facts.block], facts.recall.get(0)
    settings = [] if facts.rank is None else [f"rank {facts.rank}"]
    settings += [] if facts.density is None else [f"density {facts.density:g}"]
    title = units.capitalize() + (f" ({', '.join(settings)})" if settings else "")
    sentences = []
    if own is not None:
        always = ""
        if 0 in facts.static_recall:
            always = f", {100 * facts.static_recall[0]:.1f} % with always the same"
        sentences.append(f"{title}: recall without distance is {with_interval(own, '%', scale=100)}{always}.")
    else:
        sentences.append(f"{title}:")
    said = " is lost"  # once is enough
    for lookahead in dict.fromkeys((min(facts.lost), max(facts.lost))):
        lost = facts.lost[lookahead]
        share, whole = _share(facts, lookahead)
        told = _change(lost, share, whole + (said if lookahead in facts.gain else ""), "points", 100.0)
        sentences.append(f"{_origin(lookahead)}: {WORDS[judge(lost, share)]}, {told}.")
        said = ""
    if facts.largest_rank is not None:
        found = facts.largest_rank
        told = _change(found.lost, share_of_gain(found.lost, found.gain), "the gain", "points", 100.0)
        sentences.append(f"{_origin(found.lookahead)} at rank {found.rank}, the largest measured: {told}.")
    return sentences


def _loss_sentence(facts: DistanceFacts) -> str:
    """In nats per token, ln(perplexity / dense): those at look-ahead 0 are lost without distance."""
    if not facts.loss_rise:
        return ""
    start, told = facts.loss.get(0), []
    above = "" if start is None else f" ({with_interval(start, 'nats')} above dense)"
    for lookahead in dict.fromkeys((min(facts.loss_rise), max(facts.loss_rise))):
        rise = facts.loss_rise[lookahead]
        share = None if start is None else share_of_loss(rise, start)
        change = _change(rise, share, "the loss there", "nats", 1.0, worse="more")
        told.append(f"{_origin(lookahead).lower()} {WORDS[judge(rise, share)]}, {change}")
    return f"Perplexity of sparse {BLOCKS[facts.block]}{above}: {'; '.join(told)}."


def _origin(lookahead: int) -> str:
    return "One layer back" if lookahead == 1 else f"{lookahead} layers back"


def _change(
    change: Estimate, share: Estimate | None, whole: str, unit: str, scale: float, *, worse: str = "less"
) -> str:
    """The share of the whole of what is certainly a loss, else how large the change is or may be."""
    if change.low is not None and change.holds_zero:
        return f"at most {at_most(change.largest, scale=scale)} {unit}"
    if share is not None and change.low is not None and change.value > 0:
        return f"{with_interval(share, '%', scale=100)} of {whole}"
    better = "more" if worse == "less" else "less"
    size, word = (change, worse) if change.value > 0 else (-change, better)
    return f"{with_interval(size, unit, scale=scale)} {word}"


def _cosine_sentence(records: Sequence[Record]) -> str:
    """Over the longest distance."""
    told = []
    for variant, by_lookahead in cosines(records).items():
        if variant in TOLD_COSINES:
            far = max(by_lookahead)
            told.append(f"{variant.replace('_', ' ')} {with_interval(by_lookahead[far])}")
    if not told:
        return ""
    distance = "one layer" if far == 1 else f"{far} layers"
    return f"Cosine of states {distance} apart: {', '.join(told)}."


def _layers_sentence(records: Sequence[Record]) -> str:
    """Whether layers whose input has drifted more lose more recall."""
    found = layer_correlation(records)
    if found is None:
        return ""
    lookahead, num_layers, correlation = found
    told = f"{num_layers} layers, look-ahead {lookahead}: rank correlation {with_interval(correlation)}"
    if correlation.holds_zero:
        return f"Whether layers that drift more lose more is open ({told})."
    word = "more" if correlation.value > 0 else "less"
    return f"Layers that drift more lose {word} recall ({told})."
