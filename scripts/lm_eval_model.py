"""Our engine as a model of lm-eval 0.4.13, registered as `dejavu-lab`: tokens and scores are ours, prompts and metrics
lm-eval's.

All ranks hold the same requests, and all of them have all answers in the end. lm-eval sees one process
(rank 0 of 1), since it would else split the requests a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import lm_eval.models  # noqa: F401  (registers lm-eval's own models, `hf` among them, which is done once and first)
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from loguru import logger

from modules.checkpoint.tokenizer import chat_text
from modules.requests import GenerationRequest
from modules.sampling import SamplingParams, mix_seed
from modules.scoring import Window
from scripts.answerer import Answerer, BatchSizes, Requests, Score
from scripts.model_loading import RunOptions
from scripts.run_records import selection_labels
from scripts.selection_options import SelectionOptions
from sparse_predictor.methods.registry import SparsePhases


@dataclass(frozen=True, kw_only=True)
class ModelArguments(SelectionOptions, RunOptions):
    """`--model_args` of lm-eval's command line."""

    sparse_phases: SparsePhases = "all"
    """Unlike `infer`'s: a log-likelihood never decodes."""


def parse_batch_size(value: str | int) -> int | None:
    """A number of rows; None for `auto` (and `auto:N`, of which the N is not needed). ValueError for anything else."""
    if str(value).partition(":")[0] == "auto":
        return None
    try:
        rows = int(value)
    except ValueError:
        rows = 0
    if rows < 1:
        raise ValueError(f"batch_size must be auto or a number of at least 1, got {value!r}")
    return rows


def usable_device(device: str) -> str:
    """lm-eval passes `cuda:0` where no device was given, on a machine without a GPU too."""
    if device.startswith("cuda") and torch.cuda.device_count() == 0:
        logger.info(f"device {device}: this machine has no GPU, so the CPU is taken")
        return "cpu"
    return device


def parse_arguments(given: Mapping[str, Any]) -> ModelArguments:
    """`--model_args` with the types of the flags they are named after; ValueError names what does not fit."""
    names = [field.name for field in fields(ModelArguments)]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"--model_args {unknown[0]}: unknown; allowed are {', '.join(sorted(names))}")
    if "model" not in given:
        raise ValueError("--model_args needs model=DIR (a converted folder, a Hugging Face folder or a hub id)")
    hints = get_type_hints(ModelArguments)
    return ModelArguments(**{name: _parse(name, value, hints[name]) for name, value in given.items()})


