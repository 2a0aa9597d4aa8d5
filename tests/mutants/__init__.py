"""Mutants: the reference decoder with one defect each, on any model, for the suites to find.

``catalogue`` lists them, with honest decoders among them; a row describes the defect and names the shipped test that
must catch it. ``mutant`` defines mutants, and overrides parts of the reference decoder over a lent copy of the model;
``cache_defects``, ``decision_defects``, ``request_defects`` and ``environment_defects`` hold the overrides.
``provider`` puts a mutant in a run of pytest, and ``complaints`` reads from the report what complained.
"""
