"""Mutants: the reference decoder with one defect each, on any model, for ``--emad-selfcheck`` to find.

``catalogue`` lists them, honest decoders among them; a row says what is wrong and which shipped test must catch it.
``base`` says what a mutant is, and overrides parts of the reference decoder over the copy of the model that decoders
are lent; ``cache_defects``, ``decision_defects``, ``request_defects`` and ``environment_defects`` hold the overrides.
No run that judges a decoder imports this package.
"""
