"""A random campaign against every stage, outside CI: kills, damage, bad JSON, bad flags, two at once.

    python tests/campaign/campaign.py --seed 0 --output-dir outputs/campaign [--kind damage] [--count 20] [--first 7]

The same seed gives the same cases (but the moments at which processes are killed or meet are those of the machine).
OUTPUT_DIR/cases.jsonl gets one line per case with its command, what was done, exit code, error and verdict; what is
there already is not run again. Cases with a finding keep their folder, OUTPUT_DIR/KIND/NUMBER.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import re
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

from analysis.results import environment_stamp  # noqa: E402
from tests.campaign.changes import change_json, change_words, damage, flags_of  # noqa: E402
from tests.campaign.stages import (  # noqa: E402
    COMMANDS,
    MODELS,
    PRODUCTS,
    RESUME,
    Outcome,
    Run,
    build,
    case_folder,
    content,
    differing,
    left_over,
    run,
    with_output,
)

# Everything that a stage imports, so that a forked one starts at once.
PRELOADED = (
    "convert_llama_checkpoint", "lm_eval.evaluator", "scripts.benchmark.agreement", "scripts.budget",
    "scripts.carried_tasks", "scripts.collect", "scripts.studies.drift", "scripts.evaluate", "scripts.infer",
    "scripts.lm_eval_model", "scripts.studies.relufy", "scripts.summarize", "scripts.train", "scripts.write_text",
    "transformers.models.auto.tokenization_auto",
)  # fmt: skip
COUNTS = {"kills": 60, "damage": 150, "json": 1000, "flags": 150, "pairs": 21}
LIMIT_S = 60.0  # of a run that takes up to 10 s on an idle machine
FINE = ("as uninterrupted", "refused", "same output", "other output", "done", "works on", "consistent")

# Who reads an artefact: its own stage, which continues it in place, or one that writes something else.
STAGE_OF = {product: stage for stage, product in PRODUCTS.items()}
READERS = {"hf": "convert", "tiny": "infer", "store": "train", "predictors": "infer", "budget.json": "infer",
           "requests.gz": "answer", "carried.jsonl": "fold", "records.jsonl": "summarize", "prompts.jsonl": "infer",
           "train.jsonl": "collect", "choices.json": "choices", "splits.json": "splits"}  # fmt: skip
FOLDERS = {
    "hf": ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
           "model.safetensors.index.json"),
    "tiny": ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "manifest.json"),
    "store": ("manifest.json",), "predictors": ("manifest.json", "metrics.json"),
}  # fmt: skip
JSON_ARTEFACTS = (*FOLDERS, *FOLDERS, *READERS, *STAGE_OF, "answers.jsonl.manifest.json", "text.jsonl.manifest.json")


class Campaign:
    """The tiny models' artefacts, and the cases that are done."""

    def __init__(self, output_dir: Path, seed: int, kind: str) -> None:
        self.output_dir, self.seed, self.records = output_dir.resolve(), seed, output_dir.resolve() / "cases.jsonl"
        self.base, self.other, durations = (self.output_dir / name for name in ("base", "other", "seconds.json"))
        os.environ["HF_DATASETS_CACHE"] = str(self.output_dir / "cache")
        if not durations.exists():
            seconds = build(self.base, MODELS[kind], seed=0)
            build(self.other, MODELS[kind], seed=1)
            durations.write_text(json.dumps(seconds))
        self.seconds: dict[str, float] = json.loads(durations.read_text())
        lines = self.records.read_text().splitlines() if self.records.exists() else []
        self.done = [json.loads(line) for line in lines]
        self.expected = {product: content(self.base / product) for product in PRODUCTS.values()}
        self.commit = environment_stamp()["commit"]
        self.helps: dict[str, str] = {}

    def case(self, kind: str, number: int) -> None:
        """Run one case, unless it is done, and record it."""
        if any((record["kind"], record["case"], record["seed"]) == (kind, number, self.seed) for record in self.done):
            return
        folder = self.output_dir / kind / str(number)
        record = CASES[kind](self, folder, random.Random(f"{self.seed} {kind} {number}"))
        is_finding = record["verdict"] not in FINE
        head = {"kind": kind, "case": number, "seed": self.seed, "commit": self.commit, "finding": is_finding}
        record = {**head, **record}
        self.done.append(record)
        with self.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if is_finding:
            print(
                kind, f"{number}: {record['verdict']}", record["did"], record["error"][-400:], sep="\n    ", flush=True
            )
        else:
            shutil.rmtree(folder)

    def help(self, command: str) -> str:
        """What `--help` of a command's stage says."""
        words = [word for word in command.split()[:2] if not word.startswith("--")]
        name = " ".join(words)
        if name not in self.helps:
            self.helps[name] = with_output(run(f"{name} --help", self.base), self.base).stderr
        return self.helps[name]

    def unlike(self, folder: Path, product: str) -> list[str]:
        """Files of a product that differ from those of an uninterrupted run."""
        return differing(content(folder / product), self.expected[product])


