"""One pytest run: options, fixtures, the recorder of verdicts, and the report of the run."""
