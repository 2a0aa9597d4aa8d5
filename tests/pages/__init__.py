"""Run README, CONTRIBUTING and docs/ as readers do: write their files, run their commands, compare their outputs."""