def _parse(name: str, value: Any, kind: Any) -> Any:
    """`value` as the type of its flag, or as the first of several that it fits."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for one in kinds:
        if get_origin(one) is Literal and value in get_args(one):
            return value
        if one is Path:
            return Path(str(value))
        if one is str or (one is bool and isinstance(value, bool)):
            return one(value)
        if (
            one in (int, float)
            and isinstance(value, int | float)
            and not isinstance(value, bool)
            and one(value) == value
        ):
            return one(value)
    named = [
        name
        for one in kinds
        if one is not NoneType
        for name in (map(str, get_args(one)) if get_origin(one) is Literal else [one.__name__])
    ]
    raise ValueError(f"--model_args {name}={value}: expected {' or '.join(named)}")


NAME = "dejavu-lab"
DEFAULT_NEW_TOKENS = 256  # lm-eval's own
SAMPLING = ("temperature", "top_k", "top_p")


def _window(context: Sequence[int], rest: Sequence[int], longest: int) -> Window:
    """`rest` is scored after `context`, of which only so much is kept that both are `longest` tokens."""
    token_ids = [*context, *rest][-longest:]
    return Window(token_ids, len(token_ids) - len(rest))


@register_model(NAME)
class EngineLM(TemplateLM):
    """A loaded model, dense or sparse, with the interface of lm-eval's tasks; `answerer` computes the answers."""

    def __init__(self, answerer: Answerer, *, seed: int = 0) -> None:
        super().__init__()
        self.answerer, self.loaded, self.seed = answerer, answerer.loaded, seed
        self.tokenizer = self.loaded.require_tokenizer("lm-eval's tasks are text")
        self._prefix = self.tokenizer.decode(self.prefix_token_id)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> EngineLM:
        """From lm-eval's `model=DIR,method=predictor,...`; see `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> EngineLM:
        """What lm-eval's command line calls. ValueError names an argument that is not ours, or a value that is not
        allowed."""
        given = {name: value for name, value in (additional_config or {}).items() if value is not None} | dict(arg_dict)
        given.pop("trust_remote_code", None)  # lm-eval's flag for data sets: this engine runs no code of a model's
        fixed, most = parse_batch_size(given.pop("batch_size", 1)), given.pop("max_batch_size", None)
        options = parse_arguments({**given, "device": usable_device(str(given.get("device", "auto")))})
        selection = options.selection(seed=options.seed)
        selection.check()
        loaded = options.load()
        sizes = BatchSizes(loaded, fixed=fixed, most=None if most is None else int(most))
        answerer = Answerer(loaded, sizes, quiet=options.quiet)
        answerer.attach(selection)
        return cls(answerer, seed=options.seed)

    @property
    def eot_token_id(self) -> int:
        """End of text: the tokenizer's EOS, else the first that the model has. ValueError if it has none."""
        eos = self.tokenizer.eos_token_id
        if eos is None and not self.loaded.eos_token_ids:
            raise ValueError(f"{self.loaded.directory}: neither the tokenizer nor the config names a BOS or EOS token")
        return self.loaded.eos_token_ids[0] if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context: BOS, or EOS where there is none."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """The model's context."""
        return self.loaded.model.config.max_position_embeddings

    @property
    def batch_sizes(self) -> dict[int, int]:
        """Those that were used; lm-eval prints the values."""
        return dict(enumerate(sorted(self.answerer.sizes.taken)))

    @property
    def tokenizer_name(self) -> str:
        """Names lm-eval's cache of prompts."""
        return self.loaded.model_id.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the text the model was trained on."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("this model's tokenizer has no chat template; leave out --apply_chat_template")
        return chat_text(self.tokenizer, chat_history, answer_follows=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, with the tokenizer's own special tokens unless told otherwise or the text has its BOS already."""
        if add_special_tokens is None and self._prefix and string.startswith(self._prefix):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        # verbose=False: texts beyond the context are cut below, with a message of our own.
        return list(self.tokenizer(string, verbose=False, **special)["input_ids"])

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[Score]:
        """[(log-probability, is greedy)] of `(context, continuation)` pairs."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **unused: Any
    ) -> list[Score]:
        longest = self.max_length + 1  # the last token conditions nothing
        cut = [len(context) + len(rest) - longest for _, context, rest in requests]
        if max(cut, default=0) > 0:
            num_cut = sum(excess > 0 for excess in cut)
            logger.warning(
                f"{num_cut} of {len(cut)} prompts do not fit the context of {self.max_length}: cut from the left"
            )
        windows = [_window(context, rest, longest) for _, context, rest in requests]
        scores = self._ask("log-likelihoods", windows)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-probability of whole texts, in windows of the context, cut as lm-eval's `hf` cuts them."""
        pieces: list[Window] = []
        owners: list[int] = []
        for idx, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, rest in map(make_disjoint_window, windows):
                pieces.append(_window(context, rest, self.max_length + 1))
                owners.append(idx)
        totals = [0.0] * len(requests)
        for idx, (logprob, _) in zip(owners, self._ask("texts", pieces), strict=True):
            totals[idx] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """The text that follows each context, before the first of its stop strings."""
        prepared = [self._generation_request(idx, *request.args) for idx, request in enumerate(requests)]
        texts = self._ask("generations", prepared, self.loaded.eos_token_ids)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval's results say of the model: how it was cut and thinned out, and what came of it."""
        model = self.loaded.model
        return {
            "model_name_in_records": self.loaded.model_id,
            "model_dtype": str(model.compute_dtype),
            **selection_labels(self.answerer.selection, model.config.num_hidden_layers),
            "achieved": self.answerer.achieved,
        }

    def _ask(self, title: str, requests: Requests, eos_token_ids: Sequence[int] = ()) -> list[Any]:
        return self.answerer.answer(title, requests, eos_token_ids) if requests else []

    def _generation_request(self, idx: int, context: str, options: dict[str, Any]) -> GenerationRequest:
        values: dict[str, Any] = dict(normalize_gen_kwargs(options, DEFAULT_NEW_TOKENS))
        stop, max_new_tokens = values.pop("until", []), values.pop("max_gen_toks")
        is_sampled = values.pop("do_sample", False)
        sampling = {name: values.pop(name) for name in SAMPLING if name in values}
        if values:
            name, value = next(iter(values.items()))
            raise ValueError(
                f"generation option {name}={value!r} is not supported; allowed are until, max_gen_toks, do_sample, "
                f"{', '.join(SAMPLING)}"
            )
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks {max_new_tokens} leaves no room for a prompt in a context of {self.max_length}"
            )
        seed = mix_seed(self.seed, idx) >> 1
        theirs = self.loaded.generation_defaults
        if is_sampled:
            sampling = {"temperature": 1.0, **(sampling or theirs.sampling or {}), "seed": seed}
        return GenerationRequest(
            prompt_token_ids=self.tok_encode(context)[-room:],
            max_new_tokens=max_new_tokens,
            sampling=SamplingParams(**(sampling if is_sampled else {}), **theirs.penalties),
            stop=tuple(text for text in ([stop] if isinstance(stop, str) else stop) if text),
            request_id=idx,
        )
