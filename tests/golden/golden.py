"""What the commands write on tiny models, frozen, and compared bit for bit after a change to the code.

    python -m tests.golden.golden --output BASE.json                     # freeze, on the code before
    python -m tests.golden.golden --check BASE.json [--only answers ranks]  # on the code after; exit 1 if it differs

It knows commands, flags and files, nothing of what is inside. Dates, commits, paths, seconds and versions are left out
(`fingerprints.OF_THE_RUN`). Bits of predictors and logits depend on the CPU and on torch, so a base holds for one
machine and is never committed. A base is a file of fingerprints and, beside it, BASE.files/: a checkpoint, a store,
predictors, a budget, answers and records, which section `older` reads with the code of now. One thread, whatever the
machine; ranks are processes that talk over gloo. Entries that are new are counted, not reported.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TORCH_CPP_LOG_LEVEL": "ERROR"}

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import random
import runpy
import shutil
import socket
import string
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

# ruff: noqa: E402
from tests.golden.fingerprints import Entry, differences, read_entries
from tests.modules.tiny_kinds import KINDS, LLAMA, LLAMA3_SCALING, OPT
from tests.modules.tiny_models import save_hf_folder

SECTIONS = ("checkpoints", "stores", "predictors", "budgets", "answers", "records", "ranks", "study", "tasks", "older")
METHODS = (
    "predictor", "oracle", "static", "random", "cats", "m-countdown", "teal", "teal-all", "wina-unrotated",
    "r-sparse-uniform", "griffin",
)  # fmt: skip
NEED_A_GATE = ("cats", "m-countdown")
MIXED = LLAMA | {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
MIXED |= {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING}
# Those that go through all stages; the others are converted and answer, dense.
MODELS = {
    "llama": LLAMA,
    "llama-mixed": MIXED,
    "opt": OPT,
    "opt-post-norm-projected": OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 24},
}
DENSE_ONLY = {kind: config for kind, config in KINDS.items() if kind not in MODELS}
CHARACTERS = ["<unk>", "<s>", "</s>", *string.ascii_letters, *string.digits, " ", ".", ","]
TRAIN = "--steps 4 --batch-rows 64 --refine-steps 4 --refine-window 32 --batch-size 2 --closed-form-rows 256"
TRAIN += " --standin-tokens 256 --calibration-tokens 128 --quiet"
COLLECT = "--corpus train.jsonl --max-tokens 600 --max-document-tokens 64 --batch-size 4 --quiet"
INFER = "--input prompts.jsonl --echo --max-new-tokens 6 --quiet"
EVALUATE = "--corpus test.jsonl --window 32 --quality-windows 2 --max-windows 6 --quiet"
BUDGET = "--corpus train.jsonl --tokens 64 --check-tokens 64 --window 32 --densities 0.8 0.5 0.3 --quiet"


@cache
def module(name: str) -> str:
    """A command's module; those of studies have a folder of their own since the rebuild."""
    names = [name] if name.startswith("convert") else [f"scripts.{name}", f"scripts.studies.{name}"]
    for found in names:
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(found) is not None:
                return found
    raise SystemExit(f"no module {' or '.join(names)}")


def run(folder: Path, command: str, *, ranks: int = 1, may_refuse: bool = False) -> bool:
    """Run a command in forked processes, in `folder`; whether it ended well. SystemExit with what it said if not."""
    name, *words = command.split()
    variables: dict[str, str] = {}
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    sys.stdout.flush()
    sys.stderr.flush()
    started = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            os.environ.update(variables | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}))
            os._exit(_child(folder, [module(name), *words], folder / f"log.{rank}"))
        started.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    if not any(codes):
        return True
    if may_refuse and codes == [2]:
        return False
    said = "\n".join((folder / f"log.{rank}").read_text()[-3000:] for rank in range(ranks))
    raise SystemExit(f"{command}\nin {folder} ended with {codes}:\n{said}")


def _child(folder: Path, words: list[str], log: Path) -> int:
    try:
        os.chdir(folder)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = words
        sys.modules.pop(words[0], None)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


