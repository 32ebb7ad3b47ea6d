"""One request of vLLM: its committed tokens, its drafted tokens, and branches for other outcomes.

vLLM decides the text; this file only follows it. It uses the same objects as PEARL's own target. So
the same rules apply to a draft that is late, that restarts or that sends nonsense.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pearl.drafting.ngram import Anchor, NgramIndex, guess_tree
from pearl.protocol.draft_state import DraftState, Received
from pearl.protocol.machine import Do
from pearl.protocol.messages import DraftTokens, Provenance, Submit
from pearl.protocol.outside import OPTIONS
from pearl.protocol.request import Request
from pearl.protocol.sequence import TokenSequence
from pearl.protocol.speeds import Speeds

# N-grams are looked up only if fewer drafted tokens than this are expected to be accepted.
_LEAST_DRAFTED = 1.5
# Last tokens of a prompt whose n-grams are indexed: indexing takes time from vLLM's step.
_INDEXED = 2048


class Chain(NamedTuple):
    """Tokens that may follow a text.

    `chances`: for each token, the probability that this token and all before it are accepted.
    """

    tokens: Sequence[int]
    chances: Sequence[float]


class DraftedText:
    """A request for which a service drafts.

    Args:
        number: identifies the request to the service.
        tokens: the prompt, and the tokens that were generated already.
        limit: the maximum number of tokens of a request in vLLM.
        context: how many tokens of a text the draft can hold; 0 if there is no draft.
        window: the window c that was used last.
        has_ngrams: whether n-grams of the text may be proposed in place of the draft's tokens; see
            `ProposerSettings`.
    """

    def __init__(
        self,
        number: int,
        tokens: Sequence[int],
        limit: int,
        speeds: Speeds,
        context: int,
        window: int,
        *,
        has_ngrams: bool = False,
    ) -> None:
        submit = Submit(number, tuple(tokens), limit, OPTIONS)
        self.number = number
        self.request = Request(submit, TokenSequence())
        self.draft = DraftState(self.request, speeds, context, window)
        #: Whether the last step committed another token than the drafted one.
        self.was_rejected = False
        #: Whether the draft had prepared a continuation of that other token.
        self.was_foreseen = False
        self._speeds = speeds
        self._index: NgramIndex | None = None
        if has_ngrams:
            self._index = NgramIndex(tokens[-_INDEXED:])
        self.request.begin()

    def begin(self, do: Do) -> None:
        """Send the draft the whole text, from which it then drafts."""
        self.draft.begin(do)

    def drop(self) -> None:
        """Drop the drafted tokens, because no draft works on this request now.

        The next draft gets the whole text.
        """
        self.draft.known = 0
        self.request.discard_pending()

    def fail(self, do: Do) -> None:
        """Stop using the draft for this request, for good."""
        self.draft.finish(do)
        self.draft.is_lost = True
        self.drop()

    def _restart(self, do: Do) -> None:
        self.request.counts.resyncs += 1
        self.request.discard_pending()
        if self.draft.resyncs_too_often:
            self.draft.finish(do)
            self.draft.is_lost = True
            return
        self.draft.begin(do)

    # ---- vLLM's steps ----

    def commit(self, tokens: Sequence[int], do: Do) -> None:
        """Add the tokens that a step has committed, and send the draft a verdict on its tokens."""
        request = self.request
        num_accepted = 0
        num_undrafted = 0
        is_wrong = False
        for token in tokens:
            drafted = request.sequence.first_pending
            if drafted is not None:
                request.learn(self._speeds.foresight, token)
            if drafted == token:
                num_accepted += 1
                request.commit(None, Provenance.ACCEPTED, is_stop=False)
            elif drafted is None:
                num_undrafted += 1
                request.commit(token, Provenance.DIRECT, is_stop=False)
            else:
                is_wrong = True
                request.commit(token, Provenance.CORRECTED, is_stop=False)
        if self._index is not None:
            self._index.extend(tokens)
            self._index.learn(len(self._index))
        self._speeds.observe_judgement(num_accepted, num_accepted + is_wrong)
        request.is_fresh = is_wrong or not num_accepted or num_undrafted > 1
        self.was_rejected = is_wrong
        self.was_foreseen = is_wrong and bool(request.sequence.pending)
        self.draft.announce(do)
        request.deliver(do)

    def end(self, do: Do) -> None:
        self.draft.finish(do)

    # ---- the draft's messages ----

    def receive(self, message: DraftTokens, do: Do) -> None:
        """Add drafted tokens. Raises `RemoteProtocolError` if `DraftState.receive` does."""
        if self.draft.known and self.draft.receive(message) is Received.GAP:
            self._restart(do)

    def resynchronise(self, epoch: int, do: Do) -> None:
        """Send the draft the whole text again, because it has lost the text in `epoch`.

        If another epoch has begun since, this does nothing.
        """
        if epoch == self.request.epoch:
            self._restart(do)

    # ---- what vLLM may verify ----

    @property
    def is_served(self) -> bool:
        """Whether the draft has this text, and can draft for it."""
        return bool(self.draft.known) and self.draft.is_drafting

    @property
    def has_begun(self) -> bool:
        """Whether the draft has sent its first tokens; reading a long prompt takes it a while."""
        return self.is_served and self.draft.has_sent

    def lacks(self, count: int) -> bool:
        """Return whether fewer than `count` drafted tokens are there to be verified."""
        return len(self.request.sequence.tokens) < self.request.sequence.committed + count

    def proposal(self, most: int) -> Chain:
        """Return up to `most` tokens to verify.

        The result is n-grams of the text if more of the n-grams than of the draft's tokens are
        expected to be accepted; otherwise it is the draft's tokens.
        """
        drafted = self._drafted(most)
        expected = sum(drafted.chances)
        if self._index is None or expected >= _LEAST_DRAFTED:
            return drafted
        end = len(self._index)
        tree = guess_tree(self._index, [Anchor(end, 1.0)], most, end + most, branches=False)
        return Chain(tree.tokens, tree.chances) if sum(tree.chances) > expected else drafted

    def _drafted(self, most: int) -> Chain:
        tokens = self.request.sequence.pending[:most]
        chances = []
        reached = 1.0
        for about in self.request.proposals.seen(len(tokens)):
            if about is None:
                reached *= self._speeds.acceptance
            else:
                reached *= self._speeds.foresight.agrees(about)
            chances.append(reached)
        return Chain(tokens, chances)
