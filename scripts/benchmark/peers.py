"""Other people's operators, timed beside ours in the same call and recorded under their name."""

from __future__ import annotations

import importlib
from typing import Any


def import_peer(place: str) -> Any:
    """What MODULE:FUNCTION names; ValueError if there is none such. What FUNCTION must take and return is said where
    the benchmark calls it."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--peer {place}: give MODULE:FUNCTION that can be imported ({error})") from error


def check_peer_name(peer: str | None, name: str) -> None:
    """ValueError for a name that its records could not be told by."""
    if peer is not None and not name.strip():
        raise ValueError(f"--peer-name {name!r}: give the name that tables call --peer by")
