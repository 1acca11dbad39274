"""Any processor that no other family claims: one batched call, pixel values in bfloat16."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec("default", ())
