"""Measurements and training: simulator, theory, benchmarks, experiments, distillation. Only `pearl.cli` imports it."""
