"""Decode steps as CUDA graphs: one for each batch size, captured when it is first needed, replayed after that.

A graph fixes every shape and address: the rows are padded to a captured size, attention looks at the whole cache, and
what the host decides (tokens, lengths) is copied into the graph's own inputs. On a pipeline stage the hand-offs stay
outside of the graph.

Where a process has all layers, a graph also chooses the tokens and prepares its own inputs for the next step. That step
is replayed before the host has read this one, so the device does not wait for the host once per token. What the host
then asks for is mostly what already runs (`StepInputs` say so); else the step ahead is discarded. Ranks that share
layers have the same logits, so they choose and discard alike; but they run ahead in greedy steps only, since a sampled
one adds up probabilities in an order that may differ between devices.

Legend: B rows of a step, V vocabulary, C blocks that choose their units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import cycle, pairwise
from struct import pack, unpack
from typing import Any

import torch
from torch import Tensor

from modules.cache import Cache
from modules.decoder import Decoder
from modules.forward_pass import ForwardPass
from modules.kernels.arguments import MAX_ROWS
from modules.kernels.greedy_choice import greedy_choice
from modules.normalization import residual_dtype
from modules.sampling import SamplingParams, greedy, sample_on_device, stream_of, stream_uniforms
from modules.scoring import chosen_logprobs
from modules.sparsity import BLOCKS, ActiveList, ActiveSet, Block, SelectionContext, SparsityStats
from modules.thinned_input import ThinnedInput, in_step

# The rows of a graph's inputs, int64 [9, B]; options of sampling lie there as they are, float64 bit by bit. A row's
# length and step grow by `_GROWTH` with every token: 1, and 0 for a row that only pads the size.
_TOKEN, _LENGTH, _STEP, _GROWTH, _STREAM, _TOP_K, _TEMPERATURE, _TOP_P, _MIN_P = range(9)


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step, for its first rows [B]: each row's token, the number of tokens cached before it, the number
    of the token that will be chosen, and how it is sampled."""

    token_ids: list[int]
    lengths: list[int]
    steps: list[int]
    sampling: list[SamplingParams]

    def followed_by(self, token_ids: list[int]) -> StepInputs:
        """The step after this one, if it has chosen these and every row goes on."""
        return StepInputs(
            [*token_ids], [length + 1 for length in self.lengths], [step + 1 for step in self.steps], self.sampling
        )

    def packed(self, size: int) -> Tensor:
        """As a graph reads them: int64 [9, size]."""
        count = len(self.token_ids)
        columns = [self.token_ids, self.lengths, self.steps, [1] * count]
        columns += map(list, zip(*map(_packed_options, self.sampling), strict=True))
        # Rows that pad the size write to a place that nobody reads, position 0, and stay there.
        return torch.tensor([[*column, *[0] * (size - count)] for column in columns])


@lru_cache(maxsize=1024)
def _packed_options(options: SamplingParams) -> tuple[int, int, int, int, int]:
    bits: tuple[int, int, int] = unpack("<3q", pack("<3d", options.temperature, options.top_p, options.min_p))
    return stream_of(options.seed), options.top_k, *bits


@dataclass(frozen=True)
class BlockCall:
    """One block of a step: `num_units` are counted here, of which each row computes `num_active`, or as many as the
    message says at `place`."""

    layer_idx: int
    block: Block
    execution: str
    num_units: int
    is_first: bool
    num_active: int
    place: int | None


