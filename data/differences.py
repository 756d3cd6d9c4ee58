"""In which settings what lies on the disk differs from what is asked for now."""

from collections.abc import Mapping
from typing import Any


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> list[str]:
    """One phrase, `NAME is OLD WHERE, NEW now`, for each setting in which the two differ; one that is not there is
    None."""
    return [
        f"{name} is {stored.get(name)!r} {where}, {wanted.get(name)!r} now"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    ]
