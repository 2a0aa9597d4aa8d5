"""Scores of tasks at an operating point: lm-eval's, local files, and programs in a sandbox. No verdicts."""
