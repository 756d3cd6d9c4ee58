"""A tiny model that reads characters, and lm-eval tasks in local files."""

import json
import random
import string
from pathlib import Path
from typing import Any

import lm_eval.tasks
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import save_hf_folder

CHARACTERS = ["<s>", "</s>", "<unk>", *string.printable[:95], "\n"]
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CHOICES = """
task: tiny_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/choices.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
TEXTS = """
task: tiny_texts
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/texts.jsonl
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
"""
ANSWERS = """
task: tiny_answers
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/choices.jsonl
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs:
  until: []
  max_gen_toks: 4
metric_list:
  - metric: exact_match
"""


def model_folder(directory: Path, context: int = 64) -> Path:
    """A Hugging Face folder of a tiny model with a tokenizer."""
    save_hf_folder(directory, LLAMA | {"max_position_embeddings": context, "bos_token_id": 0, "eos_token_id": 1})
    tokens = Tokenizer(models.BPE({text: i for i, text in enumerate(CHARACTERS)}, [], unk_token="<unk>"))
    tokens.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def task_folder(directory: Path, rows: int = 12) -> Path:
    """tiny_choices (options of one and of several tokens), tiny_texts (longer than the context) and tiny_answers."""
    draw = random.Random(3)
    questions = [
        {
            "question": "".join(draw.choices(string.ascii_lowercase + " ", k=draw.randint(5, 40))).strip() + "?",
            "choices": ["a", "b", "c"] if idx % 2 else ["yes it is", "no", "never ever"],
            "answer": draw.randrange(3),
        }
        for idx in range(rows)
    ]
    texts = [{"text": "".join(draw.choices(string.ascii_lowercase + "  ", k=length))} for length in (9, 150, 64)]
    directory.mkdir()
    for name, lines in (("choices", questions), ("texts", texts)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (("choices", CHOICES), ("texts", TEXTS), ("answers", ANSWERS)):
        (directory / f"tiny_{name}.yaml").write_text(text.format(folder=directory))
    return directory


class LocalTaskManager(lm_eval.tasks.TaskManager):
    """Without lm-eval's own tasks: reading their thousands of files takes seconds."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **{**named, "include_defaults": False})
