"""Small safetensors files of predictors: replaced whole, read whole, and compared with the sum that a manifest has."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from data.files import replace_file

AGAIN = "train again, with the same options into the same folder"


@dataclass(frozen=True)
class TensorFile:
    """What a file holds; `sha256` is of all its bytes."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    sha256: str

    def check(self, expected: Mapping[str, Tensor]) -> None:
        """ValueError names the tensor that is missing, not expected, of another shape or type, or not finite;
        thresholds may be -inf, where everything is kept."""
        for name in sorted(expected.keys() | self.tensors.keys()):
            if name not in self.tensors:
                raise ValueError(f"{self.path}: missing tensor {name}; {AGAIN}")
            if name not in expected:
                raise ValueError(f"{self.path}: unexpected tensor {name}; {AGAIN}")
            found, wanted = self.tensors[name], expected[name]
            if found.shape != wanted.shape:
                shapes = f"{list(found.shape)}, expected {list(wanted.shape)}"
                raise ValueError(f"{self.path}: size mismatch for {name}: {shapes}; {AGAIN}")
            if found.dtype != wanted.dtype:
                raise ValueError(f"{self.path}: {name} is of type {found.dtype}, expected {wanted.dtype}; {AGAIN}")
            usable = found.isfinite()
            if name.endswith("thresholds"):
                usable |= found == float("-inf")
            if not bool(usable.all()):
                what = "NaN" if bool(found.isnan().any()) else "infinite values"
                raise ValueError(f"{self.path}: {name} holds {what}; {AGAIN}")

    def check_sum(self, sums: Mapping[str, str]) -> None:
        """ValueError if the bytes are not those that the manifest was written with (older manifests have no sums)."""
        if sums and sums.get(self.path.name) != self.sha256:
            others = [name for name, value in sums.items() if value == self.sha256]
            what = f"it is {others[0]}" if others else "its sha256 differs from the manifest's"
            raise ValueError(f"{self.path}: not as it was written ({what}); {AGAIN}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Replace a file whole; returns its sha256. OSError as `data.files.disk_errors`."""
    content = save({name: value.contiguous().cpu() for name, value in tensors.items()}, metadata=dict(metadata))
    replace_file(path, content)
    return hashlib.sha256(content).hexdigest()


def read_tensors(path: Path) -> TensorFile:
    """Read a file whole; FileNotFoundError, or ValueError where it is no safetensors file."""
    content = path.read_bytes()
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
        tensors = load(content)
    except (SafetensorError, RuntimeError, KeyError, ValueError) as problem:
        raise ValueError(f"{path}: damaged ({' '.join(str(problem).split())[:200]}); {AGAIN}") from problem
    return TensorFile(path, tensors, metadata, hashlib.sha256(content).hexdigest())
