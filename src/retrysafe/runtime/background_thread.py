"""Work in a thread of its own for as long as a block lasts.

Owns the thread, and what becomes of the error that ends its work before the block ends. What the
work is, the class that derives from it says.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from retrysafe import forks
from retrysafe.errors import InvalidInput

_logger: Final = logging.getLogger("retrysafe")


class BackgroundThread(ABC):
    """Runs in the thread that calls `run`, or aside in a `with` block."""

    # In the name of the thread, and in what the log says.
    _ROLE: ClassVar[str]
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def __init__(self) -> None:
        # Those who derive from it make what they wait with when they are made.
        self._make_lock: object = threading.Lock

    def _begin(self) -> None:
        """Called first by all work; raises `InvalidInput` for what gevent has patched since."""
        if threading.Lock is not self._make_lock:
            raise InvalidInput(
                f"this {self._ROLE} was made before gevent patched the process, and would stop all "
                "of its greenlets: make it afterwards, where you run it"
            )
        forks.refresh_if_stale()

    @abstractmethod
    def run(self) -> Any:
        """Works until `stop`."""

    @abstractmethod
    def stop(self) -> None:
        """Ends `run` once what is under way has ended."""

    def __enter__(self) -> Self:
        """Works in threads of its own until the block ends."""
        self._thread = threading.Thread(
            target=self._run_aside, name=f"retrysafe-{self._ROLE}", daemon=True
        )
        try:
            self._thread.start()
        except BaseException:
            # A signal may raise once it runs, and then nobody calls `__exit__`.
            self.stop()
            raise
        return self

    def _run_aside(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._error = error
            log_end(self._ROLE, error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops, waits, and raises what ended the work early."""
        assert self._thread is not None  # Entered before it is left.
        self.stop()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error


def log_end(role: str, error: BaseException) -> None:
    """Tells at once: the block that the work was started for may last as long as its process."""
    _logger.error("the %s was ended by an error, and does nothing more", role, exc_info=error)
