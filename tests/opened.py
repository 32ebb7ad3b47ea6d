"""Executors and proposers that let a test see what they hold for a request."""

import torch

from pearl.drafting.draft_text import DraftText
from pearl.drafting.ngram import NgramIndex
from pearl.drafting.proposer import ModelProposer
from pearl.execution.target import TargetExecutor


class OpenExecutor(TargetExecutor):
    def index(self, request: int) -> NgramIndex:
        """Return the n-gram index from which guesses for the request come."""
        state = self._requests[request]
        if state.index is None:
            state.index = self._make_index(state)
        return state.index

    def logits(self, request: int) -> torch.Tensor:
        """Return the logits of the request's last forward, [rows, vocab]."""
        return self._requests[request].logits


class OpenProposer(ModelProposer):
    def text(self, request: int) -> DraftText:
        return self._texts[request]
