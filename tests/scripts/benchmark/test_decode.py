"""Decoding is timed only where it agrees; records say what was computed, what it moved and what it was beside."""

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from loguru import logger

import scripts.benchmark.decode
from analysis.results import Record, read_records
from analysis.tables import all_tables
from modules.checkpoint.load import load_model, random_model
from modules.families.registry import from_hf_config
from modules.linear import Linear
from modules.scoring import windows_likelihood
from modules.sparsity import ActiveSet, SelectionContext
from modules.thinned_input import ThinnedInput
from scripts.benchmark import hugging_face, random_models
from scripts.benchmark.decode import Options
from scripts.benchmark.decode_steps import (
    DecodingCheck,
    Limits,
    Shares,
    _watch_inputs,
    measure_achieved,
    predictor_parameters,
    step_bytes,
)
from scripts.benchmark.engine import bytes_of_weights
from scripts.benchmark.random_models import HF_CONFIGS, Sizes, attach_random
from sparse_predictor.budgets import predictors_id
from sparse_predictor.selection import Selection, apply_sparsity, attach_selection
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import save_hf_folder
from tests.sparse_predictor.tiny_stages import collect, model_folder, train

CEILING = 10.0  # GB/s, made up: measuring it takes longer than all else here
CONFIG = from_hf_config(HF_CONFIGS["tiny"])


@pytest.fixture(autouse=True)
def a_known_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.benchmark.decode.measure_read_ceiling", lambda device: CEILING)


def decode(tmp_path: Path, **flags: Any) -> list[Record]:
    defaults: dict[str, Any] = {"shape": "TINY", "prompt_tokens": 24, "new_tokens": 8, "repetitions": 1}
    output = tmp_path / "decode.jsonl"
    options = Options(output=output, device="cpu", quiet=True, **{**defaults, **flags})
    records = scripts.benchmark.decode.main(options)
    assert read_records(output) == records
    return records


@pytest.mark.parametrize(
    ("method", "head_density", "predictor_is_read"),
    [("predictor", 0.5, True), ("cats", 1.0, False), ("teal", 1.0, False), ("static", 0.5, False)],
)
def test_a_sparse_random_model_is_timed_beside_our_dense_one_at_the_density_asked_for(
    tmp_path: Path, method: Any, head_density: float, predictor_is_read: bool
) -> None:
    flags = {"mlp_density": 0.25, "head_density": head_density, "batch_size": (4,), "lookahead": 1, "dtype": "float64"}
    records = decode(tmp_path, method=method, **flags)
    assert [record["baseline"]["name"] for record in records] == ["our dense"]
    record = records[0]
    labels, achieved = record["labels"], record["achieved"]
    assert (labels["shape"], labels["weights"], labels["method"], labels["execution"]) == (
        "tiny",
        "random",
        method,
        "eager",
    )
    assert (labels["mlp_density"], labels["head_density"], labels["batch_size"]) == (0.25, head_density, 4)
    assert achieved["mlp_density"] == pytest.approx(0.25, abs=0.02)
    assert achieved["head_density"] == head_density
    assert achieved["union_mlp_density"] >= achieved["mlp_density"]
    assert (record["bytes"]["predictor"] > 0) == predictor_is_read == ("predictor_rank" in labels)
    assert record["bytes_per_step"] == sum(record["bytes"].values())
    assert record["largest_logprob_difference"] < 1e-9
    assert 0 < record["share_of_ceiling"] == record["achieved_gb_per_s"] / CEILING
    assert set(all_tables(records)) == {"one_gpu_decode"}


