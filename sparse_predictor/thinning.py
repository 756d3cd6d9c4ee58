"""Methods that thin out the inputs of matmuls: TEAL on the MLP or on all matrices of a layer, and WINA's
weighting without its rotation.

An entry of a matmul's input that is small is dropped, and its column of the weights need not be read. The keys' and
values' matrices are thinned out like any other: cached keys and values are then those of the thinned inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import torch
from loguru import logger
from torch import Tensor, nn

from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.forward_pass import real_tokens
from modules.linear import Linear
from modules.sparsity import BLOCKS, Block
from modules.thinned_input import ThinnedInput, lay_out_for_kernels
from sparse_predictor.calibration import LayerCalibration, threshold_at

ThinningMethod = Literal["teal", "teal-all", "wina-unrotated"]
THINNING_METHODS: tuple[ThinningMethod, ...] = ("teal", "teal-all", "wina-unrotated")
PROJECTIONS: dict[Block, tuple[str, ...]] = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
# Of each among a layer's matrices, from the front or the end: there may be no gate, and TEAL's may be the MLP's alone.
PLACES = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "o_proj": 3, "gate_proj": -3, "up_proj": -2, "down_proj": -1}
OUTPUT_PROJECTIONS = ("o_proj", "down_proj")  # held unit-major, [in, out]; the inputs are those of a rank's own units
# What TEAL reads thresholds off: the inputs that several matrices share, and what output projections read.
STATISTICS = {"q_proj": "attention_input", "k_proj": "attention_input", "v_proj": "attention_input"}
STATISTICS |= {"o_proj": "head_output", "gate_proj": "input", "up_proj": "input", "down_proj": "activation"}

# Of a projection by name, in a layer: its input wrapped.
Thin = Callable[[int, str, Linear, float, Tensor | None], ThinnedInput]


def is_thinning(method: str) -> TypeGuard[ThinningMethod]:
    """Whether a method thins out inputs instead of choosing units."""
    return method in THINNING_METHODS


def thins_attention(method: str) -> bool:
    """Whether a method thins out the inputs of attention's matrices, too."""
    return is_thinning(method) and method != "teal"


def teal(calibration: Mapping[int, LayerCalibration], method: str) -> Thin:
    """TEAL (Liu et al. 2024, section 4): drop the entries of a matmul's input that are small in magnitude, by one
    threshold per layer and matrix, a quantile of calibration text.

    Densities are uniform, or those of a budget file, where `scripts.budget` puts what the paper's greedy allocation
    (algorithm 1) finds (see `greedy_paths`). Differs: thresholds are those of the sparse run where they were set in one
    (the densities of training, and budgets), and with sparse phases `all` every token is thinned out, where the paper
    spares the first half of a text. `teal` thins out the MLP alone, for comparison at equal bytes of it; `teal-all` all
    seven matrices.
    """

    def thin(layer: int, name: str, projection: Linear, density: float, counted: Tensor | None) -> ThinnedInput:
        quantiles = calibration[layer].require(f"{STATISTICS[name]}_quantiles", method)
        threshold = calibration[layer].threshold_in_run(method, density, PLACES[name])
        threshold = threshold_at(quantiles, density) if threshold is None else threshold
        return ThinnedInput(projection, threshold, counted, density=density)

    return thin


def wina(model: Decoder, calibration: Mapping[int, LayerCalibration]) -> Thin:
    """The weighting of WINA (Chen et al. 2025, Weight Informed Neuron Activation, section 3) without its rotation: as
    TEAL on all matrices, but an entry counts by |x_i| * ||W[:, i]||, what it can add to the product.

    This is not WINA, hence the name wina-unrotated: the weights stay as they are, where the paper first rotates them
    until their columns are orthogonal, without which its bound does not hold. There is one threshold per layer and
    matrix (a quantile of this weighted magnitude on calibration text) instead of the top entries of each token.
    """

    def thin(layer: int, name: str, projection: Linear, density: float, counted: Tensor | None) -> ThinnedInput:
        found, place = calibration[layer], matrices(model).index(name)
        quantiles = found.require("weighted_quantiles", "wina-unrotated")[place]
        if name in OUTPUT_PROJECTIONS:
            norms = norms_of_inputs(model, layer, name)
        else:  # over all outputs, of which a rank may have a part
            shared = [other for other in matrices(model) if other not in OUTPUT_PROJECTIONS]
            norms = found.require("input_norms", "wina-unrotated")[shared.index(name)]
        norms = norms.to(device=model.device, dtype=model.compute_dtype)
        threshold = found.threshold_in_run("wina-unrotated", density, PLACES[name])
        threshold = threshold_at(quantiles, density) if threshold is None else threshold
        return ThinnedInput(projection, threshold, counted, norms, density)

    return thin


def thin_of(model: Decoder, calibration: Mapping[int, LayerCalibration], method: ThinningMethod) -> Thin:
    """How a method thins out."""
    return wina(model, calibration) if method == "wina-unrotated" else teal(calibration, method)


