"""GRIFFIN: the neurons that are large over a prompt, for all that is decoded after it."""

from collections.abc import Callable

import torch
from torch import Tensor

from modules.sparsity import ActiveSet, Block, SelectionContext, Selector, num_kept
from sparse_predictor.labels import contribution
from sparse_predictor.methods.registry import Setting, UnitMethod


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


def make(setting: Setting) -> Callable[[int, Block], Selector]:
    scores_text = setting.sparse_phases == "all"
    return lambda layer, block: PromptSelector(
        setting.densities[block][layer], setting.num_units(layer, block), scores_text=scores_text
    )


METHOD = UnitMethod(
    name="griffin",
    summary="The neurons that are large over a prompt, for all that is decoded after it.",
    paper="GRIFFIN, arXiv 2404.01365",
    order=70,
    colour="#8C6D00",
    marker="h",
    sees_prompt=True,
    make=make,
)
