"""The cases of test_parity.py: what is run in one process, and by `python -m tests.pipeline_parallel.parity_cases` on
every rank of a world. One start of the ranks runs all cases of its size; rank 0 writes what came out."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from modules.checkpoint.load import load_model
from modules.decoder import Decoder
from modules.requests import GenerationRequest, GenerationResult
from modules.sampling import SamplingParams
from modules.sparsity import BLOCKS, ActiveSet, SelectionContext, Selector
from pipeline_parallel.engine import generate_on_mesh, parallelise
from pipeline_parallel.launch import distributed
from pipeline_parallel.mesh import ParallelMesh
from sparse_predictor.selection import Selection, attach_selection
from tests.modules.tiny_kinds import KINDS, random_tokens

# (tp, pp) by world size; what is left over is data parallel.
MESHES = {
    2: [(2, 1), (1, 2)],
    4: [(4, 1), (2, 2), (2, 1), (1, 1)],
}
# Neurons, and in one model heads, that ranks cannot share evenly.
MODELS = {
    name: KINDS[name] | {"intermediate_size": 81} for name in ("llama-24-heads-8-groups", "llama-9-heads-3-groups")
}
MODELS |= {name: KINDS[name] | {"ffn_dim": 81} for name in ("opt", "opt-post-norm-projected")}
BATCH_SIZES = (1, 8)


# variant of the predictors, and the selection; everything is sparse in the prompt, too, unless said otherwise
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "oracle": ("standin", {"method": "oracle", "head_density": 0.5}),
    "static": ("standin", {"method": "static", "head_density": 0.5}),
    "random": ("standin", {"method": "random", "head_density": 0.5}),
    "cats": ("standin", {"method": "cats"}),
    "teal": ("standin", {"method": "teal"}),
    "predictor": ("standin", {"method": "predictor", "head_density": 0.5}),
    "predictor-topk": ("topk", {"method": "predictor", "sparse_phases": "decode"}),
    "predictor-lookahead": ("lookahead", {"method": "predictor"}),
}
SPARSE_CASES = [("llama-24-heads-8-groups", name) for name in SPARSE] + [
    ("opt", "oracle"),
    ("opt", "predictor"),
]


def sparse_runs(tp_size: int, pp_size: int, dp_size: int) -> list[tuple[str, str, int]]:
    """(model, method, batch size): one at a time, so that calls can be compared in order; the predictor together, too.
    Every method on two ranks of a layer; on other cuts those whose choices depend on more than scores, and on replicas,
    which do not change what a method does, the predictor alone."""
    names = {"predictor"} | ({"oracle", "predictor-lookahead"} if dp_size == 1 else set())
    if (tp_size, pp_size, dp_size) == (2, 1, 1):
        names = set(SPARSE)
    single = [(kind, name, 1) for kind, name in SPARSE_CASES if name in names]
    return single + [(kind, name, 8) for kind, name in SPARSE_CASES if name == "predictor"]


def requests(*, greedy: bool = False) -> list[GenerationRequest]:
    """Ragged prompts, each with options of its own; one does not fit."""
    sampling = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, top_p=0.9, seed=2),
        SamplingParams(),
        SamplingParams(temperature=1.5, top_k=20, seed=3),
    ]
    lengths, counts = [9, 1, 17, 4, 12], [6, 2, 7, 1, 5]
    tokens = random_tokens(5, 70).tolist()
    made = [
        GenerationRequest(
            prompt_token_ids=ids[:length],
            max_new_tokens=count,
            sampling=SamplingParams() if greedy else options,
            echo=True,
        )
        for ids, length, count, options in zip(tokens, lengths, counts, sampling, strict=True)
    ]
    return [*made[:2], GenerationRequest(prompt_token_ids=tokens[0]), *made[2:]]


class RecordingSelector:
    """Notes, in order of calls, which units (by their number in the whole block) each row computes on this rank."""

    def __init__(self, inner: Selector, into: list[Any]) -> None:
        self.inner, self.into = inner, into

    @property
    def lookahead(self) -> int:
        return self.inner.lookahead

    def select(self, hidden_states: torch.Tensor, context: SelectionContext) -> ActiveSet | None:
        active = self.inner.select(hidden_states, context)
        if active is not None:
            units = torch.arange(active.mask.shape[1]) if context.units is None else context.units.local
            self.into.append([units[row].tolist() for row in active.mask])
        return active


@contextmanager
def recorded_sets(model: Decoder) -> Iterator[dict[str, list[Any]]]:
    """Within the block, every selector's choices: `layer block` -> calls -> rows -> units."""
    found: dict[str, list[Any]] = {}
    for layer in model.layers:
        for block in BLOCKS:
            holder = model.half_block(layer, block).block
            if holder.selector is not None:
                holder.selector = RecordingSelector(holder.selector, found.setdefault(f"{layer} {block}", []))
    yield found


def run_dense(model: Decoder, mesh: ParallelMesh, batch_size: int) -> list[dict[str, Any]]:
    """Answers in order, as rank 0 hears of them."""
    heard: dict[int, GenerationResult] = {}
    generate_on_mesh(model, mesh, requests(), batch_size=batch_size, eos_token_ids=(), on_finish=heard.__setitem__)
    return [asdict(heard[idx]) for idx in sorted(heard)]


def run_sparse(
    model: Decoder, mesh: ParallelMesh, predictors: Path, name: str, batch_size: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers, and what each rank has chosen."""
    options = {"sparse_phases": "all", "mlp_density": 0.4, **SPARSE[name][1]}
    attach_selection(model, Selection(predictors=predictors, **options))
    heard: dict[int, GenerationResult] = {}
    with recorded_sets(model) as sets:
        generate_on_mesh(
            model,
            mesh,
            requests(greedy=True),
            batch_size=batch_size,
            eos_token_ids=(),
            on_finish=heard.__setitem__,
        )
    return [asdict(heard[idx]) for idx in sorted(heard)], mesh.gather(sets)


def load_wide(folder: Path, mesh: ParallelMesh) -> Decoder:
    """In float64, cut to this rank's part."""
    return load_model(folder, dtype=torch.float64, prepare=lambda model: parallelise(model, mesh))


def run_all(folder: Path) -> dict[str, Any]:
    """All cases on the ranks of this world."""
    found: dict[str, Any] = {}
    with distributed("cpu") as launch:
        for tp_size, pp_size in MESHES[launch.world_size]:
            mesh = ParallelMesh.from_process_group(tp_size, pp_size, "cpu")
            for kind in MODELS:
                model = load_model(folder / kind / "model", prepare=lambda model, mesh=mesh: parallelise(model, mesh))
                for batch_size in BATCH_SIZES:
                    answers = run_dense(model, mesh, batch_size)
                    found[f"dense {kind} tp{tp_size} pp{pp_size} batch{batch_size}"] = answers
            models: dict[str, Decoder] = {}
            for kind, name, batch_size in sparse_runs(mesh.tp_size, mesh.pp_size, mesh.dp_size):
                if kind not in models:
                    models[kind] = load_wide(folder / kind / "model", mesh)
                model = models[kind]
                case = run_sparse(model, mesh, folder / kind / SPARSE[name][0], name, batch_size)
                found[f"{name} {kind} tp{tp_size} pp{pp_size} batch{batch_size}"] = case
        if launch.rank == 0:
            (folder / f"world{launch.world_size}.json").write_text(json.dumps(found))
    return found


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
