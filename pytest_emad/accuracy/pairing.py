"""Pairs two evaluations: the same items, in one order, or one line that says why they are not the same.

Items are paired by task, filter and id, and must have one document hash. A changed prompt or target makes another item,
so it is refused unless the caller says that it is meant. A task or an item that one side lacks is refused as well,
since items that fail are rarely a random sample; the caller can ask for the common ones, and the others are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from emad_ref.errors import BadArgument, suggest_nearest
from emad_ref.files import BadFile, resolve_path
from emad_ref.record import Floats, Ints
from pytest_emad.accuracy.items import Evaluation, ItemTexts, Omission, ScoredTask, TaskGroup

BASE, CANDIDATE = "BASE", "CANDIDATE"
COMMON = "--common-items"
CHANGED = "--allow-changed-prompts"


@dataclass(frozen=True, eq=False)
class PairedScores:
    """Scores of one metric of one task, under one filter, of the items that both sides have.

    ``base``, ``candidate``  float64 [items], larger is better. ``clusters`` int64 [items].
    ``places``               int64 [items, 2]: index of each item in the task of either side, for its texts.
    """

    task: str
    metric: str
    filter: str
    ids: tuple[str, ...]
    base: Floats
    candidate: Floats
    clusters: Ints
    places: Ints
    sides: tuple[ScoredTask, ScoredTask]

    def read_texts(self, indices: Sequence[int]) -> list[tuple[ItemTexts, ItemTexts]]:
        """Texts of items on either side."""
        base, candidate = (
            side.read_texts([int(place) for place in self.places[list(indices), column]])
            for column, side in enumerate(self.sides)
        )
        return list(zip(base, candidate, strict=True))


@dataclass(frozen=True)
class PairedEvaluations:
    """All scores that can be compared, and groups of them; what is left out; sentences for readers."""

    scores: tuple[PairedScores, ...]
    groups: tuple[TaskGroup, ...]
    omissions: tuple[Omission, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PairingOptions:
    """``tasks``, ``metrics``: names or patterns; empty: all. The two switches are those of the command."""

    tasks: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    common_items: bool = False
    allow_changed_prompts: bool = False


def pair_evaluations(base: Evaluation, candidate: Evaluation, options: PairingOptions) -> PairedEvaluations:
    """Pair two evaluations item by item.

    Raises:
        BadFile: one evaluation twice; two forms; other tasks, items, documents, prompts or targets; no common metric.
        BadArgument: a task or metric that neither side has.
    """
    _require_two_runs(base, candidate)
    groups = _common_groups(base, candidate)
    wanted, groups, skipped = _choose_tasks(base, candidate, groups, options)
    tasks = {(task.task, task.filter): task for task in base.tasks if task.task in wanted}
    others = {(task.task, task.filter): task for task in candidate.tasks if task.task in wanted}
    omissions = [*_side_omissions(base, candidate), *skipped]
    omissions += _require_same_tasks(tasks, others, base, candidate, options)
    notes = [f"{name}: {note}" for name, side in ((BASE, base), (CANDIDATE, candidate)) for note in side.notes]
    notes += _group_notes(base, candidate, groups)
    scores: list[PairedScores] = []
    for key, task in tasks.items():
        if key in others:
            found, left_out, said = _pair_task(task, others[key], options)
            scores += found
            omissions += left_out
            notes += said
    scores, dropped = _choose_metrics(scores, options)
    return PairedEvaluations(tuple(scores), tuple(groups), (*omissions, *dropped), tuple(notes))


def _require_two_runs(base: Evaluation, candidate: Evaluation) -> None:
    again = "name two evaluations"
    if resolve_path(base.path) == resolve_path(candidate.path):
        raise BadFile(CANDIDATE, candidate.path, "another evaluation than BASE", "both are one path", again)
    if base.form != candidate.form:
        reason = f"BASE is of {base.form}, CANDIDATE of {candidate.form}"
        raise BadFile(
            CANDIDATE, candidate.path, "an evaluation of the same tool", reason, "evaluate both with one tool"
        )
    if base.run and base.run == candidate.run and base.model == candidate.model:
        reason = f"both are the run {base.run}"
        raise BadFile(CANDIDATE, candidate.path, "another evaluation than BASE", reason, again)


def _choose_tasks(
    base: Evaluation, candidate: Evaluation, groups: Sequence[TaskGroup], options: PairingOptions
) -> tuple[set[str], list[TaskGroup], list[Omission]]:
    """Tasks to compare, groups among them, and tasks that the user left out. A named group brings its members."""
    names = dict.fromkeys(task.task for side in (base, candidate) for task in side.tasks)
    if not options.tasks:
        return set(names), list(groups), []
    known = [*dict.fromkeys(group.name for group in groups), *names]
    matched: set[str] = set()
    for pattern in options.tasks:
        found = {name for name in known if fnmatchcase(name, pattern)}
        if not found:
            remedy = suggest_nearest(pattern, known) or f"tasks: {', '.join(known)}"
            raise BadArgument("--task", pattern, "a task of both sides, or a pattern", remedy)
        matched |= found
    chosen = [group for group in groups if group.name in matched]
    wanted = (matched & set(names)) | {member for group in chosen for member in group.members}
    rest = [name for name in names if name not in wanted]
    omissions = [Omission(f"tasks: {', '.join(rest)}", len(rest), "not named by --task")] if rest else []
    return wanted, chosen, omissions


def _side_omissions(base: Evaluation, candidate: Evaluation) -> Iterator[Omission]:
    """What the readers left out, once if both sides left out the same."""
    mine, theirs = list(base.omissions), list(candidate.omissions)
    for omission in mine:
        side = "both sides" if omission in theirs else BASE
        yield Omission(f"{omission.subject} ({side})", omission.count, omission.reason)
    for omission in theirs:
        if omission not in mine:
            yield Omission(f"{omission.subject} ({CANDIDATE})", omission.count, omission.reason)


def _common_groups(base: Evaluation, candidate: Evaluation) -> list[TaskGroup]:
    """Groups of both sides with the same tasks and weights; weights that one side leaves open are the other's."""
    groups = []
    for mine in base.groups:
        for theirs in candidate.groups:
            known = {mine.by_size, theirs.by_size} - {None}
            if replace(mine, by_size=None) == replace(theirs, by_size=None) and len(known) < 2:
                groups.append(replace(mine, by_size=next(iter(known), True)))
    return groups


