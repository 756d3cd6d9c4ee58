"""The import rule of the layout, the length of files and the names that are out of bounds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "modules": {"modules", "data"},
    "data": {"data"},
    "analysis": {"analysis", "data"},
    "sparse_predictor": {"sparse_predictor", "modules", "data"},
    "pipeline_parallel": {"pipeline_parallel", "modules", "data"},
    "convert_llama_checkpoint": {"modules", "data"},
    "scripts": {"scripts", "convert_llama_checkpoint", "modules", "data", "analysis", "sparse_predictor"}
    | {"pipeline_parallel"},
}
OURS = {*MAY_IMPORT, "tests"}
MAX_LINES = 500
FAMILY_FILES = re.compile(r"modules/families/\w+\.py|convert_llama_checkpoint\.py")
BANNED_FILE_NAME = re.compile(r"(^|_)(new|v\d+|save|old|utils|helpers)(_|$)")
BANNED_FAMILY = re.compile(r"(?i:llama|smollm|mistral)|(^|_)opt(_|$)|OPT|Opt([A-Z]|$)")
BANNED_VARIABLES = {"dim", "d", "h", "inp", "ckt", "K"}


def violations(root: Path) -> list[str]:
    """Every breach below `root`, as `file:line: what`."""
    found = []
    for path in sorted(
        {*root.glob("*.py"), *(file for folder in MAY_IMPORT for file in root.glob(f"{folder}/**/*.py"))}
    ):
        name = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{name}:{line}: {what}" for line, what in file_violations(name, tree)]
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_LINES:
            found.append(f"{name}:{num_lines}: longer than {MAX_LINES} lines")
    return found


def circles(root: Path) -> list[list[str]]:
    """Groups of files below `root` that import each other, by whatever way round: imports under TYPE_CHECKING and
    within functions count."""
    paths = {*root.glob("*.py"), *(file for folder in MAY_IMPORT for file in root.glob(f"{folder}/**/*.py"))}
    named = {path.relative_to(root).with_suffix("").as_posix().replace("/", "."): path for path in paths}
    named = {name.removesuffix(".__init__"): path for name, path in named.items()}
    reached: dict[str, set[str]] = {}
    for name, path in named.items():
        found = {one for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for one in imports(node)}
        files = ({".".join(one.split(".")[:depth]) for depth in range(1, one.count(".") + 2)} for one in found)
        reached[name] = {max(here, key=len) for one in files if (here := one & named.keys())} - {name}
    for _ in named:  # what is reached in one step more, until there is nothing more
        longer = {name: there.union(*(reached[one] for one in there)) for name, there in reached.items()}
        if longer == reached:
            break
        reached = longer
    groups = {tuple(sorted(one for one in there if name in reached[one])) for name, there in reached.items()}
    return sorted(list(group) for group in groups if group)


def file_violations(name: str, tree: ast.Module) -> list[tuple[int, str]]:
    package = name.split("/")[0].removesuffix(".py")
    found = []
    stem = name.rsplit("/", 1)[-1].removesuffix(".py")
    if BANNED_FILE_NAME.search(stem) or (not FAMILY_FILES.fullmatch(name) and BANNED_FAMILY.search(stem)):
        found.append((1, f"file name {stem!r}"))
    for node in ast.walk(tree):
        for imported in imports(node):
            top = imported.split(".")[0]
            is_fact = package == "analysis" and imported.startswith("sparse_predictor.methods.")  # of each method
            if top in OURS and top not in MAY_IMPORT.get(package, set()) and not is_fact:
                found.append((node.lineno, f"imports {imported}"))
            if (imported + ".").startswith("torch.distributed.") and package != "pipeline_parallel":
                found.append((node.lineno, f"imports {imported}"))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if not FAMILY_FILES.fullmatch(name) and BANNED_FAMILY.search(node.name):
                found.append((node.lineno, f"{node.name!r} is named after a model family"))
        elif isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)):
            identifier = node.arg if isinstance(node, ast.arg) else node.id
            if identifier in BANNED_VARIABLES:
                found.append((node.lineno, f"the name {identifier!r}"))
    return found


def imports(node: ast.AST) -> list[str]:
    """Absolute dotted names that a node imports, or reaches as an attribute of torch."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level:
            return ["tests"]  # relative imports hide what they reach: never allowed
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
        return ["torch.distributed"]
    return []


def test_source_folders_keep_the_import_rule_the_length_and_the_names() -> None:
    assert not (breaches := violations(ROOT)), "\n".join(breaches)


def test_no_file_imports_one_that_imports_it() -> None:
    assert not (found := circles(ROOT)), "\n".join(map(" <-> ".join, found))


def test_circles_are_found_however_they_are_closed(tmp_path: Path) -> None:
    sources = {
        "decoder": "from modules.cache import Cache\nfrom modules.linear import Linear",
        "cache": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from modules.graphs import DecodeGraphs",
        "graphs": "def f():\n    import modules.decoder",
        "linear": "import torch",
    }
    (tmp_path / "modules").mkdir()
    for name, source in sources.items():
        (tmp_path / "modules" / f"{name}.py").write_text(source)
    assert circles(tmp_path) == [["modules.cache", "modules.decoder", "modules.graphs"]]


@pytest.mark.parametrize(
    ("name", "source", "breach"),
    [
        ("modules/attention.py", "from analysis.tables import x", "imports analysis.tables.x"),
        ("data/corpora.py", "def f():\n    import modules.decoder", "imports modules.decoder"),
        ("analysis/tables.py", "import modules", "imports modules"),
        ("analysis/tables.py", "from scripts.collect import main", "imports scripts.collect.main"),
        ("sparse_predictor/train.py", "import analysis.results", "imports analysis.results"),
        ("sparse_predictor/train.py", "from . import labels", "imports tests"),
        ("pipeline_parallel/engine.py", "import sparse_predictor", "imports sparse_predictor"),
        ("convert_llama_checkpoint.py", "import scripts", "imports scripts"),
        ("scripts/collect.py", "import tests.conftest", "imports tests.conftest"),
        ("modules/decoder.py", "import torch.distributed as dist", "imports torch.distributed"),
        ("modules/decoder.py", "from torch import distributed", "imports torch.distributed"),
        ("scripts/infer.py", "import torch\ntorch.distributed.barrier()", "imports torch.distributed"),
        ("modules/decoder.py", "\n" * 501, "longer than 500 lines"),
        ("modules/attention_v2.py", "", "file name 'attention_v2'"),
        ("modules/llama.py", "", "file name 'llama'"),
        ("modules/decoder.py", "class OPTDecoder: ...", "'OPTDecoder' is named after a model family"),
        ("modules/feed_forward.py", "def f(inp): ...", "the name 'inp'"),
    ],
)
def test_every_kind_of_breach_is_found(tmp_path: Path, name: str, source: str, breach: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(source)
    assert any(breach in found and found.startswith(name) for found in violations(tmp_path))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (
            "sparse_predictor/train.py",
            "from data.activation_store import ActivationStore\nimport modules.config",
        ),
        ("pipeline_parallel/engine.py", "import torch.distributed\nfrom modules.decoder import Decoder"),
        ("scripts/options.py", "class RunOptions: ...\ndef optional_path(optimizer): ..."),
        ("modules/families/llama.py", "def from_llama(config): ..."),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, name: str, source: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(source)
    assert violations(tmp_path) == []
