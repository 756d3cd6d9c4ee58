"""The stages on tiny models: folders, corpora of token ids, collected stores and trained predictors in a call each."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import pytest
import torch
from torch import Tensor

import scripts.collect
import scripts.train
from data.activation_store import ActivationStore
from modules.decoder import Decoder
from scripts.command_line import run_stage
from sparse_predictor.selection import Selection
from tests.modules.tiny_models import save_hf_folder

LENGTHS = (17, 40, 1, 33, 25, 9, 38, 30, 21, 40, 12, 36)
# Few steps of everything: enough for artefacts whose use is tested, not for good predictors.
QUICK: dict[str, Any] = {
    "steps": 4,
    "batch_rows": 64,
    "refine_steps": 0,
    "label_density": 0.5,
    "refine_window": 32,
    "closed_form_rows": 512,
    "quiet": True,
}


def ragged_documents(lengths: Sequence[int] = LENGTHS, seed: int = 1, vocab_size: int = 131) -> list[list[int]]:
    """Random token ids, special ones among them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def write_corpus(path: Path, documents: Sequence[Sequence[int]]) -> str:
    """A corpus that needs no tokenizer; returns its spec."""
    path.write_text("".join(json.dumps({"token_ids": list(ids)}) + "\n" for ids in documents))
    return str(path)


def model_folder(directory: Path, hf_config: dict[str, Any], seed: int = 0) -> Path:
    """A Hugging Face folder of a tiny model."""
    save_hf_folder(directory, hf_config, seed)
    return directory


def collect(
    model: Path, output_dir: Path, documents: Sequence[Sequence[int]] | None = None, **options: Any
) -> ActivationStore:
    """Run the collect stage over token ids."""
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    corpus = write_corpus(output_dir.with_suffix(".jsonl"), documents or ragged_documents())
    return scripts.collect.main(
        scripts.collect.Options(model=str(model), corpus=corpus, output_dir=output_dir, quiet=True, **options)
    )


def train(model: Path, store: ActivationStore, output_dir: Path, **options: Any) -> Path:
    """Run the train stage, quickly unless told otherwise; returns the predictor directory."""
    scripts.train.main(
        scripts.train.Options(
            model=str(model), activations=store.directory, output_dir=output_dir, **{**QUICK, **options}
        )
    )
    return output_dir


def one_error_line(
    main: Callable[[Any], object],
    options_class: type[Any] | UnionType,
    arguments: Sequence[object],
    capsys: pytest.CaptureFixture,
) -> str:
    """Run a stage that must fail as a user sees it: exit code 2 and exactly one `error:` line, which is returned."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_stage(main, options_class, [str(argument) for argument in arguments])
    captured = capsys.readouterr().err
    lines = [line for line in captured.splitlines() if line.startswith("error:")]
    assert stop.value.code == 2 and len(lines) == 1, captured
    assert "Traceback" not in captured
    return lines[0]


# Predictor directory of a variant of training and a kind of model, see conftest.py.
Trained = Callable[..., Path]


def selection(method: str, predictors: Path | None, density: float, **more: Any) -> Selection:
    more = {"sparse_phases": "all", **more}
    return Selection(method=method, predictors=predictors, mlp_density=density, **more)


def prompt_then_decode(model: Decoder, batch: int, prompt: int = 6, steps: int = 3) -> Tensor:
    """Logits [batch, prompt + steps, V] of a prefill and of decoding steps after it."""
    ids = torch.randint(0, model.config.vocab_size, (batch, prompt + steps), generator=torch.Generator().manual_seed(7))
    cache = model.new_cache(batch, prompt + steps)
    with torch.inference_mode():
        found = [model.logits(model(ids[:, :prompt], cache=cache))]
        for step in range(prompt, prompt + steps):
            found.append(model.logits(model(ids[:, step : step + 1], cache=cache, phase="decode")))
    return torch.cat(found, 1)
