"""Compute and communication at once: a long prefill under tensor parallelism in two halves, on two streams.

The tokens of a pass are split in two along the sequence. While attention or the MLP of one half computes, the residual
junction (all-reduce, add, norm) of the other half runs on a second stream:

    compute:        A0      B0      A1      B1      A2  ...        half-block i of halves A and B
    communication:      +A0     +B0     +A1     +B1     ...        the junction behind it

Causal attention needs no more: half B sees the keys of half A, never the other way round. Both junctions
can do it, NCCL's and the fused one, of which each half has one with a workspace of its own; rows of the residual stay
with their owners within a half. On a CPU the same calls are made in the same order, on no stream.

How many tokens go to which half, and how much of the device the fused junction may take meanwhile, was measured or was
not: split files (all_reduce_choice.py), TokenWeave's or those of `scripts.benchmark.prefill --tune-splits`, are looked
for as `pipeline_parallel/configs/splits/DEVICE-RANKSxHIDDEN_SIZE.json`, spaces in the device's name written as `_`.

After Gond et al. 2025, TokenWeave (arXiv 2505.11329).

Legend: B batch, T tokens, D hidden, G key-value heads, H head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from pathlib import Path
from typing import Literal

import torch
from loguru import logger
from torch import Tensor

from modules.cache import Cache
from modules.decoder import Decoder
from modules.forward_pass import ForwardPass, ResidualStream, attention_mask
from modules.kernels.deferred_norm import DeferredNorm
from modules.normalization import AddNorm, Norm, partial_memory
from modules.specs import Sliding
from pipeline_parallel.all_reduce_choice import CONFIGS_DIR, SplitPoint, nearest_split_point, read_split_points
from pipeline_parallel.fused_add_norm import FusedAddNorm
from pipeline_parallel.mesh import ParallelMesh

OverlapTokens = int | Literal["auto"]
DEFAULT_TOKENS = 1024  # where splitting begins to pay in TokenWeave
STEP = 256  # the first half has a multiple of so many tokens: whole tiles of the matrix products
# Of the fused junction beside a half that computes, where nothing was measured: none, the copy engines do it.
DEFAULT_PROGRAMS = 0


class HalfCache(Cache):
    """The cache that attention of one half sees. It returns the keys that attention reads, and writes to the pass's own
    cache, if there is one. The first half keeps its keys and values of a layer for the second.

    Only in passes that begin at an empty cache, or have none; elsewhere attention reads all from the cache itself.
    """

    def __init__(self, cache: Cache | None, kept: dict[int, tuple[Tensor, Tensor]], *, is_first: bool) -> None:
        # No memory of its own, so nothing of Cache's is made.
        self._cache, self._kept, self._is_first = cache, kept, is_first

    def write(self, layer_idx: int, positions: Tensor, keys: Tensor, values: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """As `Cache.write`: keys, values [B, G, T of the half, H] -> what this half sees of them."""
        if self._cache is not None:
            self._cache.write(layer_idx, positions, keys, values, end)
        if self._is_first:
            self._kept[layer_idx] = keys, values
            return keys, values
        first_keys, first_values = self._kept.pop(layer_idx)
        return torch.cat((first_keys, keys), dim=2), torch.cat((first_values, values), dim=2)


@dataclass(kw_only=True)
class Half(ResidualStream):
    """The residual stream of one half; its junctions run on another stream of the device, `side`.

    `junction_behind(idx)` is what follows half-block `idx`, -1: the embeddings.
    """

    side: torch.cuda.Stream | None
    junction_behind: Callable[[int], AddNorm]
    idx: int = -1
    held: Tensor | None = None
    """What the junction on the other stream reads: not freed before that is done, since its memory would be used again
    on this stream."""
    is_reduced: torch.cuda.Event | None = None

    def read(self) -> Tensor | DeferredNorm:
        """The half's hidden states, which this stream may read from now on."""
        if self.is_reduced is not None:
            assert self.side is not None
            torch.cuda.current_stream(self.side.device).wait_event(self.is_reduced)
            self.held = None
        return super().read()

    def add(self, partial: Tensor, norm: Norm | None, bias: Tensor | None) -> None:
        """Start the junction behind what this stream has just computed.

        Memory: the other stream waits for all that was queued here so far, so also for whoever has read what it is
        about to overwrite; what it reads of this stream's is held until `read`.
        """
        self.junction, stream = self.junction_behind(self.idx), self.side
        self.idx += 1
        if stream is None:
            super().add(partial, norm, bias)
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            super().add(partial, norm, bias)
        self.held, self.is_reduced = partial, stream.record_event()


