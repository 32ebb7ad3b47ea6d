"""Carries out the commands of the state machines; workers and the simulator share this code."""
