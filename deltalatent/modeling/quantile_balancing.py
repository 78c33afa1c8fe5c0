# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantile balancing of a top-k router: the estimator of the selection bias, without an auxiliary loss.

Source: Kimi K3 technical report (arXiv 2607.24653), section on Stable LatentMoE. A router selects the ``k`` experts
with the largest ``s + b`` (score plus selection bias). The cutoff of a token is its ``(k + 1)``-th largest ``s + b``;
an expert is selected by that token if its bias exceeds ``r = cutoff - s`` (the *required bias*). Let the next bias of
every expert be the ``k / n`` quantile of its required biases over the tokens of an optimizer step: if the cutoffs stay
put, it is selected by a share ``k / n`` of them, the balanced load. No learning rate is involved, and as the cutoffs
do move, a handful of steps settles it.

Two estimators of that quantile live here. :func:`exact_next_bias` sorts, and is the reference.
:class:`QuantileHistogram` counts required biases in 1000 bins per expert, so that micro-batches and ranks are joined
by adding integers.

Letters: T tokens, E experts (``n`` in the report), K experts per token, B bins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils import logging

from deltalatent.kernels.router import bin_range, count_required_biases

__all__ = [
    "DEFAULT_NUM_BINS",
    "QuantileHistogram",
    "exact_next_bias",
    "next_biases",
    "reduce_histograms",
    "sign_rule_next_bias",
]

logger = logging.get_logger(__name__)

# B of the report: with required biases in a range about 2 wide a bin is 2e-3, far below the spread of sigmoid scores.
DEFAULT_NUM_BINS = 1000

# So many micro-batches in one optimizer step are unheard of, so a histogram this full is one that nobody reads.
_UNREAD_FORWARDS = 256

_UNREAD_WARNING = (
    f"A router has gathered {_UNREAD_FORWARDS} training forwards of balancing statistics that nothing has read, so "
    "the experts are not being balanced: pass `QuantileBalancingCallback()` to the Trainer, or call "
    "`register_quantile_balancing(model, optimizer)` in your own loop (both in `deltalatent.training`); to keep the "
    "selection bias as it is on purpose, call `freeze_selection_bias(model)`."
)


