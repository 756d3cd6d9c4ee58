"""The types of what tables and plots read of a record; keys and labels that are not here may hold anything."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Number = float | None
Text = str | None
Count = int | None
Interval = Annotated[list[float], Meta(min_length=2, max_length=2)] | None
PerLayer = list[float | None] | None


class Labels(msgspec.Struct, kw_only=True):
    """Conditions that are compared, sorted or put into words."""

    model: Text = None
    method: Text = None
    weights: Text = None
    phase: Text = None
    task: Text = None
    dtype: Text = None
    corpus: Text = None
    block: Text = None
    study: Text = None
    variant: Text = None
    activation: Text = None
    norm: Text = None
    positions: Text = None
    operator: Text = None
    shape: Text = None
    transport: Text = None
    execution: Text = None
    point: Text = None
    text: Text = None
    tokens: Text = None
    label: Text = None
    density_budget: Text = None
    predictors: Text = None
    converted_from: Text = None
    all_reduce: Text = None
    density: Number = None
    mlp_density: Number = None
    head_density: Number = None
    batch_size: Count = None
    num_tokens: Count = None
    prompt_tokens: Count = None
    new_tokens: Count = None
    lookahead: Count = None
    seed: Count = None
    layer_idx: Count = None
    hidden_size: Count = None
    window: Count = None
    num_fewshot: Count = None
    num_samples: Count = None
    predictor_rank: Count = None
    standin_rank: Count = None
    calibration_tokens: Count = None
    tp_size: Count = None
    pp_size: Count = None
    dp_size: Count = None


class Environment(msgspec.Struct, kw_only=True):
    """Where it was measured."""

    commit: Text = None
    dirty: bool | None = None
    cpu: Text = None
    device: Text = None
    date: Text = None
    cuda: Text = None
    driver: Text = None
    torch: Text = None
    triton: Text = None
    num_cores: Count = None
    num_devices: Count = None


class Achieved(msgspec.Struct, kw_only=True):
    """What a run really did."""

    mlp_density: Number = None
    head_density: Number = None
    union_mlp_density: Number = None
    union_head_density: Number = None
    bytes_read_share: Number = None
    layer_bytes_share: Number = None
    sparse_calls: Count = None
    executions: dict[str, int] | None = None
    per_layer: dict[str, PerLayer] | None = None


class Quality(msgspec.Struct, kw_only=True):
    """Of the choice of units."""

    recall: Number = None
    precision: Number = None
    windows: Count = None
    per_layer: dict[str, dict[str, PerLayer] | None] | None = None


class Windows(msgspec.Struct, kw_only=True):
    """Nats and tokens of each window of a text."""

    nll: list[float]
    tokens: list[int]


class FirstWindows(msgspec.Struct, kw_only=True):
    """Of a text: how many windows, and the perplexities of a run and of dense on them."""

    num: int
    perplexity: float
    dense: float


class Timing(msgspec.Struct, kw_only=True):
    """The repetitions of one call."""

    samples: list[float] | None = None


class Position(msgspec.Struct, kw_only=True):
    """A value of the tokens from one position on, below another."""

    start: int = msgspec.field(name="from")
    below: int
    value: float


class RecordTypes(msgspec.Struct, kw_only=True):
    """A record, as far as its types matter to a reader."""

    labels: Labels
    environment: Environment
    achieved: Achieved | None = None
    quality: Quality | None = None
    windows: Windows | None = None
    first_windows: FirstWindows | None = None
    timing: Timing | None = None
    text_achieved: Achieved | None = None
    interval: Interval = None
    ratio_interval: Interval = None
    above_static: Number = None
    above_static_interval: Interval = None
    static: Number = None
    true_density: Number = None
    union_density: Number = None
    predicted_density: Number = None
    achieved_gb_per_s: Number = None
    ceiling_gb_per_s: Number = None
    achieved_gb_per_s_each: Number = None
    ceiling_gb_per_s_each: Number = None
    tflops_each: Number = None
    ceiling_tflops_each: Number = None
    bytes_per_call: Number = None
    bytes_per_step: Number = None
    per_layer: PerLayer = None
    per_position: list[Position] | None = None
    massive_channels: dict[str, float] | None = None
