"""What the drift study measured, as records with the labels that all of one model's share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.drift_facts import DENSITY_LABELS
from analysis.embedding_drift import Measure
from analysis.results import Record, make_record
from sparse_predictor.activation_study import ActivationPoint
from sparse_predictor.distance_study import DistancePoint


@dataclass(frozen=True)
class DriftBook:
    """Makes records with the labels and the environment that all of them share."""

    name: str
    labels: Mapping[str, Any]
    environment: Mapping[str, Any]

    def record(self, metric: str, value: float, labels: Mapping[str, Any], unit: str = "", **more: Any) -> Record:
        """One record; `labels` are its own, `more` what `make_record` takes."""
        return make_record(
            self.name, {**self.labels, **labels}, metric, value, unit, environment=self.environment, **more
        )

    def of_measures(self, measures: Iterable[Measure], *, num_tokens: int) -> list[Record]:
        """Cosines, relative updates, CKA."""
        return [
            self.record(
                one.metric,
                one.value,
                {**one.labels, "num_tokens": num_tokens},
                interval=one.interval,
                per_layer=one.per_layer,
                **one.extras,
            )
            for one in measures
        ]

    def of_distances(self, points: Iterable[DistancePoint]) -> list[Record]:
        """The metrics of each point, shares between 0 and 1 but where another unit stands.

        Recall (against the same units for every token), precision, of neurons r_precision (of the R best-scored, R the
        number of a token's true ones; likewise against the same for every token; groups of heads always write, so it
        would be their recall), recall_drop (recall at look-ahead 0 minus that on the same tokens and layers: above 0,
        distance costs), perplexity (against dense) and loss_rise (nats per token).
        """
        found = []
        for one in points:
            labels: dict[str, Any] = {
                "study": one.study,
                "block": one.block,
                "lookahead": one.lookahead,
                "predictor_rank": one.predictor_rank,
                "calibration_tokens": one.calibration_tokens,
                DENSITY_LABELS[one.block]: one.density,
                "num_tokens": one.num_tokens,
            }
            found.append(
                self.record(
                    "recall",
                    one.recall,
                    labels,
                    baseline={"name": "static", "value": one.static_recall},
                    interval=one.recall_interval,
                    per_layer=one.per_layer_recall,
                    predicted_density=one.predicted_density,
                    true_density=one.true_density,
                )
            )
            found.append(self.record("precision", one.precision, labels, interval=one.precision_interval))
            if one.block == "mlp":
                found.append(
                    self.record(
                        "r_precision",
                        one.r_precision,
                        labels,
                        baseline={"name": "static", "value": one.static_r_precision},
                        interval=one.r_precision_interval,
                    )
                )
            if one.lookahead:
                low, high = one.recall_drop_interval
                found.append(self.record("recall_drop", -one.recall_drop, labels, interval=(-high, -low)))
            if one.perplexity is None:
                continue
            labels |= {"num_tokens": one.perplexity_tokens}
            dense = {"name": "dense", "value": one.dense_perplexity}
            found.append(
                self.record(
                    "perplexity",
                    one.perplexity,
                    labels,
                    baseline=dense,
                    interval=one.perplexity_interval,
                    ratio_interval=one.perplexity_ratio_interval,
                )
            )
            if one.lookahead and one.loss_rise is not None:
                found.append(self.record("loss_rise", one.loss_rise, labels, "nats", interval=one.loss_rise_interval))
        return found

    def of_activations(self, points: Iterable[ActivationPoint], *, num_tokens: int) -> list[Record]:
        """How neurons' outputs are spread, and how long they stay active: against chance, and against neurons that are
        often active anyway (`static`)."""
        found = []
        for one in points:
            compared: dict[str, Any] = {}
            if one.chance is not None:
                compared["baseline"] = {"name": "chance", "value": one.chance}
            if one.static is not None:
                compared |= {"static": one.static, "above_static": one.above_static}
                compared["above_static_interval"] = one.above_static_interval
            labels = {**one.labels, "num_tokens": num_tokens}
            more = {"interval": one.interval, "per_layer": one.per_layer, **compared}
            found.append(self.record(one.metric, one.value, labels, **more))
        return found
