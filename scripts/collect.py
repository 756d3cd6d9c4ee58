"""Run a model over a corpus and store what every MLP and attention block saw and did."""

import contextlib
import hashlib
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from loguru import logger

from analysis.results import environment_stamp
from data.activation_store import (
    ActivationStore,
    ActivationStoreWriter,
    Gather,
    open_shard_writer,
    shard_state,
    wait_for_shards,
)
from data.corpora import TokenPiece, iter_documents, parse_corpus, token_pieces
from data.store_files import read_manifest
from data.store_manifest import StoreLayout, layout_differences
from modules.config import ModelConfig
from pipeline_parallel.engine import check_same_everywhere
from scripts.command_line import progress, run_stage
from scripts.model_loading import ModelOptions
from scripts.written_text import self_writer
from sparse_predictor.collect import ActivationRecorder, Units, collect_documents, store_part
from sparse_predictor.labels import default_definition
from sparse_predictor.store import weights_sample

# Keeps a batch's activations to a few hundred MB whatever --batch-size says.
MAX_BATCH_TOKENS = 4096
PLACE = ("dp_rank", "dp_size", "pp_rank", "pp_size", "tp_rank", "tp_size")


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Run a model over a corpus and store what every MLP and attention block saw and did.

    Under torchrun each process stores what it computes; the store reads as the one of a single process.
    """

    corpus: str
    """wikitext[:SPLIT], c4[:SPLIT], a .txt, .jsonl or .jsonl.gz file, or self[:SEED]; the training side by default."""
    output_dir: Path
    """The activation store; refused if there is one, unless --resume."""
    max_tokens: int = 262144
    """Rows to store."""
    max_document_tokens: int = 2048
    """Longer documents are cut into consecutive pieces of so many tokens."""
    units: Units = "both"
    """mlp, attention or both."""
    label_format: Literal["raw", "packed"] = "raw"
    """raw: activations in float16. packed: one bit per neuron, active or not (which losses on sizes cannot use)."""
    label_density: float = 0.5
    """packed, models without exact zeros: the share of neurons called active."""
    layers: str = "all"
    """all, or a list such as 0,5-9."""
    resume: bool = False
    """Continue a store that was interrupted; of a damaged one collect again what is not whole (--verify: as found by
    reading all of it)."""


def main(options: Options) -> ActivationStore | None:
    """Collect into `output_dir`, and return the finished store, on the first of all processes (None: on the others)."""
    corpus = parse_corpus(options.corpus, side="train")
    if options.max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, got {options.max_tokens}")
    if not 0.0 < options.label_density <= 1.0:
        raise ValueError(f"--label-density must lie in (0, 1], got {options.label_density}")
    loaded = options.load()
    model, config, mesh = loaded.model, loaded.model.config, loaded.mesh
    if corpus.path is not None:  # ranks that read different texts would not notice
        check_same_everywhere(mesh, f"--corpus {options.corpus}: the file", file_fingerprint(corpus.path))
    layers = parse_layers(options.layers, config.num_hidden_layers)
    piece_tokens = min(options.max_document_tokens, config.max_position_embeddings)
    packed = default_definition(config, options.label_density) if options.label_format == "packed" else None
    place = {name: getattr(mesh, name) for name in PLACE}
    layout = StoreLayout(
        model=loaded.model_id,
        config_hash=stored_hash(options, config),
        dtype=str(model.compute_dtype).removeprefix("torch."),
        layers=tuple(layers),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        units=options.units,
        label_format=options.label_format,
        definitions={
            "corpus": corpus.label,
            "max_tokens": options.max_tokens,
            "max_document_tokens": piece_tokens,
            "weights_sample": weights_sample(model, mesh.sum),
            "packed_label": packed.to_manifest() if packed else None,
        },
        part=store_part(model, layers, **place) if mesh.world_size > 1 else None,
    )
    if options.resume and (finished := finished_store(options, layout, mesh.gather)) is not None:
        logger.info(f"{options.output_dir} is complete: {finished.num_rows} rows, nothing to do")
        return finished
    pieces: Iterator[TokenPiece] = token_pieces(
        loaded.tokenizer,
        iter_documents(
            options.corpus,
            side="train",
            self_writer=self_writer(loaded, quiet=options.quiet, max_tokens=options.max_tokens),
        ),
        max_tokens=options.max_tokens,
        max_document_tokens=piece_tokens,
        vocab_size=config.vocab_size,
    )
    if corpus.kind != "self":  # what cannot be read fails before there is a store; the model's own text can always be
        pieces = chain([next(pieces)], pieces)
    recorder = ActivationRecorder(model, layers, options.units, packed, inputs=mesh.tp_rank == 0)
    open_writer = ActivationStoreWriter if layout.part is None else partial(open_shard_writer, gather=mesh.gather)
    with (
        open_writer(
            options.output_dir,
            layout,
            command_line=shlex.join(sys.argv),
            git_commit=environment_stamp()["commit"],
            expected_rows=options.max_tokens,
            resume=options.resume,
            verify=options.verify,
        ) as writer,
        progress((), "collecting", quiet=options.quiet, total=options.max_tokens // mesh.dp_size, unit="tok") as bar,
    ):

        def new_pieces() -> Iterator[TokenPiece]:
            for piece in islice(pieces, mesh.dp_rank, None, mesh.dp_size):
                if writer.skip_document(piece.document_id, piece.token_ids):
                    bar.update(len(piece.token_ids))
                else:
                    yield piece

        for stored in collect_documents(
            recorder, writer, new_pieces(), batch_size=options.batch_size, max_batch_tokens=MAX_BATCH_TOKENS
        ):
            bar.update(stored)
    if mesh.rank > 0:
        return None
    if layout.part is not None:
        wait_for_shards(options.output_dir, layout)
    store = ActivationStore(options.output_dir)
    splits = {split: sum(stop - start for start, stop in store.row_ranges(split)) for split in ("train", "validation")}
    logger.info(
        f"{options.output_dir}: {store.num_rows} rows of {len(layers)} layers "
        f"({splits['train']} training, {splits['validation']} validation), "
        f"{store.layout.estimate_bytes(store.num_rows) / 2**30:.2f} GiB"
    )
    return store


def file_fingerprint(path: Path) -> str:
    """A hash of the size and the first mebibyte: a cheap way to distinguish two versions of a corpus."""
    with path.open("rb") as file:
        return hashlib.sha256(f"{path.stat().st_size} ".encode() + file.read(2**20)).hexdigest()


def parse_layers(text: str, num_layers: int) -> list[int]:
    """`all`, or layer_idx and ranges such as `0,5-9` -> sorted list; ValueError for others and beyond the model."""
    if text == "all":
        return list(range(num_layers))
    layers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or part.endswith("-"):
            raise ValueError(f"layers {text!r}: expected all, or a list such as 0,5-9")
        layers.update(range(int(first), int(last or first) + 1))
    if not layers or max(layers) >= num_layers:
        raise ValueError(f"layers {text!r}: this model has layers 0 to {num_layers - 1}")
    return sorted(layers)


def stored_hash(options: Options, config: ModelConfig) -> str:
    """The configuration's hash; as an older version wrote it, where a store is continued that has it so."""
    found = ""
    if options.resume:
        with contextlib.suppress(OSError, ValueError):  # no store there, or one that the writer refuses
            found = read_manifest(options.output_dir).layout.config_hash
    return found if config.has_hash(found) else config.config_hash()


def finished_store(options: Options, layout: StoreLayout, gather: Gather) -> ActivationStore | None:
    """The complete store of this very layout, if it is there, undamaged; all processes ask together."""
    directory, verify = options.output_dir, options.verify
    if layout.part is not None:
        is_complete = all(gather(shard_state(directory, layout, resume=True, verify=verify).complete))
        return ActivationStore(directory) if is_complete else None
    try:
        store = ActivationStore(directory, verify=verify)
    except (FileNotFoundError, ValueError):
        return None  # the writer repairs it, or says why it cannot
    return store if store.manifest.complete and not layout_differences(store.layout, layout) else None


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
