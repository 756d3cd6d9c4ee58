"""Parts of tensors: which one a rank holds of each parameter, and how it is read from a mapped file.

A rank that takes a quarter of each row must not read the whole file. The operating system would do so, since it reads
ahead in a mapped file. So `read_ahead` names the pages that are needed first; measurements: loading_cpu.jsonl.
"""

import ctypes
import mmap
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Linux takes as much from one request at its default setting, and forgets the rest of it.
READ_AHEAD_BYTES = 128 * 1024


@dataclass(frozen=True)
class Shard:
    """`ranges` of one dim of a full tensor, one after the other, then zeros up to `size`.

    Dims are those of the parameter as the decoder holds it, which for an output projection is the transpose of the
    tensor on disk. A range is (start, stop) with 0 <= start <= stop <= full_size; ranges may be in any order, repeat,
    or be none at all (nothing but padding). ValueError for a range out of bounds, or more than `size` in all.
    """

    dim_idx: int
    ranges: tuple[tuple[int, int], ...]
    size: int
    full_size: int

    def __post_init__(self) -> None:
        for start, stop in self.ranges:
            if not 0 <= start <= stop <= self.full_size:
                raise ValueError(f"range ({start}, {stop}) is not within (0, {self.full_size})")
        taken = sum(stop - start for start, stop in self.ranges)
        if self.dim_idx < 0 or taken > self.size:
            raise ValueError(f"ranges of {taken} in all do not fit size {self.size} of dim {self.dim_idx}")

    @staticmethod
    def of_rows(start: int, stop: int, size: int, full_size: int) -> "Shard":
        """Rows [start, stop) of `full_size`, or none at all, padded to `size`."""
        return Shard(0, ((start, stop),) if stop > start else (), size, full_size)

    def full_shape(self, local_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the full tensor of which this part has `local_shape`; ValueError if it cannot have."""
        return self._exchange(local_shape, self.size, self.full_size)

    def local_shape(self, full_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this part of a tensor of `full_shape`; ValueError if that has another size in this dim."""
        return self._exchange(full_shape, self.full_size, self.size)

    def _exchange(self, shape: tuple[int, ...], old: int, new: int) -> tuple[int, ...]:
        if len(shape) <= self.dim_idx or shape[self.dim_idx] != old:
            raise ValueError(f"shape {tuple(shape)}, but {old} in dim {self.dim_idx} was expected")
        return (*shape[: self.dim_idx], new, *shape[self.dim_idx + 1 :])

    def take(self, tensor: Tensor) -> Tensor:
        """This part of the full tensor, in memory of its own; ValueError if its size in this dim is not `full_size`.

        `tensor` may be a view of a mapped file, or the transpose of one: only the pages of the ranges are read, in
        the file's order. The result keeps that order in memory: of a transpose it is one, too, so not contiguous.
        """
        shape = self.local_shape(tensor.shape)
        taken = torch.empty_permuted(shape, _memory_order(tensor), dtype=tensor.dtype, device=tensor.device)
        position = 0
        for start, stop in self.ranges:
            piece = tensor.narrow(self.dim_idx, start, stop - start)
            read_ahead(piece)
            taken.narrow(self.dim_idx, position, stop - start).copy_(piece)
            position += stop - start
        taken.narrow(self.dim_idx, position, self.size - position).zero_()
        return taken


def take_part(tensor: Tensor, shard: Shard | None) -> Tensor:
    """A shard of a full tensor, in memory of its own; without one the tensor itself, which is then read ahead."""
    if shard is not None:
        return shard.take(tensor)
    read_ahead(tensor)
    return tensor


def set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace the parameter called `name` (as in `named_parameters`); it will not require gradients."""
    module, _, kind = name.rpartition(".")
    setattr(model.get_submodule(module), kind, nn.Parameter(value, requires_grad=False))


def own_tensor(converted: Tensor, original: Tensor) -> Tensor:
    """`converted`, contiguous and in memory of its own.

    Never a view of `original`, which may lie in a mapped file: a file can vanish under its readers, may be
    unaligned, and is written out whole by torch.save.
    """
    shared = converted.untyped_storage().data_ptr() == original.untyped_storage().data_ptr()
    return converted.clone(memory_format=torch.contiguous_format) if shared else converted.contiguous()


def read_ahead(view: Tensor) -> None:
    """Advise the operating system which pages of a mapped file a view [rows, columns] or [columns] needs. Linux only.

    Without the advice it also reads the gaps between the rows, and a window beyond both ends. In ordinary memory, or
    where the advice is not followed, the view is read all the same.
    """
    if sys.platform != "linux" or view.device.type != "cpu" or view.numel() == 0:
        return
    view = view.permute(_memory_order(view))
    rows, pitch = (1, 0) if view.is_contiguous() else (view.shape[0], view.stride(0) * view.itemsize)
    page, length = mmap.PAGESIZE, view.nbytes // rows
    spans: list[list[int]] = []
    for row in range(rows):
        start = view.data_ptr() + row * pitch
        first, end = start // page * page, -(-(start + length) // page) * page
        if spans and first <= spans[-1][1]:
            spans[-1][1] = end
        else:
            spans.append([first, end])
    advise = ctypes.CDLL(None).madvise
    for first, end in spans:
        for at in range(first, end, READ_AHEAD_BYTES):
            num_bytes = min(end - at, READ_AHEAD_BYTES)
            advise(ctypes.c_void_p(at), ctypes.c_size_t(num_bytes), ctypes.c_int(mmap.MADV_WILLNEED))


def _memory_order(tensor: Tensor) -> list[int]:
    """The dims from the widest step in memory to the narrowest."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
