"""Probes: hidden state → logits → the signal that a rule compares. A probe knows no threshold."""
