"""Screening of one model: exits fitted, chosen and certified, and lossless self-speculation."""
