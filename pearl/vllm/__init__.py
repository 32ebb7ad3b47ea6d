"""PEARL inside vLLM: drafts from a service on a device of its own. See launch/vllm.md.

Needs pyzmq, msgspec, numpy and pydantic, which vLLM has; of PEARL no model, and nothing of torch or transformers.
"""

from pearl.vllm.proposer import PearlProposer

__all__ = ["PearlProposer"]
