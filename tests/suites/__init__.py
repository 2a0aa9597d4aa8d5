"""The suites from end to end: pytest runs inside pytest, on models small enough to make while the tests run."""
