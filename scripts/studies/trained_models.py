"""What ablation and relufy do with a model: read its text, train it once and keep it, score it.

The text is of corpora mixed, split by document, tokenised once and kept beside the models.
Documents of all corpora are put in one seeded order. Every 32nd is held out, by turns for calibration and for testing;
the rest is the training stream. The tokenizer is a model's own, or a byte-level BPE trained on the training documents.
"""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from loguru import logger
from torch import Tensor

from analysis.results import Record, make_record
from data.bootstrap import Resampling
from data.corpora import iter_documents, parse_corpus
from data.files import changed_files, differences, only_writer, read_json, replace_file, sha256_of, write_json
from modules.checkpoint.manifest import MANIFEST_FILE, Manifest
from modules.checkpoint.tokenizer import MAIN_FILES, TOKENIZER_FILES, open_tokenizer
from modules.checkpoint.write import write_model
from modules.decoder import Decoder
from modules.scoring import token_logprobs
from scripts.collect import file_fingerprint
from scripts.command_line import progress
from scripts.model_loading import Dtype, resolve_device, resolve_dtype
from scripts.run_records import RecordFile, hash_of
from scripts.studies.training import TrainingOptions, train_model

HELD_OUT_EVERY = 32
# The tokenizer is trained on so much of the text, which is enough for its statistics.
TOKENIZER_CHARACTERS = 20_000_000
END_OF_TEXT = "<|endoftext|>"
DOCUMENTS_AT_ONCE = 4096
STREAMS = ("train", "calibration", "held_out", "other")


@dataclass(frozen=True, kw_only=True)
class TextPlan:
    """What to read. `corpora`: specs; `other_corpus`: a text of another kind, for testing only. `vocab_size` None: the
    tokenizer in `tokenizer_dir`, else one of so many tokens is trained. Tokens of each part: at most so many of
    training text, and just so many of the others, in windows of `window`."""

    corpora: tuple[str, ...]
    other_corpus: str
    vocab_size: int | None = None
    tokenizer_dir: str | None = None
    train_tokens: int
    calibration_tokens: int
    test_tokens: int
    window: int

    def check(self) -> None:
        """ValueError for sizes that no text could have; nothing is read yet."""
        for name in ("calibration_tokens", "test_tokens"):
            count = getattr(self, name)
            if count < 2 * self.window or count % self.window:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be two or more whole windows of {self.window} tokens; got {count}"
                )

    def identity(self) -> str:
        """Twelve hex digits of this plan and of what its files hold, wherever they lie; ValueError for text that only a
        model writes, or that is too much to be mixed."""
        files = {}
        for spec in (*self.corpora, self.other_corpus):
            corpus = parse_corpus(spec, side="train")
            if corpus.kind == "self":
                raise ValueError(
                    f"corpus {spec!r}: small models are trained on a file; write one with python -m scripts.write_text"
                )
            if spec in self.corpora and corpus.label == "c4:train":
                raise ValueError(f"corpus {spec!r}: all documents are read and mixed; give c4:validation, or a file")
            files[spec] = corpus.label if corpus.path is None else file_fingerprint(corpus.path)
        named = {**asdict(self), "corpora": [files[spec] for spec in self.corpora]}
        named["other_corpus"] = files[self.other_corpus]
        if self.tokenizer_dir is not None:
            contents = [(path.name, hash_of(path.read_bytes())) for path in tokenizer_files(Path(self.tokenizer_dir))]
            named["tokenizer_dir"] = hash_of(repr(contents).encode())
        return hash_of(json.dumps(named, sort_keys=True).encode())


@dataclass(frozen=True, kw_only=True)
class TrainingText:
    """`train`: a stream of token ids, int32 [N]; `calibration`, `held_out` (the same kind of text) and `other`: int64
    [W, T]. `identity` names the text."""

    train: Tensor
    calibration: Tensor
    held_out: Tensor
    other: Tensor
    tokenizer_dir: Path
    identity: str

    @property
    def tokenizer_files(self) -> list[Path]:
        """What a checkpoint gets copies of."""
        return tokenizer_files(self.tokenizer_dir)


def tokenizer_files(folder: Path) -> list[Path]:
    """What a tokenizer consists of, as far as it is there."""
    return [path for name in TOKENIZER_FILES if (path := folder / name).is_file()]


