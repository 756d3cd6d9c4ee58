"""Training a whole decoder on a stream of tokens, from scratch or on from a checkpoint: one loop for both.

Next-token cross-entropy over windows of the stream, in an order that a seed fixes and that does not depend on the
model. AdamW (Loshchilov & Hutter 2019) with warm-up, a cosine and gradient clipping; no dropout.

Mixed precision (Micikevicius et al. 2018): weights, their gradients' sums and AdamW's state are float32. On a GPU each
pass runs on bfloat16 copies of the matrices, made anew each step, and gradients flow through the copying; norms, the
residual stream and the loss stay float32. (Autocast would leave the norms' outputs and the rotations float32 as well,
at twice the memory traffic, and cast the same input for each of the matrices that read it.)

Legend: B windows, T tokens, D hidden, F intermediate, L layers, V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from modules.checkpoint.load import LM_HEAD, build_on_meta
from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.normalization import Norm
from modules.sampling import mix_seed
from modules.shards import set_parameter

ADAM_BETAS = (0.9, 0.95)
GRADIENT_NORM = 1.0
WARMUP_SHARE = 0.05
FINAL_LEARNING_RATE_SHARE = 0.1
EMBEDDING_STD = 0.02
# Reading the loss makes the host wait for the device, so it is read, and checked, every so many steps.
REPORT_EVERY = 20

OnStep = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """`steps` of `batch_windows` windows of `window` predicted tokens each; `learning_rate`: the peak. `weight_decay`
    pulls at matrices and embeddings, not at norms and biases."""

    steps: int
    batch_windows: int
    window: int
    learning_rate: float
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_windows", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"training: {name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 < self.learning_rate < 1.0:
            raise ValueError(f"training: learning_rate must lie in (0, 1), got {self.learning_rate}")

    @property
    def num_tokens(self) -> int:
        """Predicted tokens of the whole training, repeated ones included."""
        return self.steps * self.batch_windows * self.window


def initialised_model(config: ModelConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> Decoder:
    """A float32 decoder to be trained from scratch; dropout there is none.

    A matrix is N(0, 1 / its inputs), so that a normed state gives outputs of about unit size (LeCun et al. 1998);
    output projections are divided by sqrt(2 L), so that the residual stream does not grow with depth (GPT-2, Radford
    et al. 2019); embeddings, and with them a tied head, are N(0, 0.02^2); norms are the identity, biases 0. Every
    parameter has a stream of its own for (seed, name): models of different kinds share what they have in common.
    """
    model = build_on_meta(config)
    output_scale = 1.0 / math.sqrt(2 * config.num_hidden_layers)
    norms = {name for name, module in model.named_modules() if isinstance(module, Norm)}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, kind = name.rpartition(".")
        if name == LM_HEAD and config.tie_word_embeddings:
            model.tie_head()  # the embeddings are named before the head, so drawn
            continue
        if kind == "bias" or owner in norms:
            value = torch.full(parameter.shape, float(owner in norms and kind == "weight"))
        else:
            is_output = owner.rpartition(".")[2] in ("o_proj", "down_proj")  # held [in, out]
            inputs = parameter.shape[0] if is_output else parameter.shape[1]
            std = inputs**-0.5 * (output_scale if is_output else 1.0)
            if owner.startswith("embeddings.") and owner != "embeddings.project_in" or name == LM_HEAD:
                std = EMBEDDING_STD
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            value = torch.randn(parameter.shape, generator=generator) * std
        set_parameter(model, name, value.to(device))
    return model.eval()


def window_starts(num_tokens: int, options: TrainingOptions) -> Tensor:
    """Where the windows of every step begin: int64 [steps, B].

    Window k predicts tokens k T + 1 .. (k + 1) T of the stream. Each epoch goes through all windows once, in an order
    of its own. ValueError if there is not one.
    """
    num_windows = (num_tokens - 1) // options.window
    if num_windows < 1:
        raise ValueError(f"training: {num_tokens} tokens do not fill one window of {options.window} + 1")
    count = options.steps * options.batch_windows
    epochs = []
    for epoch in range(-(-count // num_windows)):
        generator = torch.Generator().manual_seed(mix_seed(options.seed, epoch))
        epochs.append(torch.randperm(num_windows, generator=generator))
    return torch.cat(epochs)[:count].view(options.steps, options.batch_windows) * options.window


def learning_rate_at(step: int, options: TrainingOptions) -> float:
    """Linear warm-up over the first 5 %, then a cosine down to a tenth of the peak."""
    warmup = max(1, round(WARMUP_SHARE * options.steps))
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    cosine = 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, options.steps - warmup)))
    return options.learning_rate * (FINAL_LEARNING_RATE_SHARE + (1.0 - FINAL_LEARNING_RATE_SHARE) * cosine)


def train_model(
    model: Decoder,
    token_ids: Tensor,
    options: TrainingOptions,
    *,
    compute_dtype: torch.dtype | None = None,
    on_step: OnStep | None = None,
) -> list[tuple[int, float]]:
    """Train a float32 model in place on a stream of token ids [N]; returns (steps done, loss of the last one) as read.

    `compute_dtype` None: bfloat16 on a GPU, float32 elsewhere. `on_step` gets what is returned. ValueError for a
    model that is a part or no float32, windows beyond its context, ids beyond its vocabulary, or a loss or weights that
    stop being finite. Afterwards the model is in eval mode and its weights require no gradients.
    """
    _check(model, token_ids, options)
    device = model.device
    if compute_dtype is None:
        compute_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model.requires_grad_(True).train()
    objective = NextTokenLoss(model)
    norms = {id(weight) for module in model.modules() if isinstance(module, Norm) for weight in module.parameters()}
    parameters = dict(objective.named_parameters())
    groups = [
        {"params": [one for one in parameters.values() if one.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [one for one in parameters.values() if one.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=ADAM_BETAS,
        fused=device.type == "cuda",
    )
    token_ids, offsets = token_ids.to(device), torch.arange(options.window + 1, device=device)
    starts = window_starts(len(token_ids), options).to(device)
    curve: list[tuple[int, float]] = []
    try:
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, options)
            windows = token_ids[starts[step][:, None] + offsets].long()
            copies = {name: one if id(one) in norms else one.to(compute_dtype) for name, one in parameters.items()}
            loss = functional_call(objective, copies, (windows,))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(list(parameters.values()), GRADIENT_NORM)
            optimizer.step()
            if (step + 1) % REPORT_EVERY == 0 or step + 1 == options.steps:
                curve.append((step + 1, float(loss.detach())))
                _require_finite(math.isfinite(curve[-1][1]), "loss is", step, options)
                if on_step is not None:
                    on_step(*curve[-1])
        # No loss has been read of what the last step made of the weights.
        are_finite = all(bool(one.isfinite().all()) for one in parameters.values())
        _require_finite(are_finite, "weights are", options.steps - 1, options)
    finally:
        model.requires_grad_(False).eval()
        for parameter in parameters.values():
            parameter.grad = None
    return curve


def _require_finite(is_finite: bool, what: str, step: int, options: TrainingOptions) -> None:
    if not is_finite:
        raise ValueError(
            f"training: the {what} not finite at step {step + 1}; try a smaller learning rate than "
            f"{options.learning_rate}"
        )


class NextTokenLoss(nn.Module):
    """windows [B, T + 1] -> mean cross-entropy of tokens 1 .. T in nats, each given those before it in its window."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, windows: Tensor) -> Tensor:
        """int64 [B, T + 1] -> float32 scalar."""
        logits = self.model.logits(self.model(windows[:, :-1]))
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def _check(model: Decoder, token_ids: Tensor, options: TrainingOptions) -> None:
    if model.links is not None or model.shards:
        raise ValueError("training: only a whole model can be trained, and this rank holds a part of one")
    if model.is_sparse:
        raise ValueError("training: the model chooses units; train it dense")
    if model.compute_dtype != torch.float32:
        raise ValueError(
            f"training: the weights must be float32, got {model.compute_dtype}; load them with --dtype float32"
        )
    model.check_context(options.window)
    largest = int(token_ids.max()) if len(token_ids) else 0
    if largest >= model.config.vocab_size:
        raise ValueError(f"training: token id {largest} lies outside the vocabulary of {model.config.vocab_size}")
