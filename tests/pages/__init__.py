"""README, CONTRIBUTING and docs/ as readers use them: files laid down, commands run, outputs held against pages."""
