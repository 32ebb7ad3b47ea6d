"""Declarations of all methods, acceptance rules and stop policies, each declared in one place.

All other packages may read this package, so it must not import torch.
"""
