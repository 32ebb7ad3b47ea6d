"""Measure real runs: compare methods on prompts, calibrate a pair, and check that texts are exact.

These modules start engines and read clocks. The papers' emulated pairs, and experiments in virtual
time, are in `pearl.lab.studies`.
"""
