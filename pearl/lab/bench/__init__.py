"""Measure real runs: compare methods on prompts, emulate the paper's pairs, calibrate a pair.

These modules start engines and read clocks.  Experiments in virtual time are in `pearl.lab.studies`.
"""
