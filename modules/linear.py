"""The matmuls of a block. Output projections are held unit-major, so that an active unit is one contiguous row."""

import torch
from torch import Tensor, nn


def project(states: Tensor, weight: Tensor, memory: Tensor | None = None) -> Tensor:
    """[..., in] @ [in, out]. What a GPU sums up in float32 it hands out in float32, whatever the weights' type; unless
    it is to be left in `memory` [rows, out], in the type that this has.

    Rounded to half precision, two nearly equal logits, or the partial sums of two ranks, would no longer be told apart.
    """
    if memory is not None:
        return torch.mm(states.flatten(0, -2), weight, out=memory).unflatten(0, states.shape[:-1])
    if states.is_cuda and states.dtype == weight.dtype and states.dtype.itemsize == 2 and not torch.is_grad_enabled():
        return torch.mm(states.flatten(0, -2), weight, out_dtype=torch.float32).unflatten(0, states.shape[:-1])
    return torch.matmul(states, weight)


class OutputHead(nn.Module):
    """The head, [vocab_size, width]: states [..., width] -> logits [..., vocab_size]."""

    weight: Tensor  # a parameter, which a tied head shares with the token embeddings

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, states: Tensor) -> Tensor:
        """[..., width] -> [..., vocab_size]."""
        return project(states, self.weight.t())


class OutputProjection(nn.Module):
    """x @ weight with weight [in_features, out_features]: row j is what unit j writes to the residual.

    Hugging Face stores the transpose; the checkpoint reader turns it once, at load. The bias of an output
    projection belongs to the residual junction (`HalfBlock.bias`), never to this sum.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, states: Tensor, memory: Tensor | None = None) -> Tensor:
        """[..., in_features] -> [..., out_features], in `memory` [rows, out_features] if that is given."""
        return project(states, self.weight, memory)
