"""Stage A of training: fit the scores of all layers to stored activations, neurons and heads alike.

A loss, what scores are trained towards, is a value: a name in LOSSES, a function of one batch.

Legend: L layers, n rows, D hidden, U units, R rank.
"""

import io
import math
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from torch.nn import functional as F

from data.files import replace_file
from modules.sparsity import ActiveSet, Block, num_kept
from sparse_predictor.calibration import LayerCalibration, quantiles_of, threshold_at
from sparse_predictor.labels import LabelDefinition, true_active
from sparse_predictor.low_rank import RegressionSums
from sparse_predictor.methods.static import FREQUENCIES
from sparse_predictor.metrics import SetOverlap
from sparse_predictor.predictor import PredictorStack, Rule
from sparse_predictor.training_data import TrainingBatch, TrainingRows

WARMUP_SHARE = 0.05
FINAL_LEARNING_RATE_SHARE = 0.02
ADAM_BETAS = (0.9, 0.95)
STATE_KEYS = ("stack", "optimizer", "done", "losses")
# A neuron's weight in the energy-weighted loss: its share of the token's output energy over the mean share, between
# these. The floor keeps the many small neurons from drifting up; the cap keeps a massive one from being all there is.
ENERGY_WEIGHT_FLOOR = 0.1
ENERGY_WEIGHT_CAP = 20.0
MAGNITUDE_CAP = 12.0
VALIDATION_ROWS = 4096
FREQUENCY_ROWS = 8192


@dataclass(frozen=True)
class LossTargets:
    """`true` bool [L, n, U]: the active units. `contributions` [L, n, U] >= 0: what each unit writes, or None where
    the store keeps labels only."""

    true: Tensor
    contributions: Tensor | None

    def sizes(self, loss: str) -> Tensor:
        """The contributions; ValueError if a loss needs them and there are none."""
        if self.contributions is None:
            raise ValueError(
                f"--loss {loss} needs activations, and this store keeps packed labels only; use --loss bce"
            )
        return self.contributions


def bce(scores: Tensor, targets: LossTargets) -> Tensor:
    """Binary cross-entropy on the labels, every unit alike (Deja Vu, Liu et al. 2023, section 4.2): [L]."""
    return F.binary_cross_entropy_with_logits(scores, targets.true.to(scores.dtype), reduction="none").mean((1, 2))


def energy_bce(scores: Tensor, targets: LossTargets) -> Tensor:
    """Binary cross-entropy weighted by each unit's share of the token's output energy: [L]."""
    energy = targets.sizes("energy_bce").square()
    share = energy / energy.mean(-1, keepdim=True).clamp_min(torch.finfo(energy.dtype).tiny)
    weight = (ENERGY_WEIGHT_FLOOR + share).clamp(max=ENERGY_WEIGHT_CAP)
    true = targets.true.to(scores.dtype)
    return F.binary_cross_entropy_with_logits(scores, true, weight=weight, reduction="none").mean((1, 2))


def magnitude(scores: Tensor, targets: LossTargets) -> Tensor:
    """Squared error to the root of each unit's relative contribution: [L]."""
    return (scores - relative_magnitude(targets.sizes("magnitude"))).square().mean((1, 2))


def relative_magnitude(contributions: Tensor) -> Tensor:
    """sqrt(contribution / the token's mean), capped: what a score has to order, on one scale for all tokens."""
    mean = contributions.mean(-1, keepdim=True).clamp_min(torch.finfo(contributions.dtype).tiny)
    return (contributions / mean).clamp(max=MAGNITUDE_CAP).sqrt()


LOSSES: dict[str, Callable[[Tensor, LossTargets], Tensor]] = {
    "bce": bce,
    "energy_bce": energy_bce,
    "magnitude": magnitude,
}


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How scores are fitted. `initialisation`: closed_form (reduced-rank regression on magnitudes) or random."""

    loss: str
    label: LabelDefinition
    initialisation: str
    steps: int
    batch_rows: int
    learning_rate: float
    seed: int
    closed_form_rows: int = 32768

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"--loss {self.loss!r}: choose from {', '.join(LOSSES)}")
        if self.initialisation not in ("closed_form", "random"):
            raise ValueError(f"--initialisation {self.initialisation!r}: choose closed_form or random")
        if self.steps < 0 or self.batch_rows < 1 or not self.learning_rate > 0.0:
            raise ValueError(
                f"--steps must be at least 0 (got {self.steps}), --batch-rows at least 1 (got {self.batch_rows}), "
                f"--learning-rate positive (got {self.learning_rate})"
            )


def targets_of(batch: TrainingBatch, block: Block, label: LabelDefinition) -> LossTargets:
    """Labels and contributions of one batch; packed stores bring their own labels. Heads have no exact zeros: theirs
    are the top groups at the label's share."""
    if batch.contributions is None:
        return LossTargets(batch.activations, None)
    if block == "attention":
        count = num_kept(label.share, batch.contributions.shape[-1])
        chosen = batch.contributions.topk(count, dim=-1, sorted=False).indices
        true = torch.zeros_like(batch.contributions, dtype=torch.bool).scatter_(-1, chosen, True)
        return LossTargets(true, batch.contributions)
    signed = batch.activations if label.kind == "positive" else batch.contributions
    return LossTargets(true_active(signed, None, label), batch.contributions)


