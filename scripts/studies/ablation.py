"""The controlled experiment: small models that differ in activation, positions and norm alone, and the study on each.

2 x 2 x 2 models of equal size, trained from scratch on the same text, windows and order, with the same learning rates;
what two models have in common starts from the same numbers. The ReLU MLP has no gate and is 1.5 times as wide.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from loguru import logger

from analysis.results import Record
from analysis.studies import FACTORS
from modules.checkpoint.load import build_on_meta, load_model
from modules.config import ModelConfig
from modules.families.registry import in_family
from modules.specs import Dense, Grouped, LayerSpec, Rope
from pipeline_parallel.mesh import ParallelMesh
from scripts.command_line import run_stage
from scripts.model_loading import resolve_device
from scripts.run_records import RecordFile
from scripts.studies.drift_records import DriftSettings, drift_records
from scripts.studies.drift_sources import check_calibration
from scripts.studies.trained_models import (
    TrainedStudyOptions,
    TrainingText,
    complete_records,
    keep_records,
    prepare_text,
    score,
    train_once,
    training_identity,
)
from scripts.studies.training import initialised_model

NAME = "ablation"
VARIANTS = {
    "-".join(level.split()[0] for level in levels): dict(zip(FACTORS, levels, strict=True))
    for levels in itertools.product(*FACTORS.values())
}


@dataclass(frozen=True, kw_only=True)
class Options(DriftSettings, TrainedStudyOptions):
    """Train small models that differ in one thing only, and run the drift study on each.

    Safe to run again, and beside another run with other --variants or --seeds: what is there is kept.
    """

    variants: tuple[str, ...] = tuple(VARIANTS)
    """Which models: activation-positions-norm."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of initial weights and order of the text; one model of each variant a seed."""
    hidden_size: int = 256
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    intermediate_size: int = 704
    """Of the gated MLP."""
    vocab_size: int = 8192
    """Of the tokenizer, which is trained on the text."""
    window: int = 512
    """Tokens per window, and the models' context."""
    train_tokens: int = 20_971_520
    batch_windows: int = 64
    learning_rate: float = 3e-3


def main(options: Options) -> list[Record]:
    """Train and study what is not there yet; returns the records of all that was asked for."""
    check_options(options)
    plan = options.text_plan(vocab_size=options.vocab_size)
    text = prepare_text(options.output_dir / "text", plan, quiet=options.quiet)
    output = RecordFile(options.output, ParallelMesh.single(resolve_device(options.device)), resume=True)
    return [
        record
        # Seed by seed: an interrupted run leaves whole blocks of the experiment.
        for seed in options.seeds
        for variant in options.variants
        for record in run_model(options, text, output, variant, seed)
    ]


def check_options(options: Options) -> None:
    """ValueError for flags that no run could follow, before anything is read."""
    options.check()
    if unknown := [name for name in options.variants if name not in VARIANTS]:
        raise ValueError(f"--variants {' '.join(unknown)}: choose from {', '.join(VARIANTS)}")
    if not options.variants or not options.seeds or min(options.seeds) < 0:
        raise ValueError("--variants and --seeds: give at least one each; seeds are 0 or more")
    if options.num_attention_heads < 1 or options.hidden_size % (2 * options.num_attention_heads):
        raise ValueError(
            f"--hidden-size {options.hidden_size} must be an even number of channels for each of "
            f"--num-attention-heads {options.num_attention_heads}"
        )
    options.training(0)
    if "distance" in options.parts:
        check_calibration(options.calibration_tokens, options.window, options.hidden_size)


def variant_config(options: Options, levels: Mapping[str, str], vocab_size: int) -> ModelConfig:
    """One of the eight models, as the family that has this mixture, if one has."""
    is_gated, is_rotary = levels["activation"] == "silu gated", levels["positions"] == "rotary"
    layer = LayerSpec(
        attention=Grouped(
            num_attention_heads=options.num_attention_heads,
            num_key_value_heads=options.num_attention_heads,
            head_dim=options.hidden_size // options.num_attention_heads,
            rope=Rope() if is_rotary else None,
        ),
        feed_forward=Dense(
            intermediate_size=options.intermediate_size if is_gated else options.intermediate_size * 3 // 2,
            gated=is_gated,
            activation="silu" if is_gated else "relu",
        ),
    )
    return in_family(
        ModelConfig(
            model_type="decoder",
            vocab_size=vocab_size,
            hidden_size=options.hidden_size,
            layers=(layer,) * options.num_hidden_layers,
            max_position_embeddings=options.window,
            norm="rms" if levels["norm"] == "rms" else "layer",
            norm_eps=1e-5,
            position_embedding_offset=None if is_rotary else 2,
            tie_word_embeddings=True,
            word_embed_proj_dim=options.hidden_size,
            bos_token_id=0,
            eos_token_ids=(0,),
        )
    )


def run_model(options: Options, text: TrainingText, output: RecordFile, variant: str, seed: int) -> list[Record]:
    """Train one model, unless it is there, and append its records, unless they are."""
    device = resolve_device(options.device)
    config = variant_config(options, VARIANTS[variant], vocabulary_size(text))
    training = options.training(seed)
    identity = training_identity(training, text, config=config.version_1_hash())
    folder = options.output_dir / f"{variant}-{seed}"
    dtype = options.study_dtype()
    labels: dict[str, Any] = {
        "model": variant,
        **VARIANTS[variant],
        "seed": seed,
        "dtype": str(dtype).removeprefix("torch."),
    }
    settings = options.settings()
    made = {"training": identity, "study": asdict(settings)}
    if (finished := complete_records(output, NAME, labels, made)) is not None:
        logger.info(f"{variant}, seed {seed}: its records are in {options.output}")
        return finished
    train_once(
        lambda: initialised_model(config, seed=seed, device=device),
        folder,
        text,
        training,
        identity,
        title=f"training {variant}, seed {seed}",
        quiet=options.quiet,
    )
    # From the file in either case, so that an interrupted run that is continued has the records of one that was not.
    model = load_model(folder, dtype=dtype, device=device)
    records = drift_records(
        model,
        text.calibration,
        text.held_out,
        labels=labels,
        name=NAME,
        settings=settings,
        quiet=options.quiet,
    )
    loss, perplexities = score(NAME, labels, model, text, options.test_corpus, num_parameters=num_parameters(config))
    return keep_records(output, [*records, *perplexities, loss], made)


def vocabulary_size(text: TrainingText) -> int:
    """Of the tokenizer that was trained, which a small text may have left smaller than was asked for."""
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(str(text.tokenizer_dir)))


def num_parameters(config: ModelConfig) -> int:
    """All of them, embeddings included; a tied head counts once."""
    return sum(parameter.numel() for parameter in build_on_meta(config).parameters())


if __name__ == "__main__":
    run_stage(main, Options, shares_output=True)
