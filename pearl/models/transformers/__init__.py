"""Models that the transformers library computes, with caches that can be rolled back."""

SNAPSHOTS = 8  # the most copies of the state of a recurrent model: see `cache_layers`
