"""Vision-language collation: sixteen families, one pipeline."""
