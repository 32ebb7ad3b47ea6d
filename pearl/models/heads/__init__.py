"""Heads: drafters that read the hidden states of their target. One file for each kind, which `kinds` lists."""
