"""Models layer by layer: where a family keeps its parts, K/V per layer, sizes, loading."""
