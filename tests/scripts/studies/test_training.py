"""Training whole models: it learns, as Hugging Face's classes do step by step, in one order for all kinds of model."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from modules.checkpoint.write import hf_state_dict
from modules.decoder import Decoder
from modules.families.registry import from_hf_config, to_hf_config
from modules.normalization import Norm
from scripts.studies import training
from scripts.studies.training import (
    NextTokenLoss,
    TrainingOptions,
    initialised_model,
    learning_rate_at,
    train_model,
    window_starts,
)
from tests.modules.families.test_registry import MIXTURES, mixture
from tests.modules.tiny_kinds import KINDS, LLAMA, OPT

OPTIONS = TrainingOptions(steps=30, batch_windows=4, window=16, learning_rate=1e-2, seed=1)


def repeated_text(length: int = 1000) -> Tensor:
    """A sequence that comes again and again: easily learnt."""
    return torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(0)).repeat(length // 40).int()


@pytest.mark.parametrize(("activation", "positions", "norm"), MIXTURES)
def test_every_mixture_learns_with_all_its_parameters(activation: str, positions: str, norm: str) -> None:
    model = initialised_model(mixture(activation, positions, norm))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    curve = train_model(model, repeated_text(), OPTIONS)
    assert [step for step, _ in curve] == [20, 30]
    assert curve[-1][1] < 3.0 < math.log(131) - 1.5
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


# Without key biases: their gradient is zero but for rounding, which AdamW makes whole steps of.
@pytest.mark.parametrize(
    "hf_config",
    [LLAMA, KINDS["llama-tied"], OPT | {"enable_bias": False}, KINDS["llama-24-heads-8-groups"]],
    ids=["llama", "llama-tied", "opt", "grouped"],
)
def test_steps_are_those_of_a_few_lines_on_hugging_faces_class(
    hf_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "REPORT_EVERY", 1)
    model = initialised_model(from_hf_config(hf_config), seed=4)
    options = TrainingOptions(steps=5, batch_windows=3, window=12, learning_rate=3e-3, seed=2)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config(model.config))).train()
    theirs.load_state_dict(hf_state_dict(model), strict=True)
    # Without padding tokens, whose embeddings Hugging Face's classes leave as they are.
    text = torch.randint(3, 131, (400,), generator=torch.Generator().manual_seed(3))
    curve = train_model(model, text, options)

    matrices = [one for one in theirs.parameters() if one.dim() > 1]
    others = [one for one in theirs.parameters() if one.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = []
    for step, starts in enumerate(window_starts(len(text), options).tolist()):
        windows = torch.stack([text[start : start + 13] for start in starts])
        loss = F.cross_entropy(theirs(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, options)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.testing.assert_close([loss for _, loss in curve], losses, rtol=1e-5, atol=0)
    ours = hf_state_dict(model)
    for name, weight in theirs.state_dict().items():
        # An entry whose gradient is zero but for rounding takes steps of whatever size AdamW makes of that, and
        # rounding differs between processors: one in a thousand may be off by a tenth of what five steps can do.
        difference = (ours[name] - weight).abs()
        assert (difference > 2e-4).float().mean() <= 1e-3 and difference.max() <= 1.5e-3, name


def test_half_precision_keeps_weights_norms_and_loss_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[torch.dtype]] = {"weight": set(), "norm": set(), "states": set(), "loss": set()}
    whole_loss = NextTokenLoss.forward

    def watched(self: NextTokenLoss, windows: Tensor) -> Tensor:
        def hook(module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            seen["norm" if isinstance(module, Norm) else "weight"].add(next(iter(module._parameters.values())).dtype)
            seen["states"].add(args[0].dtype)

        layer = self.model.half_block(0, "attention")
        handles = [module.register_forward_hook(hook) for module in (layer.norm, layer.block.q_proj)]
        loss = whole_loss(self, windows)
        for handle in handles:
            handle.remove()
        seen["loss"].add(loss.dtype)
        return loss

    text = repeated_text()
    exact = initialised_model(mixture("silu", "rotary", "rms"))
    expected = train_model(exact, text, OPTIONS)
    monkeypatch.setattr(NextTokenLoss, "forward", watched)
    model = initialised_model(mixture("silu", "rotary", "rms"))
    found = train_model(model, text, OPTIONS, compute_dtype=torch.bfloat16)
    assert seen == {
        "weight": {torch.bfloat16},
        "norm": {torch.float32},
        "states": {torch.float32, torch.bfloat16},  # the residual stream, and what a norm hands to a block
        "loss": {torch.float32},
    }
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert abs(found[-1][1] - expected[-1][1]) < 0.1


def test_windows_come_in_an_order_of_the_seed_alone_each_once_an_epoch() -> None:
    options = TrainingOptions(steps=10, batch_windows=3, window=16, learning_rate=0.1, seed=7)
    starts = window_starts(1 + 16 * 12 + 5, options)
    assert starts.shape == (10, 3) and torch.equal(starts, window_starts(1 + 16 * 12 + 5, options))
    first, second = starts.flatten()[:12], starts.flatten()[12:24]
    assert sorted(first.tolist()) == sorted(second.tolist()) == [16 * i for i in range(12)]
    assert not torch.equal(first, second)
    assert not torch.equal(starts, window_starts(1 + 16 * 12 + 5, TrainingOptions(**{**vars(options), "seed": 8})))


def test_models_of_a_seed_share_what_they_have_in_common() -> None:
    models = [initialised_model(mixture(*levels), seed=5) for levels in MIXTURES]
    for name in ("embeddings.tokens.weight", "half_blocks.0.block.q_proj.weight", "half_blocks.4.block.o_proj.weight"):
        assert all(torch.equal(model.get_parameter(name), models[0].get_parameter(name)) for model in models)
    other = initialised_model(mixture(*MIXTURES[0]), seed=6)
    assert not torch.equal(other.embeddings.tokens.weight, models[0].embeddings.tokens.weight)


def test_initial_weights_have_the_stated_sizes() -> None:
    config = mixture("relu", "learned", "layer", hidden_size=64, head_dim=16, intermediate_size=256)
    model = initialised_model(config)
    sizes = {name: float(parameter.std()) for name, parameter in model.named_parameters() if parameter.dim() > 1}
    assert sizes["embeddings.tokens.weight"] == pytest.approx(0.02, rel=0.1)
    assert sizes["embeddings.positions.weight"] == pytest.approx(0.02, rel=0.1)
    assert sizes["half_blocks.1.block.up_proj.weight"] == pytest.approx(64**-0.5, rel=0.1)
    assert sizes["half_blocks.1.block.down_proj.weight"] == pytest.approx(256**-0.5 / 6**0.5, rel=0.1)
    assert sizes["half_blocks.0.block.o_proj.weight"] == pytest.approx(64**-0.5 / 6**0.5, rel=0.1)
    assert model.lm_head.weight is model.embeddings.tokens.weight
    norm = model.norm_before(1, "mlp")
    assert norm is not None and norm.weight is not None and norm.bias is not None
    assert bool((norm.weight == 1).all()) and bool((norm.bias == 0).all())


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    options = TrainingOptions(steps=100, batch_windows=1, window=1, learning_rate=0.5)
    rates = [learning_rate_at(step, options) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[4] == rates[5] == 0.5 == max(rates)
    assert rates[5:] == sorted(rates[5:], reverse=True) and rates[-1] == pytest.approx(0.05, rel=0.01)


def whole() -> Decoder:
    return initialised_model(mixture(*MIXTURES[0]))


def half() -> Decoder:
    return whole().bfloat16()


def broken() -> Decoder:
    model = whole()
    model.lm_head.weight.data[:, 0] = math.inf
    return model


@pytest.mark.parametrize(
    ("make", "text", "change", "message"),
    [
        (half, repeated_text(), {}, "the weights must be float32, got torch.bfloat16"),
        (whole, repeated_text()[:16], {}, "16 tokens do not fill one window"),
        (whole, repeated_text() + 131, {}, "lies outside the vocabulary of 131"),
        (whole, repeated_text(), {"window": 64}, "context of 32"),
        (broken, repeated_text(), {}, "the loss is not finite at step"),
    ],
    ids=["dtype", "short", "vocabulary", "context", "infinite"],
)
def test_what_cannot_be_trained_is_an_error(
    make: Callable[[], Decoder], text: Tensor, change: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train_model(make(), text, TrainingOptions(**{**vars(OPTIONS), **change}))


def test_weights_that_the_last_step_broke_are_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.optim.AdamW.step

    def breaks_the_last(self: torch.optim.AdamW, *arguments: Any) -> None:
        step(self, *arguments)
        if self.state[self.param_groups[0]["params"][0]]["step"] == OPTIONS.steps:
            self.param_groups[0]["params"][0].data[0, 0] = math.nan

    monkeypatch.setattr(torch.optim.AdamW, "step", breaks_the_last)
    with pytest.raises(
        ValueError, match="the weights are not finite at step 30; try a smaller learning rate than 0.01"
    ):
        train_model(whole(), repeated_text(), OPTIONS)


@pytest.mark.parametrize("name", ["steps", "batch_windows", "window"])
def test_impossible_options_are_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        TrainingOptions(**{**vars(OPTIONS), name: 0})
    with pytest.raises(ValueError, match=r"learning_rate must lie in \(0, 1\), got 1.5"):
        TrainingOptions(**{**vars(OPTIONS), "learning_rate": 1.5})


@pytest.mark.cuda
@pytest.mark.parametrize(("activation", "positions", "norm"), MIXTURES)
def test_a_gpu_trains_in_half_precision_as_a_cpu_in_full(activation: str, positions: str, norm: str) -> None:
    text = repeated_text()
    losses = [
        train_model(initialised_model(mixture(activation, positions, norm), device=device), text, OPTIONS)[-1][1]
        for device in ("cpu", "cuda")
    ]
    assert abs(losses[0] - losses[1]) < 0.15