class QuantileHistogram:
    """Required biases of one router over one optimizer step, counted in ``num_bins`` bins per expert.

    Deliberately not an ``nn.Module`` and without registered buffers: the counts are neither saved in checkpoints, nor
    broadcast by ``DistributedDataParallel``, nor cast by ``model.to(dtype)``. Memory is taken at the first
    :meth:`add`, on the device of the scores, as one int32 tensor of ``E * B + E + 1`` elements (3.4 MiB for 896
    experts; good for 2^31 - 1 tokens per step over all ranks), and follows if the scores move to another device.
    ``copy.deepcopy`` and ``pickle`` copy the counts.

    The bins span ``[min(b) - 1, max(b) + 1]``, the range that ``cutoff - s`` cannot leave while ``0 <= s <= 1``.
    Every :meth:`add` of a step, on every rank, and the closing :meth:`next_bias` must be given the same bias, as they
    are when the bias changes once per optimizer step only. A bin holds its lower edge and not its upper one; with a
    zero bias the tie value ``r = 0`` is the lower edge of bin ``B / 2``.

    Args:
        num_experts: number of routed experts E, at least 1.
        top_k: experts per token K, ``1 <= K <= E``. With ``K = E`` no token has a cutoff (pass ``-inf``), nothing is
            counted and the bias never changes.
        num_bins: bins per expert B, at least 2.

    Raises:
        ValueError: if a size is out of its range.
    """

    def __init__(self, num_experts: int, top_k: int, num_bins: int = DEFAULT_NUM_BINS) -> None:
        if num_experts < 1:
            raise ValueError(f"`num_experts` must be at least 1, got {num_experts}: pass the number of routed ones.")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"`top_k` must lie in [1, num_experts={num_experts}], got {top_k}: lower `top_k`.")
        if num_bins < 2:
            raise ValueError(f"`num_bins` must be at least 2, got {num_bins}: the report uses {DEFAULT_NUM_BINS}.")
        self.num_experts = num_experts
        self.top_k = top_k
        self.num_bins = num_bins
        #: ``False`` makes :meth:`add` do nothing (a bias frozen on purpose); see ``freeze_selection_bias``.
        self.enabled = True
        #: Set by whoever reads the statistics every step: no reminder then, and no Python counter, whose changing
        #: value would cost ``torch.compile`` a second graph.
        self.has_reader = False
        self._flat: Tensor | None = None  # int32 [E * B + E + 1]: counts, loads, tokens
        self._unread = 0  # calls of add since the last reset

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_experts={self.num_experts}, top_k={self.top_k}, num_bins={self.num_bins})"

    @property
    def counts(self) -> Tensor:
        """Counts, int32 [E, B]; a view of the live tensor."""
        num_counts = self.num_experts * self.num_bins
        return self._require_flat()[:num_counts].view(self.num_experts, self.num_bins)

    @property
    def loads(self) -> Tensor:
        """Tokens that selected each expert, int32 [E]; a view of the live tensor."""
        num_counts = self.num_experts * self.num_bins
        return self._require_flat()[num_counts : num_counts + self.num_experts]

    @property
    def tokens(self) -> Tensor:
        """Counted tokens, int32 []; a view of the live tensor (reading its value waits for the device)."""
        return self._require_flat()[-1]

    def allocate(self, device: torch.device | str) -> Tensor:
        """Make sure that the counts exist on ``device`` (zero if nothing was added); return the flat int32 tensor."""
        device = torch.device(device)
        if self._flat is None:
            size = self.num_experts * self.num_bins + self.num_experts + 1
            self._flat = torch.zeros(size, dtype=torch.int32, device=device)
        elif self._flat.device != device:
            self._flat = self._flat.to(device)
        return self._flat

    def reset(self) -> None:
        """Forget every count (in place, so the memory keeps its address)."""
        if self._flat is not None:
            self._flat.zero_()
        self._unread = 0

    @torch.no_grad()
    def add(
        self,
        scores: Tensor,
        cutoff: Tensor,
        selection_bias: Tensor,
        mask: Tensor | None = None,
        selected: Tensor | None = None,
    ) -> None:
        """Count one micro-batch. Never waits for the device.

        Call it once per micro-batch: in training, with gradients, outside activation checkpointing. A token whose
        cutoff is not finite (NaN activations) is not counted.

        Args:
            scores: router scores in [0, 1], float32 or float64 [T, E]. T may be 0.
            cutoff: ``(K + 1)``-th largest ``scores + selection_bias`` of each token, dtype of the scores, [T].
            selection_bias: the bias that selected, dtype of the scores, [E].
            mask: bool [T], ``True`` for the tokens that count; ``None`` counts all.
            selected: ids of the selected experts, int64 [T, K], for the loads. ``None`` counts the experts strictly
                above the cutoff, which is the same unless two experts tie at it.

        Raises:
            ValueError: if a shape does not fit.
            TypeError: if the scores are not float32 or float64, or ``mask`` is not bool.
        """
        if not self.enabled:
            return
        self._check(scores, cutoff, selection_bias, mask, selected)
        if not self.has_reader:
            self._unread += 1
            if self._unread == _UNREAD_FORWARDS:
                logger.warning_once(_UNREAD_WARNING)

        count_required_biases(
            self.allocate(scores.device), scores, cutoff, selection_bias, mask, selected, self.num_bins
        )

    @torch.no_grad()
    def next_bias(self, bias: Tensor) -> Tensor:
        """Bias for the next step: the K/E quantile of each expert's required biases, minus the mean over experts.

        With ``q = tokens * K / E``: take the first bin whose cumulative count reaches ``ceil(q)``; the bias is its
        left edge plus ``clip((q - count before) / (count inside), 0, 1)`` bin widths. The ranks are compared as
        integers, so the result depends only on the counts and the range, not on how they came about.

        Args:
            bias: the bias that was in force in every :meth:`add`, float32 or float64 [E]. Returned, copied, if no
                token was counted.

        Returns:
            The next bias, dtype of ``bias``, [E], of mean zero. Never waits for the device.

        Raises:
            ValueError: if ``bias`` is not [E].
            TypeError: if ``bias`` is neither float32 nor float64 (an update of 1e-4 would be lost in half precision).
        """
        return next_biases([self], bias[None])[0]

    def _require_flat(self) -> Tensor:
        if self._flat is None:
            raise ValueError("the histogram is empty and has no device yet: call `add`, or `allocate(device)`, first.")
        return self._flat

    def _check(
        self, scores: Tensor, cutoff: Tensor, selection_bias: Tensor, mask: Tensor | None, selected: Tensor | None
    ) -> None:
        if scores.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"`scores` must be float32 or float64, got {scores.dtype}: run the router in float32.")
        if scores.ndim != 2 or scores.shape[1] != self.num_experts:
            raise ValueError(
                f"`scores` must be [T, num_experts={self.num_experts}], got {tuple(scores.shape)}: flatten batch and "
                "sequence first."
            )
        num_tokens = scores.shape[0]
        if cutoff.shape != (num_tokens,):
            raise ValueError(
                f"`cutoff` must be [T={num_tokens}], got {tuple(cutoff.shape)}: pass the (top_k + 1)-th largest "
                "biased score of each token."
            )
        _check_bias(selection_bias, self.num_experts)
        if mask is not None:
            if mask.dtype != torch.bool:
                raise TypeError(f"`mask` must be bool (True = counted), got {mask.dtype}: pass `mask.bool()`.")
            if mask.shape != (num_tokens,):
                raise ValueError(
                    f"`mask` must be [T={num_tokens}], got {tuple(mask.shape)}: flatten it like the scores."
                )
        if selected is not None and selected.shape != (num_tokens, self.top_k):
            raise ValueError(
                f"`selected` must be [T={num_tokens}, top_k={self.top_k}], got {tuple(selected.shape)}: pass the "
                "ids of the selected experts."
            )


