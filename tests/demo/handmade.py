"""Results as the demo makes them, made by hand: no training."""

from __future__ import annotations

from spanwise.demo import arms as a

FACTS = {
    "exact_share": 0.78,
    "seconds": 280.0,
    "cache": {"seconds": 60.0, "tokens": 1000, "bytes_per_token": 140.0},
}


def arm(name, seed, docs, tales=2.0, seconds=50.0, curve=((10, 3.0), (20, 2.0))):
    return {
        "name": name,
        "seed": seed,
        "bits_per_byte": docs,
        "other_domain_bits_per_byte": tales,
        "seconds": seconds,
        "memory_mb": 700.0,
        "curve": [list(point) for point in curve],
        "curve_seconds": [[x / 20 * seconds, y] for x, y in curve],
    }


def result(taught, doubled=2.4, seeds=2):
    swaps = [
        arm(a.ORIGINAL, None, 1.03, 1.13),
        arm(a.SWAPPED, None, 1.27, 1.36),
        arm(a.SWAPPED_TRAINED, 0, 1.09, 1.23, 70.0),
        arm(a.ORIGINAL_TRAINED, 0, 0.93, 1.06, 72.0),
    ]
    students = [
        arm(name, seed, value)
        for seed in range(seeds)
        for name, value in ((a.CROSS_ENTROPY, 2.5), (a.DISTILLED, taught + seed * 0.01), (a.DOUBLED, doubled))
    ]
    return swaps + students
