"""Pipeline parallelism, applied to a decoder from outside: which layers a stage holds, and its links to the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor, nn

from modules.decoder import Decoder
from modules.forward_pass import ForwardPass, lookahead_inputs
from modules.linear import bytes_held
from modules.normalization import residual_dtype
from modules.sparsity import BLOCKS
from pipeline_parallel.communication import HandOff
from pipeline_parallel.fused_add_norm import FusedAddNorm
from pipeline_parallel.mesh import ParallelMesh


def plan_stages(layer_sizes: Sequence[int], first_size: int, last_size: int, num_stages: int) -> list[range]:
    """Consecutive layers for each stage, at least one each, so that the largest stage is as small as possible.

    Sizes are in bytes. `first_size` (embeddings) is added to the first stage, `last_size` (head) to the last. Of
    equally good plans, the one whose early stages are larger is returned.
    """
    num_layers = len(layer_sizes)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"--pp-size {num_stages} does not fit a model of {num_layers} layers: a stage needs one")
    before = [0, *accumulate(layer_sizes)]

    def stage_size(stage: int, start: int, stop: int) -> int:
        extra = (first_size if stage == 0 else 0) + (last_size if stage == num_stages - 1 else 0)
        return before[stop] - before[start] + extra

    # best[stop]: (largest stage, where the last one starts) of the best plan so far for the layers before `stop`.
    best: list[dict[int, tuple[int, int]]] = [{stop: (stage_size(0, 0, stop), 0) for stop in range(1, num_layers + 1)}]
    for stage in range(1, num_stages):
        best.append({})
        for stop in range(stage + 1, num_layers + 1):
            plans = [
                (max(best[stage - 1][start][0], stage_size(stage, start, stop)), start) for start in range(stage, stop)
            ]
            best[stage][stop] = min(plans, key=lambda plan: (plan[0], -plan[1]))
    stages, stop = [], num_layers
    for stage in range(num_stages - 1, -1, -1):
        start = best[stage][stop][1]
        stages.append(range(start, stop))
        stop = start
    return stages[::-1]


def stages_of(model: Decoder, num_stages: int) -> list[range]:
    """The layers of each stage of a model that is still whole, balanced by the bytes of its parameters."""
    layers = [bytes_held(*(model.half_block(idx, block) for block in BLOCKS)) for idx in model.layers]
    first, last = bytes_held(model.embeddings, model.first_norm), bytes_held(model.lm_head, model.project_out)
    return plan_stages(layers, first, last, num_stages)


class StageLinks:
    """The links of one stage; see `modules.decoder.PipelineLinks`."""

    def __init__(self, mesh: ParallelMesh, model: Decoder) -> None:
        self.is_first, self.is_last = mesh.pp_rank == 0, mesh.pp_rank == mesh.pp_size - 1
        self._model, self._hand_off = model, HandOff(mesh)

    def receive(self, batch_size: int, num_tokens: int, forward_pass: ForwardPass) -> tuple[Tensor, Tensor]:
        """See PipelineLinks."""
        kept = lookahead_inputs(self._model.span.start, forward_pass.max_lookahead)
        dtype, shape = self._model.compute_dtype, (batch_size, num_tokens, self._model.config.hidden_size)
        num_normed = int(self._model.config.pre_norm)  # post-norm: the stream is normed itself
        of_residual = residual_dtype(dtype), self.residual_shape(batch_size, num_tokens)
        residual, *parts = self._hand_off.receive([of_residual, *[(dtype, shape)] * (num_normed + len(kept))])
        for (block, layer_idx), states in zip(kept, parts[num_normed:], strict=True):
            forward_pass.inputs[block][layer_idx] = states
        return parts[0] if num_normed else residual.to(dtype), residual

    def send(self, hidden_states: Tensor, residual: Tensor, forward_pass: ForwardPass) -> None:
        """See PipelineLinks."""
        kept = lookahead_inputs(self._model.span.stop, forward_pass.max_lookahead)
        normed = [hidden_states] if self._model.config.pre_norm else []
        inputs = (forward_pass.inputs[block][layer_idx] for block, layer_idx in kept)
        self._hand_off.send([residual, *normed, *inputs])

    def residual_shape(self, batch_size: int, num_tokens: int) -> tuple[int, ...]:
        """See PipelineLinks."""
        shape, junction = (batch_size, num_tokens, self._model.config.hidden_size), self._model.add_norm
        return junction.residual_shape(shape) if isinstance(junction, FusedAddNorm) else shape

    def finish(self) -> None:
        """Wait until all sends are done."""
        self._hand_off.finish()


def apply_pipeline(model: Decoder, mesh: ParallelMesh) -> None:
    """Keep of a decoder on `meta` what this rank's stage computes; the rest becomes empty modules.

    The embeddings stay on the first stage, final norm and head on the last (a tied head is then a parameter of its
    own); a stage keeps the norm after its last half-block. ValueError if there are more stages than layers.
    """
    if mesh.pp_size == 1:
        return
    layers = stages_of(model, mesh.pp_size)[mesh.pp_rank]
    model.span = range(2 * layers.start, 2 * layers.stop)
    for idx in range(len(model.half_blocks)):
        if idx not in model.span:
            model.half_blocks[idx] = nn.Module()
    model.links = StageLinks(mesh, model)
    if not model.links.is_first:
        model.embeddings = nn.Module()  # type: ignore[assignment]
        model.first_norm = None
    if not model.links.is_last:
        model.lm_head = nn.Module()  # type: ignore[assignment]
        model.project_out = None