class Overlap:
    """A decoder's prefills in two halves from `min_tokens` tokens on, padding included; see the head of the file.

    Not split: passes of sparse models, passes of models with hooks, and decode steps. A model's statistics count each
    half as a call.
    `junctions`: of each half. `points`: measured splits; none: in the middle.
    """

    def __init__(
        self, model: Decoder, min_tokens: int, junctions: tuple[AddNorm, AddNorm], points: Sequence[SplitPoint]
    ) -> None:
        self.model, self.min_tokens, self.junctions, self.points = model, min_tokens, junctions, points
        self.num_split = 0  # passes so far
        # First in line for the device's free multiprocessors: the link is to be busy all the time.
        on_gpu = model.device.type == "cuda"
        self.stream = torch.cuda.Stream(model.device, priority=-1) if on_gpu else None

    def __call__(self, token_ids: Tensor, forward_pass: ForwardPass) -> Tensor | None:
        """See modules.decoder.PrefillDriver. A collective call, like all passes of a model that is cut."""
        batch, tokens = token_ids.shape
        num_tokens = batch * tokens
        if num_tokens < self.min_tokens or self.model.is_sparse or is_watched(self.model):
            return None
        point = nearest_split_point(self.points, num_tokens) if self.points else None
        first = first_half(batch, tokens, 0 if point is None else point.offset)
        if first == 0:
            return None
        self.num_split += 1
        parts = split(token_ids, forward_pass, first, self.model.compute_dtype)
        return self._run([ids for ids, _ in parts], [part for _, part in parts], point)

    def _run(self, token_ids: Sequence[Tensor], passes: Sequence[ForwardPass], point: SplitPoint | None) -> Tensor:
        model, halves = self.model, list[Half]()
        for place, forward_pass in enumerate(passes):
            forward_pass.partial_memory = partial_memory(self.junctions[place])
            halves.append(
                Half(
                    forward_pass=forward_pass,
                    junction=self.junctions[place],
                    placement=model.config.norm_placement,
                    dtype=model.compute_dtype,
                    side=self.stream,
                    junction_behind=partial(self._junction, place, point),
                    idx=model.span.start - 1,
                )
            )
            model.embed(token_ids[place], halves[place])
        model.run_half_blocks(*halves)
        # Both halves are waited for here, so nothing of this pass is left on the other stream.
        return torch.cat([states for half in halves if isinstance(states := half.read(), Tensor)], dim=1)

    def _junction(self, place: int, point: SplitPoint | None, idx: int) -> AddNorm:
        """What follows half-block `idx` (-1: the embeddings) of a half: it leaves room for what the other half computes
        meanwhile, its own half-block `idx` beside the first half's junction, the next one beside the second's."""
        junction, beside = self.junctions[place], idx + place
        if not isinstance(junction, FusedAddNorm) or beside not in self.model.span:
            return junction
        measured = (DEFAULT_PROGRAMS,) * 2 if point is None else (point.attention_programs, point.mlp_programs)
        return replace(junction, max_programs=measured[beside % 2])


def first_half(batch: int, tokens: int, offset: int) -> int:
    """Positions of the first half of [batch, tokens]: the nearest to an even split and `offset` tokens (of all rows)
    more for which the half has a multiple of 256 tokens. 0: too few for that."""
    step = STEP // gcd(STEP, batch)
    wanted = (batch * tokens + 2 * offset) / (2 * batch)
    most = (tokens - 2) // step * step  # a second half of one token would be a decode step to attention
    return max(0, min(most, max(step, int(wanted / step + 0.5) * step)))


