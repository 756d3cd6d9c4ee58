"""The decoder: read this first.

A model is a list of half-blocks (attention, MLP, attention, MLP, ...), each with the norm that *follows* it, so that
every half-block ends in one visible call of the residual junction `add_norm`. Pipeline stages and compute/communication
overlap drive the same list; tensor parallelism and sparsity attach to it from outside.

Legend: B batch, T tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from modules.attention import Attention
from modules.cache import Cache
from modules.config import ModelConfig
from modules.decode_step import DecodeStep
from modules.feed_forward import FeedForward
from modules.forward_pass import ForwardPass, ResidualStream, attention_mask, real_tokens
from modules.kernels.arguments import DTYPES
from modules.kernels.deferred_norm import DeferredNorm, triton
from modules.kernels.norm_linear import norm_linear
from modules.linear import Linear
from modules.normalization import AddNorm, Norm, add_norm, deferred_add_norm, partial_memory
from modules.positions import RotaryPositions
from modules.shards import Shard
from modules.sparsity import BLOCKS, Block, Phase, SparsityStats
from modules.specs import Sliding
from modules.thinned_input import ThinnedInput


class Embeddings(nn.Module):
    """Token embeddings, plus learned positions and an input projection where the model has them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.offset = config.position_embedding_offset or 0
        self.tokens = nn.Embedding(config.vocab_size, config.word_embed_proj_dim)
        self.positions: nn.Embedding | None = None
        self.project_in: Linear | None = None
        if config.position_embedding_offset is not None:
            self.positions = nn.Embedding(config.max_position_embeddings + self.offset, config.hidden_size)
        if config.word_embed_proj_dim != config.hidden_size:
            self.project_in = Linear(config.word_embed_proj_dim, config.hidden_size)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids, positions [B, T] -> [B, T, D]."""
        states = self.tokens(token_ids)
        if self.project_in is not None:
            states = self.project_in(states)
        if self.positions is not None:
            # Padding may lie beyond the table; its states are never used, but its index must exist.
            last = self.positions.num_embeddings - self.offset - 1
            states = states + self.positions(positions.clamp(max=last) + self.offset)
        return states


class HalfBlock(nn.Module):
    """Attention or a feed-forward block, and the norm that follows it (None where the model has none there).

    The junction applies the norm, as `ModelConfig.norm_placement` says.
    """

    def __init__(self, block: Attention | FeedForward, norm: Norm | None, *, has_bias: bool) -> None:
        super().__init__()
        self.block = block
        self.norm = norm
        self.bias = nn.Parameter(torch.zeros(block.hidden_size)) if has_bias else None
        self.residual_in = nn.Identity()  # a named point for forward hooks: sees the residual [B, T, D]

    def forward(self, stream: ResidualStream, partial: Tensor | None = None) -> None:
        """Run the block on a stream, and the residual junction after it. `partial`: the block's output [B, T, D], if
        the caller has computed it already."""
        stream.residual = self.residual_in(stream.residual)
        if partial is None:
            partial = self.block(stream.read(), stream.forward_pass)
        stream.add(partial, self.norm, self.bias)


class PipelineLinks(Protocol):
    """What joins a pipeline stage to the one before it and the one after it (see pipeline_parallel.stage)."""

    @property
    def is_first(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    def receive(self, batch_size: int, num_tokens: int, forward_pass: ForwardPass) -> tuple[Tensor, Tensor]:
        """(hidden_states, residual) [B, T, D] from the stage before; fills `forward_pass.inputs` for look-ahead."""
        ...

    def send(self, hidden_states: Tensor, residual: Tensor, forward_pass: ForwardPass) -> None:
        """Send them to the stage after; returns before they have arrived."""
        ...

    def residual_shape(self, batch_size: int, num_tokens: int) -> tuple[int, ...]:
        """Shape of the residual that is sent: [B, T, D], unless each tensor-parallel rank keeps rows of its own."""
        ...


class PrefillDriver(Protocol):
    """Runs passes through the half-blocks in another order (see pipeline_parallel.overlap)."""

    def __call__(self, token_ids: Tensor, forward_pass: ForwardPass) -> Tensor | None:
        """Hidden states [B, T, D] as of `Decoder.forward`; None, with nothing done, for a pass that it does not
        handle."""
        ...


class Decoder(nn.Module):
    """A decoder-only language model on one device, dense unless selectors are attached.

    Under pipeline parallelism it is one stage of it: `half_blocks` keeps its length, those of other stages are empty
    modules, and `span` says which are here. `shards` names the parameters that tensor parallelism has cut.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)

        def norm() -> Norm:
            return Norm(config.hidden_size, kind=config.norm, eps=config.norm_eps, affine=config.norm_affine)

        self.first_norm = norm() if config.pre_norm else None
        self.half_blocks = nn.ModuleList()
        for layer_idx, layer in enumerate(config.layers):
            attention = Attention(layer.attention, config.hidden_size, layer_idx)
            feed_forward = FeedForward(layer.feed_forward, config.hidden_size, layer_idx)
            last = layer_idx == config.num_hidden_layers - 1
            follows = norm() if not (last and config.pre_norm and not config.final_norm) else None
            self.half_blocks.append(HalfBlock(attention, norm(), has_bias=layer.attention.output_bias))
            self.half_blocks.append(HalfBlock(feed_forward, follows, has_bias=layer.feed_forward.bias))
        self.project_out: Linear | None = None
        if config.word_embed_proj_dim != config.hidden_size:
            self.project_out = Linear(config.hidden_size, config.word_embed_proj_dim)
        self.lm_head = Linear(config.word_embed_proj_dim, config.vocab_size, keep_float32=True)
        if config.tie_word_embeddings:
            self.tie_head()
        self.add_norm: AddNorm = add_norm
        self.join_logits: Callable[[Tensor], Tensor] | None = None  # of the words that this rank has: those of all
        self.span = range(len(self.half_blocks))
        self.links: PipelineLinks | None = None
        self.prefill_driver: PrefillDriver | None = None
        self.shards: dict[str, Shard] = {}
        self.stats: SparsityStats | None = None
        self.max_lookahead = 0
        self.is_sparse = False  # whether anything chooses what a token computes, on whatever stage
        self.sparsity_hook: RemovableHandle | None = None
        keys = {block.rotary_key for block in self.attentions}
        self.rotary = {key: RotaryPositions(*key) for key in keys if key is not None}

    def tie_head(self) -> None:
        """Let the head have the token embeddings' weights."""
        self.lm_head.weight = self.embeddings.tokens.weight

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of the states between blocks, in which products are computed; `residual_dtype` is the stream's, and the
        weights' is known to their format."""
        return self.attention(self.layers.start).o_proj.compute_dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def is_first(self) -> bool:
        """Whether the embeddings are here."""
        return self.links is None or self.links.is_first

    @property
    def is_last(self) -> bool:
        """Whether the head is here, so that `logits` can be asked for."""
        return self.links is None or self.links.is_last

    @property
    def layers(self) -> range:
        """The layers that are here: all of them, or those of a pipeline stage."""
        return range(self.span.start // 2, self.span.stop // 2)

    def has_block(self, layer_idx: int, block: Block) -> bool:
        """Whether a layer's block is here, and not on another pipeline stage."""
        return 2 * layer_idx + (block == "mlp") in self.span

    def half_block(self, layer_idx: int, block: Block) -> HalfBlock:
        """The half-block of a layer."""
        found = self.half_blocks[2 * layer_idx + (block == "mlp")]
        assert isinstance(found, HalfBlock)
        return found

    def attention(self, layer_idx: int) -> Attention:
        """Attention of a layer."""
        block = self.half_block(layer_idx, "attention").block
        assert isinstance(block, Attention)
        return block

    def mlp(self, layer_idx: int) -> FeedForward:
        """MLP of a layer."""
        block = self.half_block(layer_idx, "mlp").block
        assert isinstance(block, FeedForward)
        return block

    @property
    def blocks(self) -> dict[tuple[Block, int], Attention | FeedForward]:
        """The blocks that are here, by kind and layer, in the order in which a pass takes them."""
        return {(block, layer): self.half_block(layer, block).block for layer in self.layers for block in BLOCKS}

    @property
    def attentions(self) -> list[Attention]:
        """The attention blocks that are here."""
        return [self.attention(layer_idx) for layer_idx in self.layers]

    @property
    def windows(self) -> set[Sliding | None]:
        """How far back the attention blocks that are here see; None: over all."""
        return {block.spec.window for block in self.attentions}

    def norm_before(self, layer_idx: int, block: Block) -> Norm | None:
        """The norm between the residual stream and a block's input; None where the block reads the stream itself."""
        if not self.config.pre_norm:
            return None
        idx = 2 * layer_idx + (block == "mlp")
        return self.first_norm if idx == 0 else self.half_blocks[idx - 1].norm  # type: ignore[return-value]

    def new_cache(self, batch_size: int, max_seqlen: int) -> Cache:
        """An empty cache for the layers and heads that are here, of this model's dtype on its device."""
        blocks = {block.layer_idx: block.new_cache(batch_size, max_seqlen) for block in self.attentions}
        return Cache(blocks, batch_size=batch_size, max_seqlen=max_seqlen, device=self.device)

    def forward(
        self,
        token_ids: Tensor,
        *,
        cache: Cache | None = None,
        num_tokens: Tensor | None = None,
        num_prompt: Tensor | None = None,
        phase: Phase = "prefill",
    ) -> Tensor:
        """token_ids [B, T] -> hidden states [B, T, D] after the final norm.

        Rows are right-padded; `num_tokens` [B] counts each row's real tokens (None: all T). With a cache, row b's
        tokens stand at cache_seqlens[b] onwards and the cache is advanced by the real ones. `num_prompt` [B]: how many
        of a row's first tokens are its prompt, where a text is scored in one pass (for selectors that tell prompt and
        text apart). ValueError if a token would stand beyond the context.
        """
        tokens = token_ids.shape[1]
        forward_pass = self.begin(token_ids, cache=cache, num_tokens=num_tokens, num_prompt=num_prompt, phase=phase)
        driver = self.prefill_driver if phase == "prefill" else None
        driven = None if driver is None else driver(token_ids, forward_pass)
        if driven is not None:
            hidden_states = driven
        else:
            stream = self.enter(token_ids, forward_pass)
            self.run_half_blocks(stream)
            hidden_states = stream.hidden_states
            if self.links is not None and not self.links.is_last:
                self.links.send(hidden_states, stream.residual, forward_pass)
        if cache is not None:
            real = num_tokens if num_tokens is not None else torch.full_like(cache.cache_seqlens, tokens)
            cache.advance(real, tokens)
        return hidden_states

    def begin(
        self,
        token_ids: Tensor,
        *,
        cache: Cache | None = None,
        num_tokens: Tensor | None = None,
        num_prompt: Tensor | None = None,
        phase: Phase = "prefill",
    ) -> ForwardPass:
        """The `ForwardPass` of token_ids [B, T] that all half-blocks share; arguments as `forward`."""
        batch, tokens = token_ids.shape
        steps = torch.arange(tokens, device=token_ids.device)
        if cache is None:
            end = tokens
            positions = steps.expand(batch, -1)
        else:
            end = cache.reserve(tokens)
            positions = cache.cache_seqlens[:, None] + steps
        self.check_context(end)
        # Into empty rows: attention over what is written, all rows alike, and plainly causal without a mask.
        reads_cache = cache is not None and not cache.is_empty
        seen_from, dtype = positions if reads_cache else positions[:1], self.compute_dtype
        masks = {
            window: attention_mask(seen_from, end, dtype, window)
            if reads_cache or (window is not None and window.size < tokens)
            else None
            for window in self.windows
        }
        return ForwardPass(
            phase=phase,
            positions=positions,
            valid=None if num_tokens is None else real_tokens(token_ids, num_tokens),
            num_prompt=num_prompt,
            attention_masks=masks,
            cos_sin={key: rotary.cos_sin(positions, dtype) for key, rotary in self.rotary.items()},
            cache=cache,
            cache_end=end,
            reads_cache=reads_cache,
            stats=self.stats,
            max_lookahead=self.max_lookahead,
            partial_memory=partial_memory(self.add_norm),
        )

    def check_context(self, num_positions: int) -> None:
        """ValueError if a row of so many positions is longer than the model's context."""
        if num_positions > self.config.max_position_embeddings:
            raise ValueError(f"{num_positions} tokens do not fit the context of {self.config.max_position_embeddings}")

    def begin_step(self, token_ids: Tensor, cache: Cache) -> ForwardPass:
        """As `begin`, of a fused decode step of token_ids [B, 1] over a cache of static shape."""
        mlps = {layer_idx: self.mlp(layer_idx) for layer_idx in self.layers}
        step = DecodeStep(
            {place: block.selector for place, block in self.blocks.items()},
            num_rows=len(token_ids),
            hidden_size=self.config.hidden_size,
            max_lookahead=self.max_lookahead,
            rotary={key: rotary.table(cache.max_seqlen, self.device) for key, rotary in self.rotary.items()},
            neuron_sums={layer_idx: (1 + mlp.spec.gated, mlp.num_units) for layer_idx, mlp in mlps.items()},
            has_windows=not all(block.sees_all_of(cache.max_seqlen) for block in self.attentions),
            device=self.device,
        )
        if not step.fuses_attention:  # then attention takes a mask, and rotates by itself
            forward_pass = self.begin(token_ids, cache=cache, phase="decode")
            forward_pass.fused = step
            return forward_pass
        end = cache.reserve(1)
        self.check_context(end)
        return ForwardPass(
            phase="decode",
            positions=cache.cache_seqlens[:, None],
            valid=None,
            attention_masks={},
            cos_sin={},
            cache=cache,
            cache_end=end,
            reads_cache=True,
            stats=self.stats,
            max_lookahead=self.max_lookahead,
            fused=step,
        )

    def stream(self, forward_pass: ForwardPass) -> ResidualStream:
        """A stream of this model, still empty. In a fused step the junction is computed by the kernel that follows it,
        or at once where ranks that share a layer have to add up first."""
        junction: AddNorm = self.add_norm
        if forward_pass.fused is not None:
            junction = self._reduce_in_step if self.shards else deferred_add_norm
        return ResidualStream(
            forward_pass=forward_pass, junction=junction, placement=self.config.norm_placement, dtype=self.compute_dtype
        )

    def _reduce_in_step(
        self, partial: Tensor, residual: Tensor | None, norm: Norm | None, bias: Tensor | None, **options: Any
    ) -> tuple[DeferredNorm, Tensor]:
        hidden_states, residual = self.add_norm(partial, residual, norm, bias, **options)
        assert isinstance(hidden_states, Tensor)
        return DeferredNorm.plain(hidden_states.flatten(0, 1)), residual

    def enter(self, token_ids: Tensor, forward_pass: ForwardPass) -> ResidualStream:
        """The stream of token_ids [B, T] before the first half-block that is here."""
        stream = self.stream(forward_pass)
        if self.links is not None and not self.links.is_first:
            batch, tokens = token_ids.shape
            stream.hidden_states, stream.residual = self.links.receive(batch, tokens, forward_pass)
        else:
            self.embed(token_ids, stream)
        return stream

    def embed(self, token_ids: Tensor, stream: ResidualStream) -> None:
        """Begin a stream with the embeddings of token_ids [B, T]."""
        stream.add(self.embeddings(token_ids, stream.forward_pass.positions), self.first_norm, None)

    def begin_stream(self, token_ids: Tensor) -> ResidualStream:
        """The stream of a pass of token_ids [B, T] without a cache, for what is measured or fitted on its way."""
        return self.enter(token_ids, self.begin(token_ids))

    def run_half_blocks(self, *streams: ResidualStream) -> None:
        """Take streams through the half-blocks that are here: each half-block all of them, in their order."""
        for idx in self.span:
            for stream in streams:
                self.half_blocks[idx](stream)

    def step_logits(self, stream: ResidualStream) -> Tensor:
        """[B, V], of a stream of one token per row after the last half-block. Those of a single row of a fused step are
        float32, from a kernel with the final norm in it."""
        states = stream.read()
        if isinstance(states, Tensor):
            return self.logits(states[:, 0])
        if self.project_out is None and len(states.partial) == 1 and self.lm_head.has_kernels and not self.shards:
            return norm_linear(states, self.lm_head.kernel_argument(), None, out_dtype=torch.float32)
        return self.logits(states.normed())

    def runs_kernels(self) -> bool:
        """Whether a model of this kind and type decodes in fused kernels where it is: pre-norm models of any type but
        float64, whole on one GPU, or dense and with each layer shared by several."""
        whole = self.links is None and (not self.is_sparse if self.shards else self.add_norm is add_norm)
        on_gpu = triton is not None and self.device.type == "cuda" and self.compute_dtype in DTYPES
        return whole and on_gpu and self.config.pre_norm

    def can_fuse(self) -> bool:
        """Whether decode steps run in fused kernels (see modules.decode_step): if every block can."""
        return self.runs_kernels() and all(block.can_fuse() for block in self.blocks.values())

    def thinned_parts(self) -> list[tuple[ThinnedInput, int]]:
        """All matrices that are here whose inputs are thinned out, and the weights an entry stands for."""
        return [part for block in self.blocks.values() for part in block.thinned_parts()]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., V], in float32 where the device can give that without a detour (see `multiply`)."""
        if self.project_out is not None:
            hidden_states = self.project_out(hidden_states)
        logits = self.lm_head(hidden_states)
        return logits if self.join_logits is None else self.join_logits(logits)
