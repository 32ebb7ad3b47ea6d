"""Our own forward on a GPU: one set of kernels computes prompts in pieces, another all other feeds.

The feeds that are no prompts are laid out in tables with a fixed number of rows; see `row_table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pearl.models.feeds import Feed
from pearl.models.forward.attention import whole_blocks
from pearl.models.forward.runner import ForwardRunner
from pearl.models.forward.slots import Tree
from pearl.models.gpu.check import KernelsUnfit
from pearl.models.gpu.recordings import PREFILL, Record, Rows, not_recorded, record_on_gpu
from pearl.models.out_of_memory import is_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pearl.models.forward.decoder import Decoder
    from pearl.models.gpu.prefill import Prompts
    from pearl.models.gpu.token_forward import Decode

# Least dimensions of a head for the kernels of prompts, because tensor cores multiply 16 at once.
_LEAST_DIM = 16


class KernelRunner(ForwardRunner):
    """Runs a model with our kernels; for the other options see `ForwardRunner`.

    Raises:
        KernelsUnfit: our kernels do not fit the model, do not run here, or give wrong results.

    Args:
        records: whether forwards are recorded as CUDA graphs, and launched before their tokens are known.
        record: replaces the recorder of CUDA graphs (for tests).
    """

    def __init__(
        self,
        model: PreTrainedModel | Decoder,
        context: int,
        *,
        records: bool = True,
        record: Record | None = None,
        **options: Any,
    ) -> None:
        _check_dtype(model)
        # A piece of a prompt writes its padding rows after the text.
        room = whole_blocks(context) + PREFILL
        super().__init__(model, context, room, is_native=False, **options)
        if record is None:
            record = record_on_gpu(self.device) if records else not_recorded
        self._decode, self._prompts = self._make_kernels(record)
        self.capabilities = replace(
            self.capabilities,
            tree_nodes=self._decode.most,
            launches=records,
            prompt_piece=1 if self._prompts is None else PREFILL,
        )

    @torch.inference_mode()
    def _make_kernels(self, record: Record) -> tuple[Decode, Prompts | None]:
        """Make and check the kernels for row tables and the kernels for prompts.

        The kernels for prompts are None if they do not take heads of the model's size.  Raises
        `KernelsUnfit`.
        """
        dim = self.layers.heads.dim
        prompts: Prompts | None = None
        try:
            from pearl.models.gpu.autotune import one_at_a_time
            from pearl.models.gpu.prefill import Prompts
            from pearl.models.gpu.token_forward import Decode

            with one_at_a_time():
                decode = Decode(self.layers, self.slots, self._ropes, record)
            problem = decode.problem()
            if dim >= _LEAST_DIM and dim & (dim - 1) == 0:
                prompts = Prompts(self.layers, self.slots, self._ropes, record)
                problem = problem or prompts.problem()
        except Exception as error:  # the errors of Triton's compilers have no common base
            if is_of_memory(error):
                raise
            raise KernelsUnfit(f"our kernels do not run here: {error}") from error
        if problem:
            raise KernelsUnfit(problem)
        return decode, prompts

    def _compute(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        with torch.inference_mode():
            logits = self._compute_all(feeds)
        # Copied, because the next forward overwrites these logits, and the caller may not write to
        # tensors of inference mode.
        return [rows.to(torch.float32, copy=True) for rows in logits]

    def _compute_all(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Compute all feeds that are no prompts together, then the prompts one after the other.

        If there are no kernels for prompts, prompts are computed as rows of tables too.
        """
        tabled: list[Feed] = []
        rows: dict[int, Rows] = {}  # by slot
        for feed in feeds:
            if self._prompts is None or not feed.prompt or feed.parents is not None:
                tabled.append(feed)
        if tabled:
            for feed, table_rows in zip(tabled, self._decode.forward(tabled), strict=True):
                rows[feed.slot] = table_rows
                self.slots.wrote(feed.slot, self.slots.lengths[feed.slot] + len(feed.tokens))
        for feed in feeds:
            if feed.slot not in rows and self._prompts is not None:
                rows[feed.slot] = self._prompts.forward(feed)
            _, features = rows[feed.slot]
            if features is not None:
                self._seen[feed.slot] = features
            if feed.parents is not None:
                self.slots.hold(feed.slot, Tree(feed.parents))
        return [rows[feed.slot][0] for feed in feeds]


def _check_dtype(model: Any) -> None:
    """Raise `KernelsUnfit` if the weights have a dtype that our kernels do not multiply on a GPU."""
    # Triton's interpreter multiplies float32.
    if model.device.type == "cuda" and model.dtype != torch.bfloat16:
        dtype = str(model.dtype).removeprefix("torch.")
        raise KernelsUnfit(f"our kernels take bfloat16, and this is {dtype}: choose that dtype")
