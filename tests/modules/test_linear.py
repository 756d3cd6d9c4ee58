"""Matrices and their formats: what a block asks of them, shown with a format of two tensors beside the plain one."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modules.generation import generate
from modules.linear import Linear
from modules.requests import GenerationRequest
from modules.shards import Shard
from sparse_predictor.selection import Selection, attach_selection
from tests.modules.tiny_kinds import LLAMA, OPT, random_tokens
from tests.modules.tiny_models import tiny_decoder


class Int8Rows:
    """Codes `weight` int8 [num_rows, width] and one `weight_scale` float32 [num_rows] per row."""

    name, has_kernels = "int8 rows", False

    def empty(self, num_rows: int, width: int) -> dict[str, Tensor]:
        return {"weight": torch.empty(num_rows, width, dtype=torch.int8), "weight_scale": torch.empty(num_rows)}

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        num_rows, width = tensors["weight"].shape
        return num_rows, width

    def compute_dtype(self, tensors: Mapping[str, Tensor]) -> torch.dtype:
        return tensors["weight_scale"].dtype

    def read_rows(
        self, tensors: Mapping[str, Tensor], states: Tensor, bias: Tensor | None, *, keep_float32: bool
    ) -> Tensor:
        return F.linear(states, self.dequantised(tensors), bias)

    def add_rows(self, tensors: Mapping[str, Tensor], states: Tensor, memory: Tensor | None) -> Tensor:
        assert memory is None
        return states @ self.dequantised(tensors)

    def rows(self, tensors: Mapping[str, Tensor], indices: Tensor) -> Tensor:
        return tensors["weight"][indices] * tensors["weight_scale"][indices, None]

    def shards(self, shard: Shard) -> dict[str, Shard]:
        return {"weight": shard, "weight_scale": shard}

    def dequantised(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"] * tensors["weight_scale"][:, None]

    def kernel_argument(self, tensors: Mapping[str, Tensor]) -> Tensor:
        raise AssertionError("no kernel reads it")


def coded(linear: Linear) -> Linear:
    """The same matrix in codes; `linear` gets what they stand for."""
    found = Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        rows_are=linear.rows_are,
        weight_format=Int8Rows(),
    )
    with torch.no_grad():
        scale = linear.dequantised().abs().amax(1) / 127
        codes = (linear.dequantised() / scale[:, None]).round().to(torch.int8)
        found.load_state_dict({**linear.state_dict(), "weight": codes, "weight_scale": scale})
        linear.weight.copy_(found.dequantised())
    return found


def encode(source: nn.Module, target: nn.Module) -> None:
    """Give `target`, a block, every matrix of `source` in codes."""
    for name, child in [*source.named_children()]:
        if isinstance(child, Linear):
            setattr(target, name, coded(child))


@pytest.mark.parametrize("kind", [LLAMA, OPT], ids=["llama", "opt"])
@torch.inference_mode()
def test_a_model_in_another_format_computes_what_its_codes_stand_for(kind: dict[str, object]) -> None:
    plain, model = tiny_decoder(kind), tiny_decoder(kind)
    for one, other in zip(plain.blocks.values(), model.blocks.values(), strict=True):
        encode(one, other)
    ids = torch.tensor(random_tokens(3, 12).tolist())
    torch.testing.assert_close(model.logits(model(ids)), plain.logits(plain(ids)), atol=1e-5, rtol=1e-5)
    assert model.compute_dtype == torch.float32 and not any(block.can_fuse() for block in model.blocks.values())
    mlp, same = model.mlp(0), plain.mlp(0)
    assert mlp.bytes_read(0.5) < 0.3 * same.bytes_read(0.5), "a byte and a share of a scale per weight instead of four"


@pytest.mark.parametrize("kind", [LLAMA, OPT], ids=["llama", "opt"])
def test_what_is_skipped_is_skipped_in_any_format(kind: dict[str, object]) -> None:
    model = tiny_decoder(kind)
    for block in model.blocks.values():
        encode(block, block)
    attach_selection(model, Selection(method="oracle", mlp_density=0.4, head_density=0.5, sparse_phases="all"))
    requests = [GenerationRequest(prompt_token_ids=ids, max_new_tokens=6) for ids in random_tokens(2, 7).tolist()]
    gathered = generate(model, requests, eos_token_ids=())
    for block in model.blocks.values():
        block.force_mask = True
    for found, masked in zip(gathered, generate(model, requests, eos_token_ids=()), strict=True):
        assert found.token_ids == masked.token_ids
        assert found.logprobs == pytest.approx(masked.logprobs, abs=1e-4)
        assert found.mlp_density == pytest.approx(0.4, abs=0.02)


def test_a_cut_matrix_holds_its_rows_of_every_tensor() -> None:
    full = coded(Linear(6, 8, bias=True))
    with torch.device("meta"):
        part = Linear(6, 8, bias=True, weight_format=Int8Rows())
    shards = part.cut(Shard.of_rows(2, 5, 4, 8))
    assert {name: tuple(value.shape) for name, value in part.named_parameters()} == {
        "weight": (4, 6),
        "weight_scale": (4,),
        "bias": (4,),
    }
    part = part.to_empty(device="cpu")
    part.load_state_dict({name: shards[name].take(value) for name, value in full.state_dict().items()})
    states = torch.randn(5, 6)
    torch.testing.assert_close(part(states)[:, :3], full(states)[:, 2:5])
    assert (part.in_features, part.out_features) == (6, 4)
    assert not part(states)[:, 3].any(), "padding computes nothing"
    assert part.num_bytes == 4 * 6 + 4 * 4


@pytest.mark.parametrize("rows_are", ["outputs", "inputs"])
def test_rows_are_the_units_whichever_side_they_are_on(rows_are: str) -> None:
    linear = Linear(6, 8, rows_are=rows_are)  # type: ignore[arg-type]
    states, units = torch.randn(2, 3, 6), torch.tensor([4, 1])
    matrix = linear.weight if rows_are == "inputs" else linear.weight.t()
    torch.testing.assert_close(linear(states), states @ matrix)
    assert torch.equal(linear.rows(units), linear.weight[units])
    assert isinstance(linear.weight, nn.Parameter) and linear.num_bytes == 6 * 8 * 4
