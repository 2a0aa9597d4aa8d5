"""Run long work in other processes: units dispatched to workers, child processes."""
