"""Measurements and training: simulator, theory, benchmarks, experiments, distillation. Only `pearl.cli` imports it.

The registry of methods (`pearl.spec.methods`) names the factories in `guesses`.
"""
