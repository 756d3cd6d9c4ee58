"""The matrices of a model: a `Linear` has a bias or none, and a `WeightFormat` that knows how they lie in memory.

A matrix is held by units, [num_rows, width]: a row is what one unit (a neuron, a channel of a head, a word) reads of
its input or adds to its output, so an active unit is one contiguous row. Weight type, compute type and the type of the
residual stream are three things: the format knows the first two (`compute_dtype`), `modules.normalization` the third.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from modules.formats.plain import Plain
from modules.shards import Shard


class WeightFormat(Protocol):
    """How a matrix of units [num_rows, width] lies in memory.

    A format holds no tensors. They are parameters of the `Linear` that asks, under the names that the format gives
    them (the first is `weight`), so that checkpoints, training, devices and tensor parallelism see plain parameters.
    `tensors` below are those, by name.
    """

    name: str
    has_kernels: bool  # whether the kernels of a decode step read it

    def empty(self, num_rows: int, width: int) -> dict[str, Tensor]:
        """The tensors of a matrix of this size, without values."""
        ...

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """(num_rows, width) of the matrix that these tensors hold."""
        ...

    def compute_dtype(self, tensors: Mapping[str, Tensor]) -> torch.dtype:
        """The type of the states that the matrix is multiplied with."""
        ...

    def read_rows(
        self, tensors: Mapping[str, Tensor], states: Tensor, bias: Tensor | None, *, keep_float32: bool
    ) -> Tensor:
        """Each unit's product with the input: [..., width] -> [..., num_rows]. `keep_float32`: sums that a
        device makes in float32 are returned as float32."""
        ...

    def add_rows(self, tensors: Mapping[str, Tensor], states: Tensor, memory: Tensor | None) -> Tensor:
        """The sum of the rows, each times its unit's state: [..., num_rows] -> [..., width], as float32 where a device
        sums in it, or left in `memory` [rows of states, width]."""
        ...

    def rows(self, tensors: Mapping[str, Tensor], indices: Tensor) -> Tensor:
        """Some rows in the compute type: indices int64 [A] -> [A, width]."""
        ...

    def shards(self, shard: Shard) -> dict[str, Shard]:
        """The part of each tensor that a part of the rows is; ValueError if the format cannot be cut there."""
        ...

    def dequantised(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The whole matrix in the compute type, [num_rows, width]."""
        ...

    def kernel_argument(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What the kernels of a decode step take for the matrix."""
        ...


class Linear(nn.Module):
    """x -> x W + b, with W held by units. `rows_are` its outputs ([out_features, in_features], each reads the input) or
    its inputs ([in_features, out_features], each adds to the output).

    The bias of a matrix whose rows are inputs belongs to the residual junction (`HalfBlock.bias`), never to this sum.
    `keep_float32`: see `WeightFormat.read_rows`; sums over rows always are.
    """

    weight: Tensor  # the first tensor of any format
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        rows_are: Literal["outputs", "inputs"] = "outputs",
        keep_float32: bool = False,
        weight_format: WeightFormat | None = None,
    ) -> None:
        super().__init__()
        assert not (bias and (rows_are == "inputs" or keep_float32)), "such a bias is added elsewhere"
        self.rows_are, self.keep_float32 = rows_are, keep_float32
        self.weight_format: WeightFormat = Plain() if weight_format is None else weight_format
        by_units = (out_features, in_features) if rows_are == "outputs" else (in_features, out_features)
        for name, tensor in self.weight_format.empty(*by_units).items():
            value = nn.init.normal_(tensor, std=0.02) if tensor.is_floating_point() else tensor.zero_()
            self.register_parameter(name, nn.Parameter(value, requires_grad=tensor.is_floating_point()))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What the format reads, by name."""
        return self._parameters  # type: ignore[return-value]

    @property
    def num_rows(self) -> int:
        """Units that are here."""
        return self.weight_format.shape(self.tensors)[0]

    @property
    def width(self) -> int:
        """Entries of a row."""
        return self.weight_format.shape(self.tensors)[1]

    @property
    def in_features(self) -> int:
        """Entries of the input, as far as they are here."""
        return self.width if self.rows_are == "outputs" else self.num_rows

    @property
    def out_features(self) -> int:
        """Entries of the output, as far as they are here."""
        return self.num_rows if self.rows_are == "outputs" else self.width

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of the states that it is multiplied with."""
        return self.weight_format.compute_dtype(self.tensors)

    @property
    def has_kernels(self) -> bool:
        """Whether the kernels of a decode step read its format."""
        return self.weight_format.has_kernels

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the matrix that are here, without the bias."""
        return sum(tensor.nbytes for name, tensor in self._parameters.items() if tensor is not None and name != "bias")

    def forward(self, states: Tensor, memory: Tensor | None = None) -> Tensor:
        """[..., in_features] -> [..., out_features]; a sum over rows may be left in `memory` [rows, out_features]."""
        if self.rows_are == "inputs":
            return self.weight_format.add_rows(self.tensors, states, memory)
        return self.weight_format.read_rows(self.tensors, states, self.bias, keep_float32=self.keep_float32)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of some units in the compute type: indices int64 [A] -> [A, width]."""
        return self.weight_format.rows(self.tensors, indices)

    def dequantised(self) -> Tensor:
        """All rows in the compute type, [num_rows, width]."""
        return self.weight_format.dequantised(self.tensors)

    def kernel_argument(self) -> Tensor:
        """What the kernels of a decode step take for it."""
        return self.weight_format.kernel_argument(self.tensors)

    def cut(self, shard: Shard) -> dict[str, Shard]:
        """Keep, of a matrix on `meta`, the rows of a shard (dim 0), and of a bias of its rows the same; returns which
        part each parameter then is, by name. ValueError if the format cannot be cut there."""
        shards = self.weight_format.shards(shard)
        if self.bias is not None:
            shards["bias"] = shard
        for name, part in shards.items():
            full = self._parameters[name]
            assert full is not None and full.is_meta, f"{name}: a matrix is cut before it has values"
            setattr(self, name, nn.Parameter(full.new_empty(part.local_shape(tuple(full.shape))), full.requires_grad))
        return shards


def bytes_held(*modules: nn.Module | None) -> int:
    """Bytes of all parameters of some modules, in the formats that they have."""
    return sum(one.nbytes for module in modules if module is not None for one in module.parameters())
