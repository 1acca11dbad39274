"""SIGTERM, as schedulers send it before they take a machine away: the run saves a checkpoint and ends.

Nothing is saved in the handler; the run looks after each step whether it was asked. Costs nothing until then.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


class Preemption:
    """What asks a run to save and end: SIGTERM, or ``told`` where another process hears the signal.

    It may reach one rank alone, or the ranks at different steps: a rank only says that it was asked, and the trainer
    agrees with the others.
    """

    def __init__(self, told: Callable[[], bool] | None = None) -> None:
        self._told = told
        self._received = False

    def asked(self) -> bool:
        """Whether this process was asked to end the run."""
        return self._received or (self._told is not None and self._told())

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Note SIGTERM instead of dying of it."""
        return at_sigterm(self._note)

    def _note(self) -> None:
        self._received = True


@contextlib.contextmanager
def at_sigterm(do: Callable[[], object]) -> Iterator[None]:
    """Do something at SIGTERM and go on."""

    def handle(number: int, frame: FrameType | None) -> None:
        do()

    try:
        previous = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not the main thread: whoever runs this thread handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
