"""The infer stage on tiny models: a folder whose tokens are words, and prompts answered in a call."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scripts.infer import Options, main
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import save_hf_folder

WORDS = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(128))]
CHAT_TEMPLATE = "{% for m in messages %}<s> {{ m['content'] }} {% endfor %}w1"


def words_folder(folder: Path) -> Path:
    """A model whose tokens are words."""
    save_hf_folder(folder, LLAMA)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def infer(model: Path, tmp_path: Path, *lines: dict[str, Any] | str, **options: Any) -> list[dict[str, Any]]:
    """The answers to these prompts, over older ones unless they are to be resumed."""
    output = tmp_path / "out.jsonl"
    options = {"overwrite": not options.get("resume", False), **options}
    prompts = write_prompts(tmp_path / "prompts.jsonl", *lines)
    main(Options(model=str(model), input=prompts, output=output, quiet=True, **options))
    return [json.loads(line) for line in output.read_text().splitlines()]