def record_of(outcome: Outcome, verdict: str, did: str, **more: Any) -> dict[str, Any]:
    """A case's record."""
    told = {"command": outcome.command, "exit": outcome.code, "error": outcome.error}
    return {"verdict": verdict, "did": did, **told, **more}


def kills(campaign: Campaign, folder: Path, draw: random.Random) -> dict[str, Any]:
    """Kill a stage at random moments, run it to its end: the product is that of an uninterrupted run."""
    stage = draw.choice(list(PRODUCTS))
    product = PRODUCTS[stage]
    case_folder(campaign.base, folder, without=product)
    command, resumed, moments = COMMANDS[stage].format(out=product), "", []
    for _ in range(draw.choice((1, 1, 2, 3))):
        moment = draw.uniform(0.0, 1.1 * campaign.seconds[stage])
        running = Run(command + resumed, folder)
        ended = running.ends_within(moment)
        if not ended:
            running.kill()
        outcome = running.wait(1.0)
        moments.append(f"{moment:.2f} s" + (" (had ended)" if ended else ""))
        if ended and outcome.verdict != "done":
            return record_of(outcome, f"killed before: {outcome.verdict}", f"{stage} killed after {', '.join(moments)}")
        resumed = RESUME.get(stage, "")
    outcome, did = run(command + resumed, folder, LIMIT_S), f"{stage} killed after {', '.join(moments)}"
    verdict = outcome.verdict
    if verdict == "refused":
        verdict = "refuses to go on"
    elif verdict == "done":
        verdict = "differs" if (unlike := campaign.unlike(folder, product)) else "as uninterrupted"
        did += f": {unlike}" if unlike else ""
    return record_of(outcome, verdict, did, left_over=left_over(folder / product))


def damaged(campaign: Campaign, folder: Path, draw: random.Random) -> dict[str, Any]:
    """Damage a file of an artefact and read it: refused, or read as if nothing had happened; then repaired."""
    artefact = draw.choice(("hf", "tiny", "tiny", "store", "predictors", "training state", *STAGE_OF))
    if artefact == "training state":
        started(campaign, folder)
        states = sorted((folder / "predictors").glob("training_*")) or [folder / "predictors/manifest.json"]
        did, file, values = damage(draw.choice(states), folder, draw)
        command, product = COMMANDS["train"].format(out="predictors"), "predictors"
    else:
        command, product = reading(campaign, folder, artefact, draw)
        did, file, values = damage(folder / artefact, campaign.other / artefact, draw)
    verifies = draw.random() < 0.5 and "--verify" in campaign.help(command)
    outcome = run(command + (" --verify" if verifies else ""), folder, LIMIT_S)
    did += f", read by {command.split()[0]}" + (" --verify" if verifies else "")
    verdict = outcome.verdict
    names = [file.name, did.split()[2], *([artefact] if " removed" in did else ()), "density budget"]
    if verdict == "refused" and not any(name in outcome.error for name in names):
        verdict = "refused, file not named"
    elif verdict == "refused" and artefact in STAGE_OF:
        return repaired(campaign, folder, artefact, did, outcome)
    elif verdict == "done":
        unlike = campaign.unlike(folder, product) if product in campaign.expected else []
        # A model may come without a tokenizer, or with a template that is empty or fails; what we wrote must be whole.
        allowed = values and not (verifies and file.suffix != ".jsonl")
        allowed |= artefact == "hf" and (".jinja" in did or " removed" in did or "WARNING" in outcome.stderr)
        verdict = ("other output" if allowed else f"read, {', '.join(unlike)} differ") if unlike else "same output"
    return record_of(outcome, verdict, did)


