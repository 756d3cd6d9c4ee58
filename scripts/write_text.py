"""Let a model write a corpus of any size into a file, once, for stages that read it several times.

As `--corpus self:SEED`, but without top-p and about random words, so that tens of millions of tokens do not repeat
themselves. One line per document: `text`, or `token_ids` of a model without tokenizer. NAME.manifest.json beside it
says how it was written.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from loguru import logger

from data.completions import MANIFEST_SUFFIX
from data.files import differences, parse_json, read_json, whole_lines, write_json
from modules.checkpoint.sources import checkpoint_fingerprint
from scripts.command_line import run_stage
from scripts.model_loading import ModelOptions, resolve_model
from scripts.written_text import write_documents


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Let a model write a corpus of any size into a file. On a GPU give --batch-size 1024."""

    output: Path
    """A .jsonl file."""
    max_tokens: int = 20_000_000
    """Tokens of the model's own to write, the last document's being whole. A batch is written when all of it is there:
    what is killed earlier loses as much."""
    temperature: float = 0.9
    """1: the model's own distribution. At 0.9 what SmolLM2 writes is as hard to predict as WikiText, 3 nats per token;
    at 1.0 it is garbled, at 0.8 it repeats itself."""
    num_words: int = 3
    """Random words of the vocabulary that each document is asked for."""
    resume: bool = False
    """Continue a file that was interrupted, if it was begun with the same options."""


class WrittenDocument(msgspec.Struct, frozen=True):
    """What a resume reads of a line."""

    num_tokens: Annotated[int, msgspec.Meta(ge=1)]


def main(options: Options) -> int:
    """Write, and return the number of tokens that the file holds."""
    if options.output.suffix != ".jsonl":
        raise ValueError(f"--output must end in .jsonl, got {options.output}; compress it afterwards (gzip)")
    if options.max_tokens < 1 or options.num_words < 0 or not options.temperature > 0.0:
        raise ValueError("--max-tokens must be at least 1, --num-words at least 0, --temperature above 0")
    if options.output.exists() and not options.resume:
        raise ValueError(f"{options.output} exists; give --resume to continue it, or another --output")
    num_documents, num_tokens = mended(options.output)
    keep_settings(options, has_text=num_documents > 0)
    if num_tokens >= options.max_tokens:
        logger.info(f"{options.output} is complete: {num_tokens} tokens, nothing to do")
        return num_tokens
    loaded = options.load()
    before, started_s = num_tokens, time.perf_counter()
    documents = write_documents(
        loaded,
        seed=options.seed,
        max_tokens=options.max_tokens - num_tokens,
        first_document=num_documents,
        batch_size=options.batch_size,
        temperature=options.temperature,
        top_p=1.0,
        num_words=options.num_words if loaded.tokenizer is not None else 0,
        quiet=options.quiet,
    )
    with options.output.open("a", encoding="utf-8", buffering=1) as file:  # whole lines, should it be killed
        for token_ids in documents:
            content: dict[str, object] = {"token_ids": token_ids}
            if loaded.decode is not None:
                content = {"text": loaded.decode(token_ids)}
            file.write(json.dumps({**content, "num_tokens": len(token_ids)}, ensure_ascii=False) + "\n")
            num_tokens += len(token_ids)
            if num_tokens >= options.max_tokens:
                break
    seconds = time.perf_counter() - started_s
    logger.info(f"{options.output}: {num_tokens} tokens, {(num_tokens - before) / seconds:.0f} per second")
    return num_tokens


def keep_settings(options: Options, *, has_text: bool) -> None:
    """Write down what the text depends on, or ValueError where the file was begun with something else."""
    settings = {
        "checkpoint": checkpoint_fingerprint(resolve_model(options.model))[:12],
        **{name: getattr(options, name) for name in ("dtype", "seed", "temperature", "num_words")},
    }
    path = options.output.with_name(options.output.name + MANIFEST_SUFFIX)
    if not has_text:
        write_json(path, settings)
        return
    there = read_json(path, dict[str, Any]) if path.is_file() else {}
    if found := differences(there, settings, "of its text"):
        raise ValueError(f"cannot resume {options.output}: {'; '.join(found)}; give another --output")


def mended(path: Path) -> tuple[int, int]:
    """(documents, tokens) that a file holds; a last line that an interrupted run left unfinished is cut off."""
    num_documents = num_tokens = num_bytes = 0
    if not path.exists():
        return 0, 0
    for line in whole_lines(path):
        num_documents += 1
        num_bytes += len(line)
        try:
            num_tokens += parse_json(line, WrittenDocument, f"{path} line {num_documents}").num_tokens
        except ValueError as error:
            raise ValueError(f"{error}: not of this command, or damaged; choose another --output") from error
    os.truncate(path, num_bytes)
    return num_documents, num_tokens


if __name__ == "__main__":
    run_stage(main, Options)
