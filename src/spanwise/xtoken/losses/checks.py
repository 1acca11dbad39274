"""What every loss checks about its arguments. O(1)."""

from __future__ import annotations

import math

from spanwise.teachers.scores import TeacherScores


def check_temperature(temperature: float) -> None:
    """Refuse what is not a positive finite number."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"the temperature is {temperature}; expected a positive finite number. It was probably set to 0 to switch "
            "it "
            "off. Fix: 1.0 leaves the distributions as they are."
        )


def check_scores(scores: TeacherScores, batch: int, length: int) -> None:
    """Refuse teacher scores of another shape than the alignment's teacher side."""
    if scores.shape != (batch, length):
        raise ValueError(
            f"the teacher scores are {scores.shape[0]} × {scores.shape[1]} and the alignment's teacher side is {batch} "
            "× "
            f"{length}; expected equal shapes. The scores probably belong to another batch or teacher, or the batch "
            "was "
            "sliced after scoring. Fix: slice scores and batch alike (TeacherScores.slice)."
        )
