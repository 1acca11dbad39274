"""The embedded default: a real teacher, fair controls, one report."""
