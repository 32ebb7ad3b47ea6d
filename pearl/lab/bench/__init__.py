"""Measuring real runs: methods side by side on prompts, the paper's pairs emulated, a pair calibrated.

Everything here starts engines and reads clocks.  What needs no clock is `pearl.lab.experiments`.
"""
