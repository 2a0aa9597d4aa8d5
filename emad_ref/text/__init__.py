"""Text to calibrate and evaluate on: generated, from files, or from the hub. No model is loaded here."""
