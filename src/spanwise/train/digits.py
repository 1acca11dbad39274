"""``builtin:digits``: scikit-learn's 1,797 handwritten digits as questions with an image and an answer in words.

Small enough to train a vision-language model from random weights in minutes, and honest about it: every fifth image is
held out, and asking with another row's image must make the answers wrong. O(1,797) small images in memory.
"""

from __future__ import annotations

from typing import Any

DIGITS = "builtin:digits"
HELD_OUT = ":eval"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTIONS = ("Which digit is this?", "Read the digit in the picture.", "What number do you see?")
SIDE = 56


def digit_rows(name: str = DIGITS) -> list[dict[str, Any]]:
    """Rows with "conversation" and "digit"; ``builtin:digits:eval`` gives every fifth image, the name the rest."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "builtin:digits takes its images from scikit-learn, which is not installed. Fix: pip install scikit-learn."
        ) from error
    from PIL import Image

    if name not in (DIGITS, DIGITS + HELD_OUT):
        raise ValueError(
            f"there is no built-in data set '{name}'; expected {DIGITS} or {DIGITS}{HELD_OUT}. It is probably "
            "misspelt. Fix: use one of these."
        )
    found: Any = load_digits()
    rows = []
    for place, (pixels, digit) in enumerate(zip(found.images, found.target, strict=True)):
        if (place % 5 == 4) != name.endswith(HELD_OUT):
            continue
        small = Image.fromarray((pixels * (255 / 16)).astype("uint8"))
        image = small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB")
        question = QUESTIONS[place % len(QUESTIONS)]
        rows.append(
            {
                "conversation": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "image": image}, {"type": "text", "text": question}],
                    },
                    {"role": "assistant", "content": [{"type": "text", "text": WORDS[digit]}]},
                ],
                "digit": int(digit),
            }
        )
    return rows
