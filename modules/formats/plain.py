"""Plain weights: one tensor in the floating-point type that the model computes in."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.shards import Shard


class Plain:
    """A matrix of units as it is, `weight` [num_rows, width]; see `modules.linear.WeightFormat`."""

    name = "plain"
    has_kernels = True

    def empty(self, num_rows: int, width: int) -> dict[str, Tensor]:
        """See WeightFormat."""
        return {"weight": torch.empty(num_rows, width)}

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """See WeightFormat."""
        num_rows, width = tensors["weight"].shape
        return num_rows, width

    def compute_dtype(self, tensors: Mapping[str, Tensor]) -> torch.dtype:
        """See WeightFormat: that of the weights."""
        return tensors["weight"].dtype

    def read_rows(
        self, tensors: Mapping[str, Tensor], states: Tensor, bias: Tensor | None, *, keep_float32: bool
    ) -> Tensor:
        """See WeightFormat."""
        if keep_float32:
            assert bias is None, "a bias is added behind a product that stays in float32"
            return multiply(states, tensors["weight"].t())
        return F.linear(states, tensors["weight"], bias)

    def add_rows(self, tensors: Mapping[str, Tensor], states: Tensor, memory: Tensor | None) -> Tensor:
        """See WeightFormat."""
        return multiply(states, tensors["weight"], memory)

    def rows(self, tensors: Mapping[str, Tensor], indices: Tensor) -> Tensor:
        """See WeightFormat."""
        return tensors["weight"][indices]

    def shards(self, shard: Shard) -> dict[str, Shard]:
        """See WeightFormat."""
        return {"weight": shard}

    def dequantised(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """See WeightFormat: the weights themselves."""
        return tensors["weight"]

    def kernel_argument(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """See WeightFormat: the weights themselves."""
        return tensors["weight"]


def multiply(states: Tensor, weight: Tensor, memory: Tensor | None = None) -> Tensor:
    """[..., in] @ [in, out]. A GPU sums in float32, and returns float32, whatever the weights' type; unless
    it is to be left in `memory` [rows, out], in the type that this has.

    Rounded to half precision, two nearly equal logits, or the partial sums of two ranks, would no longer be told apart.
    """
    if memory is not None:
        return torch.mm(states.flatten(0, -2), weight, out=memory).unflatten(0, states.shape[:-1])
    if states.is_cuda and states.dtype == weight.dtype and states.dtype.itemsize == 2 and not torch.is_grad_enabled():
        return torch.mm(states.flatten(0, -2), weight, out_dtype=torch.float32).unflatten(0, states.shape[:-1])
    return torch.matmul(states, weight)
