"""Continue the prompts of a JSON-lines file, dense or sparse, in one process or on many; one JSON line per answer.

Input lines are described in `data.prompts`, output lines in `data.completions`. A request's own options win over the
flags; the flags win over the model's generation_config.json, whose penalties (repetition_penalty, no_repeat_ngram_size,
bad_words_ids) always apply. Under torchrun the first rank alone reads the prompts and writes the answers.
"""

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from data.completions import CompletionRecord, CompletionWriter, check_output, request_identity
from data.files import require_file
from data.prompts import check_option, read_prompts, seed_of
from modules.requests import GenerationRequest, GenerationResult, GenerationTimings
from modules.sampling import SamplingParams
from pipeline_parallel.engine import generate_on_mesh
from pipeline_parallel.launch import current_launch
from scripts.command_line import progress, run_stage
from scripts.model_loading import LoadedModel, RunOptions, chat_token_ids, tokenizer_fingerprint
from scripts.run_records import hash_of, selection_labels, sources_of
from scripts.selection_options import SelectionOptions

GREEDY = {"temperature": 0.0, "top_k": -1, "top_p": 1.0}


@dataclass(frozen=True, kw_only=True)
class Options(SelectionOptions, RunOptions):
    """Continue the prompts of a JSON-lines file, dense or sparse."""

    input: Path
    """JSON lines: prompt or prompt_token_ids; optionally id and the request's own options."""
    output: Path
    """JSON lines, one per answer; a pipe or /dev/stdout gets each as it is finished."""
    max_new_tokens: int = 64
    """Tokens to generate at most; 0 only scores the prompt (with --echo)."""
    temperature: float | None = None
    """0: greedy. Not given: as generation_config.json says, else greedy."""
    top_k: int | None = None
    """Sample from the k likeliest tokens; -1 or 0: all."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together reach this probability."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, names of special tokens among them; the text ends before them."""
    echo: bool = False
    """Put the prompt's log-probabilities before the answer's."""
    chat: bool = False
    """Each prompt is a user's message: put it into the model's chat template."""
    resume: bool = False
    """Keep the answers that the output already holds, if the same was asked with the same options, and do the rest."""
    overwrite: bool = False
    """Throw away the answers that the output already holds."""
    warmup: bool = False
    """Set everything up (libraries, CUDA graphs) before the first request instead of with it."""


def main(options: Options) -> GenerationTimings:
    """Answer every prompt that has no answer yet; returns where the time went."""
    given = {
        name: check_option(name, value, "--" + name.replace("_", "-"))
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "stop")
        if (value := getattr(options, name)) is not None
    }
    options.selection(seed=options.seed).check()
    lines: list[dict[str, Any]] = []
    how: dict[str, Any] = {"resume": options.resume, "overwrite": options.overwrite}
    if current_launch().rank == 0:  # before the model is loaded, which may take minutes
        lines = read_prompts(require_file(options.input, "--input"))
        check_output(options.output, **how, prompts_path=options.input)
    loaded = options.load()
    stats = options.attach(loaded.model, seed=options.seed)
    mesh = loaded.mesh
    defaults = _defaults(given, loaded)
    settings = _settings(options, defaults, loaded)
    prompts = {line["id"]: line.get("prompt") for line in lines}
    requests = mesh.from_rank_0(lambda: [_request(line, options, defaults, loaded) for line in lines])
    with ExitStack() as stack:
        # Opened after all prompts were prepared: what is wrong with one must not cost the answers already there.
        writer = None
        if mesh.rank == 0:
            identities = {str(one.request_id): _identity(prompts[one.request_id], one) for one in requests}
            writer = CompletionWriter(options.output, prompts, **how, settings=settings, identities=identities)
            stack.enter_context(writer)
        unanswered = mesh.from_rank_0(lambda: set(writer.pending) if writer else set())
        pending = [request for request in requests if request.request_id in unanswered]
        if len(pending) < len(requests):
            logger.info(f"{len(requests) - len(pending)} of {len(requests)} prompts are answered already")
        bar = stack.enter_context(progress((), "prompts", quiet=options.quiet, total=len(pending), unit="prompt"))

        def finish(request_idx: int, result: GenerationResult) -> None:
            assert writer is not None
            request_id: Any = pending[request_idx].request_id
            writer.write(
                CompletionRecord(
                    id=request_id,
                    prompt=prompts[request_id],
                    text=result.text or "",
                    token_ids=result.token_ids,
                    logprobs=[*(result.prompt_logprobs or []), *result.logprobs],
                    finish_reason=result.finish_reason,
                    error=result.error,
                    num_prompt_tokens=result.num_prompt_tokens,
                    mlp_density=result.mlp_density,
                    head_density=result.head_density,
                )
            )
            bar.update(1)

        timings = GenerationTimings()
        generate_on_mesh(
            loaded.model,
            mesh,
            pending,
            batch_size=options.batch_size,
            eos_token_ids=loaded.eos_token_ids,
            decode=loaded.decode,
            on_finish=finish,
            timings=timings,
            warm_up=options.warmup,
        )
    failed = f", {writer.num_failed} of all {len(requests)} failed" if writer is not None and writer.num_failed else ""
    logger.info(
        f"{len(pending)} answers written to {options.output}{failed}: prefill {timings.prefill_tokens_per_s:.1f} "
        f"tokens/s, decode {timings.decode_tokens_per_s:.1f} tokens/s"
    )
    if options.method != "dense":
        stats = stats.summed(loaded.model.config.num_hidden_layers, mesh.sum)
        calls = ", ".join(f"{number} {path}" for path, number in stats.executions().items())
        logger.info(f"method {options.method}: block calls by path: {calls}")
    if writer is not None and writer.num_failed == len(requests):
        raise ValueError(
            f"{options.output}: all {len(requests)} prompts failed, the first because: {writer.first_error}"
        )
    return timings


