"""Progress bars that say once, as a log line, how long the work will take: who reads a log sees no bar move."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from loguru import logger
from tqdm import tqdm

# Told after so many seconds from the first step that is done (what comes before it compiles and fills caches), and only
# of work that takes longer than that.
EARLIEST_S = 10.0
UNITS = {"tok": "token", "it": "step"}


class TellingBar(tqdm):
    """A tqdm bar of a known total. While it waits for a bar that was opened later (text that is written as it is read),
    that one tells: its own pace would be that of what was waiting."""

    _open: ClassVar[list[TellingBar]] = []
    _begun: tuple[float, float] | None = None
    _told = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if not self.disable:
            self._open.append(self)

    def close(self) -> None:
        """As tqdm's."""
        if self in self._open:
            self._open.remove(self)
        super().close()

    def update(self, n: float | None = 1) -> bool | None:
        """As tqdm's."""
        moved = super().update(n)
        if not (self.disable or self._told) and self.total and self._open[-1:] == [self]:
            self._tell(self.total)
        return moved

    def _tell(self, total: float) -> None:
        now = time.monotonic()
        if self._begun is None:
            if self.n > self.initial:
                self._begun = (now, self.n)
            return
        start_s, start_n = self._begun
        done, elapsed_s = self.n - start_n, now - start_s
        if done <= 0 or elapsed_s < EARLIEST_S:
            return
        self._told = True
        each_s = elapsed_s / done
        left_s = each_s * (total - self.n)
        if left_s > EARLIEST_S:
            unit = UNITS.get(self.unit, self.unit)
            pace = f"{each_s:.1f} s per {unit}" if each_s >= 1 else f"{1 / each_s:.0f} {unit}s per s"
            logger.info(f"{self.desc.removesuffix(': ')}: about {duration(left_s)} to go ({pace})")


def duration(seconds: float) -> str:
    """Two units at most: '2 h 47 min', '5 min', '1 min 40 s', '12 s'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes_left} min"
    if minutes >= 5:
        return f"{minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
