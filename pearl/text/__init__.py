"""Between text and tokens: tokenizers, text given out while tokens arrive, chat templates, grammars. No models."""
