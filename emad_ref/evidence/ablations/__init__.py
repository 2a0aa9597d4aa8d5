"""What ablations vary, one ingredient of an operating point at a time: a module per ingredient, its table and notes.

Thresholds come from the calibration split, rows from replays of the evaluation split; an interval resamples its
documents. State copying changes later states: it is decoded, on the openings of documents. No claim is decided here.
"""
