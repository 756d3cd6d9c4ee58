"""TEAL on all matrices and WINA, against masks written here; what they read; what has no kernels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modules.decoder import Decoder
from modules.generation import generate
from modules.graphs import can_capture
from modules.requests import GenerationRequest
from modules.thinned_input import ThinnedInput
from sparse_predictor.cost import achieved, attention_bytes_share, layer_bytes_share, mlp_bytes_share
from sparse_predictor.selection import attach_selection, remove_sparsity
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.test_selection import assert_same_sparse_run, quantile
from tests.sparse_predictor.tiny_stages import Trained, prompt_then_decode, selection

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SHARED_INPUT = {"q_proj": "attention_input", "k_proj": "attention_input", "v_proj": "attention_input"}
SHARED_INPUT |= {"o_proj": "head_output", "gate_proj": "input", "up_proj": "input", "down_proj": "activation"}


def projections(model: Decoder, layer: int) -> dict[str, Any]:
    names = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
    holders = (model.attention(layer) if name in ATTENTION else model.mlp(layer) for name in names)
    found = {name: getattr(holder, name) for name, holder in zip(names, holders, strict=True)}
    return {name: projection for name, projection in found.items() if projection is not None}


def run_masked(model: Decoder, keep: Callable[[int, str, Tensor], Tensor], batch: int) -> Tensor:
    """The dense model with `keep(layer, projection, input)` as a mask on the input of each projection."""
    handles = []
    for layer in range(3):
        for name, projection in projections(model, layer).items():

            def mask(module: Any, args: Any, layer: int = layer, name: str = name) -> Tensor:
                return args[0] * keep(layer, name, args[0])

            handles.append(projection.register_forward_pre_hook(mask))
    found = prompt_then_decode(model, batch)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize(("kind", "batch"), [("llama", 1), ("llama", 8), ("opt", 1)])
def test_teal_on_all_matrices_drops_what_is_small_in_each_input(trained: Trained, kind: str, batch: int) -> None:
    model, directory = tiny_decoder(KINDS[kind], dtype=torch.float64), trained(kind=kind)

    def keep(layer: int, name: str, states: Tensor) -> Tensor:
        return states.abs() >= quantile(directory, f"{layer}.{SHARED_INPUT[name]}_quantiles", 0.4)

    expected = run_masked(model, keep, batch)
    assert_same_sparse_run(model, selection("teal-all", directory, 0.4), batch, expected)


@pytest.mark.parametrize(("kind", "batch"), [("llama", 1), ("llama", 8), ("opt", 1)])
def test_wina_weighs_an_entry_by_what_it_is_multiplied_with(
    trained: Trained, kind: str, batch: int, tmp_path: Path
) -> None:
    model, directory = tiny_decoder(KINDS[kind], dtype=torch.float64), trained(kind=kind)
    quantiles = load_file(directory / "calibration.safetensors")
    for layer in range(3):
        for place, name in enumerate(projections(model, layer)):
            values = quantiles[f"{layer}.weighted_quantiles"][place].contiguous()
            save_file({name: values}, tmp_path / "calibration.safetensors")
            quantiles[f"{layer}.{name}"] = torch.tensor(quantile(tmp_path, name, 0.4), dtype=torch.float64)

    def keep(layer: int, name: str, states: Tensor) -> Tensor:
        weight = projections(model, layer)[name].weight
        norms = (weight if name in ("o_proj", "down_proj") else weight.T).norm(dim=1)  # of each input's weights
        return states.abs() * norms >= quantiles[f"{layer}.{name}"]

    expected = run_masked(model, keep, batch)
    assert_same_sparse_run(model, selection("wina-unrotated", directory, 0.4), batch, expected)


@pytest.mark.parametrize("method", ["teal-all", "wina-unrotated"])
def test_bytes_are_the_weights_of_the_entries_kept_over_all_of_the_layers(trained: Trained, method: str) -> None:
    model = tiny_decoder(KINDS["llama"])
    chosen = selection(method, trained(), 0.5)
    stats = attach_selection(model, chosen)
    read: dict[str, int] = {"attention": 0, "mlp": 0}
    seen: dict[str, int] = {"attention": 0, "mlp": 0}
    for layer in range(3):
        for name, part in projections(model, layer).items():
            assert isinstance(part, ThinnedInput)

            def count(module: Any, args: Any, block: str = "attention" if name in ATTENTION else "mlp") -> None:
                sizes = args[0] if module.input_norms is None else args[0] * module.input_norms
                width = module.dequantised().numel() // args[0].shape[-1]
                read[block] += int((sizes.abs() >= module.threshold).sum()) * width
                seen[block] += args[0].numel() * width

            part.register_forward_pre_hook(count)
    with torch.no_grad():
        model(random_tokens(2, 30))
    assert mlp_bytes_share(model, method, stats) == pytest.approx(read["mlp"] / seen["mlp"])  # type: ignore[arg-type]
    found = achieved(model, chosen, stats)
    assert found["head_density"] == pytest.approx(read["attention"] / seen["attention"])
    assert found["mlp_density"] == found["bytes_read_share"] == pytest.approx(read["mlp"] / seen["mlp"])
    assert found["layer_bytes_share"] == pytest.approx(sum(read.values()) / sum(seen.values()))
    assert all(0.3 < share < 0.7 for share in (found["mlp_density"], found["head_density"]))
    assert found["executions"] == {"dense": 0, "gather": 0, "mask": 6} and found["sparse_calls"] == 6
    remove_sparsity(model)


def test_bytes_of_the_layers_count_what_attention_reads(trained: Trained) -> None:
    model = tiny_decoder(KINDS["llama"])
    mlp, queries, keys = 3 * 48 * 80, 2 * 48 * 48, 2 * 48 * 16
    for method, heads in (("cats", 1.0), ("static", 0.5), ("predictor", 0.5), ("griffin", 1.0)):
        chosen = selection(method, trained("plain"), 0.3, head_density=heads)
        stats = attach_selection(model, chosen)
        prompt_then_decode(model, 2)
        share = mlp_bytes_share(model, chosen.method, stats)
        scored = 0.0
        if method == "predictor":
            file = load_file(trained("plain") / "layer_0_attention.safetensors")
            scored = sum(file[name].numel() for name in ("first", "second", "bias"))
        attention = heads * queries + keys + scored
        assert attention_bytes_share(model, chosen.method, stats) == pytest.approx(attention / (queries + keys))
        expected = (share * mlp + attention) / (mlp + queries + keys)
        assert layer_bytes_share(model, chosen.method, stats) == pytest.approx(expected)
        assert achieved(model, chosen, stats)["per_layer"]["mlp"] == stats.densities("mlp")
    remove_sparsity(model)


def test_calls_stay_dense_in_a_record_where_they_were(trained: Trained) -> None:
    model = tiny_decoder(KINDS["llama"])
    for method, phases, expected in (
        ("teal", "all", (3, 3)),
        ("wina-unrotated", "decode", (6, 0)),
        ("teal", "decode", (6, 0)),
    ):
        chosen = selection(method, trained(), 0.5, sparse_phases=phases)
        stats = attach_selection(model, chosen)
        with torch.no_grad():
            model(random_tokens(1, 8))
        found = achieved(model, chosen, stats)
        assert (found["executions"]["dense"], found["executions"]["mask"]) == expected
    remove_sparsity(model)


def test_a_prompt_that_stays_dense_counts_alike_for_every_method(trained: Trained) -> None:
    model = tiny_decoder(KINDS["llama"])
    for method in ("cats", "predictor", "teal", "wina-unrotated"):
        chosen = selection(method, trained(), 0.5, sparse_phases="decode")
        stats = attach_selection(model, chosen)
        prompt_then_decode(model, 2, prompt=6, steps=0)
        assert achieved(model, chosen, stats)["mlp_density"] == 1.0
        stats = attach_selection(model, chosen)
        prompt_then_decode(model, 2, prompt=6, steps=3)
        found = achieved(model, chosen, stats)["mlp_density"]
        assert 6 / 9 + 0.3 * 3 / 9 < found < 6 / 9 + 0.7 * 3 / 9, (method, found)
    remove_sparsity(model)


def test_answers_tell_the_share_of_attention_that_was_read(trained: Trained) -> None:
    model = tiny_decoder(KINDS["llama"], dtype=torch.float64)
    tokens = random_tokens(3, 12).tolist()
    requests = [GenerationRequest(prompt_token_ids=ids[: 4 + row], max_new_tokens=6) for row, ids in enumerate(tokens)]
    attach_selection(model, selection("wina-unrotated", trained(), 0.4, sparse_phases="decode"))
    alone = generate(model, requests, batch_size=1, eos_token_ids=())
    together = generate(model, requests, batch_size=3, eos_token_ids=(), warm_up=True)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert 0.2 < one.head_density == other.head_density < 0.7 and 0.2 < one.mlp_density == other.mlp_density < 0.7
    attach_selection(model, selection("teal", trained(), 0.4, sparse_phases="decode"))
    assert all(one.head_density == 1.0 for one in generate(model, requests, eos_token_ids=()))
    remove_sparsity(model)


def test_only_thinning_by_magnitude_in_mlps_has_kernels(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder(KINDS["llama"])
    monkeypatch.setattr(Decoder, "runs_kernels", lambda model: True)
    for method, has_kernels in (("teal", True), ("teal-all", False), ("wina-unrotated", False), ("dense", True)):
        attach_selection(model, selection(method, trained(), 0.5))
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "device", torch.device("cuda"))
            assert model.can_fuse() == can_capture(model) == has_kernels
    remove_sparsity(model)


def test_calibration_without_the_statistics_is_refused_by_name(trained: Trained, tmp_path: Path) -> None:
    model, directory = tiny_decoder(KINDS["llama"]), tmp_path / "old"
    directory.mkdir()
    for file in trained().iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, "sums": {}}))  # as older versions wrote it
    tensors = load_file(directory / "calibration.safetensors")
    kept = {
        name: value
        for name, value in tensors.items()
        if not name.endswith(("weighted_quantiles", "head_output_quantiles"))
    }
    save_file(kept, directory / "calibration.safetensors", metadata={"layers": "[0, 1, 2]"})
    for method, name in (("teal-all", "head_output_quantiles"), ("wina-unrotated", "weighted_quantiles")):
        with pytest.raises(
            ValueError, match=f"method {method} needs {name}, which these predictors were calibrated without"
        ):
            attach_selection(model, selection(method, directory, 0.5))
    attach_selection(model, selection("teal", directory, 0.5))
    save_file(tensors | {"1.input_norms": torch.ones(4, 48)}, directory / "calibration.safetensors")
    with pytest.raises(ValueError, match=r"calibration 1.input_norms has shape \(4, 48\), expected \(5, 48\)"):
        attach_selection(model, selection("wina-unrotated", directory, 0.5))
    remove_sparsity(model)
