"""Measurements of one model or pair in one run, each made on first use. No verdicts, no pytest."""