def _check_bias(bias: Tensor, num_experts: int) -> None:
    if bias.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"the selection bias must be float32 (or float64), got {bias.dtype}: keep `e_score_correction_bias` in "
            "float32 when casting the model, or small updates vanish."
        )
    if bias.shape != (num_experts,):
        raise ValueError(f"the selection bias must be [num_experts={num_experts}], got {tuple(bias.shape)}.")


@torch.no_grad()
def next_biases(histograms: Sequence[QuantileHistogram], bias: Tensor) -> Tensor:
    """:meth:`QuantileHistogram.next_bias` of L layers at once, which a GPU does in the time of one.

    Args:
        histograms: L >= 1 of equal sizes; the counts of those that have none yet are made on the device of ``bias``.
        bias: the biases that were in force, float32 or float64 [L, E].

    Returns:
        The next biases, dtype of ``bias``, [L, E]. Takes the memory of these histograms some four times.

    Raises:
        ValueError, TypeError: as :meth:`QuantileHistogram.next_bias`.
    """
    num_experts, top_k, num_bins = histograms[0].num_experts, histograms[0].top_k, histograms[0].num_bins
    _check_bias(bias[0], num_experts)
    for histogram in histograms:
        histogram.allocate(bias.device)
    counts = torch.stack([histogram.counts for histogram in histograms])  # [L, E, B]
    tokens = torch.stack([histogram.tokens for histogram in histograms]).long()[:, None]  # [L, 1]
    target = (tokens * top_k)[..., None]  # E * q: ranks are kept multiplied by E, hence integers
    cumulative = counts.cumsum(dim=-1, dtype=torch.int64)
    # cumulative >= ceil(q) is cumulative * E >= E * q; max over a 0/1 tensor gives the first bin where it holds.
    position = (cumulative * num_experts >= target).to(torch.uint8).argmax(dim=-1, keepdim=True)  # [L, E, 1]
    inside = counts.gather(-1, position).long()
    before = cumulative.gather(-1, position) - inside
    share = (target - before * num_experts).to(bias.dtype) / (inside * num_experts).clamp(min=1)
    low, width = (edge[:, None] for edge in bin_range(bias))  # [L, 1]
    edge = low + position.squeeze(-1) * (width / num_bins)
    estimate = edge + share.squeeze(-1).clamp(0, 1) * (width / num_bins)
    return torch.where(tokens > 0, estimate - estimate.mean(dim=-1, keepdim=True), bias)


