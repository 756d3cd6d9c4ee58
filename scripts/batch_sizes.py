"""`batch_size=auto`: how many rows fit, from what a forward pass was measured to need."""

from __future__ import annotations

import torch
from loguru import logger

from scripts.model_loading import LoadedModel

CPU_ROWS = 8  # more do not make a CPU faster
MOST_ROWS = 64
PROBE_TOKENS = 512
# A masked sparse pass holds scores and masks beside the activations of the dense one that is measured.
ALLOWANCE = 2.0
USABLE = 0.8  # of the free memory: what is left over is for fragments and graphs


class BatchSizes:
    """Rows that run together: a fixed number, or as many as fit, the same on all ranks.

    Making one with `fixed` None is a collective call: each GPU runs two dense passes and keeps what a token took.
    """

    def __init__(self, loaded: LoadedModel, *, fixed: int | None, most: int | None = None) -> None:
        self.fixed, self.most = fixed, MOST_ROWS if most is None else most
        self.taken: set[int] = set()  # what was used, for whoever reports it
        self._loaded = loaded
        self._fitting: dict[tuple[int, int], int] = {}
        self._bytes_per_token = 0.0
        if fixed is None and loaded.model.device.type == "cuda":
            self._bytes_per_token = self._measure() * ALLOWANCE
        elif fixed is None:
            self.fixed = min(CPU_ROWS, self.most)
            logger.info(f"batch size auto: {self.fixed} rows on a CPU")

    def for_scoring(self, num_tokens: int) -> int:
        """Rows of so many tokens in one forward pass (a collective call)."""
        return self._rows(num_tokens, 0)

    def for_generation(self, num_prompt: int, num_tokens: int) -> int:
        """Rows of so many prompt tokens and `num_tokens` in all, whose keys and values are kept (a collective call)."""
        return self._rows(num_prompt, num_tokens)

    def _rows(self, num_passed: int, num_cached: int) -> int:
        if self.fixed is not None:
            self.taken.add(self.fixed)
            return self.fixed
        # In powers of two: ranks have to agree, and not on every batch.
        sizes = (_power_above(num_passed), _power_above(num_cached) if num_cached else 0)
        if sizes not in self._fitting:
            model, device = self._loaded.model, self._loaded.model.device
            cache = model.new_cache(1, 1)
            cached_bytes = 2 * cache.keys.numel() * cache.keys.element_size()
            needed = sizes[0] * self._bytes_per_token + sizes[1] * cached_bytes
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free = torch.cuda.mem_get_info(device)[0] + unused
            fit = min(self._loaded.mesh.gather(int(free * USABLE / needed)))
            rows = max(1, min(fit, self.most))
            self._fitting[sizes] = 1 << (rows.bit_length() - 1)
            logger.info(f"batch size auto: {self._fitting[sizes]} rows of up to {max(sizes)} tokens")
        self.taken.add(self._fitting[sizes])
        return self._fitting[sizes]

    @torch.inference_mode()
    def _measure(self) -> float:
        """Bytes that one more token of a dense pass takes at its peak."""
        model, device = self._loaded.model, self._loaded.model.device
        num_tokens = min(PROBE_TOKENS, model.config.max_position_embeddings)
        peaks = []
        for rows in (3, 1, 3):  # the first sets libraries up, workspaces of the larger size included
            torch.cuda.reset_peak_memory_stats(device)
            token_ids = torch.zeros(rows, num_tokens, dtype=torch.int64, device=device)
            hidden_states = model(token_ids, phase="prefill")
            del hidden_states
            peaks.append(torch.cuda.max_memory_allocated(device))
        return max(1.0, (peaks[2] - peaks[1]) / (2 * num_tokens))


def _power_above(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()
