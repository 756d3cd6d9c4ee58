"""The answers of `infer`: one JSON line per answer, and beside them NAME.manifest.json, which says under which settings
they were made and what was asked.

The manifest holds `settings`, what all answers depend on, and `answers`: for each id the identity of its request
(`request_identity`). Both are on the disk before the first answer is: a run killed at any moment can be resumed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from data.files import (
    NUM_TOKEN_IDS,
    convert_json,
    differences,
    disk_errors,
    is_stream,
    parse_json,
    whole_lines,
    write_json,
)

MANIFEST_SUFFIX = ".manifest.json"  # appended to the whole name: the answers may have any suffix
FORMAT, FORMAT_VERSION = "dejavu-lab answers", 2
FINISH_REASONS = ("stop", "length", "error")
IDENTITY_PARTS = ("prompt", "token ids (tokenizer, chat template)", "options or seed")
ON_A_FULL_DISK = "free space there, then give the same command with --resume"
AFRESH = "give another --output, or --overwrite to start afresh"

TokenId = Annotated[int, Meta(ge=0, lt=NUM_TOKEN_IDS)]
Density = Annotated[float, Meta(ge=0.0, le=1.0)]


class CompletionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One output line. `token_ids`: generated only; `logprobs`: with echo the prompt's first (None, ...)."""

    id: str | int
    prompt: str | None
    text: str
    token_ids: Sequence[TokenId]
    logprobs: Sequence[float | None]
    finish_reason: str
    error: str | None
    num_prompt_tokens: Annotated[int, Meta(ge=0, lt=NUM_TOKEN_IDS)]
    mlp_density: Density
    head_density: Density

    def __post_init__(self) -> None:
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish_reason must be one of {FINISH_REASONS}, got {self.finish_reason!r}")
        if (self.finish_reason == "error") != (self.error is not None):
            raise ValueError(f"answer {self.id!r}: an `error` text goes with finish_reason error, and only with it")
        if not all(value is None or math.isfinite(value) for value in self.logprobs):
            raise ValueError(f"answer {self.id!r}: a log-probability is not finite")
        count = len(self.token_ids)
        if len(self.logprobs) not in (count, count + self.num_prompt_tokens):
            raise ValueError(
                f"answer {self.id!r}: {len(self.logprobs)} log-probabilities for {count} token ids (with --echo for "
                f"{self.num_prompt_tokens} of the prompt, too)"
            )
        if any(value is None for value in self.logprobs[1:]):
            raise ValueError(f"answer {self.id!r}: a log-probability after the first is null")

    def to_line(self) -> bytes:
        """The record as one line of UTF-8 JSON, line end included."""
        record = msgspec.structs.asdict(self)
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"


class _Head(msgspec.Struct):
    format: str
    format_version: int


class _Manifest(_Head):
    settings: dict[str, Any]
    answers: dict[str, str]


def request_identity(prompt: str | None, token_ids: Iterable[int], options: Mapping[str, Any]) -> str:
    """What an answer's request was, as three hashes: of IDENTITY_PARTS. `token_ids` and `options` (JSON values) are
    those that are run: after the tokenizer and the chat template, and with what the command line fills in."""
    parts = (prompt, list(token_ids), dict(options))
    return " ".join(hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16] for part in parts)


def check_output(path: str | Path, *, resume: bool, overwrite: bool, prompts_path: str | Path | None = None) -> None:
    """ValueError if answers must not go there: a folder, the prompts' own file, or other answers without a word on
    what shall become of them."""
    path = Path(path)
    if resume and overwrite:
        raise ValueError("--resume keeps the answers that are there and --overwrite throws them away: give one of them")
    if path.is_dir():
        raise IsADirectoryError(f"--output {path} is a folder; give a file")
    if prompts_path is not None and os.path.realpath(path) == os.path.realpath(prompts_path):
        raise ValueError(f"the answers would overwrite the prompts: {path} is both input and output")
    if is_stream(path):
        if resume:
            raise ValueError(f"cannot resume {path}: it is not a regular file")
    elif not (resume or overwrite) and path.exists() and path.stat().st_size > 0:
        raise ValueError(
            f"--output {path} holds answers already: --resume keeps them and does the rest, --overwrite starts afresh"
        )


