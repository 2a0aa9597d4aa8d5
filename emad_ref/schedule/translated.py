"""Free depth with state copying through translators: a map of the exit's state stands in for each state above it.

    K, V of layer ℓ + 1  from  ĥ_ℓ = h_e + U·(Vᵀ·h_e) + b        for a token that left after e < ℓ (``readout.states``)

Copying with something in front of each K/V-only pass: 2·D·r multiply-adds, none at rank 0. Approximate like copying,
and like copying decoded, never replayed. An exit that the translators do not know, which a forced depth may be, is
copied.
"""

from __future__ import annotations

from dataclasses import replace

from emad_ref.schedule.copying import COPYING

TRANSLATED = replace(COPYING, name="translated", unreplayable="translated states are decoded, not replayed")
