"""PEARL inside vLLM, with drafts from a service on a device of its own. See launch/vllm.md.

It needs only packages that vLLM has: pyzmq, msgspec, numpy and pydantic. It uses no model of PEARL,
and nothing of torch or transformers.
"""

from pearl.vllm.proposer import PearlProposer

__all__ = ["PearlProposer"]
