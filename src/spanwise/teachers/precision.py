"""What is lost between a teacher and its scores: how many tokens a position lists, and how much mass it does not.

A cache and a server give the likeliest tokens only; a run's report says of each what that left out. O(entries).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from spanwise.teachers.documents import DocumentScores


@dataclass(frozen=True)
class Precision:
    """How much of a teacher's distribution its scores hold.

    Attributes:
        name: what the teacher is called.
        fingerprint: of the model that scored; of a server that does not tell, ``served`` and the model's name there.
        mean_k: tokens listed per position.
        mean_tail_mass: probability that is not listed, on average.
        largest_tail_mass: the same at the worst position.
    """

    name: str
    fingerprint: str
    mean_k: float
    mean_tail_mass: float
    largest_tail_mass: float


@runtime_checkable
class Truncated(Protocol):
    """A teacher whose scores were cut before they came here."""

    def precision(self) -> Precision | None:
        """What its scores hold; None while there are none."""
        ...


class PrecisionTally:
    """Adds up the scores that a teacher gave."""

    def __init__(self) -> None:
        self.positions = 0
        self._entries = 0
        self._tail_mass = 0.0
        self._largest_tail_mass = 0.0

    def add(self, scores: DocumentScores) -> None:
        """Count a document."""
        tail = np.exp(scores.log_tail, dtype=np.float64)
        self.positions += len(scores.counts)
        self._entries += len(scores.ids)
        self._tail_mass += float(tail.sum())
        self._largest_tail_mass = max(self._largest_tail_mass, float(tail.max(initial=0.0)))

    def precision(self, name: str, fingerprint: str) -> Precision | None:
        """Of all that was counted; None where nothing was."""
        if not self.positions:
            return None
        mean_k, mean_tail_mass = self._entries / self.positions, self._tail_mass / self.positions
        return Precision(name, fingerprint, mean_k, mean_tail_mass, self._largest_tail_mass)
