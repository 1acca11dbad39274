"""Sound as the feature extractor takes it: one channel of float32 at its own sampling rate.

Extractors count frames by samples and ask no questions, so a clip at another rate would be heard too fast or too slow
without a word. Resampling is band-limited, so nothing above half the new rate comes back as another tone: O(n log n).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Wave = np.ndarray[Any, np.dtype[np.float32]]
_EXTRACTORS = ("feature_extractor", "audio_processor", "audio_feature_extractor")


def sampling_rate(processor: Any) -> int | None:
    """The rate at which the processor's extractor listens; None where it has none."""
    holders = (*(getattr(processor, name, None) for name in _EXTRACTORS), processor)
    named = (getattr(holder, name, None) for holder in holders for name in ("sampling_rate", "audio_sampling_rate"))
    return next((int(rate) for rate in named if isinstance(rate, (int, float)) and rate > 0), None)


def clips_of_rows(
    heard: Sequence[Sequence[Any]], examples: Sequence[Mapping[str, Any]], rate: int | None
) -> list[list[Any]]:
    """Per row the clips of its parts, else its own "audio", each at ``rate``."""
    own = [[] if example.get("audio") is None else [example["audio"]] for example in examples]
    return [
        [waveform(clip, rate, row) for clip in list(parts) or alone]
        for row, (parts, alone) in enumerate(zip(heard, own, strict=True))
    ]


def waveform(audio: Any, rate: int | None, row: int) -> Wave | str:
    """One clip as float32 at ``rate``: an array as it is; (array, rate) or a dict of both resampled; a path as a path.

    Integers of 16 or 32 bits are scaled to -1…1, as in a sound file.

    Raises:
        ValueError: no waveform of one channel, or no rate where one must be known. Names the row.

    >>> waveform({"array": [0.5, 0.5], "sampling_rate": 8_000}, 16_000, 0).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    if isinstance(audio, (str, Path)):
        return str(audio)
    own_rate: Any = None
    if isinstance(audio, Mapping):
        own_rate = audio.get("sampling_rate")
        if audio.get("array") is None or own_rate is None:
            raise _unreadable(row, f"a dict with {sorted(map(str, audio))}")
        audio = audio["array"]
    elif isinstance(audio, (tuple, list)) and len(audio) == 2 and np.ndim(audio[0]) > 0:
        audio, own_rate = audio
    wave = _as_floats(audio, row)
    if own_rate is None or rate is None or own_rate == rate:
        return wave
    if not isinstance(own_rate, (int, float)) or own_rate <= 0:
        raise _unreadable(row, f"a sampling rate of {own_rate!r}")
    return _resampled(wave, max(round(len(wave) * rate / own_rate), 1))


def _resampled(wave: Wave, size: int) -> Wave:
    """The same sound in ``size`` samples: its spectrum cut, or continued by zeros, at the lower of the two limits."""
    spectrum = np.fft.rfft(wave)[: size // 2 + 1]
    return (np.fft.irfft(spectrum, size) * (size / len(wave))).astype(np.float32)


def _as_floats(audio: Any, row: int) -> Wave:
    try:
        wave = np.asarray(audio)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _unreadable(row, f"a {type(audio).__name__}") from error
    if wave.ndim == 2 and 1 in wave.shape:
        wave = wave.reshape(-1)
    if wave.ndim != 1 or len(wave) == 0 or wave.dtype.kind not in "fiu":
        raise _unreadable(row, f"a {type(audio).__name__} of shape {wave.shape} and type {wave.dtype}")
    if wave.dtype in (np.int16, np.int32):
        return (wave / (np.iinfo(wave.dtype).max + 1)).astype(np.float32)
    return wave.astype(np.float32)


def _unreadable(row: int, given: str) -> ValueError:
    return ValueError(
        f"row {row}: its audio is {given}; expected one channel of numbers, alone or with its rate, as "
        "{'array': …, 'sampling_rate': …} or (array, rate). The clip is stereo, not decoded, or its rate was left out. "
        "Fix: decode it, take the mean of its channels, and give its sampling rate."
    )
