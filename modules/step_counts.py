"""What a decode step computes, noted while the step is captured and counted each time the host has read a replay."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from modules.sparsity import BLOCKS, ActiveList, ActiveSet, Block, SelectionContext, SparsityStats
from modules.thinned_input import ThinnedInput


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
    """Stands in for a model's statistics in a step whose Python code runs once, but whose kernels run many times.

    The host keeps the calls; what only the device knows, as active units above a threshold, is for the step's message
    (`table`). `add_to` counts one step that was really wanted: a step run ahead and discarded never gets there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[BlockCall] = []
        self._num_active: list[Tensor | ActiveSet] = []
        self._thinned: list[tuple[ThinnedInput, int, int]] = []  # with its weights an entry, and its place among those

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
