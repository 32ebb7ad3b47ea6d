"""The protocol, sans-IO: its messages, and the two state machines that exchange them.

This package has no clock, process, socket, tensor or random number: time and verdicts enter as events, and
`handle(event)` returns a list of commands.  So the same code runs in two processes, under a virtual clock
(`pearl.lab.studies.simulate`) and, step by step, in a test.
"""
