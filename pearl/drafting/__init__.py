"""Everything that guesses tokens: the draft model, n-grams, datastores, heads; and stop policies.

This package uses model runners and acceptance rules. It knows no sockets and no window policies.
"""
