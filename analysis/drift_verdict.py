"""The drift study in words: a question each, made from records and no stronger than their intervals.

The claim under test: Deja Vu, which predicts a layer's active units from an earlier layer, fails on Llama because token
embeddings change from layer to layer (RoPE, SiLU). Each suspect is asked for its share of what a predictor misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.drift_distance_text import drift_text
from analysis.drift_factor_text import factor_text, most_text, relufication_text
from analysis.effects import reported_effects
from analysis.results import Record
from analysis.studies import FACTORS, STUDY_NAMES

FACTOR_QUESTIONS = {
    "activation": "Does the activation function explain it?",
    "positions": "Does RoPE explain it?",
    "norm": "Does the norm explain it?",
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question and what answers it: plain text without markup, a blank line between paragraphs."""

    question: str
    text: str


def verdict(records: Sequence[Record]) -> str:
    """All answers as Markdown, each after its question; '' where no record is of the study."""
    return "\n\n".join(f"**{answer.question}** {answer.text}" for answer in answers(records))


def answers(records: Sequence[Record]) -> list[Answer]:
    """The answer to each question; what the records cannot answer says which records are lacking."""
    studied = [record for record in records if record["name"] in STUDY_NAMES]
    if not studied:
        return []
    effects = reported_effects(studied)
    texts = {factor: factor_text(effects, factor) for factor in FACTORS}
    texts["activation"] = f"{texts['activation']} {relufication_text(studied)}".strip()
    found = [Answer(question="Does drift explain it?", text=drift_text(studied))]
    found += [Answer(question=FACTOR_QUESTIONS[factor], text=text) for factor, text in texts.items()]
    if most := most_text(effects):
        found.append(Answer(question="Which factor moves recall most?", text=most))
    return found
