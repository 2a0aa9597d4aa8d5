"""docs/claims.md: the generated parts of each claim, from the register and the record.

Generated are a claim's heading, ``### TITLE [ID]``, and the text from ``<!-- row: EMAD-F1 -->`` to
``<!-- end of row -->``; a claim without a section gets one. Below it a person may explain the verdicts, each in bold as
a list item: ``- `emad-tiny` on `world:premise`: **falsified**``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_emad.statistics.goldens import MACHINE_BOUND, SEED_DEPENDENT, find_golden_folder, read_verdict_entries
from pytest_emad.statistics.verdicts import OUTCOMES, PAPERS, Claim, load_register

MARKED = re.compile(r"(?<=<!-- row: )(?P<claim>\S+)( -->\n)(?P<text>.*?)(?=<!-- end of row -->)", re.DOTALL)
FOUND = re.compile(r"^- `(?P<model>[^`]+)`(?: on `(?P<corpus>[^`]+)`)?: \*\*(?P<verdict>[a-z -]+)\*\*", re.MULTILINE)
HEADING = re.compile(r"^### [^\n]*\[(?P<claim>\S+)\]$", re.MULTILINE)
SECTION = re.compile(rf"{HEADING.pattern}(?P<text>.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
ORDER = (*OUTCOMES, SEED_DEPENDENT)

Entry = Mapping[str, Any]


def written(page: str) -> str:
    """Return ``page`` with headings and marked rows updated from register and record, and a section for every claim.

    A page without any row has another subject and stays unchanged.
    """
    if MARKED.search(page) is None:
        return page
    register, record = load_register(), recorded()
    for name in register:
        page = _with_section(page, name, list(register))
    page = HEADING.sub(lambda found: heading(register[found["claim"]]), page)
    return MARKED.sub(lambda found: f"{found['claim']}{found[2]}{row(register[found['claim']], record)}", page)


def _with_section(page: str, name: str, order: Sequence[str]) -> str:
    """Return ``page`` with a section of claim ``name``; a new one goes below the preceding claim's in ``order``."""
    ends = {found["claim"]: found.end() for found in SECTION.finditer(page)}
    if name in ends:
        return page
    end = next((ends[other] for other in reversed(order[: order.index(name)]) if other in ends), len(page))
    before, after = page[:end].rstrip("\n"), page[end:]
    section = f"### [{name}]\n\n<!-- row: {name} -->\n<!-- end of row -->\n"
    return f"{before}\n\n{section}{after and chr(10)}{after}"


def heading(claim: Claim) -> str:
    """Return ``### Decoding is at least 1.10 times as fast [EMAD-F2]``."""
    return f"### {claim.plain or claim.title} [{claim.id}]"


def recorded() -> list[Entry]:
    """Return the verdicts of real models; simulated evidence has its own sentence."""
    folder = find_golden_folder()
    return [] if folder is None else [entry for entry in read_verdict_entries(folder) if entry["corpus"] != "simulated"]


def row(claim: Claim, record: Iterable[Entry]) -> str:
    """Return the Markdown of one row, with an empty line at the end, so that a comment may follow."""
    gates = "fails a run when falsified" if claim.gate else "reported, does not gate by default"
    numbers = [f"{_number(value)} ({name.replace('_', ' ')})" for name, value in claim.thresholds.items()]
    least = [f"{count} {name.replace('_', ' ')}" for name, count in claim.minimum.items()]
    lines = [
        f"**{claim.title}.** ({_linked(claim.paper)})",
        "",
        f"- Kind: {claim.kind}; {gates}. Unit: {claim.unit}.",
        f"- Thresholds: {', '.join(numbers) or 'none'}. Smallest n: {', '.join(least) or 'none asked'}.",
        f"- On record: {_on_record(claim, record)}",
    ]
    return "\n".join(lines) + "\n\n"


def _linked(place: str) -> str:
    """Return ``place`` with the id and address of the paper that it names first."""
    for name, (id, address) in PAPERS.items():
        place = re.sub(rf"(?<!\w){name}(?!\w)", f"{name}, [{id}]({address})", place, count=1)
    return place.replace("EMAD, ", "[EMAD](#papers), ", 1)


def _on_record(claim: Claim, record: Iterable[Entry]) -> str:
    if claim.requires in MACHINE_BOUND:
        return "nothing; a verdict on time or energy belongs to the machine it was measured on."
    rows = [entry for entry in record if entry["claim"] == claim.id]
    said = [f"**{verdict}** {_where(rows, verdict)}" for verdict in ORDER if any(e["verdict"] == verdict for e in rows)]
    return f"{'; '.join(said) or 'nothing yet'}."


def _where(rows: Iterable[Entry], verdict: str) -> str:
    """Return ``emad-tiny (world:mixed, world:premise), …`` of the models with this verdict."""
    corpora: dict[str, list[str]] = {}
    for entry in rows:
        if entry["verdict"] == verdict:
            corpora.setdefault(entry["name"], []).extend(filter(None, [entry["corpus"]]))
    return ", ".join(f"{name} ({', '.join(sorted(read))})" if read else name for name, read in sorted(corpora.items()))


def _number(value: float) -> str:
    return f"{value:g}"
