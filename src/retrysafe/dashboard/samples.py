"""What this process has seen of late: calls by result, in a small ring.

Nothing of it is written to the store, so a reload of the page keeps the plot and a new start of the
process begins it anew.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final

from retrysafe.core.events import Event, EventKind, Result
from retrysafe.core.keys.key import Key

# Ten minutes in bars of ten seconds.
BAR_SECONDS: Final = 10
BARS: Final = 60
# Keys whose replays are counted, those that were seen last.
KEY_LIMIT: Final = 1_000
# As a person sorts them: what ran, what was spared, what went wrong.
GROUPS: Final = {
    Result.EXECUTED: "executed",
    Result.REPLAYED: "replayed",
    Result.IN_FLIGHT: "turned away",
    Result.WAIT_TIMED_OUT: "turned away",
    Result.MISMATCHED: "turned away",
}
NAMES: Final = ("executed", "replayed", "turned away", "failed")


class Samples:
    """An observer: pass it to the `Idempotency` or `AsyncIdempotency` of this process."""

    # All that it wants to hear of.
    kinds: Final = frozenset({EventKind.ANSWERED})

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        # One that its own thread may take again: the handler of a signal may end a call in here.
        self._lock = threading.RLock()
        self._bars: OrderedDict[int, Counter[str]] = OrderedDict()
        self._replays: OrderedDict[bytes, int] = OrderedDict()
        self.has_seen_any = False

    def __call__(self, event: Event) -> None:
        """Counts the end of a call."""
        result = event.result
        if event.kind is not EventKind.ANSWERED or result is None:
            return
        now = int(self._monotonic() // BAR_SECONDS)
        with self._lock:
            self.has_seen_any = True
            self._bars.setdefault(now, Counter())[GROUPS.get(result, "failed")] += 1
            while len(self._bars) > BARS:
                self._bars.popitem(last=False)
            if result is Result.REPLAYED:
                digest = event.key.digest
                self._replays[digest] = self._replays.get(digest, 0) + 1
                self._replays.move_to_end(digest)
                if len(self._replays) > KEY_LIMIT:
                    self._replays.popitem(last=False)

    def replays_of(self, key: Key) -> int:
        """How often this process has replayed the key, as far as it remembers."""
        with self._lock:
            return self._replays.get(key.digest, 0)

    def plot(self) -> dict[str, Any] | None:
        """Bars for a drawing of 600 by 100, and what the last ten minutes add up to."""
        if not self.has_seen_any:
            return None
        last = int(self._monotonic() // BAR_SECONDS)
        with self._lock:
            counts = [Counter(self._bars.get(last - BARS + 1 + place, ())) for place in range(BARS)]
        total = sum(counts, Counter())
        most = max(1, *(sum(bar.values()) for bar in counts))
        answered = total["executed"] + total["replayed"]
        return {
            "bars": [
                rectangle
                for place, bar in enumerate(counts)
                for rectangle in _stack(place * 10, bar, most)
            ],
            "most_per_second": f"{most / BAR_SECONDS:g}",
            "totals": [(name, total[name]) for name in NAMES],
            "dedup_percent": f"{100 * total['replayed'] / answered:.1f}" if answered else "0",
            "minutes": BARS * BAR_SECONDS // 60,
        }


def _stack(left: int, bar: Counter[str], most: int) -> list[dict[str, Any]]:
    """The rectangles of one bar, one on the other."""
    made: list[dict[str, Any]] = []
    foot = 100.0
    for name in NAMES:
        if bar[name]:
            height = 100 * bar[name] / most
            foot -= height
            made.append({"x": left, "y": f"{foot:.1f}", "height": f"{height:.1f}", "name": name})
    return made
