"""Proposers, which guess tokens, and stop policies. Uses runners and rules; knows no sockets and no windows."""
