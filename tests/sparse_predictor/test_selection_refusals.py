"""What `attach_selection` refuses, and how it says so."""

from dataclasses import replace
from pathlib import Path

import pytest

from sparse_predictor.methods.registry import all_methods, in_order
from sparse_predictor.selection import Selection, attach_selection
from tests.modules.tiny_kinds import KINDS
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import Trained, selection

METHODS = list(all_methods())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"mlp": [0.5, 0.5]}', "2 mlp densities for 3 layers"),
        ('{"mlp": [0.5, 0.5, 0.0]}', r"`mlp\[2\]`: expected `float` > 0.0"),
        ('{"mlp": [0.5, 0.5, 1.5]}', r"`mlp\[2\]`: expected `float` <= 1.0"),
        ('{"heads": [0.5, 0.5, 0.5]}', "unknown field `heads`; expected {"),
        ('{"mlp": 0.5}', "`mlp`: expected `array"),
        ('{"mlp": ["half", 0.5, 0.5]}', r"`mlp\[0\]`: expected `float`, got `str`"),
        ("{}", "budget.json: expected"),
        ("[0.5, 0.5, 0.5]", "budget.json: expected"),
        ('{"mlp": [0.5 0.5]}', "budget.json: not JSON"),
    ],
)
def test_bad_density_budgets_are_refused(tmp_path: Path, text: str, message: str) -> None:
    budget = tmp_path / "budget.json"
    budget.write_text(text)
    with pytest.raises(ValueError, match=message):
        attach_selection(tiny_decoder(KINDS["llama"]), selection("random", None, 0.5, density_budget=budget))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        Selection(method="random", density_budget=tmp_path / "nowhere.json").densities(3)


def test_a_method_that_is_none_is_refused_and_wina_by_its_right_name() -> None:
    for chosen in (Selection(method="wina"), Selection(method="tea")):
        message = (
            "wina is now wina-unrotated" if chosen.method == "wina" else "tea is not one of dense, oracle, predictor"
        )
        with pytest.raises(ValueError, match=message):
            chosen.check()
        with pytest.raises(ValueError, match=message):
            attach_selection(tiny_decoder(KINDS["llama"]), chosen)


def test_two_methods_of_one_name_or_one_look_are_refused() -> None:
    teal, cats = all_methods()["teal"], all_methods()["cats"]
    assert list(in_order([teal, cats])) == ["cats", "teal"]
    with pytest.raises(ValueError, match="two methods are named teal"):
        in_order([teal, replace(cats, name="teal")])
    with pytest.raises(ValueError, match="methods teal and twin have one colour and marker in plots"):
        in_order([replace(teal, name="twin", order=teal.order + 1), cats, teal])


@pytest.mark.parametrize("density", [0.0, -0.5, 1.01, float("nan")])
@pytest.mark.parametrize("method", ["dense", *METHODS])
def test_densities_outside_zero_to_one_are_refused(trained: Trained, method: str, density: float) -> None:
    model = tiny_decoder(KINDS["llama"])
    for changes in ({"density": density}, {"density": 0.5, "head_density": density}):
        with pytest.raises(ValueError, match=r"density must lie in \(0, 1\]"):
            attach_selection(model, selection(method, trained(), **changes))
    assert all(half_block.block.selector is None for half_block in model.half_blocks)


@pytest.mark.parametrize("method", [name for name, method in all_methods().items() if method.files != "none"])
def test_methods_that_need_predictors_say_so(method: str, tmp_path: Path) -> None:
    model = tiny_decoder(KINDS["llama"])
    with pytest.raises(ValueError, match=f"method {method} needs --predictors"):
        attach_selection(model, selection(method, None, 0.5))
    with pytest.raises(FileNotFoundError, match="manifest.json is missing: not a predictor directory"):
        attach_selection(model, selection(method, tmp_path, 0.5))


def test_methods_refuse_what_they_cannot_choose(trained: Trained) -> None:
    llama, opt = tiny_decoder(KINDS["llama"]), tiny_decoder(KINDS["opt"])
    for method in set(METHODS) - {"predictor", "oracle", "static", "random"}:
        with pytest.raises(ValueError, match=f"method {method} does not choose heads"):
            attach_selection(llama, selection(method, trained(), 0.5, head_density=0.5))
    for method in ("cats", "m-countdown"):
        with pytest.raises(ValueError, match=f"method {method} needs a gated MLP"):
            attach_selection(opt, selection(method, trained(kind="opt"), 0.5))
    with pytest.raises(ValueError, match="no attention predictor for layer 0; train with --units attention or both"):
        attach_selection(llama, selection("predictor", trained("neurons"), 0.5, head_density=0.5))
    with pytest.raises(ValueError, match="static needs group_frequency"):
        attach_selection(llama, selection("static", trained("neurons"), 0.5, head_density=0.5))
