"""Costs of a run on this machine: time, energy, and facts about it. FLOPs are those of ``emad_ref.flop_ledger``."""
