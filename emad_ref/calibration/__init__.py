"""Calibration on text: the lens trace, entropy profiles, tuned lenses and linear fits. No point is chosen here."""
