"""From `--model` to a model that is ready to run, with its tokenizer and its generation defaults.

A model is a converted folder, a Hugging Face folder, or a hub id (downloaded once into Hugging Face's cache). On a CPU
it gets the cores that are idle when the stage starts: a step of decoding is hundreds of parallel regions of some 10 µs
each, and every one ends when its slowest thread does. Two threads on two cores with four other jobs wrote 5 to 34
tokens/s where one wrote 75 to 150. `scripts/__init__.py` keeps threads from spinning long, for work that begins later.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from loguru import logger

from data.files import read_json, sha256_of
from modules.checkpoint.load import load_model
from modules.checkpoint.manifest import MANIFEST_FILE, interrupted, verify_checkpoint
from modules.checkpoint.sources import checkpoint_fingerprint
from modules.checkpoint.tokenizer import MAIN_FILES, chat_text, open_tokenizer
from modules.decoder import Decoder
from modules.requests import Decode
from pipeline_parallel.engine import check_same_everywhere, parallelise
from pipeline_parallel.fused_add_norm import AllReduce, choose_all_reduce
from pipeline_parallel.launch import current_launch
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.overlap import OverlapTokens, check_overlap_tokens, choose_overlap
from scripts.generation_defaults import GenerationDefaults, read_generation_defaults

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
LOAD = Path("/proc/loadavg")
NUM_SAMPLES, SAMPLE_S = 10, 0.01


@cache
def share_cores() -> int:
    """Set torch's number of threads once per process, unless a variable names it, and return it."""
    threads = torch.get_num_threads()
    if threads == 1 or any(os.environ.get(name) for name in THREAD_VARIABLES):
        return threads
    cores, busy = os.cpu_count() or threads, busy_cores()
    chosen = idle_threads(threads, cores, busy)
    if chosen < threads:
        logger.info(
            f"{chosen} of {threads} threads: about {busy:.0f} threads of other work want the {cores} cores; "
            f"{THREAD_VARIABLES[0]} sets another number"
        )
        torch.set_num_threads(chosen)
    return chosen


def idle_threads(threads: int, cores: int, busy: float) -> int:
    """At most `threads`, and no more than cores are idle; at least 1."""
    return max(1, min(threads, round(cores - busy)))


def busy_cores() -> float:
    """Threads of other processes that run or wait for a core, over a tenth of a second; 0 where that is unknown."""
    seen = []
    for _ in range(NUM_SAMPLES):
        try:
            # "0.20 0.18 0.12 3/404 1234": three threads want to run, this one among them.
            seen.append(int(LOAD.read_text().split()[3].partition("/")[0]) - 1)
        except (OSError, ValueError, IndexError):
            return 0.0
        time.sleep(SAMPLE_S)
    return sum(seen) / len(seen)


Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ("*.json", "*.txt", "*.jinja", "tokenizer.model")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Flags of every stage that runs a model."""

    model: str
    """Converted folder, Hugging Face folder or hub id."""
    dtype: Dtype = "auto"
    """Type of the weights; auto: the checkpoint's."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto: a GPU if there is one."""
    batch_size: int = 8
    """Sequences run together."""
    seed: int = 0
    """Of everything random."""
    quiet: bool = False
    """No progress bars, warnings only."""
    tp_size: int = 1
    """Ranks that share each layer (tensor parallel)."""
    pp_size: int = 1
    """Pipeline stages; what tp and pp leave of torchrun's ranks is data parallel."""
    verify: bool = False
    """Read all of the files first, and compare them with the sums that they were written with."""

    def load(self) -> LoadedModel:
        """Load this rank's part of the model; ValueError or FileNotFoundError says what is wrong with the flags or
        the files (a collective call: the ranks must have been given the same model)."""
        if self.batch_size < 1:
            raise ValueError(f"--batch-size must be at least 1, got {self.batch_size}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must lie in [0, 2**63), got {self.seed}")
        launch = current_launch()
        mesh = ParallelMesh.from_process_group(self.tp_size, self.pp_size, launch.device or resolve_device(self.device))
        if launch.watch is not None:
            launch.watch.describe = mesh.describe
        if mesh.device.type == "cpu":
            share_cores()
        directory = resolve_model(self.model)
        if mesh.world_size > 1:
            check_same_everywhere(mesh, f"--model {self.model}: the checkpoint", checkpoint_fingerprint(directory))
        if self.verify and launch.local_rank == 0:
            verify_checkpoint(directory)
        model = load_model(
            directory,
            dtype=resolve_dtype(self.dtype),
            device=mesh.device,
            prepare=lambda whole: parallelise(whole, mesh),
        )
        sizes = f" x {mesh.world_size}, tp {mesh.tp_size}, pp {mesh.pp_size}, dp {mesh.dp_size}"
        where = f"{model.device.type}{sizes}" if mesh.world_size > 1 else model.device
        logger.info(f"{self.model}: {model.config.num_hidden_layers} layers, {model.compute_dtype} on {where}")
        return LoadedModel(model=model, directory=directory, model_id=model_name(self.model), mesh=mesh)


