"""Sources of guesses as other papers describe them, for comparisons.

Each source is a factory of an index (`pearl.drafting.ngram.NgramIndex`), which a method in `pearl.spec.methods` names
as "module:name". No other package imports this one: `fused_guesses.index_factory` loads a factory by its name.
"""
