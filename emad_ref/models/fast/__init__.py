"""Faster ways through the same blocks: fused steps, weight layouts, CUDA graphs (``--emad-backend walked``: none)."""
