"""The collections of test_collect_sharded.py, by `python -m tests.scripts.sharded_collection FOLDER CASE...` on every
rank: one start of the ranks runs many cases. A case that ends in `-killed` ends all ranks."""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import scripts.collect
from data.activation_store import ActivationStoreWriter, open_shard_writer
from pipeline_parallel.launch import distributed
from scripts.collect import Options
from tests.modules.tiny_kinds import KINDS

MODELS = {
    # 82 neurons on 4 ranks: 21, 21, 21, 19, no whole bytes of bits; 2 groups of 3 query heads on 4 ranks: 1, 2, 1, 2
    "llama": KINDS["llama"] | {"intermediate_size": 82},
    "opt": KINDS["opt"],
    "opt-post-norm-projected": KINDS["opt-post-norm-projected"],
}
# On four ranks; what tp and pp leave is data parallel.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp4": ("llama", {"label_format": "packed", "tp_size": 4}),
    "pp2-dp2": ("llama", {"pp_size": 2}),
    "tp2-pp2": ("opt", {"label_format": "packed", "tp_size": 2, "pp_size": 2}),
    "dp4": ("opt-post-norm-projected", {}),
    "some-layers": ("llama", {"pp_size": 2, "tp_size": 2, "units": "attention", "layers": "0"}),
    "resumed": ("llama", {"tp_size": 2}),
}
LAST_DOCUMENT = "6"  # what is collected on the rank that is killed


def options(folder: Path, case: str, **more: Any) -> Options:
    """Of a case; with `tp_size=1, pp_size=1` those of one process."""
    kind, changes = CASES[case]
    found = {"corpus": str(folder / "corpus.jsonl"), "max_document_tokens": 32, "batch_size": 2, **changes, **more}
    return Options(model=str(folder / kind), output_dir=folder / case, quiet=True, **found)


def kill_on_rank_1() -> None:
    """Batches become valid at once; rank 1 is gone as soon as it has a document in its files, half of a batch."""
    append = ActivationStoreWriter.append_document

    def dying(self: ActivationStoreWriter, document_id: str, *args: Any, **kwargs: Any) -> None:
        append(self, document_id, *args, **kwargs)
        if document_id == LAST_DOCUMENT and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    ActivationStoreWriter.append_document = dying  # type: ignore[method-assign]
    scripts.collect.open_shard_writer = partial(open_shard_writer, flush_bytes=1)


def main(folder: Path, cases: list[str]) -> None:
    with distributed("cpu", interval_s=0.2, patience_s=3.0):
        for case in cases:
            if case.endswith("-killed"):
                kill_on_rank_1()
            scripts.collect.main(options(folder, case.removesuffix("-killed"), resume=case == "resumed"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
