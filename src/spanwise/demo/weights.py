"""Where the demo's teacher lies."""

from __future__ import annotations

from spanwise.loading import smollm2_gguf

__all__ = ["smollm2_gguf"]