def prepare_text(folder: Path, plan: TextPlan, *, quiet: bool = False) -> TrainingText:
    """The text of a plan, read from `folder` if an earlier run (or one that runs beside this) has put it there.

    ValueError for a folder that holds another text, or for corpora too small for the plan. What is damaged is told and
    prepared again.
    """
    plan.check()
    identity = plan.identity()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second reads what the first has made
        parts = _kept_text(folder, identity)
        if parts is None:
            _write_text(folder, plan, quiet)
            names = [f"{name}.npy" for name in STREAMS]
            names += [] if plan.tokenizer_dir is not None else [path.name for path in tokenizer_files(folder)]
            sums = {name: sha256_of(folder / name) for name in names}
            write_json(folder / "manifest.json", {"identity": identity, "sums": sums, **asdict(plan)})
            parts = _streams(folder)
    windows = {name: parts[name].long().view(-1, plan.window) for name in STREAMS[1:]}
    tokenizer_dir = folder if plan.tokenizer_dir is None else Path(plan.tokenizer_dir)
    return TrainingText(train=parts["train"], **windows, tokenizer_dir=tokenizer_dir, identity=identity)


class _TextManifest(msgspec.Struct):
    """`sums`: sha256 of each file; folders of older versions have none."""

    identity: str
    sums: dict[str, str] = {}


def _kept_text(folder: Path, identity: str) -> dict[str, Tensor] | None:
    """The streams that lie in a folder; None if there are none, or if they are damaged, which is told."""
    try:
        there = read_json(folder / "manifest.json", _TextManifest)
        if there.identity != identity:
            problem = f"{folder} holds another text ({there.identity}, not {identity}); choose another --output-dir"
        elif not (changed := changed_files(folder, there.sums)):
            return _streams(folder)
        else:
            raise ValueError(f"{', '.join(changed)}: not as written")
    except FileNotFoundError:
        return None
    except (ValueError, EOFError) as error:
        logger.warning(f"{folder} is damaged ({error}): the text is prepared again")
        return None
    raise ValueError(problem)


def _streams(folder: Path) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.load(folder / f"{name}.npy")) for name in STREAMS}