@dataclass(frozen=True, kw_only=True)
class RunOptions(ModelOptions):
    """Flags of stages that run a model and do not look at its residual stream, of which a rank then may hold a part."""

    all_reduce: AllReduce = "auto"
    """How ranks that share layers add up. auto: what was measured as the fastest; fused: one kernel with the norm, over
    NVLink; nccl (on CPUs gloo)."""
    overlap_tokens: OverlapTokens = "auto"
    """Dense prefills of so many tokens or more (rows together) are split in two, and one half computes while the other
    is added up over the ranks. auto: 1024, where that was measured to pay; 0: never."""

    def load(self) -> LoadedModel:
        """As `ModelOptions.load`; ValueError also if the all-reduce cannot be had."""
        check_overlap_tokens(self.overlap_tokens)
        loaded = super().load()
        choose_all_reduce(loaded.model, loaded.mesh, self.all_reduce)
        choose_overlap(loaded.model, loaded.mesh, self.overlap_tokens)
        return loaded


def model_name(model: str) -> str:
    """What a model is called by where it lies: the hub id; for a folder its name (for NAME/checkpoint: NAME)."""
    path = Path(model)
    if not path.is_dir():
        return model
    path = path.resolve()
    return path.parent.name if path.name == "checkpoint" else path.name


def resolve_dtype(dtype: Dtype) -> torch.dtype | None:
    """The torch type; None for auto."""
    return None if dtype == "auto" else getattr(torch, dtype)


def resolve_device(device: str) -> torch.device:
    """The torch device of `--device`; ValueError if there is none such."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(f"--device {device!r}: give auto, cpu, cuda or cuda:N") from None
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {device!r}: give auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {device!r}: this machine offers {torch.cuda.device_count()} CUDA devices")
    return resolved


def resolve_model(model: str) -> Path:
    """The folder of `--model`, downloading a hub id into Hugging Face's cache where it is not there yet."""
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(
            f"--model {model} is a file; convert it first: python convert_llama_checkpoint.py --source {model}"
        )
    # `outputs/model` has the form of a hub id, too; where outputs/ is a folder here, a folder was meant.
    if not HUB_ID.fullmatch(model) or path.parent.is_dir():
        raise FileNotFoundError(
            f"--model {model}: no such folder; give a checkpoint folder or a hub id such as ORG/NAME{interrupted(path)}"
        )
    return _download(model)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(hub_id, allow_patterns=[*HUB_FILES, "*.safetensors"]))
        if not any(directory.glob("*.safetensors")):
            directory = Path(snapshot_download(hub_id, allow_patterns=[*HUB_FILES, "*.bin"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(f"--model {hub_id}: no such folder, and not to be had from the hub: {first_line}") from error
    return directory


class _Named(msgspec.Struct):
    model_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model, or this rank's part of it, and what lies beside it. `model_id` names it in what is made from it."""

    model: Decoder
    directory: Path
    model_id: str
    mesh: ParallelMesh

    @cached_property
    def name(self) -> str:
        """In records and tables: what the converter found the model to be called, else as its folder."""
        manifest = self.directory / MANIFEST_FILE
        return (read_json(manifest, _Named).model_id if manifest.is_file() else None) or self.model_id

    @cached_property
    def tokenizer(self) -> Any | None:
        """The folder's tokenizer, loaded on first use; None if it holds none (token ids need none)."""
        return open_tokenizer(self.directory)

    def require_tokenizer(self, purpose: str) -> Any:
        """The tokenizer; ValueError says that `purpose` needs one."""
        if self.tokenizer is None:
            raise ValueError(
                f"{self.directory} holds no tokenizer ({', '.join(MAIN_FILES)}), and {purpose}; "
                "token ids (`prompt_token_ids`) need none"
            )
        return self.tokenizer

    @property
    def decode(self) -> Decode | None:
        """Turns token ids into text; None without a tokenizer."""
        return None if self.tokenizer is None else partial(decode_text, self.tokenizer)

    @cached_property
    def _generation_defaults(self) -> GenerationDefaults:
        return read_generation_defaults(self.directory, self.model.config, self.tokenizer)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends a text, as config.json, generation_config.json and the tokenizer say."""
        return self._generation_defaults.eos_token_ids

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        """What a stage that writes text follows of generation_config.json; the first rank logs it on first use."""
        if self.mesh.rank == 0:
            self._generation_defaults.log()
        return self._generation_defaults


def tokenizer_fingerprint(directory: Path) -> str | None:
    """Twelve hex digits of a folder's vocabulary files; None if there are none. (What the other tokenizer files say is
    seen in the token ids of prompts.)"""
    files = [path for name in (*MAIN_FILES, "merges.txt") if (path := directory / name).is_file()]
    content = "".join(f"{path.name} {sha256_of(path)} " for path in files)
    return hashlib.sha256(content.encode()).hexdigest()[:12] if files else None


def decode_text(tokenizer: Any, token_ids: list[int], *, special: bool = False) -> str:
    """Text of generated token ids, spaces as they are: without special tokens, or with (`special`) their names."""
    return tokenizer.decode(token_ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def chat_token_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of one user message in the model's chat template, up to where the answer begins; ValueError if it has
    none, or if it fails."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("this model's tokenizer has no chat template; leave out --chat")
    # As text, then tokenised: with tokenize=True the type of the answer changed between transformers' versions.
    text = chat_text(tokenizer, [{"role": "user", "content": prompt}])
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
