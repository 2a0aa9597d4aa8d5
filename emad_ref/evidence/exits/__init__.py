"""Early exits of an encoder-decoder: its tasks answered under rules, with score, exit block and FLOPs per item.

tasks        which tasks, which items, how an answer is scored
rules        the rules that claims name, and the paper's minimum layers at another depth
costs        FLOPs in the parts that the paper mixes
answers      all items of a task, decoded under one rule
consistency  how far early answers stray from full depth, in calibration sets and on a pool of others
reading      what every layer says of the reference answers
timing       the same requests in time and in FLOPs
gathered     where these meet: everything of one model, decoded and read once
tables       what stands beside claims, and the ablation of the minimum layer
"""

from __future__ import annotations

from emad_ref.evidence.exits.gathered import Exits
from emad_ref.evidence.exits.rules import RULES, minimum_layers

__all__ = ["RULES", "Exits", "minimum_layers"]
