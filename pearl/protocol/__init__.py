"""The protocol between target and draft: its messages, and the state machines that exchange them.

The package is sans-IO: it has no clock, process, socket, tensor or random number.  Time and
verdicts enter as events, and `handle(event)` returns a list of commands.  So the same code runs in
two processes, under a virtual clock (`pearl.lab.studies.simulate`) and, step by step, in a test.
"""
