"""What a decode step tells the host: numbers put together on the device, and copied while the device goes on."""

import torch
from torch import Tensor


class HostCopy:
    """A tensor of the device for the host to read, without waiting for what the device does after the copy."""

    def __init__(self, source: Tensor) -> None:
        self._source = source
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._copied = torch.cuda.Event() if source.is_cuda else None

    def start(self) -> None:
        """Copy what the work queued so far leaves there."""
        self._host.copy_(self._source, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._source.device))

    def read(self) -> Tensor:
        """What was copied; valid until the next `start`."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def stacked(parts: list[Tensor], size: int) -> Tensor:
    """Parts [*, size] one below the other, float64 [sum, size].

    A short copy each: `torch.cat` has a kernel that takes kilobytes of arguments, which a graph has to carry along.
    """
    together = torch.empty(sum(map(len, parts)), size, dtype=torch.float64, device=parts[0].device)
    for place, part in zip(together.split([*map(len, parts)]), parts, strict=True):
        place.copy_(part)
    return together
