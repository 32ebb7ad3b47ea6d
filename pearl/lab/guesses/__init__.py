"""Guesses without a draft as other papers make them, for comparisons.

Each paper has a function that makes the index of one text (`pearl.drafting.ngram.NgramIndex`). A
method in `pearl.spec.methods` names this function as "module:name", and
`fused_guesses.index_factory` loads it. No other package imports this one.
"""
