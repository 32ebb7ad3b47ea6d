"""Heads: drafters that read the hidden states of their target. Each kind has a file; `kinds` lists the kinds."""
