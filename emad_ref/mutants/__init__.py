"""Planted decoders: ours with one thing wrong, on any model, for ``--emad-selfcheck`` to find.

``catalogue`` lists them, honest ones among them; each says what it does wrong and which shipped test is there for it.
A defect is a method of our session, decoder, walker or K/V store that does something else, over the copy of the model
that decoders are lent. Nothing here is imported by a run that judges.
"""
