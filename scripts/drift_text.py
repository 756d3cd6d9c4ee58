"""The two texts of a study: windows to calibrate on, and windows to measure on, which share no token."""

from __future__ import annotations

import math
from itertools import chain

import torch
from torch import Tensor

from data.corpora import Side, iter_documents, parse_corpus, token_documents
from pipeline_parallel.engine import check_same_everywhere
from scripts.model_loading import LoadedModel
from scripts.run_records import hash_of
from sparse_predictor.distance_plan import TEXT_SHARES

# So many times what is needed is read, and windows are taken evenly from it: neighbours are about the same things.
SPREAD = 8
MIN_WINDOWS = 2  # of each text: an interval is drawn over windows


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
    `corpus` where none is given. Where both are the same text, its first part calibrates and the rest tests, in
    proportion to what is wanted of each.
    Documents stand one after another, as in a stream, which is cut into windows. `calibration_tokens` None: nothing is
    to be calibrated, and that text is empty. ValueError for too little text.
    """
    learnt_from = calibration_corpus or corpus
    wanted = {"test": max(1, test_tokens // window)}
    if calibration_tokens is not None:
        wanted["calibration"] = max(1, calibration_tokens // window)

    def windows(spec: str, side: Side, number: int) -> Tensor:
        return _all_windows(loaded, spec, side, window=window, wanted=number, quiet=quiet)

    texts: dict[str, Tensor] = {}
    if calibration_tokens is None:
        texts["test"] = windows(corpus, "test", wanted["test"])
    elif parse_corpus(corpus, side="test").is_same_text(parse_corpus(learnt_from, side="train")):
        both = windows(corpus, "test", sum(wanted.values()))
        share = len(both) * wanted["calibration"] // sum(wanted.values())
        cut = min(max(share, MIN_WINDOWS), max(0, len(both) - MIN_WINDOWS))
        texts |= {"calibration": both[:cut], "test": both[cut:]}
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


def check_calibration(num_tokens: int, window: int, hidden_size: int) -> None:
    """ValueError for less text than part distance can fit predictors on: the smallest share of it that is fitted on, in
    whole windows, must hold a token for each of a predictor's inputs, or their covariance is singular."""
    share, needed = TEXT_SHARES[0], math.ceil(hidden_size / window)
    num_windows = num_tokens // window
    if num_windows < MIN_WINDOWS or max(1, int(share * num_windows)) < needed:
        least = window * (MIN_WINDOWS if needed == 1 else math.ceil(needed / share))
        raise ValueError(
            f"--calibration-tokens: {num_tokens} tokens are too few to fit predictors on; with {hidden_size} hidden "
            f"channels and windows of {window} tokens at least {least} are needed"
        )


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
