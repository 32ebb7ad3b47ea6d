"""Text and tokens: tokenizers, text streams, chat templates, tool calls and grammars. Nothing here knows a model."""
