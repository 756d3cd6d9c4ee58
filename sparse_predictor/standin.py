"""The linear stand-in for skipped neurons, fitted in closed form in the run it is for.

The dense and the sparse model run side by side over calibration text, layer by layer. At each MLP the threshold is set
for the density, and a low-rank map of the sparse model's MLP input is regressed on what is missing there:

    target = (what this MLP's skipped neurons would have added) + error_share * (what earlier layers already lost)

where the loss so far is the dense residual minus the sparse one. With `error_share` 0 each layer repairs only itself;
with 1 it steers the residual stream back to the dense one. Rows count by 1 / (mean square of the dense residual), since
the norm that follows divides by it. Needs no gradient: two forward passes and one regression per layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.forward_pass import ResidualStream
from sparse_predictor.calibration import quantiles_of, threshold_at
from sparse_predictor.low_rank import RegressionSums
from sparse_predictor.predictor import PredictorStack

CHUNK_TOKENS = 4096


@torch.inference_mode()
def fit_standins(
    model: Decoder,
    stack: PredictorStack,
    layers: Sequence[int],
    token_ids: Tensor,
    *,
    lookahead: int,
    error_share: float,
) -> None:
    """Set `stack`'s stand-ins at each of its densities, in place; token_ids [B, T] is training text.

    `layers` says which layer each of the stack's places is; others stay dense. Nothing to do without stand-ins.
    """
    places = {layer: place for place, layer in enumerate(layers)}
    for density_place in range(stack.standin_in.shape[1]):
        chunks = token_ids.split(max(1, CHUNK_TOKENS // token_ids.shape[1]))
        dense = [model.begin_stream(chunk) for chunk in chunks]
        sparse = [model.begin_stream(chunk) for chunk in chunks]
        earlier: dict[int, list[Tensor]] = {}
        for layer in range(model.config.num_hidden_layers):
            for stream in (*dense, *sparse):
                model.half_block(layer, "attention")(stream)
            # What scores read, by layer; the layer's own input is what its stand-in reads.
            earlier[layer] = [stream.hidden_states for stream in sparse]
            earlier.pop(layer - lookahead - 1, None)
            if layer not in places:
                for stream in (*dense, *sparse):
                    model.half_block(layer, "mlp")(stream)
                continue
            sources = earlier[layer - lookahead if layer >= lookahead else layer]
            _fit_layer(model, stack, layer, places[layer], density_place, dense, sparse, sources, error_share)


def _fit_layer(
    model: Decoder,
    stack: PredictorStack,
    layer: int,
    place: int,
    density_place: int,
    dense: list[ResidualStream],
    sparse: list[ResidualStream],
    sources: list[Tensor],
    error_share: float,
) -> None:
    """Fit one layer's stand-in, and move both models past this MLP."""
    mlp, density = model.mlp(layer), stack.densities[density_place]
    if (kept_share := stack.kept(place, density)) == 1.0:
        for stream in (*dense, *sparse):
            model.half_block(layer, "mlp")(stream)
        return
    scores = [stack.layer_scores(place, source.flatten(0, 1).float()) for source in sources]
    threshold = threshold_at(quantiles_of(torch.cat(scores)), kept_share)
    _, _, rank, hidden_size = stack.standin_in.shape
    sums = RegressionSums(hidden_size, hidden_size, model.device)
    kept: list[Tensor] = []
    for ours, theirs, chunk_scores in zip(sparse, dense, scores, strict=True):
        lost = theirs.residual - ours.residual
        model.half_block(layer, "mlp")(theirs)
        activations = mlp.intermediate(ours.hidden_states)
        chosen = chunk_scores.view_as(activations) >= threshold
        kept.append(mlp.down_proj(activations.masked_fill(~chosen, 0)))
        target = mlp.down_proj(activations) - kept[-1] + error_share * lost
        weight = 1.0 / theirs.residual.float().square().mean(-1).flatten()
        sums.add(ours.hidden_states.flatten(0, 1).float(), target.flatten(0, 1).float(), weight)
    fitted = sums.fit(rank)
    stack.standin_in[place, density_place] = fitted.first
    stack.standin_out[place, density_place] = fitted.second
    stack.standin_bias[place, density_place] = fitted.bias
    for stream, partial in zip(sparse, kept, strict=True):
        standin = stack.layer_standin(place, stream.hidden_states.float(), density)
        assert standin is not None
        model.half_block(layer, "mlp")(stream, partial + standin.to(partial.dtype))
