"""What one run knows of one model or pair: taken once, on demand. No verdicts, no pytest."""