@torch.no_grad()
def reduce_histograms(
    histograms: Sequence[QuantileHistogram],
    devices: Sequence[torch.device],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Sum histograms over the ranks of a data-parallel group, in place, with one all-reduce for all layers.

    Integers are added, so the result is the same on every rank and equals that of one process which saw all tokens.
    Ranks that hold the same tokens (tensor parallelism) may be members of the group as long as every token is held
    equally often: the quantile does not change if all counts are multiplied by one number. Takes the memory of all
    histograms once more.

    Args:
        histograms: in the same order, with the same sizes, on every rank.
        devices: where each histogram belongs, for a rank that has not added anything; one per histogram.
        group: process group; ``None`` is the default group.

    Raises:
        ValueError: if the numbers of histograms and devices differ.
    """
    if len(histograms) != len(devices):
        raise ValueError(f"expected one device per histogram, got {len(devices)} for {len(histograms)}.")
    if not histograms:
        return
    parts = [histogram.allocate(device) for histogram, device in zip(histograms, devices, strict=True)]
    # A model split over devices by hand is gathered on the first of them.
    joined = torch.cat([part.to(parts[0].device) for part in parts])
    dist.all_reduce(joined, op=dist.ReduceOp.SUM, group=group)
    for part, summed in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed)


@torch.no_grad()
def exact_next_bias(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """Next bias by full sorting: minus the (q + 1)-th largest margin per expert, ``q = floor(T K / E)``, then centred.

    A margin is the raw score minus the token's biased cutoff, the negated required bias. This is the reference of
    :meth:`QuantileHistogram.next_bias`, which follows the q-th instead of the (q + 1)-th margin and therefore differs
    by the gap between the two plus one bin.

    Args:
        scores: router scores, float32 or float64 [T, E], T >= 1.
        bias: the bias in force, dtype of the scores, [E].
        top_k: experts per token K, ``1 <= K < E``.

    Returns:
        The next bias, dtype of ``bias``, [E], of mean zero.

    Raises:
        ValueError: if a shape or ``top_k`` does not fit, or there is no token.
        TypeError: if ``bias`` is neither float32 nor float64.
    """
    if scores.ndim != 2 or scores.shape[0] == 0:
        raise ValueError(f"`scores` must be [T, E] with at least one token, got {tuple(scores.shape)}.")
    num_tokens, num_experts = scores.shape
    _check_bias(bias, num_experts)
    if not 1 <= top_k < num_experts:
        raise ValueError(
            f"`top_k` must lie in [1, {num_experts - 1}] for {num_experts} experts, got {top_k}: with every expert "
            "selected there is nothing to balance."
        )
    cutoff = (scores + bias).topk(top_k + 1, dim=1).values[:, top_k]
    margins = scores - cutoff[:, None]
    rank = num_tokens * top_k // num_experts
    estimate = -margins.sort(dim=0, descending=True).values[rank]
    return estimate - estimate.mean()


@torch.no_grad()
def sign_rule_next_bias(bias: Tensor, loads: Tensor, step_size: float = 1e-3) -> Tensor:
    """The predecessor's rule, for comparison: a fixed step up for under-loaded and down for over-loaded experts.

    Source: auxiliary-loss-free load balancing (arXiv 2408.15664), ``b <- b + u * sign(mean load - load)``.

    Args:
        bias: the bias in force, float [E].
        loads: tokens per expert under that bias, [E].
        step_size: u, in units of the score, > 0.

    Returns:
        The next bias, dtype of ``bias``, [E].
    """
    loads = loads.to(bias.dtype)
    return bias + step_size * torch.sign(loads.mean() - loads)
