"""Timelines of both workers: what they did, when, and what they waited for.

While it runs, each worker writes a file of its own, called its part of the trace. `recorder` writes
the part, and the wrappers of `tracer` make its records. When the engine closes, `chrome` merges the
parts into one Chrome Trace Event file, which `reading` reads back for a report or a picture.
Without tracing nothing is recorded: a wrapped call then costs one `if`.
"""
