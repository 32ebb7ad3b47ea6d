"""Carries out what the state machines command; workers and the simulator run the same."""
