"""Where a text ends and what of generation_config.json is followed: the same in `infer`, in lm-eval's tasks here and
carried elsewhere, and as Hugging Face has it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from transformers import PreTrainedTokenizerFast

from data.files import parse_json
from scripts.answerer import Answerer, BatchSizes
from scripts.carried_tasks import AskedList, Listener
from scripts.command_line import configure_logging
from scripts.lm_eval_model import EngineLM
from scripts.model_loading import ModelOptions
from scripts.written_text import write_documents
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import save_hf_folder
from tests.modules.tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer
from tests.scripts.chain_models import chain_folder
from tests.scripts.tiny_prompts import infer

BYTES = ["ĠHello", "ĠParis", "<|x|>", "Ġworld", "ST", "OP", "<|end|>", "Ġnow", "a", "b", "c"]
PIECES = [token.replace("Ġ", "▁") for token in BYTES]
PROMPTS = {"byte-level": " Hello", "sentencepiece": "Hello"}
Arguments = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that go through BYTES or PIECES."""
    folder = tmp_path_factory.mktemp("chains")
    chain_folder(folder / "byte-level", byte_level_tokenizer(), BYTES)
    chain_folder(folder / "sentencepiece", sentencepiece_tokenizer(), PIECES)
    return {kind: folder / kind for kind in PROMPTS}


def asked(*arguments: Arguments) -> list[Instance]:
    return [Instance(request_type="generate_until", doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


def in_lm_eval(folder: Path, *arguments: Arguments) -> list[str]:
    made = EngineLM.create_from_arg_obj({"model": str(folder), "quiet": True, "dtype": "float32"}, {"device": "cpu"})
    made.answerer.sizes.fixed = 3
    return made.generate_until(asked(*arguments))


def of_hugging_face(folder: Path, *arguments: Arguments) -> list[str]:
    """What lm-eval's own `hf` says, a request at a time."""
    made = get_model("hf").create_from_arg_obj({"pretrained": str(folder), "dtype": "float32"}, {"device": "cpu"})
    return made.generate_until(asked(*arguments), disable_tqdm=True)


def carried(folder: Path, *arguments: Arguments) -> list[str]:
    """As scripts.carried_tasks does it: the call is written down as JSON here, and answered there."""
    loaded = ModelOptions(model=str(folder), quiet=True, dtype="float32").load()
    listener = Listener(loaded)
    EngineLM(listener).generate_until(asked(*arguments))
    (call,) = listener.calls
    there = parse_json(msgspec.json.encode(call), AskedList, "a list")
    assert there.digest == call.digest
    answerer = Answerer(loaded, BatchSizes(loaded, fixed=2), quiet=True)
    return answerer.answer(there.title, there.requests, there.eos_token_ids)


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_text_ends_at_special_tokens_and_strings_alike(kind: str, chains: dict[str, Path], tmp_path: Path) -> None:
    stops = {"<|end|>": "Paris worldSTOP", "<|x|>": "Paris", "STOP": "Paris world", " world": "Paris"}
    expected = [f" {text}" if kind == "byte-level" else text for text in stops.values()]
    prompt, options = PROMPTS[kind], {"max_gen_toks": 9, "temperature": 0.0}
    records = infer(chains[kind], tmp_path, *({"prompt": prompt, "stop": ["never", stop]} for stop in stops))
    assert [(record["text"], record["finish_reason"]) for record in records] == [(text, "stop") for text in expected]
    arguments = [(prompt, {**options, "until": ["never", stop]}) for stop in stops]
    for answer in (in_lm_eval, carried, of_hugging_face):
        assert answer(chains[kind], *arguments) == expected
    # A stop string of both kinds of tokens: hf generates up to its end and leaves what of it is not special.
    mixed = infer(chains[kind], tmp_path, {"prompt": prompt}, stop=("STOP<|end|> now",))
    assert mixed[0]["text"] == expected[2] and mixed[0]["finish_reason"] == "stop"


def test_a_first_word_is_found_with_its_space_though_the_decoder_strips_it(
    chains: dict[str, Path], tmp_path: Path
) -> None:
    (record,) = infer(chains["sentencepiece"], tmp_path, {"prompt": "Hello"}, stop=(" Paris",))
    assert (record["text"], record["finish_reason"], len(record["token_ids"])) == ("", "stop", 1)
    (record,) = infer(chains["sentencepiece"], tmp_path, {"prompt": "Hello"}, max_new_tokens=3)
    assert record["text"] == "Paris world", "a text begins without it, as ever"


def of_config(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"eos_token_id": [1, 2]}))


