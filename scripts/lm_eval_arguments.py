"""What lm-eval's command line hands over to make a model, as our own flags understand it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from loguru import logger

from scripts.model_loading import RunOptions
from scripts.selection_options import SelectionOptions
from sparse_predictor.selection import SparsePhases


@dataclass(frozen=True, kw_only=True)
class ModelArguments(SelectionOptions, RunOptions):
    """`--model_args` of lm-eval's command line."""

    sparse_phases: SparsePhases = "all"
    """Unlike `infer`'s: a log-likelihood never decodes."""


def parse_batch_size(value: str | int) -> int | None:
    """A number of rows; None for `auto` (and `auto:N`, of which the N is not needed). ValueError for anything else."""
    if str(value).partition(":")[0] == "auto":
        return None
    try:
        rows = int(value)
    except ValueError:
        rows = 0
    if rows < 1:
        raise ValueError(f"batch_size must be auto or a number of at least 1, got {value!r}")
    return rows


def usable_device(device: str) -> str:
    """lm-eval hands over `cuda:0` where nothing was asked for, on a machine without a GPU too."""
    if device.startswith("cuda") and torch.cuda.device_count() == 0:
        logger.info(f"device {device}: this machine has no GPU, so the CPU is taken")
        return "cpu"
    return device


def parse_arguments(given: Mapping[str, Any]) -> ModelArguments:
    """`--model_args` with the types of the flags they are named after; ValueError names what does not fit."""
    names = [field.name for field in fields(ModelArguments)]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"--model_args {unknown[0]}: unknown; allowed are {', '.join(sorted(names))}")
    if "model" not in given:
        raise ValueError("--model_args needs model=DIR (a converted folder, a Hugging Face folder or a hub id)")
    hints = get_type_hints(ModelArguments)
    return ModelArguments(**{name: _parse(name, value, hints[name]) for name, value in given.items()})


def _parse(name: str, value: Any, kind: Any) -> Any:
    """`value` as the type of its flag, or as the first of several that it fits."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for one in kinds:
        if get_origin(one) is Literal and value in get_args(one):
            return value
        if one is Path:
            return Path(str(value))
        if one is str or (one is bool and isinstance(value, bool)):
            return one(value)
        if (
            one in (int, float)
            and isinstance(value, int | float)
            and not isinstance(value, bool)
            and one(value) == value
        ):
            return one(value)
    named = [
        name
        for one in kinds
        if one is not NoneType
        for name in (map(str, get_args(one)) if get_origin(one) is Literal else [one.__name__])
    ]
    raise ValueError(f"--model_args {name}={value}: expected {' or '.join(named)}")