class StepCounts(SparsityStats):
    """Replaces a model's statistics in a captured step, whose Python code runs once and whose kernels run many times.

    The host keeps the list of calls. Numbers that exist on the device only, such as active units above a threshold, go
    into the step's message (`table`). `add_to` counts one step; it is not called for a step that is discarded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[BlockCall] = []
        self._num_active: list[Tensor | ActiveSet] = []
        self._thinned: list[tuple[ThinnedInput, int, int]] = []  # with its weights per entry, and its place among those

    def count(
        self, context: SelectionContext, num_units: int, execution: str, active: ActiveSet | ActiveList | None
    ) -> None:
        """See SparsityStats; the step has one real token a row."""
        units, place = context.units, None
        is_first = True if units is None else units.is_first
        num_units = known = num_units if units is None else units.num_counted
        if isinstance(active, ActiveSet) and active.count is not None and units is None:
            known = active.count
        elif active is not None:
            place = len(self._num_active)
            if units is not None:
                assert active.mask is not None, "a list without a mask does not say which units another rank has, too"
                self._num_active.append((active.mask & units.counted).sum(-1))
            else:  # sets are added up at the end, not between the kernels of the step
                self._num_active.append(active.num_active if isinstance(active, ActiveList) else active)
        self.calls.append(BlockCall(context.layer_idx, context.block, execution, num_units, is_first, known, place))

    def note_thinned(self, part: ThinnedInput, width: int) -> None:
        """Count what a projection of this step has kept of its input, too; an entry stands for `width` weights."""
        kept, last = part.kept_in_step, self._num_active[-1] if self._num_active else None
        assert kept is not None
        if not (isinstance(last, Tensor) and last.data_ptr() == kept.data_ptr()):  # as gate and up, of one input
            self._num_active.append(kept)
        self._thinned.append((part, width, len(self._num_active) - 1))

    def table(self, num_rows: int) -> list[Tensor]:
        """Of each row what only the device knows: the active units of blocks that chose, and the entries kept of inputs
        that were thinned out: [C, num_rows], or nothing."""
        if not self._num_active:
            return []
        counts = [active if isinstance(active, Tensor) else active.num_active for active in self._num_active]
        return [_side_by_side([count.expand(num_rows) for count in counts])]

    @cached_property
    def _kinds(self) -> dict[Block, tuple[list[int], int, int]]:
        """Of a kind of block: places in the message, units computed by those that have none, units of all."""
        found: dict[Block, tuple[list[int], int, int]] = {}
        for block in BLOCKS:
            calls = [call for call in self.calls if call.block == block]
            places = [call.place for call in calls if call.place is not None]
            known = sum(call.num_active for call in calls if call.place is None)
            found[block] = places, known, sum(call.num_units for call in calls)
        return found

    def add_to(self, stats: SparsityStats, table: Tensor, num_rows: int) -> None:
        """Count a step of `num_rows` real rows; `table` [C, num_rows] is what the host has read, without padding."""
        sums = table.sum(-1).tolist()
        for call in self.calls:
            counters = stats.of(call.layer_idx, call.block)
            counters.executions[call.execution] += 1
            counters.is_first = call.is_first
            counters.total.add(num_rows * call.num_units)
            counters.active.add(num_rows * call.num_active if call.place is None else int(sums[call.place]))
        for part, _, place in self._thinned:
            part.kept.add(int(sums[place]))
            part.seen.add(num_rows * part.num_counted)
            part.last_rows = None  # it may be of a prompt before this step
        for block, counts in stats.row_counts.items():
            if block == "mlp" and self._thinned:  # rows have numbers of weights, as thinned_input.weights_read has
                widths = table.new_tensor([width for _, width, _ in self._thinned])
                counts[0] += (widths @ table[[place for _, _, place in self._thinned]]).to(counts)
                counts[1] += sum(width * part.num_counted for part, width, _ in self._thinned)
                continue
            places, known, total = self._kinds[block]
            counts[0] += table[places].sum(0).to(counts) + known
            counts[1] += total


def _side_by_side(counts: list[Tensor]) -> Tensor:
    """[C, rows] of C counts [rows]: one view where they lie evenly in one memory, as a step's kernels leave them.

    A copy of dozens takes as many pointers as arguments: 28 of them 7 us on an H200, 64 of them 15 us.
    """
    first = counts[0]
    distances = {after.storage_offset() - before.storage_offset() for before, after in pairwise(counts)}
    memories = {(count.untyped_storage().data_ptr(), count.dtype, count.stride()) for count in counts}
    if len(memories) > 1 or len(distances) != 1 or min(distances) < 0:
        return torch.stack(counts)
    return first.as_strided((len(counts), len(first)), (distances.pop(), first.stride(0)))


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


@dataclass(kw_only=True)
class CapturedStep:
    """A decode step at fixed addresses. `replay` goes from the inputs (int64 [9, B], see StepInputs; states from the
    stage before) to the states to send on (None of a fused step) and, where the head is, logits [B, V] and `facts`: all
    that the host needs to know, in one read. float64 [3 + C, B]: the chosen token, its log-probability, 1 where the
    logits are finite; then the active units of blocks that choose them (see StepCounts). `messages` are places for the
    facts of a step, used alternately: that of the step ahead must not overwrite this one's."""

    inputs: Tensor
    received: tuple[Tensor, Tensor] | None
    forward_pass: ForwardPass
    states: tuple[Tensor, Tensor] | None
    counts: StepCounts
    logits: Tensor | None = None
    facts: Tensor | None = None
    replay: Callable[[], None] = lambda: None
    messages: Iterator[HostCopy] = iter(())


