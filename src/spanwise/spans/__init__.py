"""The kernel: tokens as byte spans, rows as ragged sets."""
