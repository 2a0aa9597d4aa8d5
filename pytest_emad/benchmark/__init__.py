"""Costs of a run: FLOPs from counted work, time, and energy."""