def test_the_log_says_how_large_a_model_is_before_it_is_drawn_and_what_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    sink = logger.add(said.append, level="INFO", format="{message}")
    draw = random_models.random_model
    monkeypatch.setattr(
        random_models, "random_model", lambda *given, **more: said.append("drawn\n") or draw(*given, **more)
    )
    try:
        decode(tmp_path, method="static", baseline="hf-eager", new_tokens=4)
    finally:
        logger.remove(sink)
    num_bytes = 4 * sum(parameter.numel() for parameter in draw(CONFIG).parameters())
    size = f"tiny: drawing random weights of 4 layers, {num_bytes / 2**30:.2f} GiB in all as torch.float32, on cpu"
    first, timed = "first, 2 layers: whether static decodes what a masked prefill does", "to time, of 24 prompt tokens"
    expected = [
        first,
        "of 2 layers",
        "drawn",
        timed,
        size,
        "drawn",
        "timing our dense",
        timed,
        "timing Hugging",
        "timing static",
    ]
    heard = iter(said)
    for words in expected:
        assert any(words in line for line in heard), (words, said)


def test_everything_active_goes_the_sparse_way_and_moves_the_dense_bytes_and_the_predictor(tmp_path: Path) -> None:
    sparse = decode(tmp_path, method="predictor", mlp_density=1.0)[0]
    (tmp_path / "decode.jsonl").unlink()
    dense = decode(tmp_path)[0]
    assert dense["baseline"] is None and dense["bytes"]["predictor"] == 0
    assert sparse["achieved"]["mlp_density"] == 1.0
    assert sparse["bytes_per_step"] - sparse["bytes"]["predictor"] == dense["bytes_per_step"]


def test_bytes_of_a_step_count_what_the_rows_together_compute(tmp_path: Path) -> None:
    model = random_model(CONFIG)
    whole = bytes_of_weights(model)
    texts = [list(range(3, 30)), list(range(40, 67))]
    mask = torch.zeros(CONFIG.intermediate_size, dtype=torch.bool)
    selection = Selection(method="static", predictors=tmp_path, mlp_density=0.5, head_density=0.5, sparse_phases="all")
    attach_random(model, selection, Sizes(predictor_rank=8, standin_rank=0, lookahead=0), torch.tensor(texts), list)
    achieved = measure_achieved(model, texts, 20)
    moved = step_bytes(model, "static", achieved, batch_size=2, mean_length=10, dense_bytes=whole)
    mlp = 3 * CONFIG.hidden_size * mask.numel()
    queries = 2 * CONFIG.hidden_size * 8 * 16
    assert moved.weights == whole - 4 * CONFIG.num_hidden_layers * (mlp + queries) // 2
    assert moved.cache == 4 * CONFIG.num_hidden_layers * 2 * 10 * (2 * 4 * 16) // 2
    attach_selection(model, Selection())
    random = Selection(method="random", mlp_density=0.5, sparse_phases="all")
    attach_selection(model, random)
    assert predictor_parameters(model) == 0
    # At the same position of two rows the random selector draws the same units: their union is no larger.
    assert measure_achieved(model, texts, 20).unions["mlp"] == 0.5


def test_what_is_achieved_while_decoding_leaves_the_prompt_out() -> None:
    """All neurons of the prompt's tokens and one of each later one; of thinned inputs all and none."""
    model = random_model(CONFIG)
    num_prompt, units = 20, CONFIG.intermediate_size

    class ByPlace:
        lookahead = 0

        def select(self, hidden_states: torch.Tensor, context: SelectionContext) -> ActiveSet:
            kept = torch.where(context.positions < num_prompt, units, 1)
            return ActiveSet((torch.arange(units) < kept[..., None]).flatten(0, 1))

    apply_sparsity(model, {(layer, "mlp"): ByPlace() for layer in model.layers})
    found = measure_achieved(model, [list(range(3, 30)), list(range(40, 67))], num_prompt)
    assert found.densities["mlp"] == found.unions["mlp"] == pytest.approx(1 / units)

    shares = Shares()
    states = torch.ones(2, 27, 8)
    states[:, num_prompt:] = 0.5
    part = ThinnedInput(Linear(8, 4), threshold=0.9)
    _watch_inputs(num_prompt, shares)(part, (states,))
    assert shares.rows["mlp"] == shares.unions["mlp"] == [0.0]


