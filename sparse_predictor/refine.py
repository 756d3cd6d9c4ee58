"""Stage B of training: predictors and stand-ins of all layers at once, end to end against the dense model's logits.

The sparse model is the dense one with forward hooks: each MLP's activations are masked by its predictor, its output
gains its stand-in. The mask is hard in the forward pass; in the backward pass a score's gradient flows as through a
sigmoid (straight-through estimator, Bengio et al. 2013). The model's own weights never change. Loss: KL divergence
of the sparse model's next-token distribution from the dense model's (Hinton et al. 2015), nats a token.

Legend: L layers, B sequences, T tokens, D hidden, F neurons, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from modules.decoder import Decoder
from sparse_predictor.stack import PredictorStack
from sparse_predictor.train import ADAM_BETAS, learning_rate_at

GRADIENT_NORM = 1.0
# Rows whose scores set a step's thresholds: the share kept in the batch is within a percent of the target.
THRESHOLD_ROWS = 256
# Logits of both models are made for so many positions at a time.
LOGITS_POSITIONS = 2048


@dataclass(frozen=True, kw_only=True)
class RefineOptions:
    """`densities`: one is drawn each step. `surrogate_width`: of the sigmoid in the backward pass, in score units."""

    steps: int
    batch_sequences: int
    window: int
    learning_rate: float
    densities: tuple[float, ...]
    surrogate_width: float = 1.0
    seed: int = 0


class _StraightThroughMask(torch.autograd.Function):
    """activations * (scores >= threshold), with a sigmoid's slope for the scores."""

    @staticmethod
    def forward(ctx: Any, activations: Tensor, scores: Tensor, threshold: Tensor, width: float) -> Tensor:
        ctx.save_for_backward(activations, scores, threshold)
        ctx.width = width
        return activations.masked_fill(scores < threshold, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        activations, scores, threshold = ctx.saved_tensors
        (gradient,) = gradients
        soft = torch.sigmoid((scores - threshold) / ctx.width)
        slope = soft * (1 - soft) / ctx.width
        return gradient.masked_fill(scores < threshold, 0), gradient * activations * slope, None, None


class SparseTrainingHooks:
    """Context manager: while open and `density` is set, the model runs sparsely and differentiably by `stack`."""

    def __init__(self, model: Decoder, stack: PredictorStack, lookahead: int, surrogate_width: float) -> None:
        self.model, self.stack, self.lookahead, self.width = model, stack, lookahead, surrogate_width
        self.density: float | None = None
        self._inputs: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "SparseTrainingHooks":
        for layer in range(self.model.config.num_hidden_layers):
            mlp = self.model.mlp(layer)
            self._handles += [
                mlp.register_forward_pre_hook(self._keep_input(layer)),
                mlp.activations.register_forward_hook(self._mask(layer)),
                mlp.register_forward_hook(self._add_standin(layer)),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._inputs.clear()

    def _keep_input(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self.density is not None:
                self._inputs[layer] = args[0]
                self._inputs.pop(layer - self.lookahead - 1, None)

        return keep

    def _mask(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def mask(module: nn.Module, args: tuple[Any, ...], activations: Tensor) -> Tensor:
            if self.density is None:
                return activations
            source = self._inputs[layer - self.lookahead if layer >= self.lookahead else layer]
            scores = self.stack.layer_scores(layer, source.flatten(0, 1))
            with torch.no_grad():
                few = scores[:: max(1, scores.shape[0] // THRESHOLD_ROWS)].flatten().float().sort().values
                threshold = few[int((1.0 - self.density) * few.numel())].to(scores.dtype)
            return _StraightThroughMask.apply(activations, scores.view_as(activations), threshold, self.width)

        return mask

    def _add_standin(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            if self.density is None:
                return output
            standin = self.stack.layer_standin(layer, self._inputs[layer], self.density)
            return output if standin is None else output + standin

        return add


def token_windows(token_ids: np.ndarray, window: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Endless batches int64 [batch, window] of a token stream; each epoch is shuffled and cut at another offset."""
    if len(token_ids) < window + 1:
        raise ValueError(f"refinement: {len(token_ids)} training tokens do not fill one window of {window}")
    generator = np.random.default_rng(seed)
    starts: list[int] = []
    while True:
        while len(starts) < batch:
            offset = int(generator.integers(min(window, len(token_ids) - window)))
            count = (len(token_ids) - offset) // window
            starts = list(generator.permutation(count) * window + offset) + starts
        rows = [token_ids[start : start + window] for start in (starts.pop() for _ in range(batch))]
        yield torch.from_numpy(np.stack(rows).astype(np.int64))


def divergence_and_gradient(model: Decoder, sparse: Tensor, dense: Tensor) -> tuple[float, Tensor]:
    """Mean KL(dense || sparse) over positions, and its gradient by `sparse`; both hidden states [B, T, D].

    Logits are made and dropped a few positions at a time: [B, T, V] in float32 would be gigabytes.
    """
    flat = sparse.detach().flatten(0, 1).requires_grad_()
    total = 0.0
    for states, target in zip(flat.split(LOGITS_POSITIONS), dense.flatten(0, 1).split(LOGITS_POSITIONS), strict=True):
        expected = F.log_softmax(model.logits(target).float(), dim=-1)
        predicted = F.log_softmax(model.logits(states).float(), dim=-1)
        divergence = F.kl_div(predicted, expected, reduction="sum", log_target=True) / flat.shape[0]
        divergence.backward()
        total += float(divergence.detach())
    assert flat.grad is not None
    return total, flat.grad.view_as(sparse)


def refine(
    model: Decoder,
    stack: PredictorStack,
    token_ids: np.ndarray,
    options: RefineOptions,
    *,
    lookahead: int,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train `stack` (of the MLPs of all layers) in place on a token stream; returns each step's divergence.

    ValueError if the stack does not cover every layer, the text is too short, or the loss stops being finite.
    """
    if stack.num_layers != model.config.num_hidden_layers:
        raise ValueError(
            f"refinement runs the whole model: it needs all {model.config.num_hidden_layers} layers in the store, "
            f"which has {stack.num_layers}; or give --refine-steps 0"
        )
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = [parameter for parameter in stack.parameters() if parameter.numel()]
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, betas=ADAM_BETAS, weight_decay=0.0)
    draw = np.random.default_rng(options.seed)
    batches = token_windows(token_ids, options.window, options.batch_sequences, options.seed)
    losses: list[float] = []
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with SparseTrainingHooks(model, stack, lookahead, options.surrogate_width) as hooks:
            for step in range(options.steps):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate_at(step, options.steps, options.learning_rate)
                batch = next(batches).to(model.device)
                with _half_precision(model):
                    hooks.density = None
                    with torch.no_grad():
                        dense = model(batch)
                    hooks.density = options.densities[int(draw.integers(len(options.densities)))]
                    sparse = model(batch)
                    loss, gradient = divergence_and_gradient(model, sparse, dense)
                if not np.isfinite(loss):
                    raise ValueError(f"refinement: the loss is not finite at step {step}; try a smaller learning rate")
                optimizer.zero_grad(set_to_none=True)
                sparse.backward(gradient)
                nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)
                optimizer.step()
                losses.append(loss)
                if on_step is not None:
                    on_step(step, loss)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return losses


def _half_precision(model: Decoder) -> contextlib.AbstractContextManager[None]:
    """bfloat16 matmuls on a GPU, whatever the weights are stored in; full precision on a CPU."""
    if model.device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()
