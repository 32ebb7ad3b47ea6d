"""Timelines of both workers: what they did, when, and what they waited for.

Each worker writes a file of its own while it runs: the worker's part of the trace. `recorder`
writes the part, and the wrappers of `tracer` make its records. When the engine closes, `chrome`
merges the parts into one Chrome Trace Event file, which `reading` reads back for a report or a
picture. Without tracing, nothing is recorded, and a call through a wrapper costs one `if`.
"""
