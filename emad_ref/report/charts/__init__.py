"""What the page draws itself, one chart a module; a chart is None where the report has no numbers for it.

quality   cost against quality: rise of perplexity over net FLOPs saved, the region that the claim asks for shaded
ceilings  saving against loss: what criteria save over what they lose, under those who know the divergence
entropy   entropy by depth: mean entropy after each layer, targets of the probes
position  depth by position: depth along the text, and where it no longer rises
drawing   what all are made of: lines, marks and intervals, laid out for every screen
"""

from __future__ import annotations

from emad_ref.report.charts.ceilings import saving_and_loss
from emad_ref.report.charts.drawing import Chart
from emad_ref.report.charts.entropy import entropy_by_depth
from emad_ref.report.charts.position import by_position
from emad_ref.report.charts.quality import cost_and_quality
from emad_ref.report.reading import Report

__all__ = ["Chart", "charts", "saving_and_loss"]

CHARTS = (cost_and_quality, saving_and_loss, entropy_by_depth, by_position)


def charts(report: Report) -> list[Chart]:
    """All that the report has numbers for."""
    models = [model["name"] for model in report["models"]]
    found = [make(report, model) for model in models for make in CHARTS]
    return [chart for chart in found if chart is not None]
