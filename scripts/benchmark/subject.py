"""What decode.py measures: a model of random weights, or a trained one with text, and the prompts it continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from data.corpora import iter_documents, parse_corpus, token_documents
from modules.checkpoint.load import load_model, read_hf_config
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from modules.requests import GenerationRequest
from modules.scoring import Window, check_window, score_windows
from pipeline_parallel.mesh import ParallelMesh
from scripts.benchmark.engine import NUM_CHECKED
from scripts.benchmark.engine import Options as EngineOptions
from scripts.benchmark.engine import requests as random_requests
from scripts.benchmark.random_models import HF_CONFIGS, find_shape, random_weights
from scripts.model_loading import Dtype, LoadedModel, model_name, resolve_dtype, resolve_model
from scripts.written_text import self_writer


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(EngineOptions):
    """Which model, which text."""

    dtype: Dtype = "auto"
    """Type of the weights; auto: the checkpoint's, of random weights bfloat16 on a GPU and float32 elsewhere."""
    model: str | None = None
    """A trained model, instead of random weights of --shape: folder or hub id. Needs --corpus."""
    corpus: str | None = None
    """Of a trained model: its prompts, and what its perplexity is measured on."""
    max_windows: int | None = None
    """Score at most so many windows of the corpus; all of it by default."""
    decoded_windows: int = 8
    """Of these, run so many through decode steps, too: their perplexity must be near that of scoring. 0: none."""
    window: int = 2048
    """Tokens per window."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """`prompts`: of the largest batch, and as many as are checked. `windows` of the perplexity and `loaded`, where the
    model came from: random weights have neither."""

    model: Decoder
    hf_config: Mapping[str, Any]
    labels: dict[str, Any]
    prompts: Sequence[Sequence[int]]
    windows: Sequence[Window] = ()
    loaded: LoadedModel | None = None

    @property
    def is_trained(self) -> bool:
        """Whether its numbers say anything about quality."""
        return bool(self.windows)

    def requests(self, count: int, new_tokens: int) -> list[GenerationRequest]:
        """The first `count` prompts."""
        return [GenerationRequest(prompt_token_ids=row, max_new_tokens=new_tokens) for row in self.prompts[:count]]


def load_subject(options: SubjectOptions, device: torch.device, *, num_layers: int | None = None) -> Subject:
    """ValueError or FileNotFoundError says which flags or files do not fit. `num_layers`: of random weights, instead of
    all that the shape has."""
    num_prompts = max(NUM_CHECKED, *options.batch_size)
    if options.model is None:
        if options.corpus is not None:
            raise ValueError("--corpus goes with --model: random weights have no perplexity worth measuring")
        shape = find_shape(options.shape)
        hf_config = HF_CONFIGS[shape] | ({} if num_layers is None else {"num_hidden_layers": num_layers})
        config = from_hf_config(hf_config)
        dtype = resolve_dtype(options.dtype) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        model = random_weights(shape, config, seed=options.seed, dtype=dtype, device=device)
        return Subject(
            model=model,
            hf_config=hf_config,
            labels={"shape": shape, "weights": "random", "dtype": dtype_name(dtype)},
            prompts=[request.prompt_token_ids for request in random_requests(options, config, num_prompts)],
        )
    if options.corpus is None:
        raise ValueError("--model needs --corpus, the text that it continues and that is scored")
    directory = resolve_model(options.model)
    model = load_model(directory, dtype=resolve_dtype(options.dtype), device=device)
    loaded = LoadedModel(
        model=model, directory=directory, model_id=model_name(options.model), mesh=ParallelMesh.single(device)
    )
    prompts, windows = read_text(options, loaded, num_prompts)
    return Subject(
        model=model,
        hf_config=_hf_config(directory),
        labels={
            "model": loaded.name,
            "weights": "trained",
            "dtype": dtype_name(model.compute_dtype),
            "task": f"perplexity:{parse_corpus(options.corpus, side='test').label}",
            "window": options.window,
            "num_tokens": sum(piece.num_scored for piece in windows),
        },
        prompts=prompts,
        windows=windows,
        loaded=loaded,
    )


def read_text(options: SubjectOptions, loaded: LoadedModel, num_prompts: int) -> tuple[list[list[int]], list[Window]]:
    """Prompts and windows from the beginning of the corpus; ValueError if it is too short."""
    assert options.corpus is not None
    check_window(loaded.model, options.window)
    if options.max_windows is None and parse_corpus(options.corpus, side="test").kind == "self":
        raise ValueError("--corpus self has no end; say with --max-windows how much of it to score")
    enough = None if options.max_windows is None else options.max_windows * options.window
    max_tokens = None if enough is None else max(enough, num_prompts * options.prompt_tokens)
    writer = self_writer(loaded, quiet=options.quiet, max_tokens=max_tokens)
    documents = list(
        token_documents(
            loaded.tokenizer,
            iter_documents(options.corpus, side="test", self_writer=writer),
            max_tokens=max_tokens,
            vocab_size=loaded.model.config.vocab_size,
        )
    )
    text = list(islice(chain.from_iterable(documents), num_prompts * options.prompt_tokens))
    prompts = [text[start : start + options.prompt_tokens] for start in range(0, len(text), options.prompt_tokens)]
    if len(prompts) < num_prompts or len(prompts[-1]) < options.prompt_tokens:
        raise ValueError(f"--corpus {options.corpus} holds fewer than {num_prompts} x {options.prompt_tokens} tokens")
    pieces = (piece for document in documents for piece in score_windows(document, options.window))
    return prompts, list(islice(pieces, options.max_windows))


def _hf_config(directory: Path) -> dict[str, Any]:
    """Without what is said of the files and not of the model."""
    unwanted = ("dtype", "torch_dtype", "architectures", "transformers_version")
    return {name: value for name, value in read_hf_config(directory).items() if name not in unwanted}


def dtype_name(dtype: torch.dtype) -> str:
    """As records have it."""
    return str(dtype).removeprefix("torch.")
