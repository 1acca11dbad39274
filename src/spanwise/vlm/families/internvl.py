"""InternVL 3: tiles of 448 pixels, a fixed run of context tokens for each."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec("InternVL", ("InternVLProcessor",), media_tokens=("<IMG_CONTEXT>", "<img>", "</img>", "<video>"))