def reading(campaign: Campaign, folder: Path, artefact: str, draw: random.Random) -> tuple[str, str]:
    """A folder with a copy of an artefact, the command that reads it there, and what that writes."""
    in_place = artefact in STAGE_OF and (artefact not in READERS or draw.random() < 0.7)
    stage = STAGE_OF[artefact] if in_place else READERS[artefact]
    product = PRODUCTS.get(stage, "out")
    case_folder(campaign.base, folder, artefact, without=None if in_place else product)
    return COMMANDS[stage].format(out=product) + (RESUME.get(stage, "") if in_place else ""), product


def started(campaign: Campaign, folder: Path) -> None:
    """A folder in which training was killed when it had kept a state of its last phase, or of the one before."""
    case_folder(campaign.base, folder, without="predictors")
    running = Run(COMMANDS["train"].format(out="predictors"), folder)
    while not list((folder / "predictors").glob("training_refinement.pt")):
        if running.ends_within(0.002):
            break
    running.kill()
    running.wait(1.0)


def repaired(campaign: Campaign, folder: Path, artefact: str, did: str, refusal: Outcome) -> dict[str, Any]:
    """Do what the message says, and what the message about that says; the artefact is then whole."""
    stage, outcome = STAGE_OF[artefact], refusal
    tried: list[str] = []
    while outcome.verdict == "refused" and len(tried) < 3:
        if "--overwrite" in outcome.error:
            flag = " --overwrite"
        elif re.search(r"leave out --resume|\b(an)?other\b|remove", outcome.error):
            flag = ""
            for path in (folder / artefact, folder / f"{artefact}.manifest.json"):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        elif re.search("again|first|--resume|writes", outcome.error):
            flag = RESUME.get(stage, "")
        else:
            return record_of(refusal, "refused without advice", did, tried=tried, last_error=outcome.error)
        outcome = run(COMMANDS[stage].format(out=artefact) + flag, folder)
        tried.append(outcome.command)
    verdict = "refused" if outcome.verdict == "done" else f"repair: {outcome.verdict}"
    if outcome.verdict == "done" and (unlike := campaign.unlike(folder, artefact)):
        verdict = f"repair leaves {', '.join(unlike)}"
    return record_of(refusal, verdict, did, tried=tried, last_error=outcome.error)


def changed_json(campaign: Campaign, folder: Path, draw: random.Random) -> dict[str, Any]:
    """Give one key of a JSON file a bad value and read it: refused, or read."""
    artefact = draw.choice(JSON_ARTEFACTS)
    command, _ = reading(campaign, folder, artefact.removesuffix(".manifest.json"), draw)
    if artefact == "hf" and draw.random() < 0.5:
        command = COMMANDS["infer"].format(out="out.jsonl").replace("--model tiny", "--model hf")
    did = change_json(folder / artefact / draw.choice(FOLDERS.get(artefact, ("",))), draw)
    outcome = run(command, folder, LIMIT_S)
    return record_of(outcome, outcome.verdict, f"{artefact}: {did}")


