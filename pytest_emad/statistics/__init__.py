"""Claims as data, and the rules that turn measurements into verdicts. Importing this loads neither SciPy nor torch."""
