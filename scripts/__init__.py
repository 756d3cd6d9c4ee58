"""Entry points: the only place that wires the other folders together, one module a stage."""
