"""The jagged data plane: ragged rows on the wire, padding only where a reader asks."""
