"""Drift measures against NumPy, a few lines each, on made-up states: cosines, updates, moments, intervals, CKA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from scripts.studies.embedding_drift import CkaSums, DriftSums, StateMoments, StateRows
from scripts.studies.measures import Measure

LAYERS, WINDOWS, TOKENS, HIDDEN = 4, 6, 9, 8
LOOKAHEADS = range(1, 9)
POINTS = {"block_input": (0, 0), "after_attention": (1, 0), "after_mlp": (0, 1)}  # parity, first of its chain


@dataclass
class MadeUpStates:
    """states float64 [S, W, T, D]; `windows_at_once` are one unit, whose rows come in `parts`."""

    states: np.ndarray
    windows_at_once: int = 2
    parts: int = 1
    present: Sequence[bool] = ()
    ordinary_weight: float = 1.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        num_states, self.num_groups, self.num_tokens, self.hidden_size = self.states.shape
        self.present = self.present or [True] * num_states
        self.num_units = -(-self.num_groups // self.windows_at_once)
        self.num_rows = self.num_groups * self.num_tokens

    def __iter__(self) -> Iterator[StateRows]:
        for unit in range(self.num_units):
            windows = np.arange(self.num_groups)[unit * self.windows_at_once :][: self.windows_at_once]
            states = torch.tensor(self.states[:, windows]).flatten(1, 2)
            positions = torch.arange(self.num_tokens).repeat(len(windows))
            groups = torch.tensor(windows).repeat_interleave(self.num_tokens)
            for first in range(self.parts):
                part = slice(first, None, self.parts)
                yield StateRows(states[:, part], positions[part], groups[part], unit)


def made_up_states(seed: int = 0, windows: int = WINDOWS, tokens: int = TOKENS) -> np.ndarray:
    """A stream that drifts, with unequal channels, an offset, and first tokens of another size."""
    source = np.random.default_rng(seed)
    steps = source.normal(size=(2 * LAYERS + 1, windows, tokens, HIDDEN)) * 0.7
    states = np.cumsum(steps, 0) * np.linspace(0.3, 3, HIDDEN) + 0.5
    states[:, :, 0] *= 20
    return states


def measures_of(source: MadeUpStates, seed: int = 0) -> dict[tuple[Any, ...], Measure]:
    moments = StateMoments(source)
    for rows in source:
        moments.add(rows)
    moments.finish(lambda part: part)
    sums: list[DriftSums | CkaSums] = [cls(source, moments, LOOKAHEADS) for cls in (DriftSums, CkaSums)]
    for rows in source:
        for each in sums:
            each.add(rows)
    for each in sums:
        each.finish(lambda part: part)
    found = [measure for each in sums for measure in each.measures(seed)]
    return {(one.metric, *one.labels.values()): one for one in found}


def transformed(states: np.ndarray, variant: str) -> np.ndarray:
    ordinary = states[:, :, 1:].reshape(len(states), -1, states.shape[-1])
    if variant == "no_massive":
        energy = (ordinary**2).sum(1)
        largest = (energy / energy.sum(1, keepdims=True)).mean(0).argmax()  # one of 8 channels is the least there is
        return np.delete(states, largest, -1)
    if variant == "centred":
        return states - ordinary.mean(1)[:, None, None]
    if variant == "standardised":
        return (states - ordinary.mean(1)[:, None, None]) / ordinary.std(1)[:, None, None]
    return states


def cosines(states: np.ndarray, point: str, lookahead: int) -> np.ndarray:
    """[pairs, W, T]"""
    parity, first = POINTS[point]
    chain = states[parity::2][first:]
    pairs = [(chain[i], chain[i + lookahead]) for i in range(LAYERS - lookahead)]
    return np.stack([(x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1)) for x, y in pairs])


CHOSEN = {"all": np.s_[:], "first": np.s_[:1], "ordinary": np.s_[1:]}


@pytest.mark.parametrize("parts", [1, 3])
def test_cosines_are_those_of_a_few_lines_of_numpy_however_rows_come(parts: int) -> None:
    states = made_up_states()
    found = measures_of(MadeUpStates(states, parts=parts, windows_at_once=4))
    for point in POINTS:
        for variant in ("raw", "centred", "standardised", "no_massive"):
            for lookahead in range(1, LAYERS):
                every = cosines(transformed(states, variant), point, lookahead)
                for tokens, chosen in CHOSEN.items():
                    per_layer = every[:, :, chosen].mean((1, 2))
                    measure = found["cosine", point, lookahead, variant, tokens]
                    assert measure.per_layer == pytest.approx([*per_layer, *[None] * lookahead], abs=1e-12)
                    assert measure.value == pytest.approx(per_layer.mean(), abs=1e-12)
    assert not any(key[0] == "cosine" and key[2] >= LAYERS for key in found), "no two layers are so far apart"


def test_updates_are_norms_of_what_a_half_block_adds_over_norms_of_what_it_finds() -> None:
    states = made_up_states()
    found = measures_of(MadeUpStates(states))
    ratios = np.linalg.norm(states[1:] - states[:-1], axis=-1) / np.linalg.norm(states[:-1], axis=-1)
    for point, first in (("after_attention", 0), ("after_mlp", 1)):
        for tokens, chosen in CHOSEN.items():
            per_layer = ratios[first::2][:, :, chosen].mean((1, 2))
            assert found["relative_update", point, tokens].per_layer == pytest.approx(per_layer, abs=1e-12)


def test_thinned_ordinary_tokens_count_for_those_left_out_where_all_are_meant() -> None:
    states = made_up_states()
    found = measures_of(MadeUpStates(states, ordinary_weight=5.0))
    every = cosines(states, "block_input", 2).mean(0)  # [W, T]
    expected = (every[:, 0].sum() + 5 * every[:, 1:].sum()) / (WINDOWS + 5 * every[:, 1:].size)
    assert found["cosine", "block_input", 2, "raw", "all"].value == pytest.approx(expected, abs=1e-12)
    ordinary = found["cosine", "block_input", 2, "raw", "ordinary"]
    assert ordinary.value == pytest.approx(every[:, 1:].mean(), abs=1e-12)


def test_states_that_are_missing_leave_their_pairs_out() -> None:
    states = made_up_states()
    whole = measures_of(MadeUpStates(states))
    present = [True] * (2 * LAYERS + 1)
    present[-1] = present[2] = False  # what follows the last MLP, and the input of layer 1
    states[2] = np.nan  # a state that is not there may hold anything
    found = measures_of(MadeUpStates(np.nan_to_num(states, nan=1e3), present=present))
    for metric, key in (("cosine", ("raw", "ordinary")), ("cka", ("raw", "ordinary"))):
        expected = whole[metric, "block_input", 1, *key].per_layer
        assert found[metric, "block_input", 1, *key].per_layer == pytest.approx([None, None, expected[2], None])
        expected = whole[metric, "after_mlp", 2, *key].per_layer
        assert (metric, "after_mlp", 2, *key) not in found, "layers 0 and 2, 1 and 3: one of each pair is missing"
        expected = whole[metric, "after_attention", 3, *key].per_layer
        assert found[metric, "after_attention", 3, *key].per_layer == pytest.approx(expected)
    assert found["relative_update", "after_attention", "all"].per_layer[1] is None
    assert found["relative_update", "after_mlp", "all"].per_layer[3] is None


def test_intervals_are_those_of_windows_drawn_again() -> None:
    states = made_up_states(windows=40)
    states[:, ::2] += 4  # windows differ, so whole ones must be drawn and not tokens
    measure = measures_of(MadeUpStates(states))["cosine", "block_input", 1, "raw", "ordinary"]
    by_window = cosines(states, "block_input", 1)[:, :, 1:].mean((0, 2))
    draws = np.random.default_rng(1).integers(0, 40, (20000, 40))
    low, high = np.quantile(by_window[draws].mean(1), [0.025, 0.975])
    # Student's t with 39 degrees of freedom is 2.0227.
    wider, mean = 2.0227 / 1.95996 * (40 / 39) ** 0.5, by_window.mean()
    expected = (mean - wider * (mean - low), mean + wider * (high - mean))
    assert measure.interval == pytest.approx(expected, abs=0.1 * (high - low))
    assert measures_of(MadeUpStates(states))["cosine", "block_input", 1, "raw", "ordinary"] == measure
    other_seed = measures_of(MadeUpStates(states), seed=3)["cosine", "block_input", 1, "raw", "ordinary"]
    assert other_seed.value == measure.value and other_seed.interval != measure.interval


def test_one_window_has_no_interval_and_neither_have_tokens_of_one_window_only() -> None:
    measure = measures_of(MadeUpStates(made_up_states(windows=1)))["cosine", "block_input", 1, "raw", "all"]
    assert measure.interval is None
    states, moments = MadeUpStates(made_up_states(windows=2)), None
    moments = StateMoments(states)
    for rows in states:
        moments.add(rows)
    moments.finish(lambda counts: counts)
    sums = DriftSums(states, moments, [1])
    for rows in states:  # of the second window the first token only
        kept = (rows.groups == 0) | (rows.positions == 0)
        part = StateRows(rows.states[:, kept], rows.positions[kept], rows.groups[kept], rows.unit)
        sums.add(part)
    sums.finish(lambda counts: counts)
    found = {each.labels["tokens"]: each for each in sums.measures(0) if each.labels.get("variant") == "raw"}
    assert found["ordinary"].interval is None
    assert found["first"].interval is not None and found["all"].interval is not None


def hsic(x: np.ndarray, y: np.ndarray) -> float:
    """Song et al. 2012, equation 4: rows [n, D] -> HSIC1 with linear kernels."""
    n, ones = len(x), np.ones(len(x))
    k, m = ((rows @ rows.T) * (1 - np.eye(n)) for rows in (x, y))
    inner = np.trace(k @ m) + (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return (inner - 2 / (n - 2) * ones @ k @ m @ ones) / (n * (n - 3))


@pytest.mark.parametrize("max_rows", [256, 13])
def test_cka_is_hsic_of_minibatches_summed_by_their_rows(max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.studies.embedding_drift.MAX_ROWS", max_rows)
    states = made_up_states()
    found = measures_of(MadeUpStates(states, windows_at_once=4))
    for variant in ("raw", "standardised", "no_massive"):
        changed = transformed(states, variant)[:, :, 1:]
        batches = []
        for unit in (changed[:, :4], changed[:, 4:]):
            rows = unit.reshape(len(states), -1, changed.shape[-1])
            number = -(-rows.shape[1] // max_rows)  # each with every so-many-th row, of all windows
            batches += [rows[:, first::number] for first in range(number)]
        for point, (parity, first) in POINTS.items():
            idx = [2 * place + parity for place in range(first, first + LAYERS - 2)]
            sums = [
                [
                    sum(batch.shape[1] * hsic(batch[a], batch[b]) for batch in batches)
                    for a, b in ((k, k + 4), (k, k), (k + 4, k + 4))
                ]
                for k in idx
            ]
            expected = [cross / np.sqrt(own * other) for cross, own, other in sums]
            measure = found["cka", point, 2, variant, "ordinary"]
            assert measure.per_layer == pytest.approx([*expected, None, None], abs=1e-9)
            assert measure.value == pytest.approx(np.mean(expected), abs=1e-9)
            low, high = measure.interval or (0, 0)
            assert low <= measure.value <= high


def test_cka_of_much_text_in_minibatches_is_that_of_kornblith_over_all_of_it() -> None:
    states = made_up_states(windows=200)
    measure = measures_of(MadeUpStates(states, windows_at_once=10))["cka", "block_input", 1, "raw", "ordinary"]
    rows = states[:, :, 1:].reshape(len(states), -1, HIDDEN)
    rows = rows - rows.mean(1, keepdims=True)

    def kornblith(x: np.ndarray, y: np.ndarray) -> float:
        return ((x.T @ y) ** 2).sum() / np.sqrt(((x.T @ x) ** 2).sum() * ((y.T @ y) ** 2).sum())

    expected = [kornblith(rows[2 * layer], rows[2 * layer + 2]) for layer in range(LAYERS - 1)]
    assert measure.per_layer == pytest.approx([*expected, None], abs=0.02)