def test_a_density_that_does_not_come_out_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_calibration(model: Any, selection: Selection, *others: Any) -> None:
        attach_selection(model, replace(selection, method="random", mlp_density=0.4))

    monkeypatch.setattr("scripts.benchmark.decode.attach_random", without_calibration)
    with pytest.raises(ValueError, match=r"density of MLPs and heads .* was asked for; it is not timed"):
        decode(tmp_path, method="predictor", mlp_density=0.25)


def test_decoding_that_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = measure_achieved

    def spoiled(*arguments: Any) -> Any:
        found = real(*arguments)
        return replace(found, logprobs=[[value + 0.01 for value in row] for row in found.logprobs])

    monkeypatch.setattr("scripts.benchmark.decode_steps.measure_achieved", spoiled)
    with pytest.raises(ValueError, match="decoding and a masked prefill: log-probabilities of the same tokens differ"):
        decode(tmp_path)
    assert not (tmp_path / "decode.jsonl").exists()


@pytest.mark.parametrize(("offsets", "allowed"), [((0.04,), "0.03"), ((0.0, 1.0), "0.5")])
def test_a_sparse_random_model_is_checked_in_float32_and_in_what_is_timed(
    offsets: tuple[float, ...], allowed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, looked_at = measure_achieved, []

    def spoiled(model: Any, *arguments: Any) -> Any:
        found = real(model, *arguments)
        looked_at.append((model.compute_dtype, len(model.layers)))
        spoilt = offsets[len(looked_at) - 1]
        return replace(found, logprobs=[[value + spoilt for value in row] for row in found.logprobs])

    monkeypatch.setattr("scripts.benchmark.decode_steps.measure_achieved", spoiled)
    with pytest.raises(ValueError, match=rf"differ by .* \(allowed {allowed}\)"):
        decode(tmp_path, method="predictor", dtype="bfloat16")
    assert looked_at == [(torch.float32, 2), (torch.bfloat16, 2)][: len(offsets)]


def test_limits_hold_the_mean_narrowly_and_refuse_nan() -> None:
    limits = Limits.of(torch.bfloat16, sparse=True)
    assert limits.check([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.5], "x") == (0.5, pytest.approx(0.5 / 3))
    for other in ([-1.0, -2.0, -4.0], [-1.5, -2.5, -3.5], [-1.0, -2.0, float("nan")]):
        with pytest.raises(ValueError, match="x: log-probabilities"):
            limits.check([-1.0, -2.0, -3.0], other, "x")
    assert DecodingCheck(sparse=True).expected is None


def test_hugging_face_compiled_is_a_baseline_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import CompileConfig

    def on_a_cpu(*, fullgraph: bool) -> Any:
        config = CompileConfig(fullgraph=fullgraph, backend="eager", mode="default")
        config._compile_all_devices = True
        return config

    monkeypatch.setattr(hugging_face, "compile_config", on_a_cpu)
    monkeypatch.setitem(HF_CONFIGS, "tiny", HF_CONFIGS["tiny"] | {"num_hidden_layers": 2})  # each is traced
    record = decode(tmp_path, baseline="hf-compiled", new_tokens=4)[0]
    assert record["baseline"]["name"] == "Hugging Face compiled" and record["baseline"]["value"] > 0


def test_hugging_face_that_did_not_compile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="transformers did not compile its decode steps on cpu"):
        decode(tmp_path, baseline="hf-compiled", new_tokens=3)


