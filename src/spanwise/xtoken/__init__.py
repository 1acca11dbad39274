"""Cross-tokenizer distillation: align, project, compare."""
