"""Measurements and training: simulator, theory, benchmarks, experiments, distillation. Only `pearl.cli` imports it.

One part is reached by name: the registry of methods (`pearl.spec.methods`) names the factories in `guesses`.
"""
