"""The two texts of a study: windows to calibrate on, and windows to measure on, which share no token."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from data.corpora import Side, iter_documents, parse_corpus, token_documents
from pipeline_parallel.engine import check_same_everywhere
from scripts.model_loading import LoadedModel
from scripts.run_records import hash_of

# So many times what is needed is read, and windows are taken evenly from it: neighbours are about the same things.
SPREAD = 8
MIN_WINDOWS = 2


def read_texts(
    loaded: LoadedModel,
    corpus: str,
    calibration_corpus: str | None,
    *,
    window: int,
    test_tokens: int,
    calibration_tokens: int | None,
    quiet: bool = False,
) -> tuple[Tensor, Tensor]:
    """(calibration, test) int64 [W, T] on the CPU (a collective call).

    The test side of `corpus` is measured on; predictors learn from the training side of `calibration_corpus`, or of
    `corpus` where none is given. Where both are the same text, its first half calibrates and the other one tests.
    Documents stand one after another, as in a stream, which is cut into windows. `calibration_tokens` None: nothing is
    to be calibrated, and that text is empty. ValueError for too little text.
    """
    context = loaded.model.config.max_position_embeddings
    if not 2 <= window <= context:
        raise ValueError(f"--window must lie between 2 and the model's context of {context}, got {window}")
    learnt_from = calibration_corpus or corpus
    wanted = {"test": max(1, test_tokens // window)}
    if calibration_tokens is not None:
        wanted["calibration"] = max(1, calibration_tokens // window)

    def windows(spec: str, side: Side, number: int) -> Tensor:
        return _all_windows(loaded, spec, side, window=window, wanted=number, quiet=quiet)

    texts: dict[str, Tensor] = {}
    if calibration_tokens is None:
        texts["test"] = windows(corpus, "test", wanted["test"])
    elif parse_corpus(corpus, side="test") == replace(parse_corpus(learnt_from, side="train"), side="test"):
        both = windows(corpus, "test", sum(wanted.values()))
        texts |= {"calibration": both[: len(both) // 2], "test": both[len(both) // 2 :]}
    else:
        texts["calibration"] = windows(learnt_from, "train", wanted["calibration"])
        texts["test"] = windows(corpus, "test", wanted["test"])
    for name, text in texts.items():
        spec, number = corpus if name == "test" else learnt_from, wanted[name]
        if min(len(text), number) < MIN_WINDOWS:
            raise ValueError(
                f"corpus {spec!r}: --{name}-tokens asks for {number} windows of {window} tokens, and the text has "
                f"{len(text)}; at least {MIN_WINDOWS} are needed: give more text or a smaller --window"
            )
        texts[name] = _evenly(text, number)
    content = b"".join(text.numpy().tobytes() for text in texts.values())
    check_same_everywhere(loaded.mesh, f"--corpus {corpus}: the text", hash_of(content))
    return texts.get("calibration", texts["test"][:0]), texts["test"]


def _evenly(windows: Tensor, wanted: int) -> Tensor:
    return windows[torch.linspace(0, len(windows) - 1, min(wanted, len(windows)), dtype=torch.float64).round().long()]


def _all_windows(loaded: LoadedModel, spec: str, side: Side, *, window: int, wanted: int, quiet: bool) -> Tensor:
    """[W, T]: up to `SPREAD` times as many as wanted, or just as many of a text that has to be written first."""
    is_written = parse_corpus(spec, side="test").kind == "self"
    max_tokens = wanted * window * (1 if is_written else SPREAD)
    writer = loaded.self_writer(quiet=quiet, max_tokens=max_tokens)
    documents = token_documents(
        loaded.tokenizer,
        iter_documents(spec, side=side, self_writer=writer),
        max_tokens=max_tokens,
        vocab_size=loaded.model.config.vocab_size,
    )
    tokens = torch.tensor(list(chain.from_iterable(documents)), dtype=torch.int64)
    num_windows = len(tokens) // window
    return tokens[: num_windows * window].view(num_windows, window)
