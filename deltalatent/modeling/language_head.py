# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The language-modelling head: logits, or a loss without them."""

from __future__ import annotations

from torch import Tensor, nn

from deltalatent.kernels.linear_cross_entropy import linear_cross_entropy


class KimiK3LanguageHead(nn.Linear):
    """Hidden states [..., D] to logits [..., V], without a bias; with targets, to their cross-entropy.

    The loss is a call of the module, too, so that what surrounds a call happens: FSDP gathers the weight before it.
    """

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(
        self,
        input: Tensor,
        targets: Tensor | None = None,
        num_items: Tensor | int | None = None,
        ignore_index: int = -100,
    ) -> Tensor:
        """Logits [..., V] in the dtype of `input`; with targets, what `linear_cross_entropy` makes of them."""
        if targets is None:
            return super().forward(input)
        return linear_cross_entropy(input, self.weight, targets, num_items=num_items, ignore_index=ignore_index)


def has_loss_without_logits(head: nn.Module) -> bool:
    """Whether a head can be called with targets, and nothing that its call runs besides waits for logits.

    Adapters and quantisers are modules of other classes; tensor parallelism, offloading and hooks want the ordinary
    output. FSDP2 does not mind.
    """
    if not isinstance(head, KimiK3LanguageHead) or hasattr(head, "_hf_hook") or getattr(head, "_is_hooked", False):
        return False
    if type(head) is KimiK3LanguageHead:
        return type(head.weight) in (Tensor, nn.Parameter) and not (head._forward_hooks or head._forward_pre_hooks)
    from torch.distributed.fsdp import FSDPModule

    return isinstance(head, FSDPModule)
