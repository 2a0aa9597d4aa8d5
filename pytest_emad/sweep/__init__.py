"""Sweeps of operating points: fronts, oracles, components and risk bounds, as arrays without verdicts."""
