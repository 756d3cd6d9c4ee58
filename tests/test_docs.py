"""README.md and docs/: their links, commands and flags exist, their examples run, and generated tables have a place."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from analysis.results import read_records
from analysis.tables import all_tables, short_tables
from tests.modules.tiny_kinds import LLAMA
from tests.sparse_predictor.tiny_stages import collect, model_folder

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_OURS = {"--nproc-per-node", "--standalone", "--nnodes", "--tasks", "--batch_size", "--model_args", "--help"}


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_name_modules_files_and_flags_that_exist(page: Path) -> None:
    text = page.read_text()
    for module in re.findall(r"\bscripts\.[a-z_.]+[a-z_]", text):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module
    folders = "scripts|modules|analysis|data|sparse_predictor|pipeline_parallel"
    for name in re.findall(rf"\b(?:tests/)?(?:{folders})/[\w./]+\.(?:sh|py|ipynb|jsonl)", text):
        assert "NAME" in name or (ROOT / name).is_file(), name
    sources = "".join(path.read_text() for path in [*ROOT.glob("*.py"), *(ROOT / "scripts").rglob("*.py")])
    shell = "".join(path.read_text() for path in (ROOT / "scripts").rglob("*.sh"))
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)) - NOT_OURS:
        name = flag.removeprefix("--").replace("-", "_")
        assert re.search(rf"^    {name}: ", sources, re.MULTILINE) or flag in shell or f'"{flag}"' in sources, flag


def test_the_first_page_is_short_and_every_generated_table_has_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    marked = [name for page in PAGES for name in re.findall(r"^<!-- table:([\w-]+) -->", page.read_text(), re.M)]
    assert len(marked) == len(set(marked))
    recipe = (ROOT / "scripts" / "recipes" / "readme.sh").read_text()
    assert "--readme README.md docs/results/*.md" in recipe
    names = re.search(r"^tables all (.*)$", recipe, re.MULTILINE)
    assert names is not None
    made = all_tables(read_records(*(ROOT / "analysis" / "results" / f"{name}.jsonl" for name in names[1].split())))
    assert set(marked) <= made.keys() | short_tables(made).keys() | {"drift_verdict"}


def test_the_examples_of_the_store_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = collect(model_folder(tmp_path / "model", LLAMA), Path("outputs/smollm2/activations"))
    text = (ROOT / "docs" / "formats.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out.startswith(f"{store.num_rows} (0, 1, 2) raw\n")
    (links,) = (each for each in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "score_norm" in each)
    subprocess.run(["bash", "-ec", links.replace("NAME", "smollm2")], check=True)
    for layer in store.layers:
        linked = tmp_path / f"outputs/smollm2/deja_vu/score_norm_{layer}.mmap"
        norms = np.memmap(linked, dtype="float16", mode="r", shape=(store.num_rows, 6))
        assert np.array_equal(norms, store.att_label(layer))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_no_page_says_a_layer_where_it_means_per_layer(page: Path) -> None:
    """`4 kernels a layer` reads as broken English; generated tables are tested where they are made."""
    prose = re.sub(r"<!-- table:([\w-]+) -->.*?<!-- /table:\1 -->", "", page.read_text(), flags=re.DOTALL)
    units = "layer|token|step|row|density|record|process|rank|task|seed|model|neuron|answer|document"
    found = re.findall(
        rf"\b(?:one|two|three|four|\d+|rows?|kernels?|tokens|bits?|files?|lines?|records?) an? (?:{units})\b", prose
    )
    assert not found
