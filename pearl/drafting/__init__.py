"""Who guesses: proposers and stop policies. Runners and rules, no sockets and no windows."""
