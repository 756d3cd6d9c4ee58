"""The files of `infer`: prompts in, one JSON line each, and one JSON line out for each answer; beside the answers
NAME.manifest.json says under which settings they were made.

A prompt line holds `prompt` or `prompt_token_ids`, and optionally `id` (default: the line number) and its own
options (OPTIONS below); an option left out, or null, is the command line's. Anything else on the line is an
error that names the line and the key.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from data.differences import differences
from data.json_lines import check_token_ids, parse_object, read_json_lines

OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop")
PROMPT_KEYS = ("id", "prompt", "prompt_token_ids", *OPTIONS)
FINISH_REASONS = ("stop", "length", "error")
MANIFEST_SUFFIX = ".manifest.json"  # appended to the whole name: the answers may have any suffix
MANIFEST_HEAD = {"format": "dejavu-lab answers", "format_version": 1}


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """One prompt, as text or as token ids (never both), and its own options (None: the command line's)."""

    id: str | int
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None

    def options(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """All of OPTIONS for this request: its own where it has one, else `defaults[name]`."""
        own = {name: getattr(self, name) for name in OPTIONS}
        return {name: defaults[name] if value is None else value for name, value in own.items()}


@dataclass(frozen=True, kw_only=True)
class CompletionRecord:
    """One output line. `token_ids`: generated only; `logprobs`: with echo the prompt's first (None, ...)."""

    id: str | int
    prompt: str | None
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    finish_reason: str
    error: str | None = None
    num_prompt_tokens: int = 0
    mlp_density: float = 1.0
    head_density: float = 1.0

    def __post_init__(self) -> None:
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish_reason must be one of {FINISH_REASONS}, got {self.finish_reason!r}")
        if (self.finish_reason == "error") != (self.error is not None):
            raise ValueError(f"answer {self.id!r}: an `error` text goes with finish_reason error, and only with it")
        if not all(value is None or math.isfinite(value) for value in self.logprobs):
            raise ValueError(f"answer {self.id!r}: a log-probability is not finite")

    def to_line(self) -> bytes:
        """The record as one line of UTF-8 JSON, line end included."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"


def check_option(name: str, value: Any, where: str) -> Any:
    """Return the value of one of OPTIONS as requests hold it; ValueError says `where`, and what is allowed.

    max_new_tokens >= 0 (0 only scores the prompt); temperature >= 0 (0 is greedy); top_k >= -1 (-1 and 0: all, as -1);
    0 < top_p <= 1; 0 <= seed < 2**63; stop: a non-empty string or a list of them.
    """
    if name == "stop":
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"{where}: `stop` must be a non-empty string or a list of them, got {value!r}")
        return tuple(stops)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    is_number = is_integer or (isinstance(value, float) and math.isfinite(value))
    allowed, holds = {
        "max_new_tokens": ("an integer >= 0", is_integer and value >= 0),
        "temperature": ("a number >= 0", is_number and value >= 0),
        "top_k": ("-1 or 0 (all tokens) or an integer >= 1", is_integer and value >= -1),
        "top_p": ("a number in (0, 1]", is_number and 0 < value <= 1),
        "seed": ("an integer in [0, 2**63)", is_integer and 0 <= value < 2**63),
    }[name]
    if not holds:
        raise ValueError(f"{where}: `{name}` must be {allowed}, got {value!r}")
    if name == "top_k" and value == 0:
        return -1  # the same to Hugging Face, and one value here
    return float(value) if name in ("temperature", "top_p") else value


def read_prompts(path: str | Path) -> list[PromptRequest]:
    """Read all prompts, strictly and before any of them is run; blank lines are passed over.

    ValueError names file, line and key; FileNotFoundError the file.
    """
    path = Path(path)
    requests: list[PromptRequest] = []
    lines: dict[str, int] = {}
    for line_number, record in read_json_lines(path):
        where = f"{path} line {line_number}"
        request = _parse_request(record, line_number, where)
        first = lines.setdefault(str(request.id), line_number)
        if first != line_number:
            raise ValueError(f"{where}: `id` {request.id!r} is already that of line {first} (default: the line number)")
        requests.append(request)
    if not requests:
        raise ValueError(f"{path} holds no prompts")
    return requests


def _parse_request(record: dict[str, Any], line_number: int, where: str) -> PromptRequest:
    unknown = [key for key in record if key not in PROMPT_KEYS]
    if unknown:
        raise ValueError(f"{where}: unknown key `{unknown[0]}`; allowed: {', '.join(PROMPT_KEYS)}")
    given = {key: value for key, value in record.items() if value is not None}
    if ("prompt" in given) == ("prompt_token_ids" in given):
        found = "both" if "prompt" in given else "neither"
        raise ValueError(f"{where}: give either `prompt` or `prompt_token_ids`, found {found}")
    request_id = given.get("id", line_number)
    if not isinstance(request_id, str | int) or isinstance(request_id, bool):
        raise ValueError(f"{where}: `id` must be a string or an integer, got {request_id!r}")
    prompt = given.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"{where}: `prompt` must be a string, got {type(prompt).__name__}")
    token_ids = None
    if "prompt_token_ids" in given:
        token_ids = tuple(check_token_ids(given["prompt_token_ids"], where, "prompt_token_ids"))
    options = {name: check_option(name, given[name], where) for name in OPTIONS if name in given}
    return PromptRequest(id=request_id, prompt=prompt, prompt_token_ids=token_ids, **options)


class CompletionWriter:
    """Writes answers to a JSON-lines file, each as one whole line the moment it is finished.

    A killed run loses no finished answer. Lines are appended in the order they finish; `close` puts the file
    into the order of `requests` if they differ. Without `resume` the file starts afresh; with it, the answers
    already there are kept (failed ones too: they are answers), a half-written last line is cut off, and
    `pending` is what is left to do. `prompts_path`, if given, must not be the output.

    `settings`, if given, are what the answers depend on besides their prompts (JSON values). They are written to a
    manifest beside the file, and answers made under others are not resumed: ValueError, and nothing is touched.
    """

    def __init__(
        self,
        path: str | Path,
        requests: Sequence[PromptRequest],
        *,
        resume: bool = False,
        prompts_path: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        # realpath: what a link points at is written and, at the end, replaced; never the link
        self.path = Path(os.path.realpath(path))
        if prompts_path is not None and self.path == Path(os.path.realpath(prompts_path)):
            raise ValueError(f"the answers would overwrite the prompts: {path} is both input and output")
        self._requests = {str(request.id): request for request in requests}
        self._spans: dict[str, tuple[int, int]] = {}  # id -> where its line begins and ends, in file order
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._is_file = self.path.is_file() or not self.path.exists()  # else a pipe or terminal: write only
        if resume and self.path.exists():
            self._read_answers()
        if settings is not None and self._spans:
            self._check_settings(settings)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if resume else os.O_TRUNC)
        self._descriptor = os.open(self.path, flags, 0o666)
        self._end = max((stop for _, stop in self._spans.values()), default=0)
        if resume and self._is_file:
            os.ftruncate(self._descriptor, self._end)
        if settings is not None and self._is_file and not self._spans:  # after older answers are gone
            self._write_manifest(settings)

    @property
    def pending(self) -> list[PromptRequest]:
        """The requests without an answer, in input order."""
        return [request for key, request in self._requests.items() if key not in self._spans]

    def write(self, record: CompletionRecord) -> None:
        """Append the answer to a pending request (else ValueError). Whatever interrupts it leaves no half line; an
        OSError names the file."""
        key = str(record.id)
        if key not in self._requests or key in self._spans:
            problem = "was answered before" if key in self._spans else "is no request's"
            raise ValueError(f"answer with id {record.id!r} {problem}")
        line = record.to_line()
        try:
            num_written = 0
            while num_written < len(line):  # one call, unless a signal or a full disk cuts it short
                num_written += os.write(self._descriptor, line[num_written:])
            self._spans[key] = (self._end, self._end + len(line))
        except BaseException as error:
            self._spans.pop(key, None)
            if self._is_file:
                os.ftruncate(self._descriptor, self._end)
            if isinstance(error, OSError):  # a write does not know the name of its file
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            raise
        self._end += len(line)

    def close(self) -> None:
        """Put the lines into input order if they are not, and close the file."""
        if self._descriptor < 0:
            return
        try:
            if self._is_file:
                os.fsync(self._descriptor)
                ordered = [key for key in self._requests if key in self._spans]
                if ordered != list(self._spans):
                    self._rewrite(ordered)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _rewrite(self, keys: list[str]) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            with open(self.path, "rb") as source, open(temporary, "wb") as target:
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

    def _write_manifest(self, settings: Mapping[str, Any]) -> None:
        temporary = self._manifest_path.with_name(self._manifest_path.name + ".tmp")
        temporary.write_text(json.dumps({**MANIFEST_HEAD, "settings": settings}, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self._manifest_path)

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        advice = "give another output, or leave out --resume to start afresh"
        if not self._manifest_path.is_file():
            raise ValueError(
                f"cannot resume {self.path}: {self._manifest_path.name}, which says how its answers were made, is not "
                f"beside it; {advice}"
            )
        try:
            stored = parse_object(self._manifest_path.read_bytes(), str(self._manifest_path))
        except ValueError as error:
            raise ValueError(f"cannot resume {self.path}: {error}; {advice}") from error
        made = stored.get("settings")
        if {key: stored.get(key) for key in MANIFEST_HEAD} != MANIFEST_HEAD or not isinstance(made, dict):
            raise ValueError(
                f"cannot resume {self.path}: {self._manifest_path} is not the manifest of answers; {advice}"
            )
        # As JSON has them: a tuple comes back as a list.
        found = differences(made, json.loads(json.dumps(settings)), "of its answers")
        if found:
            raise ValueError(f"cannot resume {self.path}: {'; '.join(found)}; {advice}")

    def _read_answers(self) -> None:
        if not self._is_file:
            raise ValueError(f"cannot resume {self.path}: it is not a regular file")
        position = 0
        with open(self.path, "rb") as file:
            for line_number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return  # half-written when the run was killed: its prompt is done again
                where = f"{self.path} line {line_number}"
                record = parse_object(line, where)
                key = str(record.get("id"))
                request = self._requests.get(key)
                same_prompt = request is not None and request.prompt in (None, record.get("prompt"))
                if not same_prompt or key in self._spans:
                    raise ValueError(
                        f"{where}: cannot resume, `id` {record.get('id')!r} "
                        + ("is answered twice" if key in self._spans else "belongs to no prompt of this run")
                        + "; give another output, or leave out --resume to start afresh"
                    )
                self._spans[key] = (position, position + len(line))
                position += len(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
