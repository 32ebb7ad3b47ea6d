"""Timelines of both workers: what they did, when, and what they waited for.

While it runs, each worker writes its own file (`recorder`, filled by the wrappers of `tracer`). When the engine closes,
`chrome` merges the files into one Chrome Trace Event file, which `reading` reads back for a report or a picture.
Without tracing nothing is recorded: a wrapped call then costs one `if`.
"""
