"""What may be said after a demo: one plain sentence, built from the numbers of this run alone.

The sentence leads with whichever part holds the stronger true statement. If the teacher did not help, it says so; one
seed is no verdict, and a quick run proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from spanwise.demo.arms import (
    CROSS_ENTROPY,
    DISTILLED,
    DOUBLED,
    ORIGINAL,
    ORIGINAL_TRAINED,
    SWAPPED,
    SWAPPED_TRAINED,
)

Arms = Sequence[Mapping[str, Any]]

# Two runs that differ in their random numbers alone can differ by as much as the teacher brings.
FEWEST_SEEDS = 2
PROVES_NOTHING = "This was --quick: a few steps that show the machinery; it proves nothing."


@dataclass(frozen=True)
class StudentVerdict:
    """The small student's comparison, seed by seed; positive = the teacher's arm needs fewer bits."""

    gains: list[float]
    gains_over_doubled: list[float]
    cross_entropy: float
    distilled: float

    @property
    def helped(self) -> bool:
        """In every seed, and against both controls; never from one seed."""
        return len(self.gains) >= FEWEST_SEEDS and min(self.gains + self.gains_over_doubled) > 0


def values(arms: Arms, name: str, key: str = "bits_per_byte") -> list[float]:
    """One value per run of an arm, by seed."""
    chosen = sorted((arm for arm in arms if arm["name"] == name), key=lambda arm: arm["seed"] or 0)
    return [arm[key] for arm in chosen]


def student_verdict(arms: Arms) -> StudentVerdict:
    """Compare the arms of the small student seed by seed."""
    plain, taught, doubled = (values(arms, name) for name in (CROSS_ENTROPY, DISTILLED, DOUBLED))
    return StudentVerdict(
        [a - b for a, b in zip(plain, taught, strict=True)],
        [a - b for a, b in zip(doubled, taught, strict=True)],
        mean(plain),
        mean(taught),
    )


def swap_sentence(arms: Arms) -> str:
    """What the swap came to."""
    before, after = _pair(arms, SWAPPED), _pair(arms, SWAPPED_TRAINED)
    original, adapted = _pair(arms, ORIGINAL), _pair(arms, ORIGINAL_TRAINED)
    seconds = mean(values(arms, SWAPPED_TRAINED, "seconds"))
    moved = "down from" if after[0] < before[0] and after[1] < before[1] else "against"
    return (
        f"After {seconds:.0f} seconds of training on one core, SmolLM2-135M runs on a new 8k tokenizer at "
        f"{after[0]:.2f} / {after[1]:.2f} bits per byte (Python's help / tales, held out), {moved} {before[0]:.2f} / "
        f"{before[1]:.2f} straight after the swap; with its own tokenizer it has {original[0]:.2f} / {original[1]:.2f} "
        f"untouched and {adapted[0]:.2f} / {adapted[1]:.2f} trained the same way."
    )


def student_sentence(arms: Arms) -> str:
    """What the teacher brought to the small student."""
    verdict = student_verdict(arms)
    seeds = len(verdict.gains)
    numbers = f"{verdict.cross_entropy:.3f} → {verdict.distilled:.3f} held-out bits per byte"
    if verdict.helped:
        return (
            f"A teacher with another tokenizer took a small student from {numbers} at the same data, steps and total "
            f"loss weight, better in each of {seeds} seeds (by {_spread(verdict.gains)}); doubling cross entropy with "
            f"no teacher does not explain it (behind by {_spread(verdict.gains_over_doubled)})."
        )
    if seeds < FEWEST_SEEDS:
        return (
            f"One seed is no verdict on the teacher of the small student: {numbers} at the same data, steps and total "
            f"loss weight, a difference of {_spread(verdict.gains)}, against doubled cross entropy "
            f"{_spread(verdict.gains_over_doubled)}."
        )
    return (
        f"In this run the teacher did not reliably help the small student: {numbers}, differences by seed "
        f"{_spread(verdict.gains)}, against doubled cross entropy {_spread(verdict.gains_over_doubled)}."
    )


def lead(arms: Arms, *, quick: bool = False) -> str:
    """What stands on top: the stronger statement first, and before it what a quick run is worth."""
    student, swap = student_sentence(arms), swap_sentence(arms)
    found = f"{student} {swap}" if student_verdict(arms).helped else f"{swap} {student}"
    return f"{PROVES_NOTHING} {found}" if quick else found


def share_closed(arms: Arms) -> tuple[float, float]:
    """Share of the gap between the untrained swap and the adapted original that training closed, per domain."""
    before, after, adapted = (_pair(arms, name) for name in (SWAPPED, SWAPPED_TRAINED, ORIGINAL_TRAINED))
    shares = [(b - a) / (b - o) if b > o else float("nan") for b, a, o in zip(before, after, adapted, strict=True)]
    return shares[0], shares[1]


def equal_wall_clock(arms: Arms) -> list[tuple[int, float, float]]:
    """(seed, cross entropy's last value, the teacher arm's value at that many seconds of training), from the curves."""
    found = []
    for plain in (arm for arm in arms if arm["name"] == CROSS_ENTROPY):
        taught = next(a for a in arms if a["name"] == DISTILLED and a["seed"] == plain["seed"])
        found.append((plain["seed"], plain["curve_seconds"][-1][1], _at(taught["curve_seconds"], plain["seconds"])))
    return found


def _at(curve: Sequence[Sequence[float]], seconds: float) -> float:
    """The curve at a time: between two points by a straight line, before the first the first, after the last the
    last."""
    earlier = [point for point in curve if point[0] <= seconds]
    later = [point for point in curve if point[0] > seconds]
    if not earlier or not later:
        return (earlier[-1] if earlier else later[0])[1]
    (x0, y0), (x1, y1) = earlier[-1], later[0]
    return y0 + (y1 - y0) * (seconds - x0) / (x1 - x0)


def _pair(arms: Arms, name: str) -> tuple[float, float]:
    return mean(values(arms, name)), mean(values(arms, name, "other_domain_bits_per_byte"))


def _spread(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:+.3f}" for number in numbers)
