"""Decode steps in fused kernels (without a GPU: their references) equal plain ones: logits, cache and active sets."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from modules.decoder import Decoder
from modules.generation import generate, prefill
from modules.graphs import DecodeGraphs, can_capture
from modules.kernels.early_selection import EarlyGroups, EarlySelection, EarlyUnits, ExtraRows
from modules.requests import GenerationRequest
from sparse_predictor.selection import remove_sparsity
from tests.modules.choosing_methods import METHODS, Method, attach, counted, predicted, static
from tests.modules.played_graphs import PlayedGraphs, play_graphs
from tests.modules.tiny_kinds import KINDS, LLAMA, random_tokens
from tests.modules.tiny_models import tiny_decoder

GROUPED = LLAMA | {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
LENGTHS = [9, 5, 12, 7, 3]
CASES = [
    (kind, name)
    for kind in ("llama", "llama-biases", "llama-9-heads-3-groups", "opt", "opt-untied-projected", "opt-no-final-norm")
    for name in METHODS
    if (kind in ("llama", "opt") or name in ("dense", "threshold-ahead")) and (kind[0] == "l" or name != "cats")
]


@torch.inference_mode()
def both_steps(model: Decoder, method: Method | None, num_rows: int) -> list[tuple[list[torch.Tensor], Any]]:
    """A step as it is, and in fused kernels: logits, keys and values; units active, and units in all."""
    attach(model, method)  # what a prompt says may count
    cache = model.new_cache(num_rows, 64)
    prompts = [ids[:length] for ids, length in zip(random_tokens(5, 20).tolist(), LENGTHS[:num_rows], strict=False)]
    prefill(model, prompts, cache)
    cache.has_static_shapes = True
    before = [states.clone() for states in cache.states]
    token_ids = torch.arange(7, 7 + num_rows)[:, None]
    found = []
    for fused in (False, True):
        for states, first in zip(cache.states, before, strict=True):
            states.copy_(first)
        stats = attach(model, method)
        plain = model.begin(token_ids, cache=cache, phase="decode")
        stream = model.enter(token_ids, model.begin_step(token_ids, cache) if fused else plain)
        model.run_half_blocks(stream)
        logits = model.step_logits(stream)
        found.append(([logits, *(states.clone() for states in cache.states)], counted(stats)))
    assert not torch.equal(found[0][0][1], before[0]), "the step has written"
    return found


@pytest.mark.parametrize("num_rows", [1, 3, 5])  # five: the MLP's library product and a mask
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_fused_step_equals_the_plain_one(kind: str, name: str, num_rows: int) -> None:
    model = tiny_decoder(KINDS[kind], dtype=torch.float32)
    (plain, expected), (fused, counts) = both_steps(model, METHODS[name], num_rows)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert counts == expected and len(counts) == 6
    assert (name == "dense") == all(active == total for active, total in counts.values())


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def heard_selections(model: Decoder, name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    heard: list[str] = []

    def extra_rows(weight: torch.Tensor, output: torch.Tensor) -> ExtraRows:
        heard.append("rows")
        return ExtraRows(weight, output)

    class HeardSelection(EarlySelection):
        def add(self, choice: EarlyUnits | EarlyGroups) -> bool:
            heard.append("units" if isinstance(choice, EarlyUnits) else "groups")
            return super().add(choice)

    monkeypatch.setattr("modules.decode_step.ExtraRows", extra_rows)
    monkeypatch.setattr("modules.decode_step.EarlySelection", HeardSelection)
    both_steps(model, METHODS[name], num_rows)
    return sorted(heard)


@pytest.mark.parametrize(
    ("name", "num_rows", "expected"),
    [
        ("threshold-ahead", 1, ["groups"] * 2 + ["rows"] * 4 + ["units"] * 2),
        ("threshold-2-ahead", 1, ["groups"] + ["rows"] * 2 + ["units"]),
        ("topk-ahead", 1, ["groups"] * 2 + ["rows"] * 2),
        ("threshold", 1, []),
        ("threshold-ahead", 3, []),
    ],
)
def test_choices_of_one_row_that_look_ahead_are_made_by_kernels_of_earlier_blocks(
    name: str, num_rows: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_decoder(LLAMA, dtype=torch.float32)
    assert heard_selections(model, name, num_rows, monkeypatch) == expected


def test_lists_in_no_fixed_order_are_not_made_early_where_runs_must_repeat(
    deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_decoder(LLAMA, dtype=torch.float32)
    assert heard_selections(model, "threshold-ahead", 1, monkeypatch) == ["groups"] * 2 + ["rows"] * 2


def test_more_groups_than_a_kernel_takes_are_chosen_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparse_predictor.methods.learned_predictor.MAX_GROUPS", 1)
    model = tiny_decoder(LLAMA, dtype=torch.float32)
    (plain, expected), (fused, counts) = both_steps(model, METHODS["threshold-ahead"], 1)
    torch.testing.assert_close(fused[0], plain[0], rtol=0, atol=1e-4)
    assert counts == expected


def test_the_table_of_positions_is_made_once_a_length() -> None:
    (rotary,) = tiny_decoder(LLAMA).rotary.values()
    table = rotary.table(64, torch.device("cpu"))
    assert rotary.table(64, torch.device("cpu")) is table and table.shape == (2, 64, 4)
    assert rotary.table(32, torch.device("cpu")).equal(table[:, :32])


def requests() -> list[GenerationRequest]:
    """More than rows, of different lengths: rows leave, and others take their places."""
    return [
        GenerationRequest(prompt_token_ids=ids[:length], max_new_tokens=count)
        for ids, length, count in zip(random_tokens(5, 20).tolist(), [9, 1, 17, 4, 12], [5, 8, 3, 6, 1], strict=True)
    ]


@pytest.fixture
def fused_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], PlayedGraphs]]:
    """Call it, and generation runs fused steps in played graphs."""

    def start() -> PlayedGraphs:
        monkeypatch.setattr(Decoder, "runs_kernels", lambda model: True)
        return play_graphs(monkeypatch)

    yield start


@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case[0] in ("llama", "opt")])
def test_generation_in_fused_steps_equals_eager_generation(
    kind: str, name: str, fused_graphs: Callable[[], PlayedGraphs]
) -> None:
    model = tiny_decoder(KINDS[kind], dtype=torch.float32)
    stats = attach(model, METHODS[name])
    eager = generate(model, requests(), batch_size=3, eos_token_ids=())
    expected = counted(stats)
    seen = fused_graphs()
    for batch_size in (1, 3):
        stats = attach(model, METHODS[name])
        found = generate(model, requests(), batch_size=batch_size, eos_token_ids=(), warm_up=batch_size == 3)
        assert [each.token_ids for each in found] == [each.token_ids for each in eager]
        for ours, theirs in zip(found, eager, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
            assert (ours.mlp_density, ours.head_density) == (theirs.mlp_density, theirs.head_density)
        assert counted(stats) == expected
    assert seen.steps_ahead("used") > 0 and seen.num_captured > 3


def test_more_rows_than_lists_are_made_for_are_masked_in_graphs(fused_graphs: Callable[[], PlayedGraphs]) -> None:
    model = tiny_decoder(LLAMA, dtype=torch.float32)
    stats = attach(model, METHODS["threshold-ahead"])
    eager = generate(model, 2 * requests(), batch_size=9, eos_token_ids=())
    expected = counted(stats)
    fused_graphs()
    stats = attach(model, METHODS["threshold-ahead"])
    found = generate(model, 2 * requests(), batch_size=9, eos_token_ids=())
    assert [each.token_ids for each in found] == [each.token_ids for each in eager]
    assert [each.mlp_density for each in found] == [each.mlp_density for each in eager]
    assert counted(stats) == expected and stats.executions()["mask"] > 0


def test_no_row_of_padding_adds_its_units_to_those_that_all_rows_read() -> None:
    model = tiny_decoder(LLAMA, dtype=torch.float32)
    graphs = DecodeGraphs(model, model.new_cache(16, 64))
    assert [graphs.size_for(count) for count in (1, 3, 5, 8, 9)] == [1, 4, 8, 8, 16]
    attach(model, METHODS["threshold"])
    assert [graphs.size_for(count) for count in (1, 3, 5, 8, 9)] == [1, 3, 5, 8, 16]


def test_what_the_kernels_cannot_compute_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fuses(hf_config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, **attributes: Any) -> bool:
        model = tiny_decoder(hf_config, dtype=dtype)
        for name, value in attributes.items():
            setattr(model, name, value)
        return model.can_fuse()

    assert not fuses(LLAMA), "no GPU"
    monkeypatch.setattr(Decoder, "device", torch.device("cuda"))
    monkeypatch.setattr("modules.decoder.triton", object())
    assert fuses(LLAMA) and fuses(KINDS["opt"]) and fuses(LLAMA, torch.float16) and fuses(LLAMA, torch.float32)
    assert not fuses(LLAMA, torch.float64)
    assert not fuses(KINDS["opt-post-norm-projected"])
    reduced = {"shards": {"lm_head.weight": object()}, "add_norm": lambda *_, **__: None}
    assert fuses(LLAMA, **reduced) and not fuses(LLAMA, is_sparse=True, **reduced)
    assert not fuses(LLAMA, add_norm=reduced["add_norm"]) and not fuses(LLAMA, links=object())
    assert not fuses(LLAMA | {"num_attention_heads": 24, "num_key_value_heads": 1, "head_dim": 4})
    monkeypatch.setattr("modules.decoder.triton", None)
    assert not fuses(LLAMA), "no triton"


def test_a_sparse_model_that_is_not_fused_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = {kind: tiny_decoder(KINDS[kind], dtype=torch.float64) for kind in ("llama", "opt-post-norm-projected")}
    for model in sparse.values():
        attach(model, static)
    monkeypatch.setattr(Decoder, "device", torch.device("cuda"))
    for model in sparse.values():
        assert not can_capture(model)
        remove_sparsity(model)
        assert can_capture(model)


def on_gpu(dtype: torch.dtype) -> Decoder:
    return tiny_decoder(GROUPED, dtype=dtype).to("cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_captured_generation_equals_the_eager_run(
    dtype: torch.dtype, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, method = on_gpu(dtype), predicted("threshold", 1, margin=1.0)
    stats = attach(model, method)
    assert model.can_fuse() and can_capture(model)
    found = generate(model, requests(), batch_size=batch_size, eos_token_ids=(), warm_up=True)
    counts = counted(stats)
    monkeypatch.setattr("modules.generation.can_capture", lambda model: False)
    stats = attach(model, method)
    eager = generate(model, requests(), batch_size=batch_size, eos_token_ids=())
    assert counts == counted(stats) and 0.3 < stats.mean_density("mlp") < 0.9
    tolerance = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.3}[dtype]
    for ours, theirs in zip(found, eager, strict=True):
        # The first token that differs was a near-tie, of almost the same probability; what follows it may be anything.
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
        alike = next((place for place, (mine, other) in pairs if mine != other), len(ours.token_ids)) + 1
        assert ours.logprobs[:alike] == pytest.approx(theirs.logprobs[:alike], abs=tolerance)
        assert (ours.mlp_density, ours.head_density) == (theirs.mlp_density, theirs.head_density)


@pytest.mark.cuda
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_deterministic_run_repeats_bit_for_bit(
    batch_size: int, deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = on_gpu(torch.bfloat16)
    attach(model, predicted("threshold", 1))
    runs = [generate(model, requests(), batch_size=batch_size, eos_token_ids=()) for _ in range(3)]
    for run in runs[1:]:
        assert [(each.token_ids, each.logprobs) for each in run] == [
            (each.token_ids, each.logprobs) for each in runs[0]
        ]