class CompletionWriter:
    """Writes answers to a JSON-lines file, each as one whole line the moment it is finished.

    A killed run loses no finished answer. Lines are appended in the order they finish; `close` puts the file into the
    order of `prompts`, the text of each request by its id (None: token ids), if they differ. Answers that are there
    already are refused, unless `overwrite` throws them away or `resume` keeps them: failed ones too (they are answers);
    a half-written last line is cut off, and `pending` is what is left to do. `prompts_path`, if given, must not be the
    output. Into a pipe, a terminal or a device lines are written as they are finished, and nothing else is done.

    `settings`, if given, are what all answers depend on (JSON values), and `identities` what each request was (by id,
    see `request_identity`). They are written to a manifest beside the file, and answers of others are not resumed:
    ValueError, and nothing is touched.
    """

    def __init__(
        self,
        path: str | Path,
        prompts: Mapping[str | int, str | None],
        *,
        resume: bool = False,
        overwrite: bool = False,
        prompts_path: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        identities: Mapping[str, str] | None = None,
    ) -> None:
        check_output(path, resume=resume, overwrite=overwrite, prompts_path=prompts_path)
        self._is_file = not is_stream(path)
        # realpath: what a link points at is written and, at the end, replaced; never the link
        self.path = Path(os.path.realpath(path)) if self._is_file else Path(path)
        self.first_error: str | None = None
        self.num_failed = 0
        self._prompts = {str(request_id): (request_id, prompt) for request_id, prompt in prompts.items()}
        self._spans: dict[str, tuple[int, int]] = {}  # id -> where its line begins and ends, in file order
        if self._is_file:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume and self.path.exists():
            self._read_answers()
        manifest = None
        if settings is not None and self._is_file:
            # As JSON has them: a tuple comes back as a list.
            wanted = json.loads(json.dumps({"settings": dict(settings), "answers": dict(identities or {})}))
            manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, **wanted}
            if self._spans:
                self._check_manifest(wanted["settings"], wanted["answers"])
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._end = max((stop for _, stop in self._spans.values()), default=0)
        if self._is_file:
            os.ftruncate(self._descriptor, self._end)
            os.fsync(self._descriptor)
        if manifest is not None:  # after older answers are gone, and before the first new one
            write_json(self._manifest_path, manifest)

    @property
    def pending(self) -> list[str | int]:
        """The ids of the requests without an answer, in input order."""
        return [request_id for key, (request_id, _) in self._prompts.items() if key not in self._spans]

    def write(self, record: CompletionRecord) -> None:
        """Append the answer to a pending request (else ValueError). Whatever interrupts it leaves no half line; an
        OSError names the file."""
        key = str(record.id)
        if key not in self._prompts or key in self._spans:
            problem = "was answered before" if key in self._spans else "is no request's"
            raise ValueError(f"answer with id {record.id!r} {problem}")
        line = record.to_line()
        try:
            with disk_errors(self.path, ON_A_FULL_DISK):  # a write does not know the name of its file
                num_written = 0
                while num_written < len(line):  # one call, unless a signal or a full disk cuts it short
                    num_written += os.write(self._descriptor, line[num_written:])
            self._spans[key] = (self._end, self._end + len(line))
        except BaseException:
            self._spans.pop(key, None)
            if self._is_file:
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(line)
        self._count(record)

    def close(self) -> None:
        """Put the lines into input order if they are not, and close the file."""
        if self._descriptor < 0:
            return
        try:
            if self._is_file:
                with disk_errors(self.path, ON_A_FULL_DISK):
                    os.fsync(self._descriptor)
                ordered = [key for key in self._prompts if key in self._spans]
                if ordered != list(self._spans):
                    self._rewrite(ordered)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _count(self, record: CompletionRecord) -> None:
        if record.error is not None:
            self.num_failed += 1
            self.first_error = self.first_error or record.error

    def _rewrite(self, keys: list[str]) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            with (
                disk_errors(temporary, ON_A_FULL_DISK),
                open(self.path, "rb") as source,
                open(temporary, "wb") as target,
            ):
                for key in keys:
                    start, stop = self._spans[key]
                    source.seek(start)
                    target.write(source.read(stop - start))
                target.flush()
                os.fsync(target.fileno())
            temporary.chmod(self.path.stat().st_mode & 0o777)
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    @property
    def _manifest_path(self) -> Path:
        return self.path.with_name(self.path.name + MANIFEST_SUFFIX)

    def _check_manifest(self, settings: Mapping[str, Any], identities: Mapping[str, str]) -> None:
        if not self._manifest_path.is_file():
            raise ValueError(
                f"cannot resume {self.path}: {self._manifest_path.name}, which says how its answers were made, is not "
                f"beside it; {AFRESH}"
            )
        try:
            made = _read_manifest(self._manifest_path)
        except ValueError as error:
            raise ValueError(f"cannot resume {self.path}: {error}; {AFRESH}") from error
        found = differences(made.settings, settings, "of its answers")
        if found:
            raise ValueError(f"cannot resume {self.path}: {'; '.join(found)}; {AFRESH}")
        for key in self._spans:
            then, now = made.answers.get(key, "").split(), identities.get(key, "").split()
            if then == now:
                continue
            parts = [name for name, old, new in zip(IDENTITY_PARTS, then, now, strict=False) if old != new]
            request_id = self._prompts[key][0]
            by_line = isinstance(request_id, int)
            raise ValueError(
                f"cannot resume {self.path}: request {request_id!r} is not the one that was answered: "
                f"{' and '.join(parts) or 'what was asked'} changed"
                + (" (without `id`, the line number is the id: was a line put in or left out?)" if by_line else "")
                + f"; {AFRESH}"
            )

    def _read_answers(self) -> None:
        position = 0
        for line_number, line in enumerate(whole_lines(self.path), start=1):
            where = f"{self.path} line {line_number}"
            record = _parse_answer(line, where)
            key = str(record.id)
            if key not in self._prompts or self._prompts[key][1] != record.prompt or key in self._spans:
                problem = "is answered twice" if key in self._spans else "belongs to no prompt of this run"
                raise ValueError(f"{where}: cannot resume, `id` {record.id!r} {problem}; {AFRESH}")
            self._spans[key] = (position, position + len(line))
            position += len(line)
            self._count(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _parse_answer(line: bytes, where: str) -> CompletionRecord:
    try:
        # Not msgspec's decoder: it refuses half of a surrogate pair, which the text of an answer may hold.
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = f"{where}: not JSON ({error})"
    else:
        try:
            return convert_json(value, CompletionRecord, where)
        except ValueError as error:
            problem = str(error)
    raise ValueError(f"{problem}; remove this line, and --resume answers its prompt again; or {AFRESH}")


def _read_manifest(path: Path) -> _Manifest:
    content = path.read_bytes()
    head = parse_json(content, _Head, path)
    if head.format != FORMAT:
        raise ValueError(f"{path} is not the manifest of answers")
    if head.format_version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version {head.format_version}, but this version writes {FORMAT_VERSION}, which also says "
            "what each answer was asked"
        )
    return parse_json(content, _Manifest, path)
