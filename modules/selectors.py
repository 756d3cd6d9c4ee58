"""Selectors that need neither calibration nor training: oracle, random, and what a prompt or a list of units says.

The learned predictor and CATS live in `sparse_predictor/selectors.py`.
"""

import torch
from torch import Tensor

from modules.decode_step import Choice
from modules.kernels.deferred_norm import DeferredNorm
from modules.sampling import as_int64, mix_seed, stream_element
from modules.sparsity import ActiveList, ActiveSet, SelectionContext, UnitShard, num_kept

# Random numbers drawn at once: as many as fit a CPU's cache; on a GPU, a bound of what a long prefill needs.
MAX_DRAWS = {"cpu": 1 << 18, "cuda": 1 << 24}


class OracleSelector:
    """Top units by what they really contribute: |a_j| * ||down_j|| for neurons, output norm for head groups.

    The bound that Deja Vu (Liu et al. 2023, section 3.1) calls contextual sparsity: their sets too are read off a dense
    pass, by magnitude. Here neurons are weighted by what they write, and the count is fixed. It computes the dense
    block first, so it bounds accuracy and saves nothing. ReLU neurons that are exactly zero may be kept to fill the
    count; keeping them changes no output.
    """

    lookahead = 0

    def __init__(self, unit_norms: Tensor | None, density: float, num_units: int) -> None:
        self.unit_norms = unit_norms
        self.count = num_kept(density, num_units)

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        scores = contribution(context.dense_output(), self.unit_norms, context.units)
        return ActiveSet.from_scores(scores, self.count, context.units)


def contribution(dense_output: Tensor, unit_norms: Tensor | None, units: UnitShard | None = None) -> Tensor:
    """Size of each unit's part of the block output, [rows, U]; of a shard, of all units: [rows, num_units].

    MLP: `dense_output` [B, T, F] and `unit_norms` [F] = ||down_j||. Attention: `dense_output` [B, T, G, R, H]
    (key-value groups of R query heads): L2 over a group's heads.
    """
    if dense_output.dim() == 5:
        norms = dense_output.flatten(-2).norm(dim=-1).flatten(0, 1)
        return norms if units is None else units.gather_norms(norms)
    scores = dense_output.abs() if unit_norms is None else dense_output.abs() * unit_norms
    return scores.flatten(0, 1) if units is None else units.gather(scores.flatten(0, 1))


class StaticSelector:
    """The same units for every token (those most often active on calibration text): `mask` bool, over all units.

    Static sparsity by calibration, what Deja Vu (Liu et al. 2023, section 1 and figure 1) sets contextual sparsity
    against; pruning by how often a unit is active as in Hu et al. 2016 (Network Trimming, section 3), not retrained.
    """

    lookahead = 0

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self._listed: dict[tuple[int, torch.device], ActiveList | ActiveSet] = {}  # by number of rows, and where

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        rows = hidden_states.shape[0] * hidden_states.shape[1]
        mask = self.mask.to(hidden_states.device)
        return ActiveSet((mask if context.units is None else context.units.columns(mask)).expand(rows, -1))

    def select_in_step(self, source: DeferredNorm, context: SelectionContext, counters: Tensor) -> Choice:
        """See `StepSelector`: the list is made once."""
        place = rows, device = len(source.partial), source.partial.device
        if place not in self._listed:
            chosen = ActiveSet(self.mask.to(device).expand(rows, -1), is_early=True)
            self._listed[place] = chosen if context.block == "attention" else chosen.listed()
        return self._listed[place]


class RandomSelector:
    """`count` random units for each token: nobody's method, but what a method must beat to know anything. The draw
    depends on (seed, layer, block, position) alone, not on batching, order, device or cut; so tokens at the same
    position of two requests get the same units."""

    lookahead = 0

    def __init__(self, density: float, num_units: int, seed: int) -> None:
        self.count = num_kept(density, num_units)
        self.num_units = num_units
        self.seed = seed

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        key = as_int64(mix_seed(self.seed, 2 * context.layer_idx + (context.block == "mlp")))
        unit_indices = torch.arange(self.num_units, device=hidden_states.device)
        num_rows = max(1, MAX_DRAWS.get(hidden_states.device.type, MAX_DRAWS["cpu"]) // self.num_units)
        masks = []
        for positions in context.positions.flatten().split(num_rows):
            draws = stream_element(stream_element(key, positions)[:, None], unit_indices)
            masks.append(ActiveSet.from_scores(draws, self.count, context.units).mask)
        return ActiveSet(torch.cat(masks))


class PromptSelector:
    """GRIFFIN (Dong, Chen and Chi 2024, Prompt-prompted Adaptive Structured Pruning, section 4): the neurons that are
    large over a prompt serve all that is decoded after it.

    A neuron's statistic is the L2 norm, over the prompt's tokens, of its share of each token's activations (which are
    scaled to unit norm first); the top `count` of each row are kept. The prompt itself stays dense, as in the paper.

    Differs: `scores_text` (sparse phases `all`) also gives a rule for text that is scored in one pass, without a cache.
    Of a continuation that a task asks for, the prompt is the whole context it was given, and no token of the
    continuation; of a window of text, the tokens that are conditioned on and not scored (`--stride`). The prompt stays
    dense, and so the first token after it is scored densely, as it is chosen when decoding; all later ones run on the
    prompt's neurons. A text without a context (one token at most, as in windows that do not overlap) has its first half
    as the prompt, though that is scored, too: perplexity is then that of a dense first and a sparse second half. The
    achieved density counts all tokens, dense ones too, and says so: about (1 + density) / 2 there, and nearly 1 where
    answers are short. What a row keeps moves with it in the cache. Statistics are made anew by every prompt.
    """

    lookahead = 0

    def __init__(self, density: float, num_units: int, *, scores_text: bool) -> None:
        self.count = num_kept(density, num_units)
        self.scores_text = scores_text

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        cache, (batch, tokens) = context.cache, hidden_states.shape[:2]
        key = "prompt", context.layer_idx, context.block
        if context.phase == "decode":
            chosen = None if cache is None else cache.kept(key)
            return None if chosen is None else ActiveSet(chosen.repeat_interleave(tokens, 0))
        if cache is None and not self.scores_text:
            return None
        is_prompt = hidden_states.new_ones(batch, tokens, dtype=torch.bool) if context.valid is None else context.valid
        if cache is None:
            count = (is_prompt.sum(-1) // 2).clamp(min=1) if context.num_prompt is None else context.num_prompt
            is_prompt = torch.arange(tokens, device=count.device) < count[:, None]
        chosen = self.neurons_of(context, is_prompt)
        if cache is not None:
            cache.keep(key, chosen)
            return None
        everything = is_prompt[..., None] if context.units is None else is_prompt[..., None] & context.units.real
        return ActiveSet((chosen[:, None] | everything).flatten(0, 1))

    def neurons_of(self, context: SelectionContext, is_prompt: Tensor) -> Tensor:
        """The neurons that stand for the tokens `is_prompt` [B, T] of each row: bool [B, U]."""
        sizes = contribution(context.dense_output(), None, context.units).unflatten(0, is_prompt.shape)
        sizes = sizes.to(torch.promote_types(sizes.dtype, torch.float32))
        shares = sizes / sizes.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        statistic = shares.masked_fill(~is_prompt[..., None], 0).norm(dim=1)
        return ActiveSet.from_scores(statistic, self.count, context.units).mask
