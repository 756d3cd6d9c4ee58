"""Thinning out the inputs of matmuls: what every method that does it shares.

An entry of a matmul's input that is small is dropped, and its column of the weights need not be read. The keys' and
values' matrices are thinned out like any other: cached keys and values are then those of the thinned inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn

from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.forward_pass import real_tokens
from modules.linear import Linear
from modules.sparsity import BLOCKS, Block
from modules.thinned_input import ThinnedInput, lay_out_for_kernels

PROJECTIONS: dict[Block, tuple[str, ...]] = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
# Of each among a layer's matrices, from the front or the end: there may be no gate, or the MLP's alone.
PLACES = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "o_proj": 3, "gate_proj": -3, "up_proj": -2, "down_proj": -1}
OUTPUT_PROJECTIONS = ("o_proj", "down_proj")  # held unit-major, [in, out]; the inputs are those of a rank's own units

# (layer, name, projection, density, inputs that are counted here) -> the projection, its input thinned out
Thin = Callable[[int, str, Linear, float, Tensor | None], ThinnedInput]


def matrices_of(config: ModelConfig, blocks: Sequence[Block] = BLOCKS) -> list[str]:
    """Names of a layer's matrices, or of those of some of its blocks."""
    return [name for block in blocks for name in PROJECTIONS[block] if name != "gate_proj" or config.gated_mlp]


def block_of(model: Decoder, layer: int, name: str) -> nn.Module:
    """The block that has a projection."""
    return model.half_block(layer, "attention" if name in PROJECTIONS["attention"] else "mlp").block


def projection_of(model: Decoder, layer: int, name: str) -> nn.Module:
    """A projection by its name."""
    found = getattr(block_of(model, layer, name), name)
    assert isinstance(found, nn.Module)
    return found


def norms_of_inputs(model: Decoder, layer: int, name: str) -> Tensor:
    """||W[:, i]||: the L2 norm of what entry i of a projection's input is multiplied by, float32 [in]."""
    linear = projection_of(model, layer, name)
    assert isinstance(linear, Linear)
    weight = linear.dequantised().float()
    return torch.linalg.vector_norm(weight, dim=-1 if linear.rows_are == "inputs" else 0)


def thinned_by_name(model: Decoder) -> dict[str, list[ThinnedInput]]:
    """What is thinned out in the layers that are here, by name of the matrix."""
    found: dict[str, list[ThinnedInput]] = {}
    for name in matrices_of(model.config):
        parts = [part for layer in model.layers if isinstance(part := projection_of(model, layer, name), ThinnedInput)]
        if len(parts) == len(model.layers):
            found[name] = parts
    return found


def densities_of_matrices(
    config: ModelConfig,
    method: str,
    names: Sequence[str],
    densities: Mapping[Block, Sequence[float]],
    given: Mapping[str, Sequence[float]] | None,
) -> dict[str, list[float]]:
    """Of every matrix `names` that a method thins out, one density per layer: those given (by a budget), else its
    block's. ValueError if those given are of other matrices or layers, or no densities."""
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
            holder = block_of(model, layer, name)
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
        units = model.mlp(layer).unit_shard
        return None if units is None else units.counted
    if name != "o_proj" or model.attention(layer).unit_shard is None:
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
