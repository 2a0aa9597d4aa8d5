"""Run long work in other processes: units dispatched to executors, child processes, supervision."""
