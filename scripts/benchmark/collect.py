"""What collecting costs over the plain forward pass: the same batches with and without recorder and store."""

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from loguru import logger

from analysis.results import Record, append_record, make_record
from data.activation_store import ActivationStoreWriter
from data.corpora import TokenPiece, iter_documents, token_pieces
from data.store_manifest import StoreLayout
from modules.scoring import pad_right
from scripts.command_line import progress, run_stage
from scripts.model_loading import LoadedModel, ModelOptions
from scripts.written_text import self_writer
from sparse_predictor.collect import ActivationRecorder, collect_documents, ragged_batches

MAX_BATCH_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """What collecting costs over the plain forward pass, on the same batches."""

    corpus: str
    """Text to run over."""
    output: Path
    """JSON lines; one record is appended."""
    work_dir: Path | None = None
    """Where the store is written and removed again; the system's temporary folder by default."""
    max_tokens: int = 4096
    """Tokens a repetition."""
    repetitions: int = 5
    """The two alternate so many times; the medians are compared."""


def main(options: Options) -> Record:
    """Time both and append one record: seconds of collecting, the plain pass as its baseline."""
    loaded = options.load()
    model = loaded.model
    pieces = list(
        token_pieces(
            loaded.tokenizer,
            iter_documents(
                options.corpus, side="train", self_writer=self_writer(loaded, max_tokens=options.max_tokens)
            ),
            max_tokens=options.max_tokens,
            max_document_tokens=min(2048, model.config.max_position_embeddings),
        )
    )
    plain_s, collect_s = [], []
    for _ in progress(range(options.repetitions), "timing", quiet=options.quiet):
        plain_s.append(time_plain(loaded, pieces, options.batch_size))
        with tempfile.TemporaryDirectory(dir=options.work_dir) as folder:
            collect_s.append(time_collecting(loaded, pieces, options.batch_size, Path(folder) / "store"))
    plain, collecting = median(plain_s), median(collect_s)
    logger.info(f"plain {plain:.2f} s, collecting {collecting:.2f} s: {100 * (collecting / plain - 1):+.1f} %")
    num_tokens = sum(len(piece.token_ids) for piece in pieces)
    record = make_record(
        "collect",
        {
            "model": loaded.name,
            "method": "dense",
            "num_tokens": num_tokens,
            "batch_size": options.batch_size,
            "dtype": str(model.dtype).removeprefix("torch."),
            "weights": "trained",
        },
        "seconds",
        collecting,
        "s",
        baseline={"name": "plain forward pass", "value": plain},
        ratio=plain / collecting,
        timing={"plain_s": plain_s, "collect_s": collect_s},
    )
    append_record(options.output, record)
    return record


def time_plain(loaded: LoadedModel, pieces: Sequence[TokenPiece], batch_size: int) -> float:
    """Seconds of the forward passes alone."""
    started = time.perf_counter()
    for batch in ragged_batches(pieces, batch_size=batch_size, max_batch_tokens=MAX_BATCH_TOKENS):
        token_ids, num_tokens = pad_right([piece.token_ids for piece in batch], loaded.model.device)
        with torch.inference_mode():
            loaded.model(token_ids, num_tokens=num_tokens)
    if loaded.model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def time_collecting(loaded: LoadedModel, pieces: Sequence[TokenPiece], batch_size: int, directory: Path) -> float:
    """Seconds of the same passes recorded into a store, until its last byte is on the disk."""
    config = loaded.model.config
    layout = StoreLayout(
        model=loaded.model_id,
        config_hash=config.config_hash(),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        layers=tuple(range(config.num_hidden_layers)),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
    )
    started = time.perf_counter()
    recorder = ActivationRecorder(loaded.model, layout.layers, "both")
    with ActivationStoreWriter(directory, layout) as writer:
        for _ in collect_documents(recorder, writer, pieces, batch_size=batch_size, max_batch_tokens=MAX_BATCH_TOKENS):
            pass
    seconds = time.perf_counter() - started
    shutil.rmtree(directory)
    return seconds


if __name__ == "__main__":
    run_stage(main, Options)
