"""A rank loads its own part of a checkpoint, and no other; the model of a seed is one however it is cut."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modules.checkpoint.load import (
    build_on_meta,
    checkpoint_shapes,
    load_model,
    load_weights,
    random_model,
)
from modules.checkpoint.sources import checkpoint_fingerprint
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from modules.shards import Shard, set_parameter
from tests.modules.tiny_kinds import KINDS, LLAMA
from tests.modules.tiny_models import StateDict, save_hf_folder, tiny_decoder, tiny_hf_model, write_checkpoint

CUT = re.compile(r".*\.(q|k|v|o|gate|up|down)_proj\.(weight|bias)|embeddings\.tokens\.weight|lm_head\.weight")
KINDS_TO_CUT = ["llama", "llama-tied", "llama-biases", "opt", "opt-untied", "opt-post-norm-projected"]
Prepare = Callable[[Decoder], None]


def cut(rank: int, num_ranks: int) -> Prepare:
    """A rank's shard of every projection and of the vocabulary: three ranges, and padding."""

    def prepare(model: Decoder) -> None:
        for name, parameter in dict(model.named_parameters(remove_duplicate=False)).items():
            if CUT.fullmatch(name) is None:
                continue
            full_size = parameter.shape[0]
            edges = [full_size * piece // (3 * num_ranks) for piece in range(3 * num_ranks + 1)]
            ranges = [(edges[at], edges[at + 1]) for at in (rank, num_ranks + rank, 2 * num_ranks + rank)]
            shard = Shard(0, tuple(ranges), -(-full_size // num_ranks) + 2, full_size)
            model.shards[name] = shard
            set_parameter(model, name, torch.empty(shard.local_shape(parameter.shape), device="meta"))
        if (
            model.config.tie_word_embeddings
            and hasattr(model.embeddings, "tokens")
            and hasattr(model.lm_head, "weight")
        ):
            model.lm_head.weight = model.embeddings.tokens.weight

    return prepare


def stage(first: int, stop: int) -> Prepare:
    """The layers [first, stop) of the tiny models' three, with embeddings or head at the ends."""

    def prepare(model: Decoder) -> None:
        for idx in range(len(model.half_blocks)):
            if not 2 * first <= idx < 2 * stop:
                model.half_blocks[idx] = nn.Module()
        if first > 0:
            model.embeddings, model.first_norm = nn.Module(), None  # type: ignore[assignment]
        if stop < 3:
            model.lm_head, model.project_out = nn.Module(), None  # type: ignore[assignment]

    return prepare


def both(first: Prepare, second: Prepare) -> Prepare:
    def prepare(model: Decoder) -> None:
        first(model)
        second(model)

    return prepare


def named(model: Decoder) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def assert_part_of(part: Decoder, whole: Decoder) -> None:
    """Every parameter of `part` is its shard of the same parameter of `whole`, in plain memory."""
    full = named(whole)
    for name, parameter in named(part).items():
        shard = part.shards.get(name)
        assert torch.equal(parameter, full[name] if shard is None else shard.take(full[name])), name
        assert parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes, name
        assert not parameter.requires_grad and parameter.dtype == full[name].dtype


@pytest.mark.parametrize("converted", [True, False], ids=["converted", "hugging-face"])
@pytest.mark.parametrize("kind", KINDS_TO_CUT)
def test_each_rank_loads_its_shards(kind: str, converted: bool, tmp_path: Path) -> None:
    if converted:
        write_checkpoint(tmp_path / "out", KINDS[kind], tiny_hf_model(KINDS[kind]).state_dict(), model_id="tiny")
    else:
        save_hf_folder(tmp_path / "out", KINDS[kind], max_shard_size="40KB")
    whole = tiny_decoder(KINDS[kind])
    for rank in range(3):
        model = load_model(tmp_path / "out", prepare=cut(rank, 3))
        assert len(model.shards) > 10
        assert_part_of(model, whole)
        tied = whole.config.tie_word_embeddings
        assert (model.lm_head.weight is model.embeddings.tokens.weight) == tied


@pytest.mark.parametrize("kind", KINDS_TO_CUT)
def test_each_stage_loads_its_layers_and_all_of_them_the_model(kind: str, tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path / "out", KINDS[kind], tiny_hf_model(KINDS[kind]).state_dict(), model_id="tiny", dtype=torch.bfloat16
    )
    whole = load_model(tmp_path / "out")
    found: set[str] = set()
    for first, stop in ((0, 1), (1, 2), (2, 3)):
        # Without dtype: it is that of the embeddings, which only the first stage holds.
        model = load_model(tmp_path / "out", prepare=both(stage(first, stop), cut(1, 2)))
        assert_part_of(model, whole)
        found |= named(model).keys()
    assert found == named(whole).keys()


class CountingSource(StateDict):
    """A source in memory that notes which parts were read."""

    def __init__(self, hf_config: dict, **changes: Tensor) -> None:
        config = from_hf_config(hf_config)
        weights = tiny_hf_model(hf_config).state_dict() | changes
        super().__init__(weights, config, checkpoint_shapes(config), "tiny")
        self.model = build_on_meta(config)
        self.parts_read: list[str] = []

    def read_part(self, part: str) -> dict[str, Tensor]:
        self.parts_read.append(part)
        return super().read_part(part)


@pytest.mark.parametrize(
    ("first", "stop", "dtype", "parts"),
    [
        # A stage keeps the norm after its last half-block, which is in the next layer's part.
        (0, 1, torch.float32, ["embs", "0", "1"]),
        (1, 2, torch.float32, ["1", "2"]),
        (2, 3, torch.float32, ["2", "lm_head"]),
        (2, 3, None, ["embs", "2", "lm_head"]),
        (0, 3, None, ["embs", "0", "1", "2", "lm_head"]),
    ],
)
def test_only_the_parts_of_a_stage_are_read(first: int, stop: int, dtype: torch.dtype | None, parts: list[str]) -> None:
    source = CountingSource(KINDS["llama-tied"])
    stage(first, stop)(source.model)
    load_weights(source.model, source, dtype=dtype)
    assert source.parts_read == parts


def test_a_weight_that_is_not_finite_is_an_error_of_the_rank_that_holds_it() -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    broken = tiny_hf_model(LLAMA).state_dict()[name].clone()
    broken[3, -1] = float("nan")  # on disk [hidden_size, intermediate_size]: the last neuron's, so the last rank's
    for rank in range(3):
        source = CountingSource(LLAMA, **{name: broken})
        cut(rank, 3)(source.model)
        if rank < 2:
            load_weights(source.model, source)
            continue
        with pytest.raises(
            ValueError, match=r"tiny: model\.layers\.1\.mlp\.down_proj\.weight: 1 of \d+ weights are NaN"
        ):
            load_weights(source.model, source)


def test_a_cut_model_checks_the_whole_shape_on_disk(tmp_path: Path) -> None:
    """Also of tensors that this rank does not hold, in the parts that it reads."""
    write_checkpoint(tmp_path / "out", LLAMA, tiny_hf_model(LLAMA).state_dict(), model_id="tiny")
    (tmp_path / "out" / "manifest.json").unlink()
    path = tmp_path / "out" / "pytorch_2.pt"
    part = torch.load(path, weights_only=True)
    torch.save(part | {"mlp.up_proj.weight": torch.ones(40, 48)}, path)
    for prepare in (cut(0, 2), stage(1, 2)):  # half of the true shape; only the norm of this part
        with pytest.raises(
            ValueError, match=r"pytorch_2\.pt: mlp\.up_proj\.weight: shape \(40, 48\), but .* \(80, 48\)"
        ):
            load_model(tmp_path / "out", prepare=prepare)
    torch.save({key: tensor for key, tensor in part.items() if key != "mlp.up_proj.weight"}, path)
    with pytest.raises(ValueError, match=r"pytorch_2\.pt: the tensors do not fit the config: missing mlp\.up_proj"):
        load_model(tmp_path / "out", prepare=cut(1, 2))


def test_a_tied_head_must_equal_the_embeddings_in_the_part_that_a_rank_holds() -> None:
    tied = KINDS["llama-tied"]
    head = tiny_hf_model(tied).state_dict()["lm_head.weight"].clone()
    head[0] += 1
    source = CountingSource(tied, **{"lm_head.weight": head})
    cut(0, 2)(source.model)
    with pytest.raises(ValueError, match=r"lm_head\.weight: differs from the token embeddings"):
        load_weights(source.model, source)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "llama-biases", "opt-post-norm-projected"])
def test_the_random_model_of_a_seed_is_one_however_it_is_cut(kind: str) -> None:
    config = from_hf_config(KINDS[kind])
    whole = random_model(config, seed=7, std=0.1, dtype=torch.bfloat16)
    for prepare in (cut(0, 2), cut(1, 2), stage(0, 1), stage(1, 3), both(stage(1, 3), cut(1, 2))):
        model = random_model(config, seed=7, std=0.1, dtype=torch.bfloat16, prepare=prepare)
        assert_part_of(model, whole)
    assert (whole.lm_head.weight is whole.embeddings.tokens.weight) == config.tie_word_embeddings


def test_no_two_parameters_of_a_random_model_are_drawn_alike() -> None:
    model = random_model(from_hf_config(LLAMA))
    queries = [model.attention(layer_idx).q_proj.weight for layer_idx in range(3)]
    assert not torch.equal(queries[0], queries[1]) and not torch.equal(queries[1], queries[2])
    assert not torch.equal(queries[0], model.attention(0).o_proj.weight)


@pytest.mark.parametrize("converted", [True, False], ids=["converted", "hugging-face"])
def test_a_fingerprint_is_of_what_is_in_the_files_that_load(converted: bool, tmp_path: Path) -> None:
    folder, other = tmp_path / "a", tmp_path / "b"
    if converted:
        write_checkpoint(folder, LLAMA, tiny_hf_model(LLAMA).state_dict(), model_id="tiny")
    else:
        save_hf_folder(folder, LLAMA, max_shard_size="60KB")
    shutil.copytree(folder, other)
    expected = checkpoint_fingerprint(folder)
    (other / "README.md").write_text("not a weight")
    assert checkpoint_fingerprint(other) == expected

    weights = sorted([*other.glob("pytorch_*.pt"), *other.glob("model-*.safetensors")])
    for path in (weights[0], weights[-1]):
        content = path.read_bytes()
        middle = (len(content) - 4096) * 3 // 7 + 100  # within a sampled block
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        assert checkpoint_fingerprint(other) != expected
        path.write_bytes(content + b"\0")
        assert checkpoint_fingerprint(other) != expected
        path.write_bytes(content)
        assert checkpoint_fingerprint(other) == expected
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    assert checkpoint_fingerprint(other) != expected


def test_a_fingerprint_sees_a_file_that_was_written_with_one_other_weight(tmp_path: Path) -> None:
    """Between the sampled blocks, too: the last block of a .pt file holds the check sums of its tensors."""
    torch.save({"up": torch.zeros(500, 1000), "down": torch.zeros(1000)}, tmp_path / "pytorch_embs.pt")
    (tmp_path / "config.json").write_text("{}")
    before = checkpoint_fingerprint(tmp_path)
    changed = torch.zeros(500, 1000)
    changed[100, 100] = 1.0
    torch.save({"up": changed, "down": torch.zeros(1000)}, tmp_path / "pytorch_embs.pt")
    assert checkpoint_fingerprint(tmp_path) != before


def test_a_fingerprint_of_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no weights; looked for"):
        checkpoint_fingerprint(tmp_path)
