"""Executors, which carry out the commands of the protocol's state machines.

The workers and the simulator share this code.
"""
