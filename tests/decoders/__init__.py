"""Decoders to audit: an honest foreign one, a small cached one, and the cached one with planted defects."""
