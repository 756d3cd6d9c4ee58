"""The selection methods, one file each: they choose the neurons, heads or inputs of matrices that a token computes.

To add a method, write one file here that defines `METHOD` (or `METHODS`, several that share code), and its test.
Flags, checks before a model is loaded, calibration, budgets, shares of bytes, records, tables and plots find methods
through `registry.py`, which refuses two of one name or one look. Only what runs a selection of them lists names:
`scripts/evaluate.sh --sweep`, `scripts/quickstart.sh`, `scripts/recipes/` and the `--method` of
`scripts.benchmark.decode`. Add a new method there if it is to be part of these. Two kinds:

- `UnitMethod`: makes a selector per block, which says per token which units are active. Begin with `cats.py`: a
  `ThresholdSelector` that compares one score per neuron with a threshold. Without a threshold: `oracle.py`.
- `InputMethod`: wraps matrices so that small entries of their input are dropped, whose weights need not be read. Begin
  with `teal.py`; `wina.py` weights the entries.

What a method must know of a model is a `Statistic`, declared beside it: `scripts.train` measures it and keeps it in
`calibration.safetensors`. A statistic that another method declares can be used as it is. Directories that were
calibrated before a statistic existed are refused with a message that names it.

Every method is then run by the tests that go through the registry: all active equals dense bit for bit, ranks agree
with one process, the prompt stays dense, refusals. Its own test compares it with a naive reference. The docstring of
its class says source, equation and what differs from the paper.
"""
