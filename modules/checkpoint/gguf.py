"""Reading a GGUF file: dequantised tensor by tensor, under Hugging Face's names and head layout.

A family says what its files are called inside (`Gguf`). What cannot be carried over is refused.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from modules.checkpoint.sources import EMBEDDINGS, HEAD
from modules.config import ModelConfig
from modules.families.llama import rope_keys
from modules.families.registry import FAMILIES, from_hf_config
from modules.positions import rotary_frequencies
from modules.specs import Rope, RopeScaling

ROPE_FACTORS = "rope_freqs.weight"


class GgufFile:
    """A GGUF file: `hf_config` as Hugging Face would spell it, and its tensors by part (float32).

    Raises ValueError for a damaged file, an architecture that no family has, tensors that do not belong to it, or a
    rotary scaling that cannot be expressed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
            self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
            end = max(int(tensor.data_offset) + int(tensor.n_bytes) for tensor in self._tensors.values())
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise ValueError(f"{path}: cannot be read, truncated or not GGUF: {error}") from error
        if end > path.stat().st_size:
            raise ValueError(f"{path}: truncated: {path.stat().st_size} bytes, its tensors end at {end}")
        architecture = self.field("general.architecture")
        families = {family.gguf.architecture: name for name, family in FAMILIES.items() if family.gguf is not None}
        if architecture not in families:
            raise ValueError(f"{path}: GGUF architecture {architecture!r}; supported: {', '.join(families)}")
        self.model_type = families[architecture]
        found = FAMILIES[self.model_type].gguf
        assert found is not None
        self.gguf = found
        self.hf_config = self._hf_config()
        self.config = self._parsed()
        self.attention = self.config.layers[0].attention
        head_dim = self.hf_config["head_dim"] = self.attention.head_dim
        rotary_dim = self.field(f"{architecture}.rope.dimension_count", head_dim)
        if rotary_dim != head_dim:
            raise ValueError(f"{path}: rotary over {rotary_dim} of {head_dim} dims of a head is not supported")
        self._names = self._gguf_names()
        self._check_names()
        if ROPE_FACTORS in self._tensors:
            self.hf_config |= rope_keys(self._scaled_rope())
            self.config = self._parsed()

    def field(self, name: str, default: Any = None) -> Any:
        """A value of the file's metadata."""
        found = self._reader.get_field(name)
        value = default if found is None else found.contents()
        # Stored as float32: the shortest decimal is what was meant (1e-05, not 9.999999747378752e-06).
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def read_part(self, part: str) -> dict[str, Tensor]:
        """The dequantised tensors of a part, float32."""
        return {key: self._read(name, key) for (owner, key), name in self._names.items() if owner == part}

    def where(self, part: str, key: str) -> str:
        return f"{self.path}: {self._names[part, key]}"

    def _read(self, name: str, key: str) -> Tensor:
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ValueError(f"{self.path}: {name}: GGUF type {kind} cannot be dequantised here: {error}") from error
        weight = torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: the file is mapped read-only
        heads = {
            "self_attn.q_proj.weight": self.attention.num_attention_heads,
            "self_attn.k_proj.weight": self.attention.num_key_value_heads,
        }.get(key)
        if not self.gguf.interleaved or heads is None or weight.shape[0] != heads * self.attention.head_dim:
            return weight  # a wrong shape is reported by whoever asked
        return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)

    def _parsed(self) -> ModelConfig:
        try:
            return from_hf_config(self.hf_config)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _hf_config(self) -> dict[str, Any]:
        of_family = self.gguf.architecture

        def required(name: str) -> Any:
            value = self.field(f"{of_family}.{name}")
            if value is None:
                raise ValueError(f"{self.path}: GGUF metadata lacks {of_family}.{name}")
            return value

        if "token_embd.weight" not in self._tensors:
            raise ValueError(f"{self.path}: missing token_embd.weight")
        rope = Rope(theta=self.field(f"{of_family}.rope.freq_base", 10000.0))
        # As llama.cpp reads them: a factor without a type is linear, and older files have another name for it.
        factor = self.field(f"{of_family}.rope.scaling.factor", self.field(f"{of_family}.rope.scale_linear"))
        scaling = self.field(f"{of_family}.rope.scaling.type", "linear" if factor not in (None, 0.0, 1.0) else None)
        if scaling == "linear":
            if factor is None:
                raise ValueError(f"{self.path}: GGUF metadata lacks {of_family}.rope.scaling.factor")
            rope = replace(rope, scaling=RopeScaling(kind="linear", factor=factor))
        elif scaling not in (None, "none"):
            raise ValueError(f"{self.path}: rope scaling {scaling!r} is not supported; convert the original checkpoint")
        # Said by few files, and then a family refuses what it does not compute.
        others = {"sliding_window": self.field(f"{of_family}.attention.sliding_window")}
        others["is_causal"] = self.field(f"{of_family}.attention.causal")
        return {
            **{name: value for name, value in others.items() if value is not None},
            "architectures": [self.gguf.hf_class],
            "model_type": self.model_type,
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_size": required("embedding_length"),
            "intermediate_size": required("feed_forward_length"),
            "num_hidden_layers": required("block_count"),
            "num_attention_heads": required("attention.head_count"),
            "num_key_value_heads": self.field(f"{of_family}.attention.head_count_kv"),
            "head_dim": self.field(f"{of_family}.attention.key_length"),
            "max_position_embeddings": required("context_length"),
            "hidden_act": "silu",
            "rms_norm_eps": required("attention.layer_norm_rms_epsilon"),
            **rope_keys(rope),
            **self.gguf.unsaid,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._ends_of_text(),
            "pad_token_id": self.field("tokenizer.ggml.padding_token_id"),
            "dtype": "float32",
            "torch_dtype": "float32",
        }

    def _ends_of_text(self) -> int | list[int] | None:
        """The ends of a text, of a turn and of a message: a text ends at any of them, as in llama.cpp."""
        found = [self.field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        ends = list(dict.fromkeys(token_id for token_id in found if token_id is not None))
        return ends if len(ends) > 1 else next(iter(ends), None)

    def _gguf_names(self) -> dict[tuple[str, str], str]:
        names = {(EMBEDDINGS, "embed_tokens.weight"): "token_embd.weight"}
        for layer_idx in range(self.config.num_hidden_layers):
            for key, name in self.gguf.layer.items():
                names[str(layer_idx), key] = f"blk.{layer_idx}.{name}"
        head = "token_embd.weight" if self.config.tie_word_embeddings else "output.weight"
        return names | {(HEAD, "norm.weight"): "output_norm.weight", (HEAD, "lm_head.weight"): head}

    def _check_names(self) -> None:
        expected = set(self._names.values())
        missing, unknown = expected - self._tensors.keys(), self._tensors.keys() - expected - {ROPE_FACTORS}
        problems = [
            f"{what} {', '.join(sorted(names)[:4])}"
            for what, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        if problems:
            raise ValueError(f"{self.path}: the tensors do not fit {self.gguf.architecture!r}: {'; '.join(problems)}")

    def _scaled_rope(self) -> Rope:
        """With the scaling of Llama 3.1 behind the file's divisors of the rotary frequencies."""
        factors = torch.from_numpy(np.array(self._tensors[ROPE_FACTORS].data, dtype=np.float32))
        head_dim, rope = self.attention.head_dim, self.attention.rope
        assert rope is not None
        scaled = replace(rope, scaling=RopeScaling(kind="llama3", factor=float(factors.max())))
        implied = rotary_frequencies(rope, head_dim) / rotary_frequencies(scaled, head_dim)
        if implied.shape != factors.shape or not torch.allclose(implied, factors, rtol=1e-3):
            raise ValueError(f"{self.path}: {ROPE_FACTORS} is not Llama 3.1's scaling; convert the original checkpoint")
        return scaled
