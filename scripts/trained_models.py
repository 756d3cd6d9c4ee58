"""What ablation and relufy do with a model: train it once and keep it, score it, have the drift study done on it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from loguru import logger
from torch import Tensor

from analysis.results import Record, make_record
from data.bootstrap import Resampling
from data.corpora import parse_corpus
from data.differences import differences
from data.files import changed_files, only_writer, read_json
from modules.checkpoint.manifest import MANIFEST_FILE, Manifest
from modules.checkpoint.write import write_model
from modules.decoder import Decoder
from modules.scoring import token_logprobs
from modules.training import TrainingOptions, train_model
from scripts.command_line import progress
from scripts.model_loading import Dtype, resolve_dtype
from scripts.run_records import RecordBook
from scripts.training_text import TrainingText

SCORED_TOGETHER = 16  # windows


class _TrainedManifest(msgspec.Struct):
    training: dict[str, Any] | None = None


def train_once(
    make_model: Callable[[], Decoder],
    folder: Path,
    text: TrainingText,
    options: TrainingOptions,
    identity: Mapping[str, Any],
    *,
    title: str,
    quiet: bool,
) -> None:
    """Train a model and write its float32 checkpoint, with its tokenizer and how the loss went, unless that is done
    already; one process at a time trains into a folder."""
    with only_writer(folder.with_name(f"{folder.name}.training")):
        if is_trained(folder, identity):
            return
        model = make_model()
        with progress((), title, quiet=quiet, total=options.steps, unit="step") as bar:

            def show(step: int, loss: float) -> None:
                bar.update(step - bar.n)
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)

            curve = train_model(model, text.train, options, on_step=show)
        logger.info(f"{title}: loss {curve[-1][1]:.3f} after {options.num_tokens} tokens")
        write_model(
            model,
            folder,
            model_id=folder.name,
            manifest={"training": dict(identity), "training_losses": curve},
            other_files=text.tokenizer_files,
        )


def is_trained(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a folder holds the checkpoint of this training, whole; of a damaged one that is told. ValueError if it
    holds that of another."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return False
    try:
        there, sums = read_json(path, _TrainedManifest).training, read_json(path, Manifest).sums
    except ValueError as error:
        logger.warning(f"{error}: training again")
        return False
    if there != identity:
        found = "; ".join(differences(there or {}, identity, "there"))
        raise ValueError(f"{folder} was trained otherwise ({found}); choose another --output-dir")
    if changed := changed_files(folder, sums):
        logger.warning(f"{folder}: {', '.join(changed[:4])} missing or not as written: training again")
    return not changed


def training_options(
    *, train_tokens: int, batch_windows: int, window: int, learning_rate: float, seed: int
) -> TrainingOptions:
    """As many steps as it takes; ValueError, with the flag, for what no training could have."""
    for name, value in (("train-tokens", train_tokens), ("batch-windows", batch_windows), ("window", window)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    return TrainingOptions(
        steps=math.ceil(train_tokens / (batch_windows * window)),
        batch_windows=batch_windows,
        window=window,
        learning_rate=learning_rate,
        seed=seed,
    )


def training_identity(options: TrainingOptions, text: TrainingText, **more: Any) -> dict[str, Any]:
    """What a training depends on, besides the model: as manifests and records have it."""
    return {**dataclasses.asdict(options), "text": text.identity, "num_tokens": options.num_tokens, **more}


def finished_records(
    book: RecordBook, name: str, labels: Mapping[str, Any], made: Mapping[str, Mapping[str, Any]], *, last: str = "loss"
) -> list[Record] | None:
    """The records under these labels and further ones (of sparse runs only if the labels say so), if all are there: the
    metric that is written last tells. `made`: their parts that say how they came about, such as `training`.

    ValueError if any of them, also of a run that was killed while it wrote, was made otherwise: new ones under the same
    labels would be taken for those.
    """
    there = [
        one
        for one in book.known
        if one["name"] == name
        and labels.items() <= one["labels"].items()
        and one["labels"].get("method") == labels.get("method")
    ]
    wanted = _as_read(made)
    for one in there:
        found = [phrase for part in wanted for phrase in differences(one.get(part) or {}, wanted[part], "there")]
        if found:
            raise ValueError(
                f"{book.path} holds records of {labels['model']} that were made otherwise: {'; '.join(found)}; choose "
                "another --output"
            )
    return there if any(one["metric"] == last for one in there) else None


def keep_records(book: RecordBook, records: Sequence[Record], made: Mapping[str, Mapping[str, Any]]) -> list[Record]:
    """Append records, as many as are not there yet, each with `made`, which says how it came about."""
    return book.write([{**record, **_as_read(made)} for record in records])


def _as_read(made: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return json.loads(json.dumps(made))  # a tuple comes back as a list


def study_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """Of the weights that are studied; auto: bfloat16 on a GPU, float32 elsewhere."""
    return resolve_dtype(dtype) or (torch.bfloat16 if device.type == "cuda" else torch.float32)


def score(
    name: str, labels: Mapping[str, Any], model: Decoder, text: TrainingText, other_corpus: str, **extras: Any
) -> tuple[Record, list[Record]]:
    """The loss on held-out text; its perplexity and that of the other text."""
    loss = loss_record(name, labels, model, text.held_out, **extras)
    other_labels = {**labels, "corpus": parse_corpus(other_corpus, side="test").label}
    other = loss_record(name, other_labels, model, text.other, **extras)
    return loss, [perplexity_record(loss, **extras), perplexity_record(other, **extras)]


def loss_record(name: str, labels: Mapping[str, Any], model: Decoder, windows: Tensor, **extras: Any) -> Record:
    """Mean next-token loss on windows [W, T], nats, with its interval over the windows."""
    losses = -torch.stack(token_logprobs(model, windows, batch_size=SCORED_TOGETHER)).double()
    per_window, count = losses.sum(1), torch.full((len(losses),), losses.shape[1], dtype=torch.float64)
    resampling, value = Resampling(len(windows), seed=0), float(losses.mean())
    interval = resampling.interval(value, resampling.ratios(per_window, count))
    labels = {**labels, "num_tokens": losses.numel()}
    return make_record(name, labels, "loss", value, "nats", interval=list(interval), **extras)


def perplexity_record(loss: Record, dense_loss: float | None = None, **extras: Any) -> Record:
    """A loss as a perplexity, compared with that of the dense model if its loss is given."""
    baseline = None if dense_loss is None else {"name": "dense", "value": math.exp(dense_loss)}
    return make_record(
        loss["name"],
        loss["labels"],
        "perplexity",
        math.exp(loss["value"]),
        "",
        baseline=baseline,
        interval=[math.exp(end) for end in loss["interval"]],
        **extras,
    )
