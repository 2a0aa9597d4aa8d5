"""Decoding at an operating point: one model, two that switch or speculate, one that drafts for itself."""