def learning_rate_at(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 5 %, then a cosine down to 2 % of the peak."""
    warm = min(1.0, (step + 1) / (WARMUP_SHARE * steps + 1.0))
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / steps))
    return peak * warm * (FINAL_LEARNING_RATE_SHARE + (1.0 - FINAL_LEARNING_RATE_SHARE) * cosine)


@torch.no_grad()
def initialise_closed_form(stack: PredictorStack, rows: TrainingRows, max_rows: int) -> None:
    """Start every layer at the best low-rank regression of the relative magnitudes: no gradient step needed.

    Both factors are scaled to unit variance, so that one learning rate suits all layers.
    """
    sample = rows.sample("train", max_rows)
    for index in range(stack.num_layers):
        sums = RegressionSums(stack.first.shape[2], stack.second.shape[1], stack.first.device)
        for block in sample:
            batch = rows.layer_rows(index, [block])
            if batch.contributions is None:
                raise ValueError("closed-form initialisation needs activations; packed labels: --initialisation random")
            sums.add(batch.inputs[0], relative_magnitude(batch.contributions[0]))
        if not bool(sums.xx.isfinite().all() and sums.xy.isfinite().all()):
            raise ValueError(f"training {rows.block}: the activations of layer {rows.layers[index]} are not finite")
        fitted = sums.fit(stack.first.shape[1])
        spread = (sums.y_variance().mean()).sqrt().float()
        rank = fitted.first.shape[0]  # fewer than asked for where the block has fewer inputs
        stack.second[index].zero_()
        stack.first[index, :rank] = fitted.first
        stack.second[index, :, :rank] = fitted.second / spread
        stack.bias[index] = fitted.bias / spread


def fit_scores(
    stack: PredictorStack,
    rows: TrainingRows,
    options: FitOptions,
    *,
    state_path: Path,
    on_step: Callable[[int, float], None] | None = None,
    save_every: int = 200,
) -> list[float]:
    """Train `stack` in place; returns the last recorded loss of each layer.

    Every `save_every` steps, and at the end, the state goes to `state_path`; a state of the same options found there
    is continued, to the same result as an uninterrupted run.
    """
    fingerprint = {
        **asdict(options),
        **rows.identity(),
        "shapes": {name: list(tensor.shape) for name, tensor in stack.state_dict().items()},
    }
    parameters = [stack.first, stack.second, stack.bias]
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, betas=ADAM_BETAS, weight_decay=0.0)
    done = 0
    losses: list[float] = []
    if (state := load_state(state_path, fingerprint, stack.first.device, STATE_KEYS)) is not None:
        stack.load_state_dict(state["stack"])
        optimizer.load_state_dict(state["optimizer"])
        done, losses = state["done"], state["losses"]
    elif options.initialisation == "closed_form":
        initialise_closed_form(stack, rows, options.closed_form_rows)
    loss_function = LOSSES[options.loss]
    batches = rows.batches("train", options.batch_rows, seed=options.seed, skip=done)
    for step in range(done, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, options.steps, options.learning_rate)
        batch = rows.load(next(batches))
        with torch.no_grad():
            targets = targets_of(batch, rows.block, options.label)
        per_layer = loss_function(stack.scores(batch.inputs), targets)
        if not bool(per_layer.isfinite().all()):
            bad = [rows.layers[i] for i in (~per_layer.isfinite()).nonzero().flatten().tolist()]
            raise ValueError(f"training {rows.block}: the loss of layers {bad} is not finite at step {step}")
        optimizer.zero_grad(set_to_none=True)
        per_layer.sum().backward()  # layers share no parameter, so a sum trains each on its own
        optimizer.step()
        losses = per_layer.tolist()
        if on_step is not None:
            on_step(step, sum(losses) / len(losses))
        if (step + 1) % save_every == 0 or step + 1 == options.steps:
            save_state(
                state_path,
                fingerprint,
                stack=stack.state_dict(),
                optimizer=optimizer.state_dict(),
                done=step + 1,
                losses=losses,
            )
    return losses


def save_state(path: Path, fingerprint: dict[str, Any], **state: Any) -> None:
    """Put a training state on the disk, durably, replacing the one before it only when it is whole; OSError as
    `data.files.disk_errors`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()  # in memory first: what torch.save raises on a full disk does not say so
    torch.save({"fingerprint": fingerprint, **state}, content)
    replace_file(path, content.getbuffer())


def load_state(
    path: Path, fingerprint: dict[str, Any], device: torch.device, keys: Sequence[str]
) -> dict[str, Any] | None:
    """The state with these keys that the same training left at `path`, or None: if there is none, or one that is
    damaged or of another training, which is named in a warning and set aside."""
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            if (spoiled := archive.testzip()) is not None:  # torch.load does not compare the sums of all parts
                raise ValueError(f"the sum of {spoiled} is not right")
        state = torch.load(path, map_location=device, weights_only=True)
        if not isinstance(state, dict) or not {"fingerprint", *keys} <= state.keys():
            raise ValueError(f"it does not hold {', '.join(keys)}")
        if not isinstance(state["fingerprint"], dict):
            raise ValueError("it does not say which training it is of")
    except Exception as problem:  # damaged bytes can make zipfile and torch raise anything
        reason, suffix = f"damaged ({' '.join(str(problem).split())[:120] or type(problem).__name__})", ".damaged"
    else:
        if state["fingerprint"] == fingerprint:
            return state
        found = {name: state["fingerprint"].get(name) for name in fingerprint}
        changed = [name for name in fingerprint if found[name] != fingerprint[name]]
        reason, suffix = f"the state of another training ({', '.join(changed)} differ)", ".other"
    aside = path.with_name(path.name + suffix)
    os.replace(path, aside)
    logger.warning(f"{path}: {reason}; it is now {aside.name}, and training starts from the beginning")
    return None


@torch.no_grad()
def validation_metrics(
    stack: PredictorStack, rows: TrainingRows, label: LabelDefinition, densities: Sequence[float], rule: Rule
) -> dict[str, Any]:
    """`{"layers": [...], "at": {density: {"recall": [per layer], "precision": ..., "density": ...}}}`.

    The truth is the label, at the share that a layer keeps where labels are shares. Choosing everything has recall 1,
    so the density that was really chosen stands beside it.
    """
    sample = rows.sample("validation", VALIDATION_ROWS)
    at: dict[str, dict[str, list[float]]] = {
        f"{density:g}": {"recall": [], "precision": [], "density": []} for density in densities
    }
    for index in range(stack.num_layers):
        batch = rows.layer_rows(index, sample)
        scores = stack.layer_scores(index, batch.inputs[0])
        quantiles = quantiles_of(scores)
        for density in densities:
            kept = stack.kept(index, density)
            share = LabelDefinition(kind=label.kind, share=kept)
            true = targets_of(batch, rows.block, share).true[0]
            if rule == "topk":
                chosen = ActiveSet.from_scores(scores, num_kept(kept, scores.shape[-1])).mask
            else:
                chosen = scores >= threshold_at(quantiles, kept)
            overlap = SetOverlap()
            overlap.add(chosen, true, None)
            found = at[f"{density:g}"]
            found["recall"].append(overlap.recall)
            found["precision"].append(overlap.precision)
            found["density"].append(float(chosen.float().mean()))
    return {"layers": rows.layers, "rows": sum(stop - start for start, stop in sample), "at": at}


def count_frequencies(rows: Mapping[Block, TrainingRows], index: int, label: LabelDefinition) -> LayerCalibration:
    """How often the units of the layer at one place of the store's layers are active, from training rows."""
    return LayerCalibration(
        {FREQUENCIES[block].name: unit_frequency(found, index, label) for block, found in rows.items()}
    )


@torch.no_grad()
def unit_frequency(rows: TrainingRows, index: int, label: LabelDefinition) -> Tensor:
    """Share of training tokens in which each unit is active: float32 [U]."""
    counts = torch.zeros(rows.num_units, device=rows.device)
    total = 0
    for block in rows.sample("train", FREQUENCY_ROWS, seed=3):
        batch = rows.layer_rows(index, [block])
        true = targets_of(batch, rows.block, label).true[0]
        counts += true.sum(0)
        total += true.shape[0]
    return counts / max(1, total)
