"""What a decode step computes, noted while the step is captured and counted each time the host has read a replay."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from modules.projections import ThinnedInput
from modules.sparsity import BLOCKS, ActiveList, ActiveSet, Block, SelectionContext, SparsityStats


@dataclass(frozen=True)
class BlockCall:
    """One block of a step: `num_units` are counted here; `place` among the blocks that chose, None for a dense one."""

    layer_idx: int
    block: Block
    execution: str
    num_units: int
    is_first: bool
    place: int | None


class StepCounts(SparsityStats):
    """Stands in for a model's statistics in a step whose Python code runs once, but whose kernels run many times.

    The host keeps the calls; what only the device knows, the active units of each row, is for the step's message
    (`table`). `add_to` counts one step that was really wanted: a step run ahead and discarded never gets there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[BlockCall] = []
        self._num_active: list[Tensor | ActiveSet | ActiveList] = []
        self._thinned: list[tuple[ThinnedInput, int, int]] = []  # with its weights an entry, and its place among those

    def count(
        self, context: SelectionContext, num_units: int, execution: str, active: ActiveSet | ActiveList | None
    ) -> None:
        """See SparsityStats; the step has one real token a row."""
        units, place = context.units, None
        if active is not None:
            place = len(self._num_active)
            if units is None:
                self._num_active.append(active)  # added up at the end, not between the kernels of the step
            else:
                assert active.mask is not None, "a list without a mask does not say which units another rank has, too"
                self._num_active.append((active.mask & units.counted).sum(-1))
        is_first = True if units is None else units.is_first
        num_units = num_units if units is None else units.num_counted
        self.calls.append(BlockCall(context.layer_idx, context.block, execution, num_units, is_first, place))

    def note_thinned(self, part: ThinnedInput, width: int) -> None:
        """Count what a projection of this step has kept of its input, too; an entry stands for `width` weights."""
        assert part.kept_in_step is not None
        self._thinned.append((part, width, len(self._num_active)))
        self._num_active.append(part.kept_in_step)

    def table(self, num_rows: int) -> list[Tensor]:
        """Of each row the active units of the blocks that chose, and the entries kept of inputs that were thinned out:
        float64 [C, num_rows], or nothing where there are none."""
        if not self._num_active:
            return []
        counts = [active if isinstance(active, Tensor) else active.num_active for active in self._num_active]
        return [torch.stack([count.expand(num_rows) for count in counts]).double()]

    @cached_property
    def _kinds(self) -> dict[Block, tuple[list[int], int, int]]:
        """Of a kind of block: the places of those that chose, units of those that did not, units of all."""
        found: dict[Block, tuple[list[int], int, int]] = {}
        for block in BLOCKS:
            calls = [call for call in self.calls if call.block == block]
            places = [call.place for call in calls if call.place is not None]
            dense = sum(call.num_units for call in calls if call.place is None)
            found[block] = places, dense, sum(call.num_units for call in calls)
        return found

    def add_to(self, stats: SparsityStats, table: Tensor, num_rows: int) -> None:
        """Count a step of `num_rows` real rows; `table` [C, num_rows] is what the host has read, without padding."""
        sums = table.sum(-1).tolist()
        for call in self.calls:
            counters = stats.of(call.layer_idx, call.block)
            counters.executions[call.execution] += 1
            counters.is_first = call.is_first
            total = num_rows * call.num_units
            counters.total.add(total)
            counters.active.add(total if call.place is None else int(sums[call.place]))
        for part, _, place in self._thinned:
            part.kept.add(int(sums[place]))
            part.seen.add(num_rows * part.num_counted)
            part.last_rows = None  # it may be of a prompt before this step
        for block, counts in stats.row_counts.items():
            if block == "mlp" and self._thinned:  # rows have numbers of weights, as Mlp.weights_read has
                widths = table.new_tensor([width for _, width, _ in self._thinned])
                counts[0] += (widths @ table[[place for _, _, place in self._thinned]]).to(counts)
                counts[1] += sum(width * part.num_counted for part, width, _ in self._thinned)
                continue
            places, dense, total = self._kinds[block]
            counts[0] += table[places].sum(0).to(counts) + dense
            counts[1] += total
