"""How a token is decided: shaping of logits, sampling with keyed randomness, acceptance rules."""