def of_generation_config(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]} | values))


def of_tokenizer(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.eos_token = "<|end|>"
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("name", [of_config, of_generation_config, of_tokenizer])
def test_every_stage_ends_a_text_where_any_of_the_models_files_says(
    name: Callable[[Path], None], chains: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(chains["byte-level"], folder)
    (folder / "generation_config.json").unlink()
    name(folder)
    options = {"until": [], "max_gen_toks": 9}
    (record,) = infer(folder, tmp_path, {"prompt": " Hello"}, max_new_tokens=9)
    assert (record["text"], record["finish_reason"], record["token_ids"][-1]) == (" Paris worldSTOP", "stop", 2)
    for answer in (in_lm_eval, carried, of_hugging_face):
        assert answer(folder, (" Hello", options)) == [" Paris worldSTOP"]


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer is byte-level."""
    folder, tokenizer = tmp_path_factory.mktemp("random"), byte_level_tokenizer()
    save_hf_folder(folder, LLAMA | {"vocab_size": len(tokenizer), "eos_token_id": 1})
    tokenizer.save_pretrained(folder)
    return folder


def test_greedy_answers_are_those_of_hugging_face_whatever_ends_them(random_folder: Path) -> None:
    prompts = ["a Hello", " Paris now", "Hello, world", "b"]
    long = {"until": [], "max_gen_toks": 20, "temperature": 0.0}
    plain = of_hugging_face(random_folder, *((prompt, long) for prompt in prompts))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(random_folder)
    spaced = next(word for text in plain for word in re.findall(r" \w+", text))
    arguments = [
        *((prompt, long) for prompt in prompts),
        *((prompt, {**long, "until": text[5:8]}) for prompt, text in zip(prompts, plain, strict=True) if text[5:8]),
        *((prompt, {**long, "until": ["never", spaced]}) for prompt in prompts),
        *((prompt, {**long, "until": ["<|end|>", "<|x|>"]}) for prompt in prompts),
        (prompts[0], {**long, "until": ["never"], "max_gen_toks": 1}),
        # The context ends (64 tokens), with a prompt that is cut from the left and with one that fits to the token.
        (" Hello world" * 40, {**long, "max_gen_toks": 60}),
        (" Hello" * 43, long),
    ]
    assert len(tokenizer(arguments[-1][0])["input_ids"]) == 44
    found = in_lm_eval(random_folder, *arguments)
    assert found == of_hugging_face(random_folder, *arguments) and len(set(found)) > 8


def test_every_stage_follows_the_penalties_of_the_model_in_greedy_text(random_folder: Path, tmp_path: Path) -> None:
    folder, prompts = tmp_path / "model", ["a Hello", " Paris now", "b"]
    shutil.copytree(random_folder, folder)
    lines = [{"prompt": prompt, "temperature": 0.0} for prompt in prompts]
    plain = infer(folder, tmp_path, *lines, max_new_tokens=16)
    words = [plain[0]["token_ids"][2:3], plain[1]["token_ids"][3:5], [1]]
    penalties = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": words}
    of_generation_config(folder, **penalties, eos_token_id=1)
    arguments = [(prompt, {"until": [], "max_gen_toks": 16}) for prompt in prompts]
    expected = of_hugging_face(folder, *arguments)
    assert expected[:2] != [record["text"] for record in plain[:2]]
    for answer in (in_lm_eval, carried):
        assert answer(folder, *arguments) == expected
    assert [record["text"] for record in infer(folder, tmp_path, *lines, max_new_tokens=16)] == expected


def test_a_penalty_belongs_to_what_answers_are_resumed_by(random_folder: Path, tmp_path: Path) -> None:
    folder, line = tmp_path / "model", {"prompt": "a Hello"}
    shutil.copytree(random_folder, folder)
    of_generation_config(folder, repetition_penalty=1.5, bad_words_ids=[[7]], eos_token_id=1)
    (record,) = infer(folder, tmp_path, line)
    assert infer(folder, tmp_path, line, resume=True) == [record]
    of_generation_config(folder, repetition_penalty=1.1, bad_words_ids=[[7]], eos_token_id=1)
    with pytest.raises(ValueError, match=r"repetition_penalty is 1.5 of its answers, 1.1 now"):
        infer(folder, tmp_path, line, resume=True)
    of_generation_config(folder, repetition_penalty=1.5, bad_words_ids=[[8]])
    with pytest.raises(ValueError, match=r"bad_words_ids is '.*eos_token_ids is \[1\] of its answers, \[1, 2\] now"):
        infer(folder, tmp_path, line, resume=True)


def test_min_p_of_the_model_is_followed_in_sampled_text_only(random_folder: Path, tmp_path: Path) -> None:
    folder, lines = tmp_path / "model", [{"prompt": "a Hello", "seed": seed} for seed in range(4)]
    shutil.copytree(random_folder, folder)
    greedy = infer(folder, tmp_path, *lines, max_new_tokens=8)
    of_generation_config(folder, do_sample=True, temperature=2.0, top_k=0, min_p=1.0, eos_token_id=1)
    assert infer(folder, tmp_path, *lines, max_new_tokens=8) == greedy, "nothing but the likeliest is left"
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["settings"]["min_p"] == 1.0
    of_generation_config(folder, do_sample=True, temperature=2.0, top_k=0, min_p=0.001, eos_token_id=1)
    assert infer(folder, tmp_path, *lines, max_new_tokens=8) != greedy
    assert infer(folder, tmp_path, *lines, max_new_tokens=8, temperature=0.0) == greedy
    # A task that asks for sampled text and says no more gets the model's own way; any option replaces it.
    options = {"max_gen_toks": 8, "do_sample": True}
    of_generation_config(folder, do_sample=True, temperature=2.0, top_k=0, min_p=1.0, eos_token_id=1)
    assert in_lm_eval(folder, ("a Hello", options)) == [greedy[0]["text"]]
    assert in_lm_eval(folder, ("a Hello", options | {"temperature": 2.0})) != [greedy[0]["text"]]


def test_what_is_followed_and_what_is_not_is_said_once(
    random_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(random_folder, folder)
    of_generation_config(
        folder,
        repetition_penalty=1.5,
        bad_words_ids=[[7], [8]],
        typical_p=0.9,
        num_beams=4,
        suppress_tokens=[5],
        min_new_tokens=3,
        # What changes nothing, or is a flag of ours.
        encoder_repetition_penalty=1.0,
        begin_suppress_tokens=[],
        sequence_bias=None,
        max_new_tokens=5,
        max_length=100,
        use_cache=True,
        length_penalty=1.0,
        top_p=0.5,
    )
    configure_logging()
    infer(folder, tmp_path, {"prompt": "b"}, {"prompt": "a"}, max_new_tokens=2)
    told = capsys.readouterr().err
    followed = "generation_config.json is followed, in greedy text too: repetition_penalty 1.5, 2 bad_words_ids\n"
    ignored = "not applied, so texts may differ from Hugging Face's: min_new_tokens 3, num_beams 4, "
    assert told.count(followed) == 1 and told.count(f"{ignored}suppress_tokens [5], typical_p 0.9\n") == 1
    # The corpus that a model writes itself is its own distribution: nothing is followed there, and nothing said.
    capsys.readouterr()
    next(write_documents(ModelOptions(model=str(folder)).load(), seed=0, max_tokens=1, quiet=True))
    assert "generation_config.json" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"repetition_penalty": "1.5"}, "`repetition_penalty`: expected `float | null`, got `str`"),
        ({"repetition_penalty": 0}, "`repetition_penalty`: expected `float` > 0.0"),
        ({"no_repeat_ngram_size": -1}, "`no_repeat_ngram_size`: expected `int` >= 0"),
        ({"bad_words_ids": [[]]}, "`bad_words_ids[0]`: expected `array` of length >= 1"),
        ({"bad_words_ids": [[5, 1000]]}, "`bad_words_ids`: token id 1000 lies outside the vocabulary of"),
        ({"eos_token_id": "</s>"}, "`eos_token_id`: expected `int | array | null`, got `str`"),
        ({"do_sample": True, "top_k": 10**12}, "`top_k`: expected `int`"),
        ({"do_sample": True, "top_p": 1.5}, "`top_p`: expected `float` <= 1.0"),
        ([1], "expected `object`, got `array`"),
    ],
)
def test_a_damaged_generation_config_is_one_line_that_names_the_key(
    values: Any, message: str, random_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(random_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"generation_config\.json: {re.escape(message)}"):
        infer(folder, tmp_path, {"prompt": "b"})
