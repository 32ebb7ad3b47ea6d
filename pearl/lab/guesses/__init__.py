"""Sources of guesses as other papers describe them, to compare methods with.

Each is a factory of an index (`pearl.drafting.ngram.NgramIndex`) that a method in `pearl.spec.methods` names as
"module:name". Nothing that runs imports this room: `fused_guesses.index_factory` loads a factory by its name.
"""
