"""An OpenAI-compatible HTTP server for an engine; it needs the extra `server`.

The caller starts the engine. Nothing here uses the terminal.
"""
