"""Reports of a run: data, tables, figures, pages and checks."""
