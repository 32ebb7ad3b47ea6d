"""Models that the transformers library computes, with caches that can be rolled back."""
