"""What lies between the name of a model and its runner: files, formats, memory and tokenizers."""
