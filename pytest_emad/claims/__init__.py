"""Claims: each gathers its evidence, and a pure function turns the evidence into a verdict."""
