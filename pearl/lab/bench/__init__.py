"""Measure real runs: compare methods on prompts, calibrate a pair, check that texts are equal bit for bit.

These modules start engines and read clocks.  Emulated pairs of the papers and experiments in virtual time are in
`pearl.lab.studies`.
"""
