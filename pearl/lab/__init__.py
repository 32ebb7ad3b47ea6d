"""Measurements and training: simulator, theory, benchmarks, experiments and distillation.

Only `pearl.cli` imports this package, and the runtime works without it. There is one exception:
methods of other papers take their guesses from `guesses`. The registry (`pearl.spec.methods`) has
the names of the factories, such as "pearl.lab.guesses.published:pld", and imports nothing.
"""
