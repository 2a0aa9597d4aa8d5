"""The pytest plugin: options, fixtures, hooks and reports around ``emad_ref``; importing it imports no torch."""
