"""Faster ways through the same blocks: fused steps, weight layouts, CUDA graphs. The backend ``walked`` uses none."""
