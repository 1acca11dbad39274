"""Nemotron-Parse: an encoder-decoder for documents; a task prompt instead of a chat template."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec("Nemotron-Parse", ("NemotronParseProcessor",), call="text_and_media")
