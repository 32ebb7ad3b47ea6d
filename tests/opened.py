"""Executors and proposers that show a test what they hold for a request."""

import torch

from pearl.drafting.draft_text import DraftText
from pearl.drafting.ngram import NgramIndex
from pearl.drafting.proposer import ModelProposer
from pearl.execution.target import TargetExecutor


class OpenExecutor(TargetExecutor):
    def index(self, request: int) -> NgramIndex:
        """The request's source of guesses."""
        state = self._requests[request]
        if state.index is None:
            state.index = self._make_index(state)
        return state.index

    def logits(self, request: int) -> torch.Tensor:
        """Rows of the request's last forward."""
        return self._requests[request].logits


class OpenProposer(ModelProposer):
    def text(self, request: int) -> DraftText:
        return self._texts[request]