def _group_notes(base: Evaluation, candidate: Evaluation, groups: Sequence[TaskGroup]) -> Iterator[str]:
    common = {(group.name, group.metric, group.filter) for group in groups}
    for name, side, other in ((BASE, base, CANDIDATE), (CANDIDATE, candidate, BASE)):
        for group in side.groups:
            if (group.name, group.metric, group.filter) not in common:
                yield f"{group.name} is a group of {name} alone, or has other tasks or weights there than in {other}"


TaskKey = tuple[str, str]


def _require_same_tasks(
    tasks: dict[TaskKey, ScoredTask],
    others: dict[TaskKey, ScoredTask],
    base: Evaluation,
    candidate: Evaluation,
    options: PairingOptions,
) -> Iterator[Omission]:
    common = [key for key in tasks if key in others]
    sides = ((BASE, base, [key for key in tasks if key not in others]),
             (CANDIDATE, candidate, [key for key in others if key not in tasks]))  # fmt: skip
    for name, side, missing in sides:
        if not missing:
            continue
        named = ", ".join(_task_text(key) for key in missing[:3]) + (" and others" if len(missing) > 3 else "")
        if not common:
            reason = f"{BASE} has {_task_names(tasks)}; {CANDIDATE} has {_task_names(others)}"
            raise BadFile(CANDIDATE, candidate.path, f"the tasks of {BASE}", reason, "evaluate both on the same tasks")
        if not options.common_items:
            reason = f"{named}: {name} alone has {'it' if len(missing) == 1 else 'them'}"
            remedy = f"evaluate both on the same tasks, or choose by --task {common[0][0]}, or pass {COMMON}"
            raise BadFile(name, side.path, "the same tasks on both sides", reason, remedy)
        for key in missing:
            yield Omission(_task_text(key), len((tasks if name == BASE else others)[key].ids), f"items of {name} alone")


def _task_text(key: TaskKey) -> str:
    return f"{key[0]} ({key[1]})" if key[1] not in ("", "none") else key[0]


def _task_names(tasks: dict[TaskKey, ScoredTask]) -> str:
    names = [_task_text(key) for key in tasks]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "none"


def _pair_task(
    mine: ScoredTask, theirs: ScoredTask, options: PairingOptions
) -> tuple[list[PairedScores], list[Omission], list[str]]:
    text = _task_text((mine.task, mine.filter))
    places = {name: index for index, name in enumerate(theirs.ids)}
    common = [(index, places[name]) for index, name in enumerate(mine.ids) if name in places]
    omissions = [
        Omission(f"{text}: items", len(side.ids) - len(common), f"{name} alone has them")
        for name, side in ((BASE, mine), (CANDIDATE, theirs))
        if len(side.ids) > len(common)
    ]
    _require_same_items(mine, theirs, common, text, options)
    pairs = np.asarray(common, dtype=np.int64)
    _require_same_documents(mine, theirs, common, text)
    notes = [*_note_changed_prompts(mine, theirs, common, text, options)]
    clusters = number_clusters([(mine.clusters[index], theirs.clusters[other]) for index, other in common])
    found = []
    for metric in mine.scores:
        if metric not in theirs.scores:
            omissions.append(Omission(f"{text}: {metric}", len(common), f"{BASE} alone has it"))
            continue
        base, candidate = mine.scores[metric][pairs[:, 0]], theirs.scores[metric][pairs[:, 1]]
        there = ~(np.isnan(base) | np.isnan(candidate))
        if absent := int((~there).sum()):
            one_sided = int((np.isnan(base) != np.isnan(candidate)).sum())
            if one_sided and not options.common_items:
                reason = f"{text}: {one_sided:,} items have {metric} on one side alone"
                remedy = f"evaluate both again, or pass {COMMON}"
                raise BadFile(CANDIDATE, theirs.source, "the same metrics for every item", reason, remedy)
            omissions.append(Omission(f"{text}: items", absent, f"without {metric} on both sides or one"))
        kept = np.flatnonzero(there)
        if not len(kept):
            continue
        names = tuple(mine.ids[index] for index in pairs[kept, 0])
        found.append(
            PairedScores(
                mine.task, metric, mine.filter, names, base[kept], candidate[kept], clusters[kept], pairs[kept],
                (mine, theirs),
            )
        )  # fmt: skip
    omissions += [
        Omission(f"{text}: {metric}", len(common), f"{CANDIDATE} alone has it")
        for metric in theirs.scores
        if metric not in mine.scores
    ]
    if not found:
        reason = f"{text}: {BASE} has {', '.join(mine.scores)}; {CANDIDATE} has {', '.join(theirs.scores)}"
        raise BadFile(CANDIDATE, theirs.source, "a metric of BASE", reason, "evaluate both with the same metrics")
    return found, omissions, notes


