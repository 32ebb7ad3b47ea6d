"""The OpenAI-compatible HTTP face of an engine; needs the extra `server`. Launches nothing and knows no terminal."""
