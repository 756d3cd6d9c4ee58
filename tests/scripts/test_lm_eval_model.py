"""Our engine as an lm-eval model: its answers are those of lm-eval's own `hf` on the same weights."""

from pathlib import Path
from typing import Any

import lm_eval.models
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from scripts.command_line import configure_logging
from scripts.lm_eval_model import EngineLM, parse_arguments, parse_batch_size, usable_device
from tests.scripts.tiny_tasks import model_folder

PAIRS = [
    ("what is it?", " a"),
    ("what is it?", " b"),
    ("what is it? ", "a long answer"),
    ("", "no context"),
    ("x" * 70, " cut from the left"),
    ("y" * 50, "z" * 14),  # as long as the context and one more
    ("another", "?"),
]
TEXTS = ["short", "x y z " * 40, "a" * 63, "b" * 64, "c" * 65]
PROMPTS = ["once upon", "2 + 2", "z" * 80, "what"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return get_model("hf").create_from_arg_obj({"pretrained": str(folder), "dtype": "float32"}, {"device": "cpu"})


def ours(folder: Path, **changes: Any) -> EngineLM:
    return EngineLM.create_from_arg_obj({"model": str(folder), "quiet": True, **changes}, {"device": "cpu"})


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_scores_are_those_of_hugging_faces_model(folder: Path, theirs: Any, batch_size: int | str) -> None:
    model = ours(folder, batch_size=batch_size)
    pairs = requests("loglikelihood", PAIRS)
    for mine, other in zip(model.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-4) and mine[1] == other[1]
    texts = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    assert model.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)


def test_a_token_that_is_the_first_choice_is_greedy(folder: Path) -> None:
    model = ours(folder)
    (answer,) = model.generate_until(requests("generate_until", [("abc", {"max_gen_toks": 4})]))
    likely, unlikely = model.loglikelihood(requests("loglikelihood", [("abc", answer), ("abc", answer[:-1] + "~")]))
    assert likely[1] and not unlikely[1] and likely[0] > unlikely[0]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_answers_are_those_of_hugging_faces_model(folder: Path, theirs: Any, batch_size: int) -> None:
    model = ours(folder, batch_size=batch_size)
    plain = requests("generate_until", [(prompt, {"until": [], "max_gen_toks": 12}) for prompt in PROMPTS])
    answers = model.generate_until(plain)
    assert answers == theirs.generate_until(plain) and len(set(answers)) > 1
    stop = answers[0][5:7]
    stopped = requests("generate_until", [(PROMPTS[0], {"until": [stop], "max_gen_toks": 12, "temperature": 0.0})])
    assert model.generate_until(stopped) == theirs.generate_until(stopped) == [answers[0].split(stop)[0]]


def test_sampled_answers_repeat_and_differ_from_each_other(folder: Path) -> None:
    options = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 12}
    sampled = requests("generate_until", [("abc", options)] * 3)
    answers = ours(folder).generate_until(sampled)
    assert ours(folder, batch_size=2).generate_until(sampled) == answers and len(set(answers)) == 3


def test_the_model_says_what_it_computed(folder: Path) -> None:
    model = ours(folder, method="random", mlp_density=0.5)
    model.loglikelihood(requests("loglikelihood", PAIRS))
    found = model.get_model_info()
    assert (found["method"], found["phase"], found["mlp_density"]) == ("random", "all", 0.5)
    assert found["achieved"]["per_layer"]["mlp"] == [0.5] * 3 and found["achieved"]["sparse_calls"] > 0


def test_phase_decode_is_warned_of_and_scores_are_dense(folder: Path, capsys: pytest.CaptureFixture) -> None:
    configure_logging()
    pairs = requests("loglikelihood", PAIRS)
    found = ours(folder, method="random", sparse_phases="decode").loglikelihood(pairs)
    assert found == ours(folder).loglikelihood(pairs)
    assert capsys.readouterr().err.count("a log-likelihood never decodes") == 1


def test_chat_messages_go_through_the_template(folder: Path) -> None:
    model, messages = ours(folder), [{"role": "user", "content": "hi"}]
    assert model.apply_chat_template(messages) == "[user] hi\n[assistant] "
    assert model.tok_encode("<s>ab")[:1] != model.tok_encode("ab")[:1]
    model.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        model.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pretrained": "x"}, "--model_args pretrained: unknown; allowed are all_reduce, "),
        ({}, "needs model=DIR"),
        ({"model": "x", "method": "magic"}, "method=magic: expected dense or "),
        ({"model": "x", "mlp_density": "half"}, "mlp_density=half: expected float"),
        ({"model": "x", "seed": True}, "seed=True: expected int"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arguments(arguments)


def test_arguments_have_the_types_of_the_flags() -> None:
    found = parse_arguments({"model": 7, "mlp_density": 1, "predictors": "p", "overlap_tokens": 0})
    assert (found.model, found.mlp_density, found.predictors, found.overlap_tokens) == ("7", 1.0, Path("p"), 0)
    assert found.sparse_phases == "all"


@pytest.mark.parametrize("value", ["autos", "0", 0, "some", -1])
def test_a_batch_size_is_auto_or_a_number(value: str | int) -> None:
    assert parse_batch_size("auto") is None and parse_batch_size("auto:4") is None and parse_batch_size("8") == 8
    with pytest.raises(ValueError, match="batch_size must be auto or"):
        parse_batch_size(value)


def test_the_gpu_that_nobody_asked_for_is_the_cpu_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    configure_logging()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert usable_device("cuda:0") == "cpu" and "no GPU, so the CPU is taken" in capsys.readouterr().err
    assert usable_device("cpu") == "cpu" and usable_device("auto") == "auto"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "generation option num_beams=4 is not supported; allowed are until"),
        ({"max_gen_toks": 64}, "max_gen_toks 64 leaves no room for a prompt in a context of 64"),
    ],
)
def test_generation_options_that_cannot_be_followed_are_refused(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ours(folder).generate_until(requests("generate_until", [("abc", options)]))


def test_a_continuation_longer_than_the_context_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="request 0: .* to be scored; one at least stands before"):
        ours(folder).loglikelihood(requests("loglikelihood", [("abc", "x" * 65)]))


def test_lm_evals_own_models_stay_known() -> None:
    assert get_model("hf").__name__ == "HFLM" and get_model("dejavu-lab") is EngineLM
    assert lm_eval.models is not None
