# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention in plain PyTorch: the recurrence as written, and its chunked form.

Alphabet: B batch, T tokens, H key heads, HV value heads, K key width, V value width, N documents, C chunk, L tile,
M chunks of all documents together.

With the inputs activated as

    q = scale * q / sqrt(|q|^2 + 1e-6),   k = k / sqrt(|k|^2 + 1e-6),   b = sigmoid(beta)
    g = lower * sigmoid(exp(A_log) * (g + dt_bias))          (log decay, natural log, in [lower, 0])
    g = -exp(A_log) * softplus(g + dt_bias)                  (when `gate_lower_bound` is None, in (-inf, 0])

one token updates the state S [K, V] of its head and reads it (Kimi Linear, arXiv 2510.26692, eq. 1; bounded gate:
Kimi K3 report, arXiv 2607.24653, section 2.1):

    S <- diag(exp(g)) S;     S <- S + b k (v - S^T k)^T;     o = S^T q

Value head h uses key head h // (HV // H). Both functions are differentiable by autograd in every tensor argument,
accept any floating dtype and compute in float32, or in float64 if one of q, k, v, g is float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

TILE = 16
"""Tokens whose mutual decay is factored around one reference point."""

DENSE_TILE_LOWER_BOUND = -5.5
"""Smallest gate bound for which exp(TILE * |bound|) is finite in float32 (largest exponent 88.7)."""

L2_EPS = 1e-6


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis; any shape, result in the dtype of `x`."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def log_decay(
    g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, gate_lower_bound: float | None
) -> torch.Tensor:
    """Gate logits `g` [..., HV, K] to log decay (natural log, <= 0) of the same shape and dtype.

    `A_log` [HV] and `dt_bias` [HV*K] or [HV, K] are cast to the dtype of `g`. The bias is added before the scale.
    """
    rate = A_log.to(g.dtype).exp().view(-1, 1)
    logits = g + dt_bias.to(g.dtype).view(g.shape[-2:])
    if gate_lower_bound is None:
        # Softplus. The backward of `F.softplus` announces other strides than it returns, which breaks compiled graphs.
        return -rate * torch.logaddexp(logits, logits.new_zeros(()))
    return gate_lower_bound * torch.sigmoid(rate * logits)


def _activate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    gate_lower_bound: float | None,
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """Raw inputs to (q, k, v, g, b) of the module docstring, all with HV heads and in the accumulation dtype."""
    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype, g.dtype) else torch.float32
    repeats = v.shape[2] // k.shape[2]
    q, k = (l2_normalize(x.to(dtype)) for x in (q, k))
    q = q * (scale if scale is not None else q.shape[-1] ** -0.5)
    if repeats > 1:
        q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
    return q, k, v.to(dtype), log_decay(g.to(dtype), A_log, dt_bias, gate_lower_bound), beta.to(dtype).sigmoid()


def _start_state(initial_state: torch.Tensor | None, num_documents: int, v: torch.Tensor, K: int) -> torch.Tensor:
    if initial_state is None:
        return v.new_zeros(num_documents, v.shape[2], K, v.shape[3])
    return initial_state.to(v.dtype)