def _require_same_items(
    mine: ScoredTask, theirs: ScoredTask, common: Sequence[tuple[int, int]], text: str, options: PairingOptions
) -> None:
    for name, side, other in ((CANDIDATE, theirs, mine), (BASE, mine, theirs)):
        lacking = len(other.ids) - len(common)
        if common and (options.common_items or not lacking):
            continue
        have = set(side.ids)
        example = next((each for each in other.ids if each not in have), "")
        reason = (
            f"{text}: {lacking:,} of {len(other.ids):,} items of the other side are missing, such as id {example!r}"
        )
        remedy = "evaluate both on the same items" + (
            f", or pass {COMMON} to judge the {len(common):,} that both have" if common else ""
        )
        raise BadFile(name, side.source, "the items of the other side", reason, remedy)


def _require_same_documents(mine: ScoredTask, theirs: ScoredTask, common: Sequence[tuple[int, int]], text: str) -> None:
    differing = [pair for pair in common if mine.documents[pair[0]] != theirs.documents[pair[1]]]
    if differing:
        example = mine.ids[differing[0][0]]
        reason = f"{text}: {len(differing):,} of {len(common):,} items have another document, such as id {example!r}"
        remedy = "evaluate both on one version of the data set"
        raise BadFile(CANDIDATE, theirs.source, "the documents of BASE", reason, remedy)


def _note_changed_prompts(
    mine: ScoredTask, theirs: ScoredTask, common: Sequence[tuple[int, int]], text: str, options: PairingOptions
) -> Iterator[str]:
    """A sentence for changed prompts and one for changed targets, if they are allowed.

    Raises:
        BadFile: they are not.
    """
    for word, before, after in (("prompt", mine.prompts, theirs.prompts), ("target", mine.targets, theirs.targets)):
        differing = [(a, b) for a, b in common if before[a] != after[b]]
        if not differing:
            continue
        counted = f"{text}: {len(differing):,} of {len(common):,} items have another {word}"
        if not options.allow_changed_prompts:
            reason = f"{counted}, such as id {mine.ids[differing[0][0]]!r}"
            remedy = f"evaluate both with one task and template, or pass {CHANGED} if it is meant"
            raise BadFile(CANDIDATE, theirs.source, f"the {word}s of BASE", reason, remedy)
        yield f"{counted}, allowed by {CHANGED}"


def number_clusters(texts: Sequence[tuple[str, str]]) -> Ints:
    """int64 [items] one number for items that share a cluster on either side, directly or by others between them.

    ``texts``: the cluster of each item by BASE and by CANDIDATE.
    """
    numbers: dict[tuple[int, str], int] = {}
    nodes = [[numbers.setdefault((side, text), len(numbers)) for side, text in enumerate(both)] for both in texts]
    if not nodes:
        return np.zeros(0, dtype=np.int64)
    ends = np.asarray(nodes, dtype=np.int64)
    edges = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(numbers), len(numbers)))
    _, component = connected_components(edges, directed=False)
    found: Ints = component[ends[:, 0]].astype(np.int64)
    return found


def _choose_metrics(
    scores: Sequence[PairedScores], options: PairingOptions
) -> tuple[list[PairedScores], list[Omission]]:
    if not options.metrics:
        return list(scores), []
    known = list(dict.fromkeys(each.metric for each in scores))
    for pattern in options.metrics:
        if not any(fnmatchcase(name, pattern) for name in known):
            remedy = suggest_nearest(pattern, known) or f"metrics: {', '.join(known)}"
            raise BadArgument("--metric", pattern, "a metric of both sides, or a pattern", remedy)
    chosen = [each for each in scores if any(fnmatchcase(each.metric, pattern) for pattern in options.metrics)]
    omissions = [
        Omission(f"{_task_text((each.task, each.filter))}: {each.metric}", len(each.ids), "not named by --metric")
        for each in scores
        if each not in chosen
    ]
    return chosen, omissions
