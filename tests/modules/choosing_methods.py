"""Every method of choosing heads and neurons, on tiny models and without training; importing this is cheap."""

from collections.abc import Callable

import torch

from modules.decoder import Decoder
from modules.feed_forward import unit_norms
from modules.sparsity import BLOCKS, Block, Selector, SparsityStats
from sparse_predictor.methods.cats import CatsSelector
from sparse_predictor.methods.griffin import PromptSelector
from sparse_predictor.methods.learned_predictor import PredictorSelector
from sparse_predictor.methods.oracle import OracleSelector
from sparse_predictor.methods.random import RandomSelector
from sparse_predictor.methods.static import StaticSelector
from sparse_predictor.predictor import Predictor, Rule
from sparse_predictor.selection import SparsePhaseGate, apply_sparsity

Method = Callable[[int, Block, Decoder], Selector | None]


def num_units(model: Decoder, block: Block) -> int:
    return model.config.intermediate_size if block == "mlp" else model.config.num_key_value_heads


def oracle(layer: int, block: Block, model: Decoder) -> Selector:
    norms = unit_norms(model.mlp(layer)) if block == "mlp" else None
    return SparsePhaseGate(OracleSelector(norms, 0.5, num_units(model, block)))


def static(layer: int, block: Block, model: Decoder) -> Selector:
    return StaticSelector((torch.arange(num_units(model, block)) + layer) % 2 == 0)


def draw(layer: int, block: Block, model: Decoder) -> Selector:
    return RandomSelector(0.5, num_units(model, block), seed=3)


def griffin(layer: int, block: Block, model: Decoder) -> Selector | None:
    return PromptSelector(0.5, num_units(model, block), scores_text=True) if block == "mlp" else None


def cats(layer: int, block: Block, model: Decoder) -> Selector | None:
    return SparsePhaseGate(CatsSelector(model.mlp(layer), 0.05)) if block == "mlp" else None


def predicted(rule: Rule, lookahead: int, margin: float = 0.0) -> Method:
    """Random predictors. `margin`: no score comes closer to the threshold, nor one group's to another's."""

    def make(layer: int, block: Block, model: Decoder) -> Selector:
        generator = torch.Generator().manual_seed(2 * layer + (block == "mlp"))
        count, is_mlp = num_units(model, block), block == "mlp"
        densities = (0.5,) if is_mlp else ()
        predictor = Predictor(model.config.hidden_size, count, 8, densities=densities, standin_rank=4 if is_mlp else 0)
        for name in ("first", "second", "bias", "standin_in", "standin_out", "standin_bias"):
            getattr(predictor, name).normal_(generator=generator)
        predictor.standin_out.mul_(0.02)
        if margin:
            predictor.first.mul_(0.02)
            steps = torch.randperm(count, generator=generator) - count // 2 + 0.5
            predictor.bias.copy_(2 * margin * (steps.sign() if is_mlp else steps))
        own = PredictorSelector(
            predictor.to(model.device, model.compute_dtype),
            0.5,
            rule if is_mlp else "topk",
            lookahead * (layer >= lookahead),
        )
        return SparsePhaseGate(own)

    return make


def mixed(layer: int, block: Block, model: Decoder) -> Selector | None:
    """Attention of one layer has no kernels of its own; what looks ahead over it must find its input all the same."""
    return (oracle if (layer, block) == (1, "attention") else predicted("threshold", 1))(layer, block, model)


METHODS: dict[str, Method | None] = {
    "dense": None,
    "oracle": oracle,
    "static": static,
    "random": draw,
    "griffin": griffin,
    "cats": cats,
    "threshold": predicted("threshold", 0),
    "threshold-ahead": predicted("threshold", 1),
    "threshold-2-ahead": predicted("threshold", 2),
    "topk": predicted("topk", 0),
    "topk-ahead": predicted("topk", 1),
    "mixed": mixed,
}


def attach(model: Decoder, method: Method | None) -> SparsityStats:
    """Heads and neurons of every layer; fresh statistics."""
    found = {(layer, block): method(layer, block, model) for layer in model.layers for block in BLOCKS if method}
    return apply_sparsity(model, {place: selector for place, selector in found.items() if selector is not None})


def counted(stats: SparsityStats) -> dict[tuple[int, Block], tuple[int, int]]:
    return {place: (int(found.active), int(found.total)) for place, found in stats.blocks.items()}
