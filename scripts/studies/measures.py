"""One number of a study, and the record that it becomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from analysis.results import Record, make_record
from data.bootstrap import Interval


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number with its labels and 95 % interval (None: of one group only). `per_layer`, of what layers have: a value
    each (None: it has none). `extras`: what else its record says, such as what it is compared with."""

    metric: str
    labels: dict[str, Any]
    value: float
    interval: Interval | None
    per_layer: list[float | None] | None = None
    unit: str = ""
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def of_layers(self) -> dict[str, Any]:
        """`per_layer` by name, if there is one."""
        return {} if self.per_layer is None else {"per_layer": self.per_layer}


@dataclass(frozen=True, kw_only=True)
class StudyRecords:
    """Makes records with the name, the labels and the environment that all of a study share."""

    name: str
    labels: Mapping[str, Any]
    environment: Mapping[str, Any]

    def of(self, measures: Iterable[Measure], **labels: Any) -> list[Record]:
        """A record each; `labels` are further ones of them all."""
        return [
            make_record(
                self.name,
                {**self.labels, **one.labels, **labels},
                one.metric,
                one.value,
                one.unit,
                environment=self.environment,
                interval=one.interval,
                **one.of_layers,
                **one.extras,
            )
            for one in measures
        ]