def split(
    token_ids: Tensor, whole: ForwardPass, first: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, ForwardPass], tuple[Tensor, ForwardPass]]:
    """Token ids and a pass of a `dtype` model as those of its first `first` positions and of the rest.

    Each has its share of every row's tokens: a row that ends in the first half has only padding in the second.
    """
    tokens = token_ids.shape[1]
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def part(start: int, stop: int) -> tuple[Tensor, ForwardPass]:
        here = slice(start, stop)
        cache: Cache | None
        masks: dict[Sliding | None, Tensor | None] = {}
        if whole.reads_cache:  # attention reads all from there
            cache = whole.cache
            masks = {
                window: None if mask is None else mask[:, :, here] for window, mask in whole.attention_masks.items()
            }
        else:
            cache = HalfCache(whole.cache, kept, is_first=start == 0)
            for window in whole.attention_masks:
                is_plain = start == 0 and (window is None or stop <= window.size)
                masks[window] = None if is_plain else mask_up_to(whole.positions[:1, here], stop, dtype, window)
        valid = None if whole.valid is None else whole.valid[:, here]
        cos_sin = {key: (cos[:, :, here], sin[:, :, here]) for key, (cos, sin) in whole.cos_sin.items()}
        forward_pass = replace(
            whole,
            positions=whole.positions[:, here],
            valid=valid,
            attention_masks=masks,
            cos_sin=cos_sin,
            cache=cache,
        )
        return token_ids[:, here], forward_pass

    return part(0, first), part(first, tokens)


def mask_up_to(positions: Tensor, end: int, dtype: torch.dtype, window: Sliding | None) -> Tensor:
    """What the queries at the last `positions` [1, T] of `end` see: keys up to their own, of a window the last."""
    if window is None and positions.is_cuda and dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.bias import causal_lower_right  # here, since it loads torch's compiler: seconds

        return causal_lower_right(positions.shape[1], end)  # flash attention
    return attention_mask(positions, end, dtype, window)


def is_watched(model: Decoder) -> bool:
    """Whether a hook looks into the half-blocks: it would see halves."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.half_blocks.modules())


def check_overlap_tokens(tokens: OverlapTokens) -> None:
    """ValueError if that is no threshold."""
    if tokens != "auto" and tokens < 0:
        raise ValueError(f"--overlap-tokens must be auto, 0 (never) or a number of tokens, got {tokens}")


def choose_overlap(model: Decoder, mesh: ParallelMesh, tokens: OverlapTokens) -> None:
    """Let a model, whose junction is chosen, split prefills as `--overlap-tokens` says (a collective call).

    auto: from 1024 tokens on where splits were measured for these GPUs, and from the smallest measured on. A number:
    from so many on, measured or not. 0: never. Pipeline stages send whole passes, so there nothing is split.
    """
    check_overlap_tokens(tokens)
    if tokens == 0 or mesh.tp_size == 1:
        return
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else mesh.device.type
    path = split_path(device, mesh.tp_size, model.config.hidden_size)
    points = read_split_points(path) if path.is_file() else []
    problem = None
    if mesh.pp_size > 1:
        problem = f"{mesh.pp_size} pipeline stages hand on whole passes"
    elif len(set(mesh.gather((tokens, repr(points))))) > 1:
        problem = "the ranks differ in what was measured for them"
    elif tokens == "auto" and not points and mesh.device.type != "cuda":
        problem = f"that is for GPUs, and the model is on {mesh.device.type}"
    elif tokens == "auto" and not points:
        problem = f"nothing was measured for these GPUs (scripts.benchmark.prefill --tune-splits --output {path} does)"
    if problem is not None:
        logger.info(f"--overlap-tokens {tokens}: prefills are not split, since {problem}")
        return
    least = max(DEFAULT_TOKENS, points[0].num_tokens) if tokens == "auto" else tokens
    split_prefills(model, least, points)
    logger.info(f"--overlap-tokens {tokens}: prefills of {least} tokens or more are split in two")


def split_prefills(model: Decoder, min_tokens: int, points: Sequence[SplitPoint]) -> None:
    """Split a cut model's prefills from so many tokens on (a collective call: fused, the second half gets memory)."""
    junction = model.add_norm
    junctions: tuple[AddNorm, AddNorm] = junction, junction
    if isinstance(junction, FusedAddNorm):
        junctions = junction.for_half(junction.operator), junction.for_half(junction.operator.with_own_memory())
    model.prefill_driver = Overlap(model, min_tokens, junctions, points)


def split_path(device: str, ranks: int, hidden_size: int) -> Path:
    """Where the measured splits of a kind of device, as torch names it, are looked for."""
    return CONFIGS_DIR / "splits" / f"{device.replace(' ', '_')}-{ranks}x{hidden_size}.json"


def overlap_tokens(model: Decoder) -> int:
    """From how many tokens on a model's prefills are split; 0: never."""
    return model.prefill_driver.min_tokens if isinstance(model.prefill_driver, Overlap) else 0
