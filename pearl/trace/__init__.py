"""See the waiting: what both workers did, when, and what they waited for.

Each worker writes a file of its own while it runs (`recorder`, filled by the wrappers in `tracer`); when the engine
closes they become one Chrome Trace Event file (`chrome`), which is read back (`reading`) for a report, a picture, a
check, or to be replayed into fresh state machines.  With tracing off no wrapper is put in: it costs nothing.
"""
