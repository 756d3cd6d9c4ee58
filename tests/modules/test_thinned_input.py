"""TEAL in decode steps that may be graphs: what eager decoding computes and counts, with kernels and without."""

from typing import Any

import pytest
import torch

from modules.decoder import Decoder
from modules.generation import generate
from modules.graphs import can_capture
from modules.kernels.thinned_rows import thinned_rows
from modules.requests import GenerationRequest, GenerationResult
from modules.thinned_input import in_step, lay_out_for_kernels
from sparse_predictor.calibration import NUM_QUANTILES, LayerCalibration
from sparse_predictor.cost import thinned_densities
from sparse_predictor.methods.registry import Setting, SparsePhases
from sparse_predictor.methods.teal import teal
from sparse_predictor.selection import apply_sparsity, remove_sparsity
from sparse_predictor.thinning import prepare_kernels, thin_inputs
from tests.modules.played_graphs import play_graphs
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_decoder

EOS = range(0, 131, 20)


def requests() -> list[GenerationRequest]:
    tokens = random_tokens(5, 20).tolist()
    return [
        GenerationRequest(prompt_token_ids=ids[:length], max_new_tokens=count)
        for ids, length, count in zip(tokens, [9, 1, 17, 4, 12], [7, 12, 3, 9, 1], strict=True)
    ]


def thin(model: Decoder, phases: SparsePhases) -> None:
    """Attach TEAL with thresholds that are not those of another layer, or input."""
    apply_sparsity(model, {})
    quantiles = torch.linspace(0.0, 1.6, NUM_QUANTILES)
    calibration = {
        layer: LayerCalibration({"input_quantiles": quantiles, "activation_quantiles": quantiles / 8})
        for layer in model.layers
    }
    # Of each matrix its own: gate and up read one input, and drop other entries of it.
    densities = {
        name: [start + 0.1 * layer for layer in model.layers]
        for name, start in (("gate_proj", 0.45), ("up_proj", 0.5), ("down_proj", 0.55))
        if name != "gate_proj" or model.config.gated_mlp
    }
    setting = Setting(model=model, densities={}, calibration=calibration)
    thin_inputs(model, teal(setting, "teal"), densities, decode_only=phases == "decode")
    prepare_kernels(model)
    model.is_sparse = True


def counted(model: Decoder) -> list[Any]:
    stats = model.stats
    assert stats is not None
    blocks = [(place, int(found.active), found.executions) for place, found in sorted(stats.blocks.items())]
    return [*blocks, *([(int(part.kept), int(part.seen)) for part, _ in model.thinned_parts()])]


def outcome(results: list[GenerationResult]) -> list[tuple[Any, ...]]:
    return [(each.token_ids, each.mlp_density, each.head_density) for each in results]