def changed_flags(campaign: Campaign, folder: Path, draw: random.Random) -> dict[str, Any]:
    """Change a command line at random and run it: refused, or done."""
    command = draw.choice([command for command in COMMANDS.values() if command.startswith(("scripts", "convert"))])
    flags = flags_of(campaign.help(command))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(campaign.base, folder)
    (folder / "dangling").symlink_to("nowhere")
    words, did = change_words(command.format(out="out.jsonl").split(), flags, draw)
    outcome = run(words, folder, LIMIT_S)
    # Without its limit, or with a huge one, a stage rightly works for hours.
    works = outcome.verdict == "runs on" and ("less" in did or "9" * 20 in outcome.command)
    return record_of(outcome, "works on" if works else outcome.verdict, did)


def pairs(campaign: Campaign, folder: Path, draw: random.Random) -> dict[str, Any]:
    """Run a stage twice at once on one output: one ends well, the other too or refused; the product is whole."""
    stage = draw.choice(list(PRODUCTS))
    product = PRODUCTS[stage]
    case_folder(campaign.base, folder, without=product)
    command = COMMANDS[stage].format(out=product)
    resume = RESUME.get(stage, " --overwrite" if stage == "convert" else "")
    # Records are appended: without --resume they stand there twice, as the stage says.
    second_flags = resume if stage in ("evaluate", "answer", "fold") else draw.choice((resume, ""))
    runs = [Run(command, folder)]
    delay = draw.uniform(0.0, 0.9) * campaign.seconds[stage]
    time.sleep(delay)
    runs.append(Run(command + second_flags, folder))
    did = f"{stage}, and {delay:.2f} s later the same{second_flags}"
    outcomes = [one.wait(LIMIT_S) for one in runs]
    verdicts = [outcome.verdict for outcome in outcomes]
    worst = next((one for one in outcomes if one.verdict not in ("done", "refused")), outcomes[-1])
    loser = next((one for one in outcomes if one.verdict == "refused"), None)
    if worst.verdict not in ("done", "refused"):
        verdict = worst.verdict
    elif "done" not in verdicts:
        verdict = "neither ends well"
    elif unlike := campaign.unlike(folder, product):
        verdict = f"{' + '.join(verdicts)}, but {', '.join(unlike)} differ"
    else:
        verdict = "consistent"
    names_pid = loser is not None and any(str(one.pid) in loser.error for one in runs)
    return record_of(loser or worst, verdict, did, verdicts=verdicts, names_pid=names_pid)


CASES: dict[str, Callable[[Campaign, Path, random.Random], dict[str, Any]]] = {
    "kills": kills, "damage": damaged, "json": changed_json, "flags": changed_flags, "pairs": pairs,
}  # fmt: skip


def main() -> None:
    """Run the cases that are asked for, and print how many ended how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=tuple(CASES), help="all by default")
    parser.add_argument("--model", choices=tuple(MODELS), default="llama", help="of a new output directory")
    parser.add_argument("--count", type=int, help=f"cases of each kind; by default {COUNTS}")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    for module in PRELOADED:
        importlib.import_module(module)
    tqdm.set_lock(threading.RLock())  # its own is shared by forks: who is killed while holding it would stop all others
    gc.freeze()
    campaign = Campaign(options.output_dir, options.seed, options.model)
    for kind in (options.kind,) if options.kind else CASES:
        for number in range(options.first, options.first + (options.count or COUNTS[kind])):
            campaign.case(kind, number)
    for kind in CASES:
        counts = Counter(record["verdict"] for record in campaign.done if record["kind"] == kind)
        print(f"{kind:<8} {sum(counts.values()):>5}  " + ", ".join(f"{n} {name}" for name, n in counts.most_common()))
    for product, expected in campaign.expected.items():
        if differing(content(campaign.base / product), expected):
            print(f"a case has changed {campaign.base / product}: its results cannot be trusted")


if __name__ == "__main__":
    main()
