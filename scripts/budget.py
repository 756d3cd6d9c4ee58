"""Divide one budget of bytes over layers, and over heads and neurons: a file for `--density-budget`.

How much the divergence from the dense logits rises is measured for each block alone at a few densities, on calibration
text. Then bytes go where they buy most (`budgets.allocate`). Blocks that are sparse together do not just add up, so
mixtures of that allocation and the uniform one are measured as a whole, and the best one is kept. Thresholds are set in
that very run. On documents that none of this has seen, the uniform densities and the budget are measured once more.

Where inputs are thinned out, what a layer gets is divided over its matrices as TEAL does it (`greedy_paths`): with as
much for every layer that is TEAL's own allocation, and it is one of those tried.
"""

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor

from analysis.results import environment_stamp
from data.corpora import iter_documents, parse_corpus, token_documents
from modules.decoder import Decoder
from modules.scoring import check_window
from modules.sparsity import BLOCKS, Block, SparsityStats
from scripts.command_line import progress, run_stage
from scripts.model_loading import LoadedModel, ModelOptions
from scripts.written_text import self_writer
from sparse_predictor.budgets import STEP, Curve, DensityBudget, Place, Thresholds, allocate, as_lists, predictors_id
from sparse_predictor.cost import achieved, num_weights, weights_by_density
from sparse_predictor.methods.registry import InputMethod, Setting, find_method, is_thinning, thins_attention
from sparse_predictor.selection import (
    MethodName,
    Selection,
    attach_selection,
    remove_sparsity,
    set_thinning,
    set_threshold,
)
from sparse_predictor.sensitivity import GREEDY_TOKENS, GreedyPath, block_divergences, divergence_of, greedy_paths
from sparse_predictor.store import load_calibration
from sparse_predictor.thinning import PROJECTIONS, matrices_of
from sparse_predictor.thresholds import set_thresholds_in_run

MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the allocation in what is tried beside the uniform densities


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Divide one budget of bytes over layers, and over heads and neurons, by measured sensitivity."""

    method: MethodName
    """Whose densities."""
    predictors: Path | None = None
    """Directory written by scripts.train."""
    output: Path
    """The file for --density-budget."""
    corpus: str
    """wikitext[:SPLIT], c4[:SPLIT], a .txt, .jsonl or .jsonl.gz file, or self[:SEED]; the training side by default."""
    mlp_density: float = 0.5
    """Mean over layers that the budget holds."""
    head_density: float = 1.0
    """Below 1: heads share the budget with neurons, which begins with this mean of theirs."""
    densities: tuple[float, ...] = (0.85, 0.7, 0.5, 0.35, 0.2)
    """Densities each block is measured at; none gets less than the smallest. Of heads: the next numbers of groups."""
    tokens: int = 8192
    """Tokens of text that everything is measured on."""
    check_tokens: int = 8192
    """Tokens of later documents, on which the budget is compared with uniform densities."""
    window: int = 512
    """Tokens per window."""
    batch_size: int = 2
    """Windows run together, their log-probabilities in memory (thresholds are set in one pass over all windows)."""


def main(options: Options) -> DensityBudget:
    """Measure, divide, set thresholds, compare; writes and returns the budget."""
    check_options(options)
    selection = Selection(
        method=options.method,
        predictors=options.predictors,
        mlp_density=options.mlp_density,
        head_density=options.head_density,
        sparse_phases="all",
        seed=options.seed,
    )
    selection.check()
    loaded = options.load()
    model, uniform = loaded.model, uniform_densities(options, loaded.model)
    check_window(model, options.window)
    text, unseen = (windows.to(model.device) for windows in read_windows(loaded, options))
    attach_selection(model, selection)  # what is missing shows before anything is measured
    if selection.budget() is not None:
        logger.warning(
            f"{options.predictors} was trained for a budget: here, uniform densities come with stand-ins of others"
        )
    selection = replace(selection, head_density=1.0)  # from here on a budget says
    losses = measure_blocks(options, model, selection, list(uniform), text)
    allocation = divide(options, model, uniform, losses)
    tried = [Division(densities=mixture(uniform, allocation, share)) for share in MIXTURES]
    names = {"uniform": 0}
    if is_thinning(options.method):
        assert options.predictors is not None
        tried = [tried[0], *divide_layers(options, model, tried, text)]
        names["uniform_layers"] = 1
    size = options.batch_size
    found = [measure(model, selection, division, text, batch_size=size) for division in tried]
    best = min(range(len(tried)), key=lambda place: found[place].divergence)
    compared = {
        name: measure(model, selection, tried[place], unseen, found[place].thresholds, batch_size=size)
        for name, place in {**names, "budget": best}.items()
    }
    thresholds = found[best].thresholds
    owner = options.predictors if thresholds is not None else None
    of_mixtures = found[-len(MIXTURES) :]
    budget = DensityBudget(
        densities=tried[best].densities,
        matrices=tried[best].matrices,
        method=options.method if owner is not None else None,
        predictors=predictors_id(owner) if owner is not None else None,
        thresholds=thresholds,
        measured={
            "method": options.method,
            "divergence_of_one_block": {
                f"{layer}.{block}": {str(density): loss for density, loss in points.items()}
                for (layer, block), points in losses.items()
            },
            "allocation": allocation,
            "divergence_by_share_of_allocation": {
                str(share): one.divergence for share, one in zip(MIXTURES, of_mixtures, strict=True)
            },
            "divergence_of_uniform_densities": found[0].divergence,
            "share_of_allocation": (0.0, *MIXTURES)[best] if len(found) > len(MIXTURES) else MIXTURES[best],
            "other_documents": {name: one.to_record() for name, one in compared.items()},
            "text": {
                "corpus": parse_corpus(options.corpus, side="train").label,
                "tokens": text.numel(),
                "check_tokens": unseen.numel(),
                "window": options.window,
            },
            "command_line": shlex.join(sys.argv),
            "git_commit": environment_stamp()["commit"],
        },
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    budget.write(options.output)
    report(options, compared, is_uniform=best == 0)
    return budget


def check_options(options: Options) -> None:
    """ValueError for what could not be measured, before anything is loaded."""
    if options.method == "dense":
        raise ValueError("--method dense has no densities to divide; give one that skips something")
    least = {"tokens": options.window, "check_tokens": options.window, "window": 2}
    for name, value in least.items():
        if getattr(options, name) < value:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {value}, got {getattr(options, name)}")
    if not options.densities or not all(0.0 < density < 1.0 for density in options.densities):
        raise ValueError(f"--densities: give some in (0, 1), got {options.densities}")
    if options.mlp_density < min(options.densities):
        raise ValueError(f"--mlp-density {options.mlp_density} lies below all --densities {options.densities}")


def uniform_densities(options: Options, model: Decoder) -> dict[Block, list[float]]:
    """The densities that the budget begins with, of the blocks that take part."""
    num_layers = model.config.num_hidden_layers
    found: dict[Block, list[float]] = {"mlp": [options.mlp_density] * num_layers}
    if thins_attention(options.method):
        found["attention"] = [options.mlp_density] * num_layers
    elif options.head_density < 1.0:
        found["attention"] = [options.head_density] * num_layers
    return found


def grid_of(options: Options, model: Decoder, block: Block) -> list[float]:
    """Densities a block is measured at; of heads those that a number of groups has."""
    if block == "mlp" or thins_attention(options.method):
        return sorted(set(options.densities))
    groups = model.config.num_key_value_heads
    numbers = {min(groups - 1, max(1, round(density * groups))) for density in options.densities if groups > 1}
    if not numbers:
        raise ValueError("--head-density: this model has one key-value group, which cannot be divided")
    return [number / groups for number in sorted(numbers)]


def read_windows(loaded: LoadedModel, options: Options) -> tuple[Tensor, Tensor]:
    """int64 [B, window] to measure on, and of later documents to check on."""
    wanted = [options.tokens, options.check_tokens]
    writer = self_writer(loaded, quiet=options.quiet, max_tokens=2 * sum(wanted))
    documents = iter_documents(options.corpus, side="train", self_writer=writer)
    token_ids = token_documents(loaded.tokenizer, documents, vocab_size=loaded.model.config.vocab_size)
    first, second = (_windows(token_ids, number, options) for number in wanted)
    return first, second


def _windows(documents: Iterator[list[int]], num_tokens: int, options: Options) -> Tensor:
    count = num_tokens // options.window
    found: list[int] = []
    for document in documents:
        found += document
        if len(found) >= count * options.window:
            return torch.tensor(found[: count * options.window]).view(count, options.window)
    raise ValueError(
        f"--corpus {options.corpus} is too short for {options.tokens} tokens to measure on and {options.check_tokens} "
        "of other documents to check on; give fewer, or more text"
    )


def measure_blocks(
    options: Options, model: Decoder, selection: Selection, blocks: Sequence[Block], text: Tensor
) -> dict[Place, dict[float, float]]:
    """KL of each block alone at each density of its grid."""
    grids = {block: grid_of(options, model, block) for block in blocks}
    total = len(BLOCKS) * model.config.num_hidden_layers * len(text.split(options.batch_size))
    with progress((), "measuring blocks", quiet=options.quiet, total=total, unit="block") as bar:
        return block_divergences(model, selection, grids, text, lambda: bar.update(1), batch_size=options.batch_size)


def divide(
    options: Options, model: Decoder, uniform: dict[Block, list[float]], losses: dict[Place, dict[float, float]]
) -> dict[Block, list[float]]:
    """As many bytes as the uniform densities have, where they buy most."""
    weights = {block: weights_by_density(model.config, options.method, block) for block in uniform}
    curves = {place: Curve(tuple(points.items()), weights[place[1]]) for place, points in losses.items()}
    total = sum(density * weights[block] for block, densities in uniform.items() for density in densities)
    of_heads = STEP if thins_attention(options.method) else 1.0 / model.config.num_key_value_heads
    return as_lists(allocate(curves, total, {"mlp": STEP, "attention": of_heads}), model.config.num_hidden_layers)


def mixture(
    uniform: dict[Block, list[float]], allocation: dict[Block, list[float]], share: float
) -> dict[Block, list[float]]:
    """Between the two: as many bytes."""
    return {
        block: [even + share * (given - even) for even, given in zip(uniform[block], allocation[block], strict=True)]
        for block in uniform
    }


@dataclass(frozen=True, kw_only=True)
class Division:
    """One density per layer by block, and by matrix where inputs are thinned out by a greedy allocation."""

    densities: dict[Block, list[float]]
    matrices: dict[str, list[float]] | None = None


def divide_layers(options: Options, model: Decoder, divisions: Sequence[Division], text: Tensor) -> list[Division]:
    """Each division with what it gives a layer divided over the layer's matrices, greedily."""
    method = find_method(options.method)
    assert options.predictors is not None and isinstance(method, InputMethod)
    sizes = {block: num_weights(model.config, block) for block in divisions[0].densities}
    total = sum(sizes.values())
    targets = [
        [sum(sizes[block] * values[layer] for block, values in one.densities.items()) / total for layer in model.layers]
        for one in divisions
    ]
    paths = greedy_paths(
        model,
        method.make(Setting(model=model, densities={}, calibration=load_calibration(options.predictors))),
        matrices_of(model.config, method.blocks),
        [min(target[layer] for target in targets) for layer in model.layers],
        text[: max(1, GREEDY_TOKENS // options.window)],
    )
    found = []
    for target in targets:
        of_layers = [path.densities(share) for path, share in zip(paths, target, strict=True)]
        matrices = {name: [of_layer[name] for of_layer in of_layers] for name in paths[0].sizes}
        found.append(Division(densities=means_by_weights(paths, matrices), matrices=matrices))
    return found


def means_by_weights(paths: Sequence[GreedyPath], matrices: dict[str, list[float]]) -> dict[Block, list[float]]:
    """The density per layer of each block, from those of its matrices."""
    found: dict[Block, list[float]] = {}
    for block in BLOCKS:
        names = [name for name in matrices if name in PROJECTIONS[block]]
        if names:
            found[block] = [
                round(
                    sum(path.sizes[name] * matrices[name][layer] for name in names)
                    / sum(path.sizes[name] for name in names),
                    9,
                )
                for layer, path in enumerate(paths)
            ]
    return found


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A sparse run: divergence in nats per token, the mean density of MLPs, shares of bytes read, and the thresholds of
    MLPs or matrices, if they have any."""

    divergence: float
    mlp_density: float
    bytes_read_share: float
    layer_bytes_share: float
    thresholds: Thresholds | None

    def to_record(self) -> dict[str, float]:
        """The numbers."""
        return {name: value for name, value in asdict(self).items() if name != "thresholds"}


def measure(
    model: Decoder,
    selection: Selection,
    division: Division,
    token_ids: Tensor,
    thresholds: Thresholds | None = None,
    *,
    batch_size: int,
) -> Measured:
    """Run at these densities; `thresholds` None: set them in this run, where the method has any. Leaves it dense."""
    budget = DensityBudget(densities=division.densities, matrices=division.matrices)
    chosen, used = replace(selection, density_budget=budget), thresholds

    def attach() -> None:
        nonlocal used
        attach_selection(model, chosen)
        if thresholds is None:
            used = set_thresholds_in_run(model, division.densities["mlp"], token_ids)
            model.stats = SparsityStats()
        elif isinstance(thresholds, dict):
            set_thinning(model, thresholds)
        else:
            for layer, threshold in enumerate(thresholds):
                if (selector := model.mlp(layer).selector) is not None:
                    set_threshold(selector, threshold)

    divergence = divergence_of(model, attach, token_ids, batch_size=batch_size)
    assert model.stats is not None
    done = achieved(model, chosen, model.stats)
    remove_sparsity(model)
    shares = {name: done[name] for name in ("mlp_density", "bytes_read_share", "layer_bytes_share")}
    return Measured(divergence=divergence, thresholds=used, **shares)


def report(options: Options, compared: dict[str, Measured], *, is_uniform: bool) -> None:
    """What was found on documents that neither the densities nor the thresholds have seen."""
    for name, found in compared.items():
        logger.info(
            f"{name.replace('_', ' ')}: divergence {found.divergence:.4f} nats per token, MLP density "
            f"{found.mlp_density:.3f}, {found.bytes_read_share:.1%} of the MLPs' bytes, "
            f"{found.layer_bytes_share:.1%} of the layers'"
        )
    if is_uniform:
        logger.warning(f"no allocation tried is better than uniform densities: {options.output} holds these")
    elif compared["budget"].divergence >= compared["uniform"].divergence:
        logger.warning(f"on other documents uniform densities are better: {options.output} does not help here")
    logger.info(f"budget in {options.output}")


if __name__ == "__main__":
    run_stage(main, Options)
