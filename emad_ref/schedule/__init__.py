"""Schedules: which depths a token may take, and who fills the K/V above an exit. They read no signal."""