def test_a_trained_model_is_recorded_with_its_perplexity_and_that_of_its_decode_steps(tmp_path: Path) -> None:
    save_hf_folder(tmp_path / "tiny", LLAMA)
    flags = {"model": str(tmp_path / "tiny"), "corpus": "self", "dtype": "float64", "window": 16, "max_windows": 3}
    flags |= {"prompt_tokens": 12, "new_tokens": 6, "shape": "tiny"}
    dense = decode(tmp_path, **flags, baseline="hf-eager", batch_size=(2,))[0]
    assert dense["labels"]["model"] == "tiny" and dense["labels"]["weights"] == "trained"
    assert dense["perplexity"] == dense["dense_perplexity"] and 0 < dense["labels"]["num_tokens"] <= 3 * 15
    (tmp_path / "decode.jsonl").unlink()
    sparse = decode(tmp_path, **flags, method="random", mlp_density=0.5)[0]
    assert sparse["dense_perplexity"] == pytest.approx(dense["perplexity"], abs=1e-9)
    assert sparse["perplexity"] != sparse["dense_perplexity"]
    for record in (dense, sparse):
        assert record["decoded_windows"]["num"] == len(record["windows"]["nll"]) == 3
        assert record["decoded_windows"]["perplexity"] == pytest.approx(record["perplexity"], abs=1e-9)
        assert record["value"] == median(record["timing"]["samples"])
        assert record["baseline"]["value"] == median(record["timing"]["baseline_samples"])


def test_speed_and_quality_are_of_one_selection_that_is_attached_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained predictors that look one layer back, with a stand-in: each density is of what was computed there."""
    folder = model_folder(tmp_path / "model", LLAMA)
    train(folder, collect(folder, tmp_path / "store"), tmp_path / "far", standin_rank="4", lookahead=1)
    attached: list[Selection] = []

    def attach(model: Any, selection: Selection) -> Any:
        attached.append(selection)
        return attach_selection(model, selection)

    monkeypatch.setattr("scripts.benchmark.decode.attach_selection", attach)
    flags = {"model": str(folder), "corpus": "self", "window": 16, "max_windows": 4, "decoded_windows": 0}
    flags |= {"method": "predictor", "predictors": tmp_path / "far", "prompt_tokens": 12, "new_tokens": 6}
    (record,) = decode(tmp_path, **flags, mlp_density=0.4, label="far")
    assert len(attached) == 2, "tried before anything is timed; then scored and timed as it is"
    labels, sources = record["labels"], record["sources"]
    assert (labels["label"], labels["predictors"], labels["lookahead"], labels["standin_rank"]) == ("far", "far", 1, 4)
    assert labels["density_budget"] is None and labels["phase"] == "all"
    assert sources["predictors"] == predictors_id(tmp_path / "far") and sources["text"] and sources["checkpoint"]
    assert record["text_achieved"]["mlp_density"] == pytest.approx(0.4, abs=0.15)
    assert record["text_achieved"] != {name: record["achieved"][name] for name in record["text_achieved"]}
    model = load_model(folder)
    stats = attach_selection(model, attached[0])
    subject = scripts.benchmark.decode.load_subject(Options(output=tmp_path, **flags), torch.device("cpu"))
    expected = windows_likelihood(model, subject.windows)
    assert record["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
    assert record["text_achieved"]["mlp_density"] == pytest.approx(stats.mean_density("mlp"), abs=1e-6)
    low, high = record["ratio_interval"]
    assert low < record["perplexity"] / record["dense_perplexity"] < high


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"method": "cats", "head_density": 0.5}, "does not choose heads"),
        ({"mlp_density": 0.0}, r"--mlp-density must lie in \(0, 1\]"),
        ({"new_tokens": 1}, "--new-tokens must be at least 2"),
        ({"predictors": Path("p")}, "random weights get random predictors"),
        ({"corpus": "self"}, "--corpus goes with --model"),
        ({"model": "m"}, "--model needs --corpus"),
        ({"label": "x"}, "--density-budget and --label go with --model"),
        ({"max_windows": 0}, "--max-windows must be at least 1, got 0"),
        ({"decoded_windows": -1}, "--decoded-windows must be at least 0, got -1"),
        ({"prompt_tokens": 2048}, "2056 tokens do not fit the context of 2048"),
        ({"shape": "opt", "method": "cats"}, "--shape 'opt': give one of"),
    ],
)
def test_flags_that_do_not_fit_are_named(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(tmp_path, **flags)
