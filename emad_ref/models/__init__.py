"""How a Transformer is walked, one layer at a time: where a family keeps its parts, K/V per layer, sizes, loading."""
