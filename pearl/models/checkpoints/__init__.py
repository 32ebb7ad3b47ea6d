"""From the name of a model to a runner: files, formats, memory, tokenizers."""
