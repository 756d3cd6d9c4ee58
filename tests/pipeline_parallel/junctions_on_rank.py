"""One rank of a small decoder on GPUs, started by test_junctions_on_gpus.py under torchrun's variables: the fused
junction over symmetric memory, and split prefills, beside NCCL's junction and whole ones. Asserts; writes nothing."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modules.checkpoint.load import random_model
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from pipeline_parallel.all_reduce_choice import SplitPoint
from pipeline_parallel.communication import ReducingAddNorm
from pipeline_parallel.engine import parallelise
from pipeline_parallel.fused_add_norm import FusedAddNorm, SymmetricOperator, choose_all_reduce, describe_all_reduce
from pipeline_parallel.kernels.workspace import require_stated_multicast
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.overlap import Overlap, choose_overlap, split_prefills
from tests.modules.tiny_kinds import KINDS

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
}
OPT_SHAPE = {name: SHAPE[name] for name in SHAPE if name not in ("intermediate_size", "num_key_value_heads")}
SHAPES = {"llama": SHAPE, "opt": OPT_SHAPE | {"ffn_dim": 2816, "word_embed_proj_dim": 1024}}
NUM_REPEATS = 20
# Of hidden states after the last norm, about 1 in size: partial sums are rounded to bfloat16 once more by the fused
# junction, and halves are other shapes to the matrix products.
MEAN_LIMIT, LARGEST_LIMIT = 0.01, 0.25


def states_of(model: Decoder, ids: Tensor, lengths: Tensor) -> list[Tensor]:
    """Hidden states of a ragged prefill into a cache, of two decode steps after it, and of a pass without a cache; the
    prefill's of real tokens only."""
    rows, tokens = ids.shape
    cache = model.new_cache(rows, tokens + 2)
    real = torch.arange(tokens, device=ids.device) < lengths[:, None]
    found = [model(ids, cache=cache, num_tokens=lengths)[real]]
    found += [model(ids[:, step : step + 1], cache=cache, phase="decode").clone() for step in range(2)]
    return [*found, model(ids).clone()]


def assert_close(found: list[Tensor], expected: list[Tensor], what: str) -> None:
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        difference = (ours.float() - theirs.float()).abs()
        mean, largest = float(difference.mean()), float(difference.max())
        assert mean <= MEAN_LIMIT and largest <= LARGEST_LIMIT, (
            f"{what}, pass {place}: off by {mean}, {largest} at most"
        )


def assert_same_every_time(run: Callable[[], list[Tensor]], rank: int, what: str) -> list[Tensor]:
    """Bit for bit, whichever rank is late: a half that reads or overwrites what is not ready would differ."""
    first = run()
    for repeat in range(NUM_REPEATS):
        if repeat % 3 == rank:
            torch.cuda._sleep(2_000_000)
        for place, (again, once) in enumerate(zip(run(), first, strict=True)):
            assert torch.equal(again, once), f"{what}, pass {place} of repeat {repeat} differs"
    return first


def check(kind: str, mesh: ParallelMesh) -> None:
    config = from_hf_config(KINDS[kind] | SHAPES[kind])
    model = random_model(
        config, seed=0, dtype=torch.bfloat16, device=mesh.device, prepare=lambda whole: parallelise(whole, mesh)
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, config.vocab_size, (3, 700), generator=generator).to(mesh.device)
    lengths = torch.tensor([700, 1, 300], device=mesh.device)  # one row ends within the first half
    unfused = model.add_norm
    assert isinstance(unfused, ReducingAddNorm) and describe_all_reduce(model) == "nccl"
    expected = states_of(model, ids, lengths)
    choose_all_reduce(model, mesh, "fused")
    fused = model.add_norm
    assert isinstance(fused, FusedAddNorm) and isinstance(fused.operator, SymmetricOperator)
    for strategy in ("one-shot", "two-shot"):
        model.add_norm = FusedAddNorm(unfused, fused.operator, lambda tokens, way=strategy: way, fused.keeps_states)
        found = assert_same_every_time(lambda: states_of(model, ids, lengths), mesh.tp_rank, strategy)
        assert_close(found, expected, f"{kind}, {strategy}")
    junctions: dict[str, Any] = {"nccl": unfused, "fused": fused}
    for name, junction in junctions.items():
        model.add_norm, model.prefill_driver = junction, None
        choose_overlap(model, mesh, 1024)
        assert isinstance(model.prefill_driver, Overlap)
        found = assert_same_every_time(lambda: states_of(model, ids, lengths), mesh.tp_rank, f"split, {name}")
        assert_close(found, expected, f"{kind}, split, {name}")
    model.add_norm = fused
    for programs in (0, 32):  # copies, and the kernel beside what computes
        point = SplitPoint(num_tokens=2100, attention_programs=programs, mlp_programs=programs, offset=128)
        split_prefills(model, 1024, (point,))
        found = assert_same_every_time(lambda: states_of(model, ids, lengths), mesh.tp_rank, f"split, {programs}")
        assert_close(found, expected, f"{kind}, split, {programs} programs")
    driver = model.prefill_driver
    assert isinstance(driver, Overlap)
    torch.cuda.synchronize()
    for half in driver.junctions:
        assert isinstance(half, FusedAddNorm) and isinstance(half.operator, SymmetricOperator)
        assert not half.operator.workspace.signal_pad.any(), "the signal pad is not zero again"


def main() -> None:
    require_stated_multicast()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    mesh = ParallelMesh.from_process_group(dist.get_world_size(), 1, device)
    with torch.inference_mode():
        for kind in SHAPES:
            check(kind, mesh)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
