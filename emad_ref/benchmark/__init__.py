"""What a run cost: FLOPs from counted work, and what clocks and energy counters say."""
