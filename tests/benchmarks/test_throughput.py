"""Benchmark: requests per second of our lm-eval model at full depth, against lm-eval's ``hf`` model with equal weights.

Run on request: ``pytest --run-slow -s tests/benchmarks/test_throughput.py``.

Both answer the same requests in the same batch sizes, in alternating order within one process. Process time decides, so
that other processes on the machine do not count; the wall-clock ratio is printed as well.
"""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.models.loading import load
from emad_ref.text import world
from pytest_emad.benchmark.clock import time_pairs
from pytest_emad.run.suite_support import CLOCK, record_benchmark_samples
from pytest_emad.statistics.speedup import estimate_speedup_per_request
from pytest_emad.statistics.units import ByPair

pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")
from pytest_emad.tasks.lm_eval_model import EmadLM
from pytest_emad.tasks.lm_eval_settings import lm_eval_quiet

pytestmark = [pytest.mark.slow, pytest.mark.benchmark(timer=CLOCK)]

LEAST, PAIRS, NEW = 0.9, 20, 48
TASKS = ("inventory", "facts", "chart", "recall")


@pytest.fixture(scope="module")
def loaded():
    return load("emad-tiny")


def examples(count, seed):
    return [
        e for task in TASKS for e in islice(world.generate_examples(task, "evaluate", count // 4, seed), count // 4)
    ]


def generated(lm, rows, seed):
    """Return answers that end at a stop string, at the end of text, or after ``NEW`` tokens."""
    settings = {"until": ["\n\n"], "max_gen_toks": NEW, "do_sample": False}
    requests = [SimpleNamespace(args=(e.prompt, settings)) for e in examples(max(4, rows), seed)]
    return lm.generate_until(requests, disable_tqdm=True)


def scored(lm, rows, seed):
    """Return scores of options of several tokens after contexts of several lengths."""
    found = examples(max(4, rows), seed)
    requests = [SimpleNamespace(args=(e.prompt, f" {o}")) for e in found for o in e.options or (e.answer,)]
    return lm.loglikelihood(requests, disable_tqdm=True)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("ask", [generated, scored], ids=lambda ask: ask.__name__)
def test_full_depth_answers_as_fast_as_lm_evals_own_model(benchmark, loaded, ask, rows):
    hf = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval[hf] is not installed", exc_type=ImportError)
    with lm_eval_quiet():
        theirs = hf.HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=rows)
    mine = EmadLM(loaded, batch_size=rows)
    if ask is generated:
        assert ask(mine, rows, 0) == ask(theirs, rows, 0), "other answers mean other work"
    arms = {
        "hf": lambda pair: ask(theirs, rows, pair),
        "emad": lambda pair: ask(mine, rows, pair),
    }
    times = time_pairs(arms, PAIRS, np.random.default_rng(0))
    used, wall = (
        estimate_speedup_per_request(ByPair(seconds["hf"]), ByPair(seconds["emad"]), threshold=LEAST)
        for seconds in (times.process_seconds, times.seconds)
    )
    benchmark.extra_info |= {"hf / emad": used.value, "hf / emad, wall clock": wall.value}
    record_benchmark_samples(benchmark, times.seconds["emad"], f"{ask.__name__}, {rows} rows")
    print(
        f"{loaded.name}, {ask.__name__}, {rows} rows: hf / emad = {used.value:.3f} [{used.low:.3f}, {used.high:.3f}], "
        f"wall clock {wall.value:.3f} [{wall.low:.3f}, {wall.high:.3f}]"
    )
    assert used.value >= LEAST