@pytest.mark.parametrize("phases", ["decode", "all"])
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_graphs_compute_and_count_what_eager_steps_do(
    kind: str, phases: SparsePhases, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_decoder(KINDS[kind], dtype=torch.float64)
    dense = generate(model, requests(), eos_token_ids=EOS)
    for batch_size in (1, 3):
        thin(model, phases)
        eager = generate(model, requests(), batch_size=batch_size, eos_token_ids=EOS)
        expected, densities = counted(model), thinned_densities(model)
        thin(model, phases)
        with monkeypatch.context() as patch:
            seen = play_graphs(patch)
            found = generate(model, requests(), batch_size=batch_size, eos_token_ids=EOS, warm_up=True)
        assert seen.steps_ahead("used") > 0
        assert outcome(found) == outcome(eager) and counted(model) == expected
        assert thinned_densities(model) == densities and max(densities) < 0.95, "dense prompts are in it"
        assert all(not part.in_step for layer in model.layers for part, _ in model.mlp(layer).thinned_parts())
    assert [each.token_ids for each in found] != [each.token_ids for each in dense]
    assert len({each.mlp_density for each in found}) > 3, "each row has its own"
    remove_sparsity(model)


@pytest.mark.parametrize("kind", ["llama", "llama-biases", "opt"])
def test_steps_in_kernels_compute_and_count_what_eager_steps_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder(KINDS[kind], dtype=torch.float32)
    thin(model, "decode")
    eager = generate(model, requests(), batch_size=1, eos_token_ids=EOS)
    densities = thinned_densities(model)
    monkeypatch.setattr(Decoder, "runs_kernels", lambda model: True)
    calls: list[int] = []

    def heard(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return thinned_rows(*args, **options)

    monkeypatch.setattr("modules.thinned_input.thinned_rows", heard)
    for batch_size in (1, 3):
        thin(model, "decode")
        with monkeypatch.context() as patch:
            play_graphs(patch)
            found = generate(model, requests(), batch_size=batch_size, eos_token_ids=EOS)
        assert calls
        assert [each.token_ids for each in found] == [each.token_ids for each in eager]
        # An entry at a threshold may have been rounded to the other side of it.
        assert thinned_densities(model) == pytest.approx(densities, abs=1e-3)
        for ours, theirs in zip(found, eager, strict=True):
            assert ours.mlp_density == pytest.approx(theirs.mlp_density, abs=3e-3)
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("batch_size", [1, 3])
def test_captured_steps_compute_and_count_what_eager_steps_do(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder(KINDS["llama-explicit-head-dim"], dtype=torch.float16).to("cuda")
    thin(model, "decode")
    assert can_capture(model) and model.mlp(0).thinned_parts()[-1][0].input_major is not None
    found = generate(model, requests(), batch_size=batch_size, eos_token_ids=(), warm_up=True)
    counts, densities = counted(model), thinned_densities(model)
    thin(model, "decode")
    monkeypatch.setattr("modules.generation.can_capture", lambda model: False)
    eager = generate(model, requests(), batch_size=batch_size, eos_token_ids=())
    # The other order of a sum may choose another token, and a rounding may drop another entry.
    assert thinned_densities(model) == pytest.approx(densities, abs=0.05)
    assert [seen for _, seen in counts[-9:]] == [seen for _, seen in counted(model)[-9:]]
    for ours, theirs in zip(found, eager, strict=True):
        assert ours.logprobs[:2] == pytest.approx(theirs.logprobs[:2], abs=0.05)
        assert ours.mlp_density == pytest.approx(theirs.mlp_density, abs=0.05)


def test_weights_for_kernels_are_laid_out_once_and_go_with_the_method() -> None:
    model = tiny_decoder(KINDS["llama"])
    thin(model, "decode")
    mlp = model.mlp(1)
    assert lay_out_for_kernels([part for part, _ in mlp.thinned_parts()]) == 2 * 48 * 80 * 4
    (gate, _), (up, _), (down, _) = mlp.thinned_parts()
    assert gate.input_major is None and up.input_major is not None and down.input_major is not None
    assert (
        torch.equal(up.input_major, torch.stack([gate.projection.weight.t(), up.projection.weight.t()]))
        and up.input_major.is_contiguous()
    )
    assert down.input_major.data_ptr() == down.projection.weight.data_ptr() and down.input_major.shape == (1, 80, 48)
    assert not any("input_major" in name for name in model.state_dict())
    remove_sparsity(model)
    assert mlp.thinned_parts() == []


def test_a_step_is_thinned_out_whatever_pass_came_before() -> None:
    model = tiny_decoder(KINDS["llama"])
    thin(model, "decode")
    model(random_tokens(1, 5))  # a prompt: dense
    part, states = model.mlp(0).thinned_parts()[1][0], torch.linspace(-1, 1, 48)[None, None]
    assert not part.enabled and torch.equal(part(states), part.projection(states))
    with pytest.raises(ZeroDivisionError), in_step(model.thinned_parts()):
        assert not torch.equal(part(states), part.projection(states))
        assert part.kept_in_step is not None and part.kept_in_step.tolist() == [10]
        assert int(part.seen) == int(part.kept) == (5 + 1) * 48, "dense tokens only"
        raise ZeroDivisionError
    assert not part.in_step and part.kept_in_step is None
