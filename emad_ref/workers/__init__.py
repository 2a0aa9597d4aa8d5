"""Where long work runs: units handed to a ``concurrent.futures.Executor``, their results taken in the units' order."""
