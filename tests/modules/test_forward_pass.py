"""What a pass carries: inputs that later half-blocks look back to, and where partial sums are left."""

from typing import Any

import pytest
import torch
from torch import Tensor

from modules.forward_pass import lookahead_inputs
from modules.normalization import add_norm
from modules.sparsity import ActiveSet, SelectionContext
from sparse_predictor.selection import apply_sparsity
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_decoder


class LooksBack:
    """Keeps everything where the input of so many layers before is what the block of that layer had seen."""

    def __init__(self, lookahead: int, num_units: int, seen: dict[tuple[str, int], Tensor]) -> None:
        self.lookahead, self.num_units, self.seen = lookahead, num_units, seen

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet:
        self.seen[context.block, context.layer_idx] = hidden_states
        earlier = context.layer_idx - self.lookahead
        same = earlier < 0 or torch.equal(context.earlier_inputs[earlier], self.seen[context.block, earlier])
        return ActiveSet(torch.full((hidden_states.shape[:2].numel(), self.num_units), same))


@pytest.mark.parametrize("lookahead", [1, 2, 3])
@pytest.mark.parametrize("cut", range(7))
def test_a_stage_that_is_sent_the_lookahead_inputs_runs_as_the_whole_model(lookahead: int, cut: int) -> None:
    model = tiny_decoder(KINDS["llama"])
    ids = random_tokens(2, 5)
    seen: dict[tuple[str, int], Tensor] = {}
    units = {"attention": 2, "mlp": 80}
    places = [(layer, block) for layer in range(3) for block in units]
    apply_sparsity(model, {place: LooksBack(lookahead, units[place[1]], seen) for place in places})  # type: ignore
    assert model.max_lookahead == lookahead
    with torch.no_grad():
        whole = model(ids)
        before, after = model.begin(ids), model.begin(ids)
        stream = model.enter(ids, before)
        for idx in range(cut):
            model.half_blocks[idx](stream)
        needed = lookahead_inputs(cut, lookahead)
        for block, layer in needed:
            after.inputs[block][layer] = before.inputs[block][layer]
        stream.forward_pass = after
        for idx in range(cut, 6):
            model.half_blocks[idx](stream)
    assert torch.equal(stream.hidden_states, whole)
    assert all(stats.density == 1.0 for stats in model.stats.blocks.values())  # type: ignore[union-attr]
    assert lookahead_inputs(cut, 0) == []
    assert needed == sorted(set(needed)) and len(needed) <= 2 * lookahead, "a defined order, and no more than needed"


def test_inputs_are_kept_no_longer_than_they_are_needed() -> None:
    model = tiny_decoder(KINDS["llama"])
    ids = random_tokens(1, 4)
    for max_lookahead in (0, 1):
        model.max_lookahead = max_lookahead
        with torch.no_grad():
            forward_pass = model.begin(ids)
            model.run_half_blocks(model.enter(ids, forward_pass))
        assert [sorted(kept) for kept in forward_pass.inputs.values()] == [[1, 2] if max_lookahead else []] * 2


class InPlace:
    """A junction that finds partial sums in memory of its own, of which one is as good as another."""

    def __init__(self, hidden_size: int) -> None:
        self.left = torch.empty(64, hidden_size, dtype=torch.float64)
        self.found_in_place: list[bool] = []

    def memory(self, num_tokens: int) -> Tensor:
        return self.left[:num_tokens]

    def __call__(self, partial: Tensor, *arguments: Any, **more: Any) -> tuple[Tensor, Tensor]:
        self.found_in_place.append(partial.data_ptr() == self.left.data_ptr())
        return add_norm(partial, *arguments, **more)


def test_partial_sums_are_left_where_a_junction_wants_them_and_anywhere_for_a_plain_function() -> None:
    model, ids = tiny_decoder(KINDS["llama"], dtype=torch.float64), random_tokens(2, 5)
    with torch.inference_mode():
        assert model.begin(ids).partial_memory is None
        expected = model(ids)
        model.add_norm = junction = InPlace(model.config.hidden_size)
        assert torch.equal(model(ids), expected)
    assert junction.found_in_place == [False, *[True] * 6]


@pytest.mark.cuda
def test_float32_weights_can_be_run_in_half_precision_by_autocast() -> None:
    """As refinement does; without gradients too, where half-precision weights have a product of their own."""
    model = tiny_decoder(KINDS["llama"]).to("cuda")
    tokens = random_tokens(2, 9).to("cuda")
    with torch.no_grad():
        expected = model.logits(model(tokens))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = model.logits(model(tokens))
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.1)