def kda_recurrent_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    gate_lower_bound: float | None = -5.0,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi delta attention token by token: the equations of the module docstring, nothing else.

    This is the oracle every other form is tested against, and the one-token decode step on the CPU.

    Args:
        q, k: [B, T, H, K] before L2 normalisation.
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV, K] gate logits, before `dt_bias` and `A_log`.
        beta: [B, T, HV] write-strength logits, before the sigmoid.
        A_log: [HV]; dt_bias: [HV*K] or [HV, K].
        gate_lower_bound: lower bound of the log decay per token (< 0), or None for the softplus gate.
        scale: factor on the normalised query, default K**-0.5.
        initial_state: [N, HV, K, V]; zeros when None. N = B, or the number of documents when packed.
        cu_seqlens: [N+1] integer offsets of the documents in the one row (B = 1), or None. Documents may be empty.
        output_final_state: return the states after the last token of each document.

    Returns:
        o [B, T, HV, V] in the dtype of `v`, zero for rows beyond `cu_seqlens[-1]`; and the final states
        [N, HV, K, V] in the accumulation dtype, or None. The state of an empty document is its initial state.
    """
    out_dtype = v.dtype
    q, k, v, g, b = _activate(q, k, v, g, beta, A_log, dt_bias, gate_lower_bound, scale)
    B, T, _, K = q.shape
    if cu_seqlens is None:
        spans = [(slice(None), 0, T, slice(None))]
        num_documents = B
    else:
        offsets = cu_seqlens.tolist()
        num_documents = len(offsets) - 1
        spans = [(slice(0, 1), offsets[n], offsets[n + 1], slice(n, n + 1)) for n in range(num_documents)]
    states = _start_state(initial_state, num_documents, v, K)
    outputs, final_states = [], []
    for rows, start, end, documents in spans:
        S = states[documents]
        for t in range(start, end):
            q_t, k_t, v_t, b_t = q[rows, t], k[rows, t], v[rows, t], b[rows, t]
            S = g[rows, t].exp().unsqueeze(-1) * S
            predicted = (k_t.unsqueeze(-2) @ S).squeeze(-2)
            S = S + k_t.unsqueeze(-1) * (b_t.unsqueeze(-1) * (v_t - predicted)).unsqueeze(-2)
            outputs.append((q_t.unsqueeze(-2) @ S).squeeze(-2))
        final_states.append(S)
    o = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v[:, :0])
    o = F.pad(o, (0, 0, 0, 0, 0, T - o.shape[1]))
    if not output_final_state:
        return o.to(out_dtype), None
    return o.to(out_dtype), torch.cat(final_states) if final_states else states


@dataclass(frozen=True)
class _ChunkLayout:
    """Where the tokens of all documents go in M chunks of C tokens.

    Chunks are ordered by their position in their document first, so that step s of the state recurrence touches
    one contiguous run of `active[s]` chunks; documents are ranked by length, so these belong to the first
    `active[s]` states.
    """

    shape: tuple[int, int]  # B, T
    chunk_size: int
    active: list[int]
    # The following are None for an unpacked batch, whose layout is a pad and a reshape.
    rank_of_document: torch.Tensor | None = None  # [N]
    document_of_rank: torch.Tensor | None = None  # [N]
    token_of_slot: torch.Tensor | None = None  # [M*C], T for a slot without token
    slot_of_token: torch.Tensor | None = None  # [T], M*C for a token without document

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] to [M, C, ...], zeros where a slot holds no token."""
        C = self.chunk_size
        if self.token_of_slot is None:
            x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, len(self.active) * C - self.shape[1]))
            return x.unflatten(1, (-1, C)).transpose(0, 1).flatten(0, 1)
        return F.pad(x[0], (0, 0) * (x.dim() - 2) + (0, 1)).index_select(0, self.token_of_slot).unflatten(0, (-1, C))

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[M, C, ...] to [B, T, ...], zeros for tokens beyond the last document."""
        B, T = self.shape
        if self.slot_of_token is None:
            return x.unflatten(0, (-1, B)).transpose(0, 1).flatten(1, 2)[:, :T]
        x = x.flatten(0, 1)
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1)).index_select(0, self.slot_of_token).unsqueeze(0)


def _chunk_layout(B: int, T: int, C: int, cu_seqlens: torch.Tensor | None) -> _ChunkLayout:
    if cu_seqlens is None:
        return _ChunkLayout((B, T), C, [B] * -(-T // C))
    offsets = cu_seqlens.to(device="cpu", dtype=torch.int64)
    lengths = offsets.diff()
    document_of_rank = torch.argsort(lengths, descending=True, stable=True)
    chunks_of_rank = (lengths[document_of_rank] + C - 1) // C
    steps = int(chunks_of_rank[0]) if len(chunks_of_rank) else 0
    step_of_chunk, rank_of_chunk = torch.nonzero(torch.arange(steps)[:, None] < chunks_of_rank, as_tuple=True)
    document = document_of_rank[rank_of_chunk]
    token = (offsets[document] + step_of_chunk * C)[:, None] + torch.arange(C)
    token = torch.where(token < offsets[document + 1][:, None], token, T).flatten()
    slot = torch.full((T + 1,), token.numel())
    slot[token] = torch.arange(token.numel())
    device = cu_seqlens.device
    return _ChunkLayout(
        (B, T),
        C,
        [int(n) for n in (chunks_of_rank > torch.arange(steps)[:, None]).sum(1)],
        rank_of_document=torch.argsort(document_of_rank).to(device),
        document_of_rank=document_of_rank.to(device),
        token_of_slot=token.to(device),
        slot_of_token=slot[:T].to(device),
    )


def _decayed_products(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, gate_lower_bound: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sum_c x_i[c] exp(G_i[c] - G_j[c]) k_j[c]` for x = q (j <= i) and x = k (j < i).

    q, k: [M, HV, C, K]; g: the log decay of each token, same shape; G its cumulative sum. Returns two [M, HV, C, C].

    The rows of one 16-token tile are factored around R, the G of the token before it: exp(G_i - R) exp(R - G_j). R
    depends on no later token, so results are causal to the last bit. Keys of earlier tiles have both exponents <= 0
    whatever the gate. On the diagonal tile a bounded gate keeps R - G_j <= 16 |bound|, so that it is one dense
    product; the powers of two centre the factors in the exponent range and are exact. An unbounded gate is taken
    pair by pair there, masked before the exponential.
    """
    C = k.shape[2]
    local = g.unflatten(2, (-1, TILE)).cumsum(3)  # [M, HV, C/L, L, K], G_i - R of each token's own tile
    before = F.pad(local[:, :, :, -1].cumsum(2), (0, 0, 1, 0))  # R of each tile
    G = (local + before[:, :, :-1, None]).flatten(2, 3)
    dense, centre = False, 1.0
    if gate_lower_bound is not None and gate_lower_bound >= DENSE_TILE_LOWER_BOUND:
        dense, centre = True, 2.0 ** round(TILE // 2 * -gate_lower_bound / math.log(2))
    causal = torch.ones(TILE, TILE, dtype=torch.bool, device=k.device).tril()
    qk_rows, kk_rows = [], []
    for n in range(C // TILE):
        start = n * TILE
        tile, earlier = slice(start, start + TILE), slice(0, start)
        c = local[:, :, n]
        x = torch.cat([q[:, :, tile], k[:, :, tile]], dim=-2)  # both products share the keys
        x_in = x * (c.exp() * centre).repeat(1, 1, 2, 1)
        # `centre` is 1 or cancels: the factors of earlier keys carry its inverse as well.
        keys = k[:, :, earlier] * (before[:, :, n, None] - G[:, :, earlier]).exp()
        if dense:
            keys = torch.cat([keys, k[:, :, tile] * (-c).exp()], dim=-2) / centre
            rows = x_in @ keys.transpose(-1, -2)
        else:
            pair = (c[:, :, :, None] - c[:, :, None]).masked_fill(~causal[:, :, None], float("-inf")).exp()
            pair = (pair * k[:, :, None, tile]).repeat(1, 1, 2, 1, 1)
            diagonal = torch.einsum("mhik,mhijk->mhij", x, pair)
            rows = torch.cat([x_in @ keys.transpose(-1, -2), diagonal], dim=-1)
        qk, kk = F.pad(rows, (0, C - start - TILE)).chunk(2, dim=-2)
        qk_rows.append(qk)
        kk_rows.append(kk)
    return torch.cat(qk_rows, dim=-2).tril(), torch.cat(kk_rows, dim=-2).tril(-1)


def kda_chunk_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    gate_lower_bound: float | None = -5.0,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi delta attention by chunks: matrix products inside a chunk, one short loop over chunks for the state.

    With G_i the cumulative log decay inside the chunk and S the state before it, the corrected values u_i of a chunk
    solve a unit lower triangular system (Kimi Linear, arXiv 2510.26692, section 3; WY form of the delta rule):

        u_i + b_i sum_{j<i} (k_i . exp(G_i - G_j) k_j) u_j = b_i (v_i - S^T exp(G_i) k_i)
        o_i = S^T exp(G_i) q_i + sum_{j<=i} (q_i . exp(G_i - G_j) k_j) u_j
        S  <- diag(exp(G_C)) S + sum_j exp(G_C - G_j) k_j u_j^T

    Only the two lines that contain S run in the loop; all other work is done for all chunks of all documents together.
    No exponent can overflow, whatever the gate. Arguments and results as in `kda_recurrent_reference`; `chunk_size`
    is a positive multiple of 16.
    """
    if chunk_size <= 0 or chunk_size % TILE:
        raise ValueError(f"`chunk_size` must be a positive multiple of {TILE}, got {chunk_size}: pass 16, 32 or 64.")
    out_dtype = v.dtype
    layout = _chunk_layout(v.shape[0], v.shape[1], chunk_size, cu_seqlens)
    num_documents = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    q, k, v, g, b = _activate(q, k, v, g, beta, A_log, dt_bias, gate_lower_bound, scale)
    states = _start_state(initial_state, num_documents, v, q.shape[-1])
    if layout.document_of_rank is not None:
        states = states.index_select(0, layout.document_of_rank)

    # [B, T, HV, *] -> [M, HV, C, *]; an empty slot has k = v = g = b = 0 and leaves the state alone.
    q, k, v, g = (layout.gather(x).transpose(1, 2).contiguous() for x in (q, k, v, g))
    b = layout.gather(b).transpose(1, 2).unsqueeze(-1)
    G = g.cumsum(-2)
    G_end = G[:, :, -1:]
    qk, kk = _decayed_products(q, k, g, gate_lower_bound)
    k_in, q_in = k * G.exp(), q * G.exp()
    k_out = (k * (G_end - G).exp()).transpose(-1, -2)
    decay = G_end.exp().transpose(-1, -2)
    # One solve for both right-hand sides: u = u_0 - w S. Forward substitution stays accurate for collinear keys.
    solved = torch.linalg.solve_triangular(b * kk, b * torch.cat([k_in, v], -1), upper=False, unitriangular=True)
    w, u_0 = solved.split([k.shape[-1], v.shape[-1]], dim=-1)

    chunk_states, u, finished = [], [], []
    start = 0
    for active in layout.active:
        finished.append(states[active:])
        states = states[:active]
        chunks = slice(start, start + active)
        start += active
        chunk_states.append(states)
        u.append(u_0[chunks] - w[chunks] @ states)
        states = decay[chunks] * states + k_out[chunks] @ u[-1]
    finished.append(states)
    if u:
        o = q_in @ torch.cat(chunk_states) + qk @ torch.cat(u)
    else:
        o = u_0
    o = layout.scatter(o.transpose(1, 2)).to(out_dtype)
    if not output_final_state:
        return o, None
    final_state = torch.cat(finished[::-1])
    if layout.rank_of_document is not None:
        final_state = final_state.index_select(0, layout.rank_of_document)
    return o, final_state