@dataclass(frozen=True)
class StepResult:
    """What the host has read of a step's rows [B]. `logits` [B, V] are on the device, until the next replay."""

    token_ids: list[int]
    logprobs: list[float]
    finite: list[bool]
    logits: Tensor


def can_capture(model: Decoder) -> bool:
    """Whether decode steps can be CUDA graphs: on a GPU, dense models, and sparse ones whose steps are fused kernels,
    which follow every choice without the host's help."""
    if model.device.type != "cuda":
        return False
    return not model.is_sparse or model.can_fuse()


def capture(
    step: Callable[[], CapturedStep], device: torch.device, pool: Any
) -> tuple[Callable[[], None], CapturedStep]:
    """Capture a step as a graph: how to replay it, and its outputs. The step runs three times."""
    # Libraries and communicators set themselves up outside of the graph.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # thread_local: communication libraries may touch the device from threads of their own meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = step()
    graph.replay()  # a first launch also brings the graph to the device; no step that is waited for should pay for that
    return graph.replay, outputs


class DecodeGraphs:
    """The decode steps of one cache (see `can_capture`). `chooses`: a step chooses its tokens itself, however they are
    sampled; elsewhere, on a part of a model, its choice is always the greedy one. `steps_ahead` counts the steps that
    ran before they were asked for (where all layers are here), `used` and `discarded`.

    Why a discarded step does no harm, though it has written to the cache. It wrote at one position of each row, which
    is the row's length as the host has it by then (`StepInputs.followed_by`): nothing that is valid. A row that goes on
    writes there itself next. A row that ends is given to a request whose prompt, and then tokens, come later in the
    same stream and overwrite the position before anything looks at it. A row that moves takes its valid positions
    along, and no more. And a step is never taken for another: a request that comes in begins at step 1, where a step
    ahead is at 2 at least, and rows that close a gap are fewer than before.
    """

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self.model, self.cache = model, cache
        cache.has_static_shapes = True
        self.has_all_layers = model.links is None
        self.chooses = self.has_all_layers and not model.shards
        self.steps_ahead = {"used": 0, "discarded": 0}
        # A step that runs already: what it took for granted, and where its facts will be.
        self._ahead: tuple[CapturedStep, StepInputs, HostCopy] | None = None
        self._steps: dict[tuple[int, bool, bool], CapturedStep] = {}
        self._pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    def size_for(self, num_rows: int) -> int:
        """The batch size that is captured for so many rows: the next power of two, or all rows of the cache. Where
        units are skipped, just as many: padding would choose units of its own, and each is read for all rows."""
        if self.model.is_sparse and num_rows <= MAX_ROWS:
            return num_rows
        return min(1 << (num_rows - 1).bit_length(), self.cache.rows.shape[0])

    def run(self, inputs: StepInputs, *, ahead: bool = False) -> StepResult | None:
        """One token for each of the first rows; None where no head is. `ahead`: all rows will probably go on, so the
        step after this one may start at once."""
        num_rows, (running, self._ahead) = len(inputs.token_ids), (self._ahead, None)
        message: HostCopy | None
        if running is not None and running[1] == inputs:
            self.steps_ahead["used"] += 1
            step, _, message = running
        else:
            self.steps_ahead["discarded"] += running is not None
            step = self.filled(inputs)
            message = self._replay(step)
        following = None
        # The next position of every row must be there: what lies beyond the cache cannot be written harmlessly.
        chosen = self.chooses or (self.has_all_layers and not any(each.temperature for each in inputs.sampling))
        if ahead and chosen and max(inputs.lengths) + 1 < self.cache.max_seqlen:
            following = self._replay(step)
        facts = torch.empty(3, num_rows) if message is None else message.read()[:, :num_rows]
        if self.model.stats is not None:
            step.counts.add_to(self.model.stats, facts[3:], num_rows)
        if message is None or step.logits is None:
            return None
        token_ids, logprobs, finite = facts[0].long().tolist(), facts[1].tolist(), facts[2].bool().tolist()
        if following is not None:
            self._ahead = step, inputs.followed_by(token_ids), following
        return StepResult(token_ids, logprobs, finite, step.logits[:num_rows])

    def filled(self, inputs: StepInputs) -> CapturedStep:
        """The graph for these inputs, which it holds now."""
        samples = any(options.temperature for options in inputs.sampling)
        limited = any(options.is_limited for options in inputs.sampling)
        step = self.prepare(len(inputs.token_ids), samples=samples, limited=limited)
        host = inputs.packed(step.inputs.shape[1])
        step.inputs.copy_(host.pin_memory() if step.inputs.is_cuda else host, non_blocking=True)
        return step

    def _replay(self, step: CapturedStep) -> HostCopy | None:
        """Start a step with what its inputs hold: where its facts will be, None where no head is."""
        links = self.model.links
        if links is not None and step.received is not None:
            arrived = links.receive(step.inputs.shape[1], 1, step.forward_pass)
            for static, states in zip(step.received, arrived, strict=True):
                static.copy_(states)
        step.replay()
        if links is not None and not links.is_last:
            assert step.states is not None
            links.send(*step.states, step.forward_pass)
        message = next(step.messages, None)
        if message is not None:
            message.start()
        return message

    def prepare(self, num_rows: int, *, samples: bool = False, limited: bool = False) -> CapturedStep:
        """The graph for so many rows, captured now if there is none yet. `samples`: some rows are sampled; `limited`:
        with a top_k, top_p or min_p, for which the vocabulary is sorted; other batches do without."""
        place = (self.size_for(num_rows), samples and self.chooses, limited and self.chooses)
        if place not in self._steps:
            self._steps[place] = self._capture(*place)
        return self._steps[place]

    def _capture(self, size: int, samples: bool, limited: bool) -> CapturedStep:
        model, device = self.model, self.model.device
        inputs = torch.zeros(9, size, dtype=torch.int64, device=device)
        received = None
        if model.links is not None and not model.links.is_first:
            shape, stream = (size, 1, model.config.hidden_size), model.links.residual_shape(size, 1)
            normed = torch.zeros(shape, dtype=model.compute_dtype, device=device)
            received = normed, torch.zeros(stream, dtype=residual_dtype(model.compute_dtype), device=device)
        fused = model.can_fuse() and size <= MAX_ROWS

        def step() -> CapturedStep:
            ids, cache = inputs[_TOKEN][:, None], self.cache.first_rows(size, inputs[_LENGTH], 0)
            forward_pass = model.begin_step(ids, cache) if fused else model.begin(ids, cache=cache, phase="decode")
            forward_pass.stats = counts = StepCounts()
            thinned = model.thinned_parts()
            with in_step(thinned):
                stream = model.stream(forward_pass)
                if received is None:
                    model.embed(ids, stream)
                else:
                    stream.hidden_states, stream.residual = received
                model.run_half_blocks(stream)
                logits = model.step_logits(stream) if model.is_last else None
                for part, width in thinned:
                    counts.note_thinned(part, width)
            states = None if fused else (stream.hidden_states, stream.residual)
            captured = CapturedStep(
                inputs=inputs, received=received, forward_pass=forward_pass, states=states, counts=counts
            )
            if logits is None:
                assert not counts.table(size), "counts of a stage without the head have no message to go with"
                return captured
            facts = _choose(logits, inputs if samples else None, limited)
            if self.has_all_layers:
                inputs[_TOKEN] = facts[0]
                inputs[_LENGTH : _STEP + 1] += inputs[_GROWTH]
            captured.logits, captured.facts = logits, stacked([facts, *counts.table(size)], size)
            return captured

        # Capturing runs the step, which writes to position 0 of rows that may be in use: put that back.
        kept = [states[:size, :, 0].clone() for states in self.cache.states]
        replay, captured = capture(step, device, self._pool)
        for states_of_cache, first in zip(self.cache.states, kept, strict=True):
            states_of_cache[:size, :, 0] = first
        captured.replay = replay
        if captured.facts is not None:
            captured.messages = cycle([HostCopy(captured.facts) for _ in range(2)])
        return captured


def _choose(logits: Tensor, inputs: Tensor | None, limited: bool) -> Tensor:
    """float64 [3, B]: token, log-probability, 1 where the logits are finite. `inputs` None: the greedy choice;
    `limited` as of `sample_on_device`."""
    if inputs is None and logits.dtype == torch.float32:
        return greedy_choice(logits)
    if inputs is None:
        chosen = greedy(logits)
    else:
        temperature, top_p, min_p = (inputs[place].view(torch.float64) for place in (_TEMPERATURE, _TOP_P, _MIN_P))
        uniforms = stream_uniforms(inputs[_STREAM], inputs[_STEP])
        chosen = sample_on_device(logits, temperature, inputs[_TOP_K], top_p, min_p, uniforms, limited=limited)
    facts = (chosen, chosen_logprobs(logits, chosen), logits.amax(-1).isfinite())
    return stacked([fact[None] for fact in facts], len(chosen))
