"""Launch parameters of the Triton kernels on Intel GPUs.

Nothing here was measured on a GPU: the tiles are those that spill the fewest registers
by the compiler's report, see ``tests/plugins/intel``.
"""

from __future__ import annotations

from inl_torch.triton.tuning import AttentionTile, Tuning

SHARED_BYTES = 64 << 10
"""Local memory of a work group that every supported GPU has."""

KINDS = {
    "decode": AttentionTile(1, 16, 1, 2),
    "single": AttentionTile(1, 16, 4, 2),
    "prompt": AttentionTile(32, 16, 8, 2),
}
"""Kind of attention -> tile. Every warp keeps the whole tile of keys, since the matrix
units divide work by queries; 16 keys are the fewest that these multiply."""

ATTENTION = {
    (kind, dim, is_float32): tile
    for kind, tile in KINDS.items()
    for dim in (64, 128)
    for is_float32 in (False, True)
}
"""(Kind of attention, head size, whether float32) -> tile."""

NARROW_LANES = 8
"""Sub-group size that only GPUs with registers of 32 bytes have: Arc A and the graphics
of the first Core Ultra, whose matrix units Triton does not use."""

WIDE_ONLY = frozenset({
    "adapted_gate_up", "adapted_linear", "adapted_qkv_linear", "attention",
    "expert_linear", "experts", "gated_lora", "gated_mlp", "linear",
    "lora", "norm_logits", "norm_mlp", "norm_qkv", "qkv_linear", "qkv_lora",
    "rope_attend", "rope_table",
})  # fmt: skip
"""Ops left to torch on such GPUs: products and attention, whose kernels spill up to
1,493 registers there, and a table that needs float64."""


def xpu_tuning(processors: int) -> Tuning:
    """Launch parameters for a GPU of ``processors`` Xe cores.

    Products of several rows are left to oneDNN, sampling filters to torch, and tiles of
    attention have all keys.
    """
    return Tuning(
        processors=processors, shared_bytes=SHARED_BYTES, attention=ATTENTION,
        tile_waves=0,
    )  # fmt: skip
