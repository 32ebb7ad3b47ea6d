"""How a token is decided: keyed randomness, logits to probabilities to a token, acceptance rules. Pure functions."""
