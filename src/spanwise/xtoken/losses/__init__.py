"""The loss families, each a function from scores and an alignment to a sum and a count."""
