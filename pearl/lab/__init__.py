"""Measurements and training: simulator, theory, benchmarks, experiments and distillation.

Only `pearl.cli` imports this package, and the runtime works without it. The one exception is
`guesses`: its functions make the guesses of other papers' methods, and are loaded when such a
method is used. `pearl.spec.methods` has their names, such as "pearl.lab.guesses.published:pld".
"""