def _write_text(folder: Path, plan: TextPlan, quiet: bool) -> None:
    documents = [text for spec in plan.corpora for text in _texts(spec, "train")]
    random.Random(0).shuffle(documents)
    if plan.tokenizer_dir is None:
        assert plan.vocab_size is not None
        training = (text for i, text in enumerate(documents) if i % HELD_OUT_EVERY)
        train_tokenizer(training, plan.vocab_size).save_pretrained(folder)
    source = folder if plan.tokenizer_dir is None else Path(plan.tokenizer_dir)
    tokenizer = open_tokenizer(source)
    if tokenizer is None:
        raise FileNotFoundError(f"{source}: holds no tokenizer ({', '.join(MAIN_FILES)})")
    wanted = dict(zip(STREAMS, (plan.train_tokens, plan.calibration_tokens, plan.test_tokens), strict=False))
    found: dict[str, list[np.ndarray]] = {name: [] for name in STREAMS}
    sizes = dict.fromkeys(STREAMS, 0)
    with progress((), "tokenising", quiet=quiet, total=plan.train_tokens, unit="tok") as bar:
        for i, token_ids in enumerate(encode(tokenizer, documents)):
            part = "train" if i % HELD_OUT_EVERY else STREAMS[1 + i // HELD_OUT_EVERY % 2]
            found[part].append(token_ids)
            sizes[part] += len(token_ids)
            if part == "train":
                bar.update(len(token_ids))
            if all(sizes[name] >= count for name, count in wanted.items()):
                break
    wanted["other"] = plan.test_tokens
    for token_ids in encode(tokenizer, _texts(plan.other_corpus, "test")):
        found["other"].append(token_ids)
        sizes["other"] += len(token_ids)
        if sizes["other"] >= plan.test_tokens:  # a corpus of the Hub goes on
            break
    for name, count in wanted.items():
        stream = np.concatenate(found[name])[:count].astype(np.int32) if found[name] else np.zeros(0, np.int32)
        if name != "train" and len(stream) < count:
            raise ValueError(
                f"the corpora hold {len(stream)} tokens of {name.replace('_', '-')} text, {count} are needed; "
                "give more text, or lower --calibration-tokens or --test-tokens"
            )
        if name == "train" and len(stream) < count:
            logger.info(f"{len(stream)} tokens of training text: {count / max(1, len(stream)):.1f} epochs")
        whole = len(stream) if name == "train" else len(stream) // plan.window * plan.window
        content = io.BytesIO()
        np.save(content, stream[:whole])
        replace_file(folder / f"{name}.npy", content.getbuffer())


def _texts(spec: str, side: Any) -> Iterator[str]:
    for document in iter_documents(spec, side=side):
        if document.text is None:
            raise ValueError(f"corpus {spec}: token ids belong to one tokenizer; give text")
        yield document.text


def encode(tokenizer: Any, texts: Iterator[str] | Sequence[str]) -> Iterator[np.ndarray]:
    """Token ids of each text, framed as the tokenizer does it; where it does not, its EOS ends each."""
    is_framed = tokenizer("a")["input_ids"] != tokenizer("a", add_special_tokens=False)["input_ids"]
    end = [] if is_framed else [tokenizer.eos_token_id]
    batch: list[str] = []

    def encoded() -> Iterator[np.ndarray]:
        for token_ids in tokenizer(batch, verbose=False)["input_ids"]:
            yield np.array(token_ids + end, dtype=np.int32)

    for text in texts:
        batch.append(text)
        if len(batch) == DOCUMENTS_AT_ONCE:
            yield from encoded()
            batch.clear()
    if batch:
        yield from encoded()


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Any:
    """A byte-level BPE (Sennrich et al. 2016, on bytes as GPT-2's) of at most `vocab_size` tokens, for transformers.

    Every text begins with one special token, which also is its EOS.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(texts, TOKENIZER_CHARACTERS), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def _first_characters(texts: Iterator[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text
        limit -= len(text)
        if limit <= 0:
            return


SCORED_TOGETHER = 16  # windows


@dataclass(frozen=True, kw_only=True)
class TrainedStudyOptions:
    """Flags of the studies that train models."""

    corpus: tuple[str, ...]
    """Training text: files (python -m scripts.write_text makes one), wikitext[:SPLIT], c4:validation; all are mixed."""
    test_corpus: str
    """A text of another kind, on which the models are scored as well."""
    output_dir: Path
    """Tokenised text, checkpoints and what else is trained go here."""
    output: Path
    """Result records (JSON lines), appended; what has its records there is not studied again."""
    train_tokens: int
    """Tokens that each model is trained on; more than the text holds: several epochs."""
    window: int
    """Tokens per window."""
    batch_windows: int
    """Windows a training step."""
    learning_rate: float
    """Peak, of AdamW."""
    calibration_tokens: int = 65536
    """Held-out text that the study's predictors are fitted on."""
    test_tokens: int = 32768
    """Other held-out text, that models and predictors are tested on."""
    dtype: Dtype = "auto"
    """Of the studies; auto: bfloat16 on a GPU, float32 elsewhere. Training: see scripts/studies/training.py."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto: a GPU if there is one."""
    quiet: bool = False
    """No progress bars, warnings only."""

    def text_plan(self, **tokenizer: Any) -> TextPlan:
        """What to read, with `vocab_size` or `tokenizer_dir`."""
        sizes = {name: getattr(self, name) for name in ("train_tokens", "calibration_tokens", "test_tokens", "window")}
        return TextPlan(corpora=self.corpus, other_corpus=self.test_corpus, **sizes, **tokenizer)

    def training(self, seed: int) -> TrainingOptions:
        """As many steps as it takes; ValueError, with the flag, for what no training could have."""
        for name in ("train_tokens", "batch_windows", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        return TrainingOptions(
            steps=math.ceil(self.train_tokens / (self.batch_windows * self.window)),
            batch_windows=self.batch_windows,
            window=self.window,
            learning_rate=self.learning_rate,
            seed=seed,
        )

    def study_dtype(self) -> torch.dtype:
        """Of the weights that are studied."""
        is_on_gpu = resolve_device(self.device).type == "cuda"
        return resolve_dtype(self.dtype) or (torch.bfloat16 if is_on_gpu else torch.float32)


class _TrainedManifest(Manifest):
    training: dict[str, Any] | None = None


def train_once(
    make_model: Callable[[], Decoder],
    folder: Path,
    text: TrainingText,
    options: TrainingOptions,
    identity: Mapping[str, Any],
    *,
    title: str,
    quiet: bool,
) -> None:
    """Train a model and write its float32 checkpoint, with its tokenizer and how the loss went, unless that is done
    already; one process at a time trains into a folder."""
    with only_writer(folder.with_name(f"{folder.name}.training")):
        if is_trained(folder, identity):
            return
        model = make_model()
        with progress((), title, quiet=quiet, total=options.steps, unit="step") as bar:

            def show(step: int, loss: float) -> None:
                bar.update(step - bar.n)
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)

            curve = train_model(model, text.train, options, on_step=show)
        logger.info(f"{title}: loss {curve[-1][1]:.3f} after {options.num_tokens} tokens")
        write_model(
            model,
            folder,
            model_id=folder.name,
            manifest={"training": dict(identity), "training_losses": curve},
            other_files=text.tokenizer_files,
        )


def is_trained(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a folder holds the checkpoint of this training, whole; of a damaged one that is told. ValueError if it
    holds that of another."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return False
    try:
        manifest = read_json(path, _TrainedManifest)
    except ValueError as error:
        logger.warning(f"{error}: training again")
        return False
    if manifest.training != identity:
        found = "; ".join(differences(manifest.training or {}, identity, "there"))
        raise ValueError(f"{folder} was trained otherwise ({found}); choose another --output-dir")
    if changed := changed_files(folder, manifest.sums):
        logger.warning(f"{folder}: {', '.join(changed[:4])} missing or not as written: training again")
    return not changed


def training_identity(options: TrainingOptions, text: TrainingText, **more: Any) -> dict[str, Any]:
    """What a training depends on, besides the model: as manifests and records have it."""
    return {**dataclasses.asdict(options), "text": text.identity, "num_tokens": options.num_tokens, **more}


def complete_records(
    output: RecordFile,
    name: str,
    labels: Mapping[str, Any],
    made: Mapping[str, Mapping[str, Any]],
    *,
    last: str = "loss",
) -> list[Record] | None:
    """The records under these labels and further ones (of sparse runs only if the labels say so), if all are there: the
    metric that is written last shows it. `made`: their parts that say how they came about, such as `training`.

    ValueError if any of them, also of a run that was killed while it wrote, was made otherwise: new ones under the same
    labels would be taken for those.
    """
    there = [
        one
        for one in output.known
        if one["name"] == name
        and labels.items() <= one["labels"].items()
        and one["labels"].get("method") == labels.get("method")
    ]
    wanted = _as_read(made)
    for one in there:
        found = [phrase for part in wanted for phrase in differences(one.get(part) or {}, wanted[part], "there")]
        if found:
            raise ValueError(
                f"{output.path} holds records of {labels['model']} that were made otherwise: {'; '.join(found)}; "
                "choose another --output"
            )
    return there if any(one["metric"] == last for one in there) else None


def keep_records(output: RecordFile, records: Sequence[Record], made: Mapping[str, Mapping[str, Any]]) -> list[Record]:
    """Append records, as many as are not there yet, each with `made`, which says how it came about."""
    return output.write([{**record, **_as_read(made)} for record in records])


def _as_read(made: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return json.loads(json.dumps(made))  # a tuple comes back as a list


def score(
    name: str, labels: Mapping[str, Any], model: Decoder, text: TrainingText, other_corpus: str, **extras: Any
) -> tuple[Record, list[Record]]:
    """The loss on held-out text; its perplexity and that of the other text."""
    loss = loss_record(name, labels, model, text.held_out, **extras)
    other_labels = {**labels, "corpus": parse_corpus(other_corpus, side="test").label}
    other = loss_record(name, other_labels, model, text.other, **extras)
    return loss, [perplexity_record(loss, **extras), perplexity_record(other, **extras)]


def loss_record(name: str, labels: Mapping[str, Any], model: Decoder, windows: Tensor, **extras: Any) -> Record:
    """Mean next-token loss on windows [W, T], nats, with its interval over the windows."""
    losses = -torch.stack(token_logprobs(model, windows, batch_size=SCORED_TOGETHER)).double()
    per_window, count = losses.sum(1), torch.full((len(losses),), losses.shape[1], dtype=torch.float64)
    resampling, value = Resampling(len(windows), seed=0), float(losses.mean())
    interval = resampling.interval(value, resampling.ratios(per_window, count))
    labels = {**labels, "num_tokens": losses.numel()}
    return make_record(name, labels, "loss", value, "nats", interval=list(interval), **extras)


def perplexity_record(loss: Record, dense_loss: float | None = None, **extras: Any) -> Record:
    """A loss as a perplexity, compared with that of the dense model if its loss is given."""
    baseline = None if dense_loss is None else {"name": "dense", "value": math.exp(dense_loss)}
    return make_record(
        loss["name"],
        loss["labels"],
        "perplexity",
        math.exp(loss["value"]),
        "",
        baseline=baseline,
        interval=[math.exp(end) for end in loss["interval"]],
        **extras,
    )