def _settings(options: Options, defaults: dict[str, Any], loaded: LoadedModel) -> dict[str, Any]:
    """What the answers depend on, whatever the cut and the batch size (a collective call)."""
    selection = options.selection(seed=options.seed)
    penalties = dict(loaded.generation_defaults.penalties)
    if "bad_words_ids" in penalties:  # there may be thousands
        penalties["bad_words_ids"] = hash_of(repr(penalties["bad_words_ids"]).encode())
    return {
        "model": loaded.model_id,
        "dtype": str(loaded.model.compute_dtype).removeprefix("torch."),
        **selection_labels(selection, loaded.model.config.num_hidden_layers),
        **defaults,
        **penalties,
        **{name: getattr(options, name) for name in ("seed", "echo", "chat")},
        "eos_token_ids": list(loaded.eos_token_ids),
        "tokenizer": tokenizer_fingerprint(loaded.directory),
        **{name: found for name, found in sources_of(loaded, selection).items() if found is not None},
    }


def _request(
    line: dict[str, Any], options: Options, defaults: dict[str, Any], loaded: LoadedModel
) -> GenerationRequest:
    """What a line of the input asks, with what the command line and the model say where it says nothing."""
    values = {**defaults, "seed": seed_of(line["id"], options.seed), **line}
    if values["stop"]:
        loaded.require_tokenizer(f"request {line['id']!r} has stop strings")
    return GenerationRequest(
        prompt_token_ids=_token_ids(line, loaded, chat=options.chat),
        max_new_tokens=values["max_new_tokens"],
        sampling=SamplingParams(
            **{name: values[name] for name in ("temperature", "top_k", "top_p", "seed")},
            min_p=defaults.get("min_p", 0.0),
            **loaded.generation_defaults.penalties,
        ),
        stop=values["stop"],
        echo=options.echo,
        request_id=line["id"],
    )


def _token_ids(line: dict[str, Any], loaded: LoadedModel, *, chat: bool) -> list[int]:
    if "prompt_token_ids" in line:
        return line["prompt_token_ids"]
    tokenizer = loaded.require_tokenizer(f"request {line['id']!r} is text")
    if chat:
        try:
            return chat_token_ids(tokenizer, line["prompt"])
        except ValueError as error:
            raise ValueError(f"request {line['id']!r}: {error}") from error
    # verbose=False: a prompt longer than the context gets an answer that says so, not a warning as well.
    return list(tokenizer(line["prompt"], verbose=False)["input_ids"])


def _identity(prompt: str | None, request: GenerationRequest) -> str:
    """All that determines an answer, but for what all answers have in common (`_settings`)."""
    options = asdict(request)
    token_ids = options.pop("prompt_token_ids")
    del options["request_id"]
    return request_identity(prompt, token_ids, options)


def _defaults(given: dict[str, Any], loaded: LoadedModel) -> dict[str, Any]:
    """The value of every option that a request leaves out; `given` on the command line."""
    theirs = loaded.generation_defaults.sampling
    if theirs is None or any(name in given for name in GREEDY):
        return {**GREEDY, **given}
    logger.info(f"sampling as the model's generation_config.json says: {theirs} (--temperature 0 for greedy)")
    return {**theirs, **given}


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
