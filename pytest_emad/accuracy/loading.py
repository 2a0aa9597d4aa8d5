"""Finds out what a path holds, and reads it: lm-eval's samples, logs of inspect_ai, or a table of scores."""

from __future__ import annotations

from pathlib import Path

from emad_ref.files import BadFile, is_file, is_folder
from pytest_emad.accuracy.inspect_logs import is_inspect_log, read_inspect_logs
from pytest_emad.accuracy.items import Evaluation
from pytest_emad.accuracy.lm_eval_samples import RESULTS_NAME, find_sample_files, read_lm_eval_samples
from pytest_emad.accuracy.score_tables import SUFFIXES, read_score_table

EXPECTED = "lm-eval's folder of samples, logs of inspect_ai, or a .jsonl or .csv of task, id and score"
WITH_SAMPLES = "evaluate again with lm_eval --log_samples"


def read_evaluation(path: Path, argument: str = "evaluation", cluster: str = "") -> Evaluation:
    """Read a finished evaluation.

    Args:
        path: a folder or file of any of the forms.
        argument: what messages call it: BASE or CANDIDATE.
        cluster: a field of the documents whose values mark items that depend on each other; "": repeats alone.

    Raises:
        BadFile: nothing there, another kind of file, or a damaged one; the message names file and remedy.
    """
    if not is_folder(path) and not is_file(path):
        raise BadFile(argument, path, EXPECTED, "there is no such file or folder", "name one that exists")
    try:
        return _read_folder(path, argument, cluster) if is_folder(path) else _read_file(path, argument, cluster)
    except OSError as error:
        if isinstance(error, BadFile):
            raise
        raise BadFile(argument, path, "a readable folder", error.strerror or str(error), "make it readable") from error


def _read_folder(path: Path, argument: str, cluster: str) -> Evaluation:
    samples = find_sample_files(path, argument)
    logs = [each for each in sorted(path.iterdir()) if is_inspect_log(each)]
    if samples and logs:
        reason = f"it holds {samples[0].path.name} and {logs[0].name}"
        raise BadFile(argument, path, "the files of one tool", reason, "name one of the files")
    if samples:
        return read_lm_eval_samples(samples, path, argument, cluster)
    if logs:
        return read_inspect_logs(logs, path, argument, cluster)
    results = [each for each in (*path.glob("*.json"), *path.glob("*/*.json")) if RESULTS_NAME.fullmatch(each.name)]
    if results:
        reason = f"it holds {results[0].name}, but no samples_TASK_DATE.jsonl"
        raise BadFile(argument, path, "the samples beside the results", reason, WITH_SAMPLES)
    names = ", ".join(sorted(each.name for each in path.iterdir())[:3])
    raise BadFile(argument, path, EXPECTED, f"it holds {names or 'nothing'}", "name the folder of --output_path")


def _read_file(path: Path, argument: str, cluster: str) -> Evaluation:
    if samples := find_sample_files(path, argument):
        return read_lm_eval_samples(samples, path, argument, cluster)
    if is_inspect_log(path):
        return read_inspect_logs([path], path, argument, cluster)
    if path.suffix in SUFFIXES:
        return read_score_table(path, argument, cluster)
    remedy = f"name its folder, {path.parent}" if RESULTS_NAME.fullmatch(path.name) else "name another file"
    raise BadFile(argument, path, EXPECTED, "it is none of these", remedy)
