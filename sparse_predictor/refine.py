"""Stage B of training: predictors and stand-ins of all layers at once, end to end against the dense model's logits.

The sparse model is the dense one with forward hooks: each MLP's activations are masked by its predictor, its output
gains its stand-in. The mask is hard in the forward pass; in the backward pass a score's gradient flows as through a
sigmoid (straight-through estimator, Bengio et al. 2013). A layer's threshold is a quantile of its scores, so raising
one score pushes another unit out. The gradient includes that effect: without it, it would raise every score at once,
and training would diverge. The model's own weights never change. Loss: KL divergence of the sparse model's next-token
distribution from the dense model's (Hinton et al. 2015), nats per token. Now and then it is measured on held-out text,
and the best state seen is the one that is kept, the start included.

Legend: L layers, B sequences, T tokens, D hidden, F neurons, V vocabulary.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from modules.decoder import Decoder
from sparse_predictor.predictor import PredictorStack
from sparse_predictor.train import ADAM_BETAS, learning_rate_at, load_state, save_state

GRADIENT_NORM = 1.0
# Rows whose scores set a step's thresholds: the share kept in the batch is within a percent of the target.
THRESHOLD_ROWS = 256
# A matrix that starts at zero (a stand-in before it is fitted) still has to be able to move.
SMALLEST_SIZE = 1e-3
# Logits of both models are made for so many positions at a time.
LOGITS_POSITIONS = 2048
STATE_KEYS = ("stack", "optimizer", "curve", "best", "best_state")


@dataclass(frozen=True, kw_only=True)
class RefineOptions:
    """`learning_rate` is relative: a step of 0.001 changes a matrix by about 0.1 % of its size. `densities`: one is
    drawn each step. `surrogate_width`: of the sigmoid in the backward pass, in score units."""

    steps: int
    batch_sequences: int
    window: int
    learning_rate: float
    densities: tuple[float, ...]
    surrogate_width: float = 1.0
    validate_every: int = 25
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
        soft = torch.sigmoid((scores - threshold).float() / ctx.width)
        slope = soft * (1 - soft)
        gain = gradient.float() * activations.float()
        # The threshold moves with the scores so that the share kept stays: d threshold / d score = slope / sum(slope).
        price = (slope * gain).sum() / slope.sum().clamp_min(1e-12)
        for_scores = (slope * (gain - price) / ctx.width).to(scores.dtype)
        return gradient.masked_fill(scores < threshold, 0), for_scores, None, None


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
            if self.density is None or (kept := self.stack.kept(layer, self.density)) == 1.0:
                return activations
            source = self._inputs[layer - self.lookahead if layer >= self.lookahead else layer]
            scores = self.stack.layer_scores(layer, source.flatten(0, 1))
            with torch.no_grad():
                few = scores[:: max(1, scores.shape[0] // THRESHOLD_ROWS)].flatten().float().sort().values
                threshold = few[int((1.0 - kept) * few.numel())].to(scores.dtype)
            return _StraightThroughMask.apply(activations, scores.view_as(activations), threshold, self.width)

        return mask

    def _add_standin(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            if self.density is None:
                return output
            standin = self.stack.layer_standin(layer, self._inputs[layer], self.density)
            return output if standin is None else output + standin.to(self.model.compute_dtype)

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


def divergence_and_gradient(model: Decoder, sparse: Tensor, dense: Tensor) -> tuple[float, Tensor | None]:
    """Mean KL(dense || sparse) over positions, and its gradient by `sparse` (None where gradients are off); both
    hidden states [B, T, D].

    Logits are made and dropped a few positions at a time: [B, T, V] in float32 would be gigabytes.
    """
    wanted = torch.is_grad_enabled()
    flat = sparse.detach().flatten(0, 1).requires_grad_(wanted)
    total = 0.0
    for states, target in zip(flat.split(LOGITS_POSITIONS), dense.flatten(0, 1).split(LOGITS_POSITIONS), strict=True):
        expected = F.log_softmax(model.logits(target).float(), dim=-1)
        predicted = F.log_softmax(model.logits(states).float(), dim=-1)
        divergence = F.kl_div(predicted, expected, reduction="sum", log_target=True) / flat.shape[0]
        if wanted:
            divergence.backward()
        total += float(divergence.detach())
    return total, None if flat.grad is None else flat.grad.view_as(sparse)


def refine(
    model: Decoder,
    stack: PredictorStack,
    token_ids: np.ndarray,
    held_out: Tensor,
    options: RefineOptions,
    *,
    lookahead: int,
    state_path: Path | None = None,
    origin: dict[str, Any] | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> list[tuple[int, float]]:
    """Train `stack` (of the MLPs of all layers) in place on a token stream.

    `held_out` [B, T]: windows of other documents. Returns (steps done, held-out divergence averaged over densities)
    each time it was measured, the start first; the stack ends in the best of these states. Each time the state also
    goes to `state_path` (None: nowhere), and one of the same options and `origin` (how the stack came to be) found
    there is continued. ValueError if the stack does not cover every layer, the text is too short, or the loss stops
    being finite.
    """
    if stack.num_layers != model.config.num_hidden_layers:
        raise ValueError(
            f"refinement runs the whole model: it needs all {model.config.num_hidden_layers} layers in the store, "
            f"which has {stack.num_layers}; or give --refine-steps 0"
        )
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = [parameter for parameter in stack.parameters() if parameter.numel()]
    sizes = [layer_sizes(parameter) for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, betas=ADAM_BETAS, weight_decay=0.0)
    draw = np.random.default_rng(options.seed)
    batches = token_windows(token_ids, options.window, options.batch_sequences, options.seed)
    fingerprint = {**asdict(options), "lookahead": lookahead, "tokens": len(token_ids), "origin": origin}
    state = load_state(state_path, fingerprint, model.device, STATE_KEYS) if state_path is not None else None
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with SparseTrainingHooks(model, stack, lookahead, options.surrogate_width) as hooks:
            if state is None:
                curve = [(0, held_out_divergence(hooks, held_out, options))]
                best, best_state = curve[0][1], copy.deepcopy(stack.state_dict())
            else:
                stack.load_state_dict(state["stack"])
                optimizer.load_state_dict(state["optimizer"])
                curve, best, best_state = state["curve"], state["best"], state["best_state"]
                for _ in range(curve[-1][0]):
                    draw.integers(len(options.densities))
                    next(batches)
            for step in range(curve[-1][0], options.steps):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate_at(step, options.steps, options.learning_rate)
                density = options.densities[int(draw.integers(len(options.densities)))]
                with _half_precision(model):
                    loss, sparse, gradient = _divergence(hooks, next(batches).to(model.device), density)
                if not np.isfinite(loss):
                    raise ValueError(f"refinement: the loss is not finite at step {step}; try a smaller learning rate")
                optimizer.zero_grad(set_to_none=True)
                sparse.backward(gradient)
                norm = nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)
                if not bool(norm.isfinite()):  # NaN scores leave the loss finite: nothing is below a NaN threshold
                    raise ValueError(f"refinement: gradient not finite at step {step}; try a smaller learning rate")
                _relative_step(optimizer, parameters, sizes)
                if on_step is not None:
                    on_step(step, loss)
                if (step + 1) % options.validate_every == 0 or step + 1 == options.steps:
                    curve.append((step + 1, held_out_divergence(hooks, held_out, options)))
                    if curve[-1][1] < best:
                        best, best_state = curve[-1][1], copy.deepcopy(stack.state_dict())
                    if state_path is not None:
                        save_state(
                            state_path,
                            fingerprint,
                            stack=stack.state_dict(),
                            optimizer=optimizer.state_dict(),
                            curve=curve,
                            best=best,
                            best_state=best_state,
                        )
            stack.load_state_dict(best_state)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return curve


def layer_sizes(parameter: Tensor) -> Tensor:
    """Root mean square of each layer's part of a stacked tensor, broadcastable to it. Vectors and what starts at zero
    move on the scale of scores, about 1, times this floor."""
    rms = parameter.detach().square().flatten(1).mean(1).sqrt().clamp_min(SMALLEST_SIZE)
    return rms.view(-1, *[1] * (parameter.dim() - 1))


@torch.no_grad()
def _relative_step(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], sizes: Sequence[Tensor]) -> None:
    """An optimizer step in units of each layer's own size: layers differ by orders of magnitude, Adam's steps not."""
    before = [parameter.clone() for parameter in parameters]
    optimizer.step()
    for parameter, old, size in zip(parameters, before, sizes, strict=True):
        parameter.copy_(old + (parameter - old) * size)


def held_out_divergence(hooks: SparseTrainingHooks, held_out: Tensor, options: RefineOptions) -> float:
    """Mean divergence over held-out windows [B, T] and densities, nats per token; no gradients kept."""
    losses = []
    with torch.no_grad(), _half_precision(hooks.model):
        for batch in held_out.split(options.batch_sequences):
            for density in options.densities:
                losses.append(_divergence(hooks, batch.to(hooks.model.device), density)[0] * batch.shape[0])
    return sum(losses) / (held_out.shape[0] * len(options.densities))


def _divergence(hooks: SparseTrainingHooks, batch: Tensor, density: float) -> tuple[float, Tensor, Tensor | None]:
    """(KL of the sparse from the dense model, the sparse hidden states, the gradient by them if gradients are on)."""
    with torch.no_grad():
        hooks.density = None
        dense = hooks.model(batch)
    hooks.density = density
    sparse = hooks.model(batch)
    hooks.density = None
    loss, gradient = divergence_and_gradient(hooks.model, sparse, dense)
    return loss, sparse, gradient


def _half_precision(model: Decoder) -> contextlib.AbstractContextManager[None]:
    """bfloat16 matmuls on a GPU, whatever the weights are stored in; on a CPU the precision of the weights."""
    if model.device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    if model.compute_dtype in (torch.bfloat16, torch.float16):
        return torch.autocast("cpu", dtype=model.compute_dtype)
    return contextlib.nullcontext()
