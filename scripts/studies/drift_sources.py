"""Where the drift study gets its states from: a model run over windows of text, or an activation store; and its two
texts, windows to calibrate on and windows to measure on, which share no token.

Both sources give the same rows each time they are iterated, in sets of groups (see `embedding_drift.StateSource`), and
give out at most `STATE_BYTES` of states at a time, whatever the model: of a large one fewer tokens of each window,
evenly spaced.

Legend: W windows, T tokens, S states (2 per layer, and one), n rows, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from data.activation_store import ActivationStore
from data.corpora import Side, iter_documents, parse_corpus, token_documents
from modules.decoder import Decoder
from modules.normalization import residual_dtype
from pipeline_parallel.engine import check_same_everywhere
from pipeline_parallel.mesh import ParallelMesh
from scripts.model_loading import LoadedModel
from scripts.run_records import hash_of
from scripts.studies.distance_measures import TEXT_SHARES
from scripts.studies.embedding_drift import StateRows
from scripts.written_text import self_writer

# Twice as much is held while one set of rows makes way for the next.
STATE_BYTES = 128 * 2**20
# Resampling draws groups, and for CKA sets of them: a handful would make poor intervals.
MIN_SETS = 8
MAX_GROUPS = 256


class WindowStates:
    """The residual stream of a model, or of this rank's part of one, over windows int64 [W, T]; a window is a group.

    All ranks iterate together. Those that lead a replica get the rows of its windows, the others none.
    """

    def __init__(
        self,
        model: Decoder,
        windows: Tensor,
        *,
        batch_size: int,
        mesh: ParallelMesh | None = None,
        state_bytes: int = STATE_BYTES,
    ) -> None:
        if windows.ndim != 2 or len(windows) < 1 or windows.shape[1] < 2:
            raise ValueError(f"drift: needs windows of at least two tokens, got {list(windows.shape)}")
        self.model, self.windows = model, windows
        self.mesh = mesh or ParallelMesh.single(model.device)
        self.hidden_size = model.config.hidden_size
        self.present: Sequence[bool] = [True] * (2 * model.config.num_hidden_layers + 1)
        self.device, self.dtype = model.device, residual_dtype(model.compute_dtype)
        num_windows, num_tokens = windows.shape
        self.num_groups = num_windows
        # Replicas whose rows meet on one rank share its memory.
        row_bytes = len(self.present) * self.hidden_size * self.dtype.itemsize * self.mesh.dp_size
        self._window_rows = max(2, min(num_tokens, state_bytes // row_bytes))
        together = max(1, state_bytes // (row_bytes * self._window_rows))
        self._set_size = max(1, min(batch_size, together, num_windows // MIN_SETS))
        self.num_units = -(-num_windows // self._set_size)
        # The first token, and as many others as there is room for, evenly spaced.
        spaced = torch.linspace(1, num_tokens - 1, self._window_rows - 1, dtype=torch.float64).round().long()
        self._positions = torch.cat([torch.zeros(1, dtype=torch.int64), spaced])
        self.num_rows = num_windows * self._window_rows
        self.ordinary_weight = (num_tokens - 1) / (self._window_rows - 1)

    def __iter__(self) -> Iterator[StateRows]:
        mesh = self.mesh
        for first in range(0, self.num_units, mesh.dp_size):
            unit = first + mesh.dp_rank
            states = self._run(unit) if unit < self.num_units else None
            if mesh.pp_size > 1:
                states = self._from_all_stages(states)
            if states is None or not mesh.is_leader:
                continue
            groups = torch.arange(self.num_groups)[self._windows_of(unit)]
            yield StateRows(
                states=states,
                positions=self._positions.repeat(len(groups)).to(self.device),
                groups=groups.repeat_interleave(self._window_rows).to(self.device),
                unit=unit,
            )

    def _windows_of(self, unit: int) -> slice:
        return slice(unit * self._set_size, (unit + 1) * self._set_size)

    def _run(self, unit: int) -> Tensor:
        """One pass; the states that are here [S here, n, D]."""
        model, windows = self.model, self.windows[self._windows_of(unit)].to(self.device)
        positions = self._positions.to(self.device)
        shape = (len(model.span) + 1, len(windows), self._window_rows, self.hidden_size)
        states = torch.empty(shape, dtype=self.dtype, device=self.device)
        with torch.inference_mode():
            stream = model.begin_stream(windows)
            for place, idx in enumerate(model.span):
                torch.index_select(stream.residual, 1, positions, out=states[place])
                model.half_blocks[idx](stream)
            torch.index_select(stream.residual, 1, positions, out=states[-1])
            if model.links is not None and not model.links.is_last:
                model.links.send(stream.hidden_states, stream.residual, stream.forward_pass)
        return states.flatten(1, 2)

    def _from_all_stages(self, states: Tensor | None) -> Tensor | None:
        """On the leader of a replica: [S, n, D] of all its stages; a stage's last state is the next one's first."""
        mesh = self.mesh
        mine = states.cpu() if states is not None and mesh.tp_rank == 0 else None
        if mine is not None and not self.model.is_last:
            mine = mine[:-1]
        everybody = mesh.gather(mine)
        parts = [everybody[rank] for rank in mesh.replica_ranks()]
        found = [part for part in parts if part is not None]
        return torch.cat(found).to(self.device) if found and mesh.is_leader else None


class StoredStates:
    """The residual stream that `scripts.collect` stored (float16), over whole documents; a document is a group.

    Documents are taken evenly from the whole store, until about `max_rows` rows. A store keeps what blocks read, so the
    state after the last MLP is missing; so are those of layers and blocks that were not collected.
    """

    def __init__(
        self,
        store: ActivationStore,
        *,
        num_layers: int,
        max_rows: int,
        device: torch.device,
        state_bytes: int = STATE_BYTES,
    ) -> None:
        self.store, self.device = store, device
        self.hidden_size, self.dtype = store.layout.hidden_size, torch.float32
        self.ordinary_weight = 1.0
        layers, kinds = set(store.layers), set(store.layout.kinds)
        self.present: Sequence[bool] = [
            *(layer in layers and kind in kinds for layer in range(num_layers) for kind in ("att_x", "mlp_x")),
            False,
        ]
        documents: dict[str, list[tuple[int, int]]] = {}
        for entry in store.documents:
            documents.setdefault(entry.document_id, []).append((entry.start, entry.stop))
        chosen = _some_documents(list(documents.values()), max_rows)
        # More groups than that make no better intervals, only larger sums.
        self.num_groups = min(len(chosen), MAX_GROUPS)
        self.num_rows = sum(stop - start for pieces in chosen for start, stop in pieces)
        self._max_rows = max(1, state_bytes // (len(self.present) * self.hidden_size * self.dtype.itemsize))
        self.num_units = min(len(chosen), max(MIN_SETS, -(-self.num_rows // self._max_rows)))
        self._sets = [list(enumerate(chosen))[unit :: self.num_units] for unit in range(self.num_units)]

    def __iter__(self) -> Iterator[StateRows]:
        for unit, documents in enumerate(self._sets):
            pieces = [(idx % self.num_groups, start, stop) for idx, spans in documents for start, stop in spans]
            rows = torch.cat([torch.arange(start, stop) for _, start, stop in pieces])
            positions = torch.cat([torch.arange(stop - start) for _, start, stop in pieces])
            groups = torch.cat([torch.full((stop - start,), group) for group, start, stop in pieces])
            num_parts = -(-len(rows) // self._max_rows)
            for part in (slice(first, None, num_parts) for first in range(num_parts)):
                yield StateRows(
                    states=self._read(rows[part]),
                    positions=positions[part].to(self.device),
                    groups=groups[part].to(self.device),
                    unit=unit,
                )

    def _read(self, rows: Tensor) -> Tensor:
        shape = (len(self.present), len(rows), self.hidden_size)
        states = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for idx, here in enumerate(self.present):
            if here:
                stored = self.store.mlp_x(idx // 2) if idx % 2 else self.store.att_x(idx // 2)
                states[idx].copy_(torch.from_numpy(stored[rows.numpy()]))
        return states


def _some_documents(documents: list[list[tuple[int, int]]], max_rows: int) -> list[list[tuple[int, int]]]:
    """Every k-th document, with the smallest k for which they hold about `max_rows` rows."""
    sizes = [sum(stop - start for start, stop in pieces) for pieces in documents]
    step = max(1, round(sum(sizes) / max_rows))
    return documents[::step]


# So many times what is needed is read, and windows are taken evenly from it: neighbours are about the same things.
SPREAD = 8
MIN_WINDOWS = 2  # of each text: an interval is drawn over windows


def read_texts(
    loaded: LoadedModel,
    corpus: str,
    calibration_corpus: str | None,
    *,
    window: int,
    test_tokens: int,
    calibration_tokens: int | None,
    quiet: bool = False,
) -> tuple[Tensor, Tensor]:
    """(calibration, test) int64 [W, T] on the CPU (a collective call).

    The test side of `corpus` is measured on; predictors learn from the training side of `calibration_corpus`, or of
    `corpus` where none is given. Where both are the same text, its first part calibrates and the rest tests, in
    proportion to what is wanted of each.
    Documents stand one after another, as in a stream, which is cut into windows. `calibration_tokens` None: nothing is
    to be calibrated, and that text is empty. ValueError for too little text.
    """
    learnt_from = calibration_corpus or corpus
    wanted = {"test": max(1, test_tokens // window)}
    if calibration_tokens is not None:
        wanted["calibration"] = max(1, calibration_tokens // window)

    def windows(spec: str, side: Side, number: int) -> Tensor:
        return _all_windows(loaded, spec, side, window=window, wanted=number, quiet=quiet)

    texts: dict[str, Tensor] = {}
    if calibration_tokens is None:
        texts["test"] = windows(corpus, "test", wanted["test"])
    elif parse_corpus(corpus, side="test").is_same_text(parse_corpus(learnt_from, side="train")):
        both = windows(corpus, "test", sum(wanted.values()))
        share = len(both) * wanted["calibration"] // sum(wanted.values())
        cut = min(max(share, MIN_WINDOWS), max(0, len(both) - MIN_WINDOWS))
        texts |= {"calibration": both[:cut], "test": both[cut:]}
    else:
        texts["calibration"] = windows(learnt_from, "train", wanted["calibration"])
        texts["test"] = windows(corpus, "test", wanted["test"])
    for name, text in texts.items():
        spec, number = corpus if name == "test" else learnt_from, wanted[name]
        if min(len(text), number) < MIN_WINDOWS:
            raise ValueError(
                f"corpus {spec!r}: --{name}-tokens asks for {number} windows of {window} tokens, and the text has "
                f"{len(text)}; at least {MIN_WINDOWS} are needed: give more text or a smaller --window"
            )
        texts[name] = _evenly_spaced(text, number)
    content = b"".join(text.numpy().tobytes() for text in texts.values())
    check_same_everywhere(loaded.mesh, f"--corpus {corpus}: the text", hash_of(content))
    return texts.get("calibration", texts["test"][:0]), texts["test"]


def check_calibration(num_tokens: int, window: int, hidden_size: int) -> None:
    """ValueError for less text than part distance can fit predictors on: the smallest share of it that is fitted on, in
    whole windows, must hold a token for each of a predictor's inputs, or their covariance is singular."""
    share, needed = TEXT_SHARES[0], math.ceil(hidden_size / window)
    num_windows = num_tokens // window
    if num_windows < MIN_WINDOWS or max(1, int(share * num_windows)) < needed:
        least = window * (MIN_WINDOWS if needed == 1 else math.ceil(needed / share))
        raise ValueError(
            f"--calibration-tokens: {num_tokens} tokens are too few to fit predictors on; with {hidden_size} hidden "
            f"channels and windows of {window} tokens at least {least} are needed"
        )


def _evenly_spaced(windows: Tensor, wanted: int) -> Tensor:
    return windows[torch.linspace(0, len(windows) - 1, min(wanted, len(windows)), dtype=torch.float64).round().long()]


def _all_windows(loaded: LoadedModel, spec: str, side: Side, *, window: int, wanted: int, quiet: bool) -> Tensor:
    """[W, T]: up to `SPREAD` times as many as wanted, or just as many of a text that has to be written first."""
    is_written = parse_corpus(spec, side="test").kind == "self"
    max_tokens = wanted * window * (1 if is_written else SPREAD)
    writer = self_writer(loaded, quiet=quiet, max_tokens=max_tokens)
    documents = token_documents(
        loaded.tokenizer,
        iter_documents(spec, side=side, self_writer=writer),
        max_tokens=max_tokens,
        vocab_size=loaded.model.config.vocab_size,
    )
    tokens = torch.tensor(list(chain.from_iterable(documents)), dtype=torch.int64)
    num_windows = len(tokens) // window
    return tokens[: num_windows * window].view(num_windows, window)
