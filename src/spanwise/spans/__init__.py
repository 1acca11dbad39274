"""The kernel: tokens as byte spans, rows as ragged sets."""

from spanwise.spans.table import TableCache, TokenTable, token_table, tokenizer_fingerprint

__all__ = ["TableCache", "TokenTable", "token_table", "tokenizer_fingerprint"]
