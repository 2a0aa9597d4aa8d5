"""Results in Python: frames, figures and short forms, and the notebook of ``docs/``, run cell by cell."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import pytest_emad
from emad_ref.errors import BadArgument, EmadError
from pytest_emad.statistics.verdicts import Leg, Verdict
from tests.unit.report.sample_report import passed, report

matplotlib = pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
pytest.importorskip("pandas", reason="the extra `report` is not installed")
NOTEBOOK = Path(__file__).parents[2] / "docs" / "results.ipynb"
LEG = Leg("batch 4", "falsified", 0.9, (0.8, 1.0), 30, 1.1, "× as fast", good="higher")
VERDICT = Verdict("EMAD-F2", "m", "falsified", 0.9, (0.8, 1.0), 30, 1.1, "× as fast", "slow", (LEG,), "higher")
LONGEST = 200  # characters of a short form


@pytest.fixture
def without_windows() -> Any:
    matplotlib.use("Agg")
    yield
    matplotlib.pyplot.close("all")


def shown(cells: list[dict[str, Any]]) -> list[Any]:
    """Run the code cells in order in one namespace; return the last line's value of each that ends in an expression."""
    names: dict[str, Any] = {}
    values = []
    for cell in cells:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "cell", "exec"), names)
            if last is not None:
                values.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
    return values


@pytest.mark.skipif(not NOTEBOOK.is_file(), reason="docs/ is not part of an installed package")
def test_the_notebook_runs_from_top_to_bottom_and_shows_what_it_says(without_windows: None) -> None:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    model, results, claims, legs, _, profile, point = shown(cells)
    stored = [each["data"] for cell in cells for each in cell.get("outputs", [])]
    texts = {"".join(data["text/plain"]) for data in stored}
    assert {repr(value) for value in (model, results, profile, point)} <= texts, "execute the notebook and save it"
    assert sum("image/png" in data for data in stored) == 2
    assert [len(repr(value)) <= LONGEST for value in (model, results, profile, point)] == [True] * 4
    assert all("<table>" in value._repr_html_() for value in (model, results, profile, point))
    assert list(claims["id"]) == ["EMAD-E1", "EMAD-E3", "EMAD-E13", "EMAD-E9"]
    assert len(legs) == model.geometry.layers
    assert sum(len(figure.axes) for figure in map(matplotlib.pyplot.figure, matplotlib.pyplot.get_fignums())) == 4


def test_a_report_becomes_frames_with_bounds_and_legs() -> None:
    lost = {"prompt": "how many?", "full_depth": "7", "at_point": "3", "depths": [2]}
    point = {"model": "m", "name": "emad m=0.00", "net_reduction": 0.4, "interval": [0.1, 0.2]}
    point |= {"lost_answers": {"chart": {"count": 3, "first": [lost]}}}
    table = {"model": "m", "title": "t", "rows": [{"layer": 1, "x": 0.5}, {"layer": 2, "x": None}]}
    claim = VERDICT.to_json() | {"title": "As fast", "gate": True, "fails": True, "test": ""}
    results = pytest_emad.RunResults(report(claims=[claim], points=[point], tables=[table]))
    assert results.claims.loc[0, ["id", "low", "high"]].tolist() == ["EMAD-F2", 0.8, 1.0]
    assert results.legs.loc[0, ["claim", "name", "estimate"]].tolist() == ["EMAD-F2", "batch 4", 0.9]
    assert results.points.loc[0, ["net_reduction", "low"]].tolist() == [0.4, 0.1]
    (row,) = results.lost_answers.to_dict("records")
    assert row == {"model": "m", "point": "emad m=0.00", "task": "chart"} | lost
    assert results.tables["m: t"].shape == (2, 2)
    broken = passed("a.py::test_b", outcome="failed", reason="OSError: no")
    told = pytest_emad.RunResults(results.report | {"tests": [broken]})._repr_html_()
    assert "<tr><th>failed tests, cause 1</th><td>1 test: OSError: no</td></tr>" in told
    assert repr(results) == "RunResults(m: FAILED: 1 of 1 gate does not hold; 1 claim, 1 table)"
    with pytest.raises(BadArgument, match="a table with the figure 'entropy profile'"):
        pytest_emad.plot_profile(results)


def test_claims_may_be_one_text_with_commas() -> None:
    """Read letter by letter, the text would be a list of patterns."""
    with pytest.raises(EmadError, match=r"status 4: ERROR: --emad-only='EMAD-F9', .*nearest: EMAD-F1"):
        pytest_emad.judge("emad-nano", only="EMAD-E1,EMAD-F9")


def test_a_verdict_is_short_in_a_notebook() -> None:
    assert repr(VERDICT) == "Verdict(EMAD-F2 on m: falsified, found 0.9× [0.8×, 1×] as fast, needs at least 1.1×)"
    assert "<td>falsified</td>" in VERDICT._repr_html_()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"corpis": "wikitext"}, "unrecognized arguments: --corpis=wikitext; did you mean --corpus?"),
        ({"budget": "huge"}, "--budget='huge', but expected one of smoke, standard, full"),
    ],
)
def test_an_option_that_judge_does_not_have_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(BadArgument) as refused:
        pytest_emad.judge("emad-nano", ["EMAD-E13"], **options)
    assert said in str(refused.value)