def thinned_by_name(model: Decoder) -> dict[str, list[ThinnedInput]]:
    """What is thinned out in the layers that are here, by name of the matrix."""
    found: dict[str, list[ThinnedInput]] = {}
    for name in matrices(model):
        parts = [getattr(holder_of(model, layer, name), name) for layer in model.layers]
        if all(isinstance(part, ThinnedInput) for part in parts):
            found[name] = parts
    return found


def norms_of_inputs(model: Decoder, layer: int, name: str) -> Tensor:
    """||W[:, i]||: the L2 norm of what entry i of a projection's input is multiplied by, float32 [in]."""
    linear = getattr(holder_of(model, layer, name), name)
    assert isinstance(linear, Linear)
    weight = linear.dequantised().float()
    return torch.linalg.vector_norm(weight, dim=-1 if linear.rows_are == "inputs" else 0)


def holder_of(model: Decoder, layer: int, name: str) -> nn.Module:
    """The block that has a projection."""
    return model.half_block(layer, "attention" if name in PROJECTIONS["attention"] else "mlp").block


def matrices(model: Decoder) -> list[str]:
    """Names of a layer's matrices, in the order of `weighted_quantiles`."""
    return thinned_matrices(model.config, "teal-all")


def thinned_matrices(config: ModelConfig, method: str) -> list[str]:
    """Names of the matrices whose inputs a method thins out."""
    blocks: Sequence[Block] = BLOCKS if thins_attention(method) else ("mlp",)
    return [name for block in blocks for name in PROJECTIONS[block] if name != "gate_proj" or config.gated_mlp]


def densities_of_matrices(
    config: ModelConfig,
    method: str,
    densities: Mapping[Block, Sequence[float]],
    given: Mapping[str, Sequence[float]] | None,
) -> dict[str, list[float]]:
    """Of every matrix that a method thins out, one density per layer: those given (by a budget), else its block's.
    ValueError if those given are of other matrices or layers, or no densities."""
    names = thinned_matrices(config, method)
    if given is None:
        return {name: list(densities["attention" if name in PROJECTIONS["attention"] else "mlp"]) for name in names}
    if set(given) != set(names):
        raise ValueError(
            f"density budget: it has matrices {', '.join(given)}; method {method} thins out {', '.join(names)}"
        )
    for name, values in given.items():
        if len(values) != config.num_hidden_layers or not all(0.0 < density <= 1.0 for density in values):
            raise ValueError(f"density budget: {name} needs {config.num_hidden_layers} densities in (0, 1]")
    return {name: list(given[name]) for name in names}


def thin_inputs(
    model: Decoder, thin: Thin, densities: Mapping[str, Sequence[float]], *, decode_only: bool
) -> list[ThinnedInput]:
    """Wrap the projections named in `densities` (one per layer each) and return them; `decode_only`: the prompt stays
    dense."""
    thinned: list[ThinnedInput] = []
    for layer in model.layers:
        for name, values in densities.items():
            holder = holder_of(model, layer, name)
            projection = getattr(holder, name)
            thinned.append(thin(layer, name, projection, values[layer], _counted(model, layer, name)))
            setattr(holder, name, thinned[-1])

    def follow_the_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token_ids, num_tokens = args[0] if args else kwargs["token_ids"], kwargs.get("num_tokens")
        for projection in thinned:
            projection.enabled = not decode_only or kwargs.get("phase", "prefill") == "decode"
            projection.valid = None if num_tokens is None else real_tokens(token_ids, num_tokens)

    model.sparsity_hook = model.register_forward_pre_hook(follow_the_pass, with_kwargs=True)
    return thinned


def prepare_kernels(model: Decoder) -> None:
    """Lay out weights for decode steps in kernels, where there are any for what is thinned out."""
    if model.can_fuse():
        parts = [[part for part, _ in model.mlp(layer).thinned_parts()] for layer in model.layers]
        num_bytes = sum(map(lay_out_for_kernels, parts))
        logger.info(f"input-major copies of the MLPs' first matrices take {num_bytes / 2**30:.2f} GiB more memory")
    elif model.device.type == "cuda":
        logger.info("no kernels for what is thinned out here: decode steps run as plain PyTorch, without graphs")


def _counted(model: Decoder, layer: int, name: str) -> Tensor | None:
    """Which inputs of a projection a rank counts; the inputs of others than output projections are whole everywhere."""
    if name == "down_proj":
        units = model.mlp(layer).units
        return None if units is None else units.counted
    if name != "o_proj" or model.attention(layer).units is None:
        return None
    attention = model.attention(layer)
    width = attention.num_units * attention.queries_per_group * attention.head_dim
    return torch.arange(width, device=model.device) < attention.num_real_channels


def restore_inputs(model: Decoder) -> None:
    """Unwrap what `thin_inputs` has wrapped."""
    for layer in model.layers:
        for block in BLOCKS:
            holder = model.half_block(layer, block).block
            for name in PROJECTIONS[block]:
                if isinstance(projection := getattr(holder, name), ThinnedInput):
                    setattr(holder, name, projection.projection)
    if model.sparsity_hook is not None:
        model.sparsity_hook.remove()
        model.sparsity_hook = None
