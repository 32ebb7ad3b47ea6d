"""The protocol, sans-IO: what is said, and two state machines that say it.

No clock, process, socket, tensor or random number lives below this line: time and verdicts enter as events, and
`handle(event)` answers with a list of commands.  So the same code runs in two processes, under a virtual clock
(`pearl.lab.studies.simulate`) and, step by step, in a test.
"""