class Freezing:
    """Runs the commands in `folder` and gathers the entries of the chosen sections."""

    def __init__(self, folder: Path, only: tuple[str, ...], older: Path) -> None:
        self.folder, self.only, self.older = folder, only, older
        self.entries: dict[str, Entry] = {}

    def all(self) -> dict[str, Entry]:
        """Every section; the time of each is printed."""
        for kind, config in (MODELS | DENSE_ONLY).items():
            self._input(kind, config)
        for section in ("checkpoints", *(one for one in SECTIONS[1:] if one in self._needed())):
            begin = time.perf_counter()
            getattr(self, f"_{section}")()
            print(f"{section}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        return self.entries

    def _needed(self) -> set[str]:
        needs = {"predictors": "stores", "budgets": "predictors", "answers": "budgets", "records": "budgets"}
        needs |= {"ranks": "predictors", "tasks": "predictors"}
        if not self.older.exists():  # they are made first
            needs["older"] = "answers"
        needed = set(self.only)
        for section in reversed(SECTIONS):
            if section in needed and section in needs:
                needed.add(needs[section])
        return needed

    def _keep(self, section: str, name: str, path: Path) -> None:
        if section in self.only:
            self.entries.update(read_entries(path, f"{section}/{name}"))

    def _input(self, kind: str, config: dict[str, Any]) -> None:
        """The Hugging Face folder, texts and prompts that one model starts from."""
        folder = self.folder / kind
        folder.mkdir(parents=True)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            save_hf_folder(folder / "hf", config, 0)
        _tokenizer().save_pretrained(folder / "hf")
        self.entries.update(read_entries(folder / "hf/model.safetensors", f"inputs/{kind}"))
        draw = random.Random(5)
        for name, count in (("train.jsonl", 40), ("test.jsonl", 8), ("long.jsonl", 1200)):
            texts = ["".join(draw.choices("abcdefgh .", k=draw.randint(20, 70))) for _ in range(count)]
            _write_lines(folder / name, ({"text": text} for text in texts))
        greedy = {"temperature": 0.0}
        sampled = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
        prompts: list[dict[str, Any]] = [
            {"id": "greedy-1", "prompt": "abc abc"} | greedy,
            {"id": "greedy-2", "prompt": "h"} | greedy,
            {"id": "greedy-3", "prompt": "The cat, the dog and the owl."} | greedy,
            {"id": "greedy-ids", "prompt_token_ids": [9, 8, 7, 6, 5]} | greedy,
            {"id": "sampled-1", "prompt": "abc abc", "seed": 3} | sampled,
            {"id": "sampled-2", "prompt": "zebra", "seed": 4, "temperature": 1.3},
            {"id": "sampled-3", "prompt": "0123456789", "max_new_tokens": 9} | sampled,
            {"id": "sampled-stop", "prompt": "to be", "stop": ["a", "b"], "max_new_tokens": 12} | sampled,
        ]
        _write_lines(folder / "prompts.jsonl", prompts)
        _write_lines(folder / "few.jsonl", [prompts[0], prompts[2], prompts[4]])

    def _checkpoints(self) -> None:
        for kind in MODELS | DENSE_ONLY:
            folder = self.folder / kind
            run(folder, "convert_llama_checkpoint --source hf --output-dir model --quiet")
            self._keep("checkpoints", kind, folder / "model")
            if kind in MODELS and "checkpoints" in self.only:
                for dtype in ("bfloat16", "float16"):
                    run(folder, f"convert_llama_checkpoint --source hf --output-dir {dtype} --dtype {dtype} --quiet")
                    self._keep("checkpoints", f"{kind}-{dtype}", folder / dtype)
        if "checkpoints" not in self.only:
            return
        folder = self.folder / "llama"
        sharded = self.folder / "sharded"
        shutil.copytree(folder, sharded)
        (sharded / "hf/model.safetensors").unlink()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            save_hf_folder(sharded / "hf", LLAMA, 0, max_shard_size="60KB")
        shutil.rmtree(sharded / "model")
        run(sharded, "convert_llama_checkpoint --source hf --output-dir model --quiet")
        self._keep("checkpoints", "llama-sharded", sharded / "model")
        gguf, write_gguf = importlib.import_module("gguf"), importlib.import_module("tests.test_convert_gguf")
        for name, tied in (("F32", False), ("Q8_0", True), ("Q4_1", False)):
            config = write_gguf.GGUF | {"tie_word_embeddings": tied}
            write_gguf.write_gguf(folder / f"{name}.gguf", config, kind=gguf.GGMLQuantizationType[name])
            run(folder, f"convert_llama_checkpoint --source {name}.gguf --output-dir {name} --quiet")
            self._keep("checkpoints", f"llama-gguf-{name}", folder / name)

    def _stores(self) -> None:
        for kind in MODELS:
            self._store(kind, "store", "")
            self._store(kind, "packed", "--label-format packed --label-density 0.4 --units mlp")
        self._store("llama", "store-bfloat16", "--dtype bfloat16")
        self._store("llama", "some-layers", "--layers 0,2 --units attention --max-document-tokens 24")
        self._store("opt", "hf-folder", "--model hf --units mlp")
        self._store("llama", "self-text", "--corpus self --max-tokens 200")

    def _store(self, kind: str, name: str, flags: str) -> None:
        model = "" if "--model" in flags else "--model model"
        run(self.folder / kind, f"collect {model} {COLLECT} --output-dir {name} {flags}")
        self._keep("stores", f"{kind}/{name}", self.folder / kind / name)

    def _predictors(self) -> None:
        for kind in MODELS:
            self._train(kind, "predictors", "--activations store")
        if "predictors" in self.only:
            packed = "--activations packed --initialisation random --loss bce --units mlp"
            self._train(
                "llama", "lookahead", "--activations store --lookahead 1 --rule topk --loss bce --densities 0.4"
            )
            self._train("llama", "random", "--activations store --initialisation random --loss magnitude --units mlp")
            self._train(
                "llama",
                "packed-labels",
                f"{packed} --standin-rank 0 --predictor-rank 6",
            )
            self._train("llama", "more-text", "--activations store --refine-corpus test.jsonl --units mlp")
            self._train(
                "opt",
                "packed-labels",
                f"{packed} --refine-steps 0 --label-density 0.2",
            )
            self._train("llama", "bf16", "--activations store-bfloat16 --dtype bfloat16")

    def _train(self, kind: str, name: str, flags: str) -> None:
        run(self.folder / kind, f"train --model model --output-dir {name} {TRAIN} {flags}")
        self._keep("predictors", f"{kind}/{name}", self.folder / kind / name)

    def _budgets(self) -> None:
        for kind in ("llama", "opt"):
            self._budget(kind, "predictor", "predictor", "")
        if "budgets" in self.only:
            for method in METHODS[1:]:
                self._budget("llama", method, method, "")
            self._budget("llama", "heads", "predictor", "--head-density 0.7")

    def _budget(self, kind: str, name: str, method: str, flags: str) -> None:
        output = f"budget-{name}.json"
        flags = f"--method {method} --predictors predictors --output {output} {BUDGET} {flags}"
        run(self.folder / kind, f"budget --model model {flags}")
        self._keep("budgets", f"{kind}/{name}", self.folder / kind / output)
        if kind == "llama" and name == "predictor" and "predictors" in self.only:
            self._train("llama", "of-budget", f"--activations store --density-budget {output} --densities 0.5")

    def _answers(self) -> None:
        for kind in MODELS | DENSE_ONLY:
            for dtype in ("float32", "bfloat16"):
                self._infer(kind, f"dense-{dtype}-b8", f"--dtype {dtype} --batch-size 8")
        self._infer("llama", "dense-float32-b1", "--batch-size 1")
        self._infer("llama", "dense-bfloat16-b1", "--dtype bfloat16 --batch-size 1")
        self._infer("llama", "dense-hf-folder", "--model hf --batch-size 3")
        for method in METHODS:
            for phases in ("decode", "all"):
                flags = f"--method {method} --predictors predictors --sparse-phases {phases}"
                for dtype, batch_size in (("float32", 1), ("float32", 8), ("bfloat16", 1 if phases == "all" else 8)):
                    more = f"--dtype {dtype} --batch-size {batch_size}"
                    self._infer("llama", f"{method}-{phases}-{dtype}-b{batch_size}", f"{flags} {more}")
            flags = f"--method {method} --predictors predictors --mlp-density 0.3 --batch-size 4"
            for kind in MODELS:
                if kind != "llama":
                    self._infer(kind, f"{method}-decode-float32-b4", flags)
            flags = f"--method {method} --predictors predictors --head-density 0.5 --sparse-phases all"
            for kind in MODELS:
                self._infer(kind, f"{method}-heads", flags)
        for kind in ("llama", "opt"):
            flags = "--method predictor --predictors predictors --density-budget budget-predictor.json"
            self._infer(kind, "predictor-budget", flags)

    def _infer(self, kind: str, name: str, flags: str) -> None:
        folder, output = self.folder / kind, f"answers-{name}.jsonl"
        model = "" if "--model" in flags else "--model model"
        if run(folder, f"infer {model} {INFER} --output {output} {flags}", may_refuse=True):
            self._keep("answers", f"{kind}/{name}", folder / output)
            if name in ("dense-float32-b8", "predictor-all-float32-b1"):
                self._keep("answers", f"{kind}/{name}", folder / f"{output}.manifest.json")
        elif "answers" in self.only:
            self.entries[f"answers/{kind}/{name}"] = {"refused": True}

    def _records(self) -> None:
        for kind in MODELS:
            methods = " ".join(one for one in METHODS if one not in NEED_A_GATE or kind.startswith("llama"))
            sparse = f"--method dense {methods} --predictors predictors"
            self._evaluate(kind, "float32", f"{sparse} --mlp-density 0.5 0.3")
        sparse = f"--method dense {' '.join(METHODS)} --predictors predictors"
        if "records" in self.only:
            self._evaluate("llama", "bfloat16", f"{sparse} --dtype bfloat16 --batch-size 2")
            self._evaluate("llama", "decode", f"{sparse} --sparse-phases decode --stride 16")
            self._evaluate("llama", "heads", "--method predictor oracle --predictors predictors --head-density 0.5")
            self._evaluate(
                "llama", "budget", "--method predictor --predictors predictors --density-budget budget-predictor.json"
            )
            folder = self.folder / "llama"
            run(folder, "summarize --results records-float32.jsonl --output-dir tables --quiet")
            self._keep("records", "llama/tables", folder / "tables")

    def _evaluate(self, kind: str, name: str, flags: str) -> None:
        output = f"records-{name}.jsonl"
        run(self.folder / kind, f"evaluate --model model {EVALUATE} --output {output} {flags}")
        self._keep("records", f"{kind}/{name}", self.folder / kind / output)

    def _ranks(self) -> None:
        cuts = {"tp2": (2, "--tp-size 2"), "pp2": (2, "--pp-size 2"), "tp2-pp2": (4, "--tp-size 2 --pp-size 2")}
        cases = {
            "dense": "",
            "predictor": "--method predictor --predictors predictors",
            "predictor-heads": "--method predictor --predictors predictors --head-density 0.5 --sparse-phases all",
            "teal": "--method teal --predictors predictors --sparse-phases all",
        }
        for kind in ("llama", "opt"):
            for cut, (ranks, flags) in cuts.items():
                for case, more in cases.items():
                    output = f"ranks-{cut}-{case}.jsonl"
                    words = f"--input few.jsonl --echo --max-new-tokens 4 --quiet --output {output} {flags} {more}"
                    run(self.folder / kind, f"infer --model model --batch-size 2 {words}", ranks=ranks)
                    self._keep("ranks", f"{kind}/{cut}-{case}", self.folder / kind / output)
        words = "--method dense predictor --predictors predictors --output ranks-records.jsonl --tp-size 2"
        run(self.folder / "llama", f"evaluate --model model {EVALUATE} {words}", ranks=2)
        self._keep("ranks", "llama/records-tp2", self.folder / "llama/ranks-records.jsonl")

    def _study(self) -> None:
        words = "--corpus train.jsonl --window 32 --test-tokens 96 --calibration-tokens 512 --max-lookahead 1 --quiet"
        for kind in ("llama", "opt"):
            run(self.folder / kind, f"drift --model model --output-dir drift {words}")
            self._keep("study", f"{kind}/drift", self.folder / kind / "drift/drift.jsonl")
        folder = self.folder / "llama"
        words = "--corpus long.jsonl --test-corpus test.jsonl --output-dir relu --output relu.jsonl --train-tokens 128"
        words += " --window 32 --batch-windows 2 --calibration-tokens 512 --test-tokens 96 --speed-densities"
        run(folder, f"relufy --model model {words} --predictor-tokens 128 --quiet")
        self._keep("study", "llama/relu", folder / "relu.jsonl")
        run(
            folder, "write_text --model model --output text.jsonl --max-tokens 200 --num-words 0 --batch-size 2 --quiet"
        )
        self._keep("study", "llama/text", folder / "text.jsonl")

    def _tasks(self) -> None:
        tiny_tasks = importlib.import_module("tests.scripts.tiny_tasks")
        folder = self.folder / "llama"
        tiny_tasks.task_folder(folder / "tasks")
        where = "--include-path tasks"
        sparse = "--method dense predictor teal --predictors predictors"
        words = f"--tasks tiny_choices,tiny_texts,tiny_answers {where} --limit 3 --output task-records.jsonl {sparse}"
        run(folder, f"evaluate --model model --batch-size 2 --quiet {words}")
        self._keep("tasks", "records", folder / "task-records.jsonl")
        words = f"--tasks tiny_choices,tiny_texts {where} --output requests.gz --limit 3"
        run(folder, f"carried_tasks export --model model {words} --quiet")
        self._keep("tasks", "requests", folder / "requests.gz")
        words = f"--requests requests.gz --output carried.jsonl --batch-size 2 {sparse}"
        run(folder, f"carried_tasks answer --model model {words} --quiet")
        run(folder, f"carried_tasks fold --model model --answers carried.jsonl {where} --output folded.jsonl --quiet")
        self._keep("tasks", "folded", folder / "folded.jsonl")

    def _older(self) -> None:
        """The code of now on the files of the code before: read, and continued."""
        if not self.older.exists():
            made = self.folder / "llama"
            self.older.mkdir()
            for name in ("model", "store", "predictors"):
                shutil.copytree(made / name, self.older / name)
            names = [f"{name}.jsonl" for name in ("train", "test", "prompts", "answers-predictor-all-float32-b8")]
            names += ["budget-predictor.json", "answers-predictor-all-float32-b8.jsonl.manifest.json"]
            for name in names:
                shutil.copyfile(made / name, self.older / name)
            words = f"{EVALUATE} --output records.jsonl --method dense cats teal --predictors predictors"
            run(self.older, f"evaluate --model model {words}")
        folder = self.folder / "older"
        shutil.copytree(self.older, folder)
        answers, records = folder / "answers-predictor-all-float32-b8.jsonl", folder / "records.jsonl"
        for path, count in ((answers, 3), (records, 2)):
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))
        flags = "--method predictor --predictors predictors --sparse-phases all --dtype float32 --batch-size 8 --resume"
        run(folder, f"infer --model model {INFER} --output {answers.name} {flags}")
        flags = "--method dense cats teal --predictors predictors --resume"
        run(folder, f"evaluate --model model {EVALUATE} --output records.jsonl {flags}")
        run(folder, f"train --model model --output-dir again {TRAIN} --activations store")
        flags = "--method predictor --predictors predictors --density-budget budget-predictor.json"
        run(folder, f"infer --model model {INFER} --output budget-answers.jsonl {flags}")
        for name in (answers.name, "records.jsonl", "again", "budget-answers.jsonl"):
            self._keep("older", name, folder / name)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = Tokenizer(models.BPE({text: i for i, text in enumerate(CHARACTERS)}, [], unk_token="<unk>"))
    tokens.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _write_lines(path: Path, lines: Any) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        shutil.rmtree(given, ignore_errors=True)
        given.mkdir(parents=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="freeze: write the fingerprints here")
    parser.add_argument("--check", type=Path, help="compare with these")
    parser.add_argument("--compare", type=Path, nargs=2, help="two files of fingerprints; nothing is run")
    parser.add_argument("--only", nargs="+", default=SECTIONS, choices=SECTIONS, help="sections")
    parser.add_argument("--folder", type=Path, help="work and leave everything here, instead of in a temporary folder")
    options = parser.parse_args()
    if options.compare:
        base, now = (json.loads(path.read_text()) for path in options.compare)
        report(base, now)
    elif not options.output and not options.check:
        parser.error("give --output, --check or --compare")
    else:
        for name in ("infer", "collect", "train", "budget", "evaluate", "drift", "relufy", "write_text", "summarize"):
            imported = importlib.import_module(module(name))
            if not Path(str(imported.__file__)).is_relative_to(ROOT):
                raise SystemExit(f"{imported.__file__} is not of {ROOT}")
        importlib.import_module("convert_llama_checkpoint")
        gc.freeze()  # what is imported stays; a fork that collects would copy all of it
        base = json.loads(options.check.read_text()) if options.check else None
        older = (options.output if base is None else options.check).with_suffix(".files")
        if base is None:
            shutil.rmtree(older, ignore_errors=True)
        with _folder(options.folder) as folder:
            os.environ["DEJAVU_LAB_CACHE"] = str(folder / "cache")
            now = Freezing(folder, tuple(options.only), older.absolute()).all()
        now = json.loads(json.dumps(now))
        if options.output:
            options.output.write_text(json.dumps(now, indent=1) + "\n")
        if base is not None:
            report(
                {name: one for name, one in base.items() if name.partition("/")[0] in {"inputs", *options.only}}, now
            )


def report(base: dict[str, Entry], now: dict[str, Entry]) -> None:
    """Print what differs and, last, a count; exit code 1 if anything does."""
    found = differences(base, now)
    for line in found:
        print(line)
    more = len(now.keys() - base.keys())
    print(f"{len(found)} differences in {len(base)} entries; {more} entries are new")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
