"""Replay over a trace: depths and losses of operating points, and the grids of points that sweeps try."""
