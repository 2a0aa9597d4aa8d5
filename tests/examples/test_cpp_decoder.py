"""The C++ example decoder passes every audit and declines the features that it lacks."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from emad_ref.errors import BadArgument
from emad_ref.point import EntropyEstimator, OperatingPoint, ThresholdBinSpec, full_depth, truncated
from emad_ref.protocol import Decoder, InadmissibleDepth, Prompt, Session, Unsupported
from pytest_emad.audit import Finding, check_decisions, check_generation, tolerance
from pytest_emad.audit.reference_logits import Lens
from pytest_emad.audit.shared_prefixes import check_shared_prefixes
from pytest_emad.audit.trajectory import DecoderUnderTest
from pytest_emad.remote.client import DecoderClient, DecoderFailed
from pytest_emad.remote.frames import WireFrame, encode_frame_to_buffers, read_frame
from tests.decoders.audited_model import lens_of
from tests.decoders.covering_cases import check_small_cases
from tests.examples.conftest import EXAMPLES, Suites
from tests.examples.models import BUNDLED, folder_of, lens_of_bundled, opened, save_odd, spread
from tests.small_models import small_model

TOLERANCE = tolerance("gpt_neox", "float32", "cpu")
LONGEST = 200  # prompt lengths, up to more than in timed requests
FED, NEW = 12, 24
LAYERS, VOCABULARY = 5, 101  # of the odd model
MANY = 33  # rows of one request


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Lens]:
    folder = tmp_path_factory.mktemp("odd")
    return folder, lens_of(save_odd(folder))


def audited(
    made: Callable[[OperatingPoint], Decoder], lens: Lens, point: OperatingPoint, longest: int, seed: int
) -> Iterator[Finding]:
    """Return every audit's finding on ragged prompts, with exact work."""
    rng = np.random.default_rng(seed)
    vocabulary = lens(np.zeros(1, dtype=np.int64)).shape[-1]
    prompts = [Prompt(rng.integers(0, vocabulary, n)) for n in (5, longest, 1, 17)]
    continuation = rng.integers(0, vocabulary, (len(prompts), FED))
    for kind in ("sessions", "requests"):
        yield check_small_cases(kind, made, lens, point, TOLERANCE)
    yield check_decisions(
        DecoderUnderTest(made(point), lens, point, TOLERANCE, exact_context=True), prompts, continuation
    )
    yield check_generation(DecoderUnderTest(made(point), lens, point, TOLERANCE, exact_context=True), prompts, NEW)


# ---------------------------------------------------------------- decisions follow the rule


def test_it_reads_prompts_to_their_ends(remote: DecoderClient, odd: tuple[Path, Lens]) -> None:
    folder, lens = odd
    point, rng = spread(lens, LAYERS, VOCABULARY), np.random.default_rng(0)
    made = DecoderUnderTest(opened(remote, folder, point, max_rows=MANY), lens, point, TOLERANCE)
    text, others = rng.integers(0, VOCABULARY, (2, 16))
    finding = check_shared_prefixes(made, text, others, FED, rng)
    assert finding.passed is True, finding


@pytest.mark.values("emad-tiny")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("name", BUNDLED)
def test_it_passes_every_audit(remote: DecoderClient, name: str, seed: int) -> None:
    lens = lens_of_bundled(name)
    layers, vocabulary = lens(np.zeros(1, dtype=np.int64)).shape[1:]

    def made(point: OperatingPoint) -> Decoder:
        return opened(remote, folder_of(name), point, max_rows=8, vocabulary=vocabulary)

    for finding in audited(made, lens, spread(lens, layers, vocabulary), LONGEST, seed):
        assert finding.passed is True, finding


@pytest.mark.parametrize("changes", [{}, {"use_parallel_residual": False}], ids=["parallel", "sequential"])
def test_sizes_and_residuals_are_the_configs(remote: DecoderClient, tmp_path: Path, changes: dict[str, Any]) -> None:
    lens = lens_of(save_odd(tmp_path, **changes))

    def made(point: OperatingPoint) -> Decoder:
        return opened(remote, tmp_path, point, max_rows=8)

    for finding in audited(made, lens, spread(lens, LAYERS, VOCABULARY), 30, 0):
        assert finding.passed is True, finding


def test_a_config_of_before_transformers_5_says_the_same(
    remote: DecoderClient, odd: tuple[Path, Lens], tmp_path: Path
) -> None:
    folder, lens = odd
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": int(rope["rope_theta"])}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    tokens = np.arange(40)
    _, step = opened(remote, tmp_path, full_depth(LAYERS)).start([Prompt(tokens)])
    np.testing.assert_allclose(step.logits[0, 0], lens(tokens)[-1, -1], atol=TOLERANCE)


def test_a_ceiling_below_the_last_layer_is_full_depth_there(remote: DecoderClient, odd: tuple[Path, Lens]) -> None:
    folder, lens = odd
    session, step = opened(remote, folder, truncated(LAYERS, 3)).start([Prompt(np.arange(9))])
    np.testing.assert_allclose(step.logits[0, 0], lens(np.arange(9))[-1, 2], atol=TOLERANCE)
    assert session.work is not None
    assert session.work.tokens.tolist() == [9, 9, 9, 0, 0]


def test_only_heads_that_serve_a_purpose_run(remote: DecoderClient, odd: tuple[Path, Lens]) -> None:
    """``last`` suppresses logits; probes are still read, and an exit at one costs no second head."""
    folder, lens = odd
    point = replace(spread(lens, LAYERS, VOCABULARY), probes=(2,), thresholds=((-np.inf,),))
    session, _ = opened(remote, folder, point).start([Prompt(np.arange(4))])
    step = session.feed(np.array([[5, 6, 7]]), last=1)
    assert step.logits.shape == (1, 1, VOCABULARY)
    assert step.signal.shape == (1, 3, 1)
    assert session.work is not None
    assert session.work.readout_rows[0].tolist() == [0, 4, 0, 0, 2]
    session.feed(np.array([[8, 9]]), depth=np.array([[2, 2]]), last=0)
    assert session.work.readout_rows[0].tolist() == [0, 4, 0, 0, 2]


@pytest.mark.parametrize("seed", range(4))
def test_interleaved_sessions_survive_any_order_of_operations(
    remote: DecoderClient, odd: tuple[Path, Lens], seed: int
) -> None:
    """Partial commits, rollbacks to them, dropped rows: later results equal those of a fresh history."""
    folder, lens = odd
    rng = np.random.default_rng(seed)
    decoder = opened(remote, folder, spread(lens, LAYERS, VOCABULARY), max_rows=5)
    scripts = [Script(decoder, lens, rng, int(count)) for count in (5, 3)]
    for _ in range(60):
        scripts[rng.integers(2)].act()
    assert sum(script.compared for script in scripts) > 60


class Script:
    """One session and the plain history of its rows."""

    def __init__(self, decoder: Decoder, lens: Lens, rng: np.random.Generator, count: int):
        self.lens, self.rng, self.compared = lens, rng, 0
        self.history = [rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(1, 9, count)]
        self.session, step = decoder.start([Prompt(np.array(row)) for row in self.history])
        self.caps = [
            [LAYERS] * len(row) + [int(depth)] for row, depth in zip(self.history, step.depth[:, 0], strict=True)
        ]
        self.committed = [1] * count
        self.compare(step.logits, step.depth)

    def act(self) -> None:
        move = self.rng.choice(["feed", "force", "rollback", "commit", "drop"], p=[0.3, 0.3, 0.2, 0.15, 0.05])
        if move in ("feed", "force"):
            self.feed(int(self.rng.integers(1, 5)), move == "force")
        elif move == "drop":
            self.drop()
        else:
            ends = [
                int(self.rng.integers(c, len(row) + 1)) for c, row in zip(self.committed, self.history, strict=True)
            ]
            getattr(self.session, move)(np.array(ends))
            if move == "commit":
                self.committed = ends
            else:
                self.history = [row[:end] for row, end in zip(self.history, ends, strict=True)]
                self.caps = [caps[: end + 1] for caps, end in zip(self.caps, ends, strict=True)]
        assert self.session.length.tolist() == [len(row) for row in self.history]
        assert self.session.cap.tolist() == [caps[-1] for caps in self.caps]

    def feed(self, n: int, force: bool) -> None:
        if max(map(len, self.history)) + n > 60:
            return
        tokens = self.rng.integers(0, VOCABULARY, (len(self.history), n))
        depth = (
            np.array([np.sort(self.rng.integers(1, caps[-1] + 1, n))[::-1] for caps in self.caps]) if force else None
        )
        if force and self.rng.random() < 0.5:
            depth[:, 0] = self.session.cap  # type: ignore[index]  # the deepest that is allowed
        step = self.session.feed(tokens, depth)
        for row, (fed, depths) in enumerate(zip(tokens.tolist(), step.depth.tolist(), strict=True)):
            self.history[row] += fed
            self.caps[row] += depths
        self.compare(step.logits, step.depth)

    def drop(self) -> None:
        gone = self.rng.permutation(len(self.history))[: self.rng.integers(0, min(3, len(self.history)))]
        self.session.drop(gone.astype(np.int64))
        for column in (self.history, self.caps, self.committed):
            column[:] = [entry for row, entry in enumerate(column) if row not in gone]  # type: ignore[index]

    def compare(self, logits: np.ndarray, depth: np.ndarray) -> None:
        n = depth.shape[1]
        for row, history in enumerate(self.history):
            wanted = self.lens(np.array(history))[-n:][np.arange(n), depth[row] - 1]
            np.testing.assert_allclose(logits[row], wanted, atol=TOLERANCE)
            self.compared += n


# ---------------------------------------------------------------- sampling


def sampled(
    remote: DecoderClient, folder: Path, prompts: list[Prompt], temperature: float, seed: int, new: int = 1
) -> list[list[int]]:
    decoder = opened(remote, folder, full_depth(LAYERS), max_rows=len(prompts), temperature=temperature, seed=seed)
    return [row.tolist() for row in decoder.generate(prompts, new, frozenset()).emitted]


@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_draws_follow_the_models_distribution(
    remote: DecoderClient, odd: tuple[Path, Lens], temperature: float
) -> None:
    folder, lens = odd
    prompt = np.array([3, 1, 4])
    drawn = np.array(
        [token for seed in range(10) for token in sampled(remote, folder, [Prompt(prompt)] * 200, temperature, seed)]
    )
    scaled = lens(prompt)[-1, -1] / temperature
    expected = np.exp(scaled - scaled.max()) / np.exp(scaled - scaled.max()).sum() * len(drawn)
    counts = np.bincount(drawn[:, 0], minlength=VOCABULARY)
    often = expected >= 5
    assert often.sum() >= 10
    found, wanted = ([*part[often], part[~often].sum()] for part in (counts, expected))
    assert chisquare(found, wanted).pvalue > 1e-3  # the seeds are fixed, so the result is deterministic


def test_draws_depend_on_the_seed_and_the_row_alone(remote: DecoderClient, odd: tuple[Path, Lens]) -> None:
    folder, _ = odd
    prompts = [Prompt(np.array([3, 1, 4]))] * 3
    first = sampled(remote, folder, prompts, 1.0, 1, new=16)
    assert sampled(remote, folder, prompts, 1.0, 1, new=16) == first
    assert sampled(remote, folder, prompts[:1], 1.0, 1, new=16) == first[:1]
    others = [
        *first,
        *sampled(remote, folder, prompts, 1.0, 2, new=16),
        *sampled(remote, folder, prompts, 1.0, 2 + (1 << 40), new=16),
    ]
    assert len({tuple(row) for row in others}) == 9


# ---------------------------------------------------------------- declined features and refused input


def declined() -> list[Any]:
    plain = OperatingPoint("p", "emad", LAYERS, LAYERS, (2,), ((0.5,),))
    return [
        pytest.param(replace(plain, schedule="free_eager"), "schedule", id="another schedule"),
        pytest.param(replace(plain, signal="softmax_response"), "signal", id="another signal"),
        pytest.param(replace(plain, estimator=EntropyEstimator("topk", k=8)), "estimator", id="an estimator"),
        pytest.param(
            replace(plain, bins=ThresholdBinSpec(("position",)), thresholds=((0.5,),) * 3), "one threshold", id="bins"
        ),
        pytest.param(replace(plain, interpolate=True), "at probes alone", id="exits between probes"),
        pytest.param(replace(plain, lens="0123abcd"), "a tuned lens", id="a tuned lens"),
    ]


@pytest.mark.parametrize(("point", "reason"), declined())
def test_other_rules_are_declined(
    remote: DecoderClient, odd: tuple[Path, Lens], point: OperatingPoint, reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        opened(remote, odd[0], point)


def test_other_models_and_precisions_are_declined(
    remote: DecoderClient, odd: tuple[Path, Lens], tmp_path: Path
) -> None:
    with pytest.raises(Unsupported, match="float32"):
        opened(remote, odd[0], full_depth(LAYERS), dtype="bfloat16")
    small_model("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(Unsupported, match="GPT-NeoX"):
        opened(remote, tmp_path / "llama", full_depth(6))
    save_odd(tmp_path / "tanh", hidden_act="gelu_new")
    with pytest.raises(Unsupported, match="gelu"):
        opened(remote, tmp_path / "tanh", full_depth(LAYERS))


def test_weights_that_do_not_fit_are_refused_by_name(
    remote: DecoderClient, odd: tuple[Path, Lens], tmp_path: Path
) -> None:
    config, weights = ((odd[0] / name).read_bytes() for name in ("config.json", "model.safetensors"))
    half = tmp_path / "half"
    save_odd(tmp_path / "half").half().save_pretrained(half)
    wrong = {
        "nothing": (None, None, "config.json"),
        "no weights": (config, None, "model.safetensors"),
        "no JSON": (config[: len(config) // 2], weights, "JSON"),
        "cut": (config, weights[: len(weights) // 2], "4 bytes per element"),
        "empty": (config, b"", "safetensors"),
        "another size": (config.replace(b'"hidden_size": 36', b'"hidden_size": 48'), weights, "of another shape"),
        "more layers": (config.replace(b'layers": 5', b'layers": 6'), weights, r"layers\.5\..*absent"),
    }
    for name, (text, tensors, reason) in wrong.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, content in (("config.json", text), ("model.safetensors", tensors)):
            if content is not None:
                (folder / file).write_bytes(content)
        with pytest.raises(BadArgument, match=reason):
            opened(remote, folder, full_depth(LAYERS))
    with pytest.raises(BadArgument, match="F16"):
        opened(remote, half, full_depth(LAYERS))


def test_logits_that_are_no_numbers_are_a_failure(remote: DecoderClient, tmp_path: Path) -> None:
    model = save_odd(tmp_path)
    model.get_decoder().final_layer_norm.weight.data[0] = np.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(DecoderFailed, match="not finite"):
        opened(remote, tmp_path, full_depth(LAYERS)).start([Prompt(np.arange(3))])


REFUSED: dict[str, Callable[[Decoder, Session], object]] = {
    "too many tokens": lambda d, s: s.feed(np.zeros((2, 9), dtype=np.int64)),
    "no token": lambda d, s: s.feed(np.zeros((2, 0), dtype=np.int64)),
    "a token that is none": lambda d, s: s.feed(np.array([[1], [VOCABULARY]])),
    "another number of rows": lambda d, s: s.feed(np.array([[1]])),
    "a depth for one of two": lambda d, s: s.feed(np.array([[1], [1]]), np.array([[1]])),
    "more logits than tokens": lambda d, s: s.feed(np.array([[1], [1]]), last=2),
    "below the committed": lambda d, s: s.rollback(np.array([4, 3])),
    "beyond the held": lambda d, s: s.commit(np.array([7, 4])),
    "all rows": lambda d, s: s.drop(np.array([0, 1])),
    "a row that is none": lambda d, s: s.drop(np.array([2])),
    "what it cannot do": lambda d, s: s.deepen(np.array([5, 3])),
    "no prompt": lambda d, s: d.start([]),
    "a prompt without a token": lambda d, s: d.start([Prompt(np.array([], dtype=np.int64))]),
    "too many prompts": lambda d, s: d.start([Prompt(np.arange(3))] * 3),
    "more positions than there are": lambda d, s: d.generate([Prompt(np.arange(60))], 6, frozenset()),
    "nothing to generate": lambda d, s: d.generate([Prompt(np.arange(60))], 0, frozenset()),
}
INADMISSIBLE: dict[str, Callable[[Decoder, Session], object]] = {
    "a depth above the cap": lambda d, s: s.feed(np.array([[1], [1]]), np.array([[5], [1]])),
    "above that of the last row": lambda d, s: s.feed(np.array([[1], [1]]), np.array([[1], [3]])),
    "no depth": lambda d, s: s.feed(np.array([[1], [1]]), np.array([[0], [1]])),
    "a depth that rises": lambda d, s: s.feed(np.array([[1, 1], [1, 1]]), np.array([[3, 4], [1, 1]])),
}


@pytest.mark.parametrize("what", [*REFUSED, *INADMISSIBLE])
def test_a_request_that_cannot_be_served_changes_nothing(
    remote: DecoderClient, odd: tuple[Path, Lens], what: str
) -> None:
    folder, lens = odd
    decoder = opened(remote, folder, full_depth(LAYERS), max_rows=2)
    session, _ = decoder.start([Prompt(np.arange(5)), Prompt(np.arange(3))])
    session.feed(np.array([[7], [8]]), np.array([[4], [2]]))
    session.commit(np.array([5, 3]))
    with pytest.raises(InadmissibleDepth if what in INADMISSIBLE else (BadArgument, Unsupported)):
        (REFUSED | INADMISSIBLE)[what](decoder, session)
    assert session.length.tolist() == [6, 4]
    assert session.cap.tolist() == [4, 2]
    step = session.feed(np.array([[9], [9]]))
    for row, history in enumerate(([0, 1, 2, 3, 4, 7, 9], [0, 1, 2, 8, 9])):
        np.testing.assert_allclose(step.logits[row, 0], lens(np.array(history))[-1, (3, 1)[row]], atol=TOLERANCE)


# ---------------------------------------------------------------- the stream


def spoken(program: Path, said: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([program], input=said, capture_output=True, timeout=30)


def framed(header: bytes, payload: bytes = b"") -> bytes:
    return b"EMW1" + len(header).to_bytes(4, "little") + len(payload).to_bytes(8, "little") + header + payload


def replies(said: bytes) -> list[dict[str, Any]]:
    rest, found = memoryview(said), []

    def read(count: int) -> np.ndarray:
        nonlocal rest
        piece, rest = rest[:count], rest[count:]
        return np.frombuffer(piece, dtype=np.uint8)

    while rest:
        found.append(read_frame(read).header)
    return found


def test_it_ends_with_the_stream_or_with_bye(program: Path) -> None:
    assert spoken(program, b"").returncode == 0
    done = spoken(program, b"".join(map(bytes, encode_frame_to_buffers(WireFrame({"call": "bye"})))))
    assert (done.returncode, replies(done.stdout)) == (0, [{"reply": "bye"}])


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"EMW1\xff\xff\xff\xff" + b"\0" * 8, framed(b"{}")[:-1], b"EM"]
)
def test_a_stream_without_frames_ends_it_with_a_word(program: Path, said: bytes) -> None:
    done = spoken(program, said)
    assert done.returncode == 1
    assert done.stdout == b""
    assert b"decoder: " in done.stderr


def test_headers_that_say_nothing_are_refused_and_it_goes_on(program: Path) -> None:
    listed = b'{"call": "hello", "wire": 1, "arrays": [%s]}'
    wrong = [
        b"", b"{", b"[]", b"{}", b'{"call": 5, "arrays": []}', b'{"call": "none", "arrays": []}', b"[" * 100_000,
        b'{"call": "hello"}', b'{"call": "hello", "arrays": [], "wire": 1e999}', b'{"call": "hello\\x", "arrays": []}',
        b'{"call": "feed", "session": 7, "arrays": []}', b'{"call": "hello", "wire": nul, "arrays": []}',
        listed % b'{"name": "a", "dtype": "int32", "shape": [1]}',
        listed % b'{"name": "a", "dtype": "int64", "shape": [-1]}',
        listed % b'{"name": "a", "dtype": "int64", "shape": [4294967296, 4294967296, 4294967296]}',
        listed % b'{"name": "a", "dtype": "int64", "shape": [2]}', b'{"call": "hello", "wire": 1, "arrays": []} x',
    ]  # fmt: skip
    well = b'{"call": "hello", "wire": 1, "later": {"\\u00e9\\ud83d\\ude00": [true, null, -1.5e-3]}, "arrays": []}'
    done = spoken(program, b"".join(map(framed, [*wrong, well])) + framed(well, b"12345678"))
    answers = replies(done.stdout)
    assert done.returncode == 0
    assert [answer.get("error") for answer in answers] == ["BadArgument"] * len(wrong) + [None, "BadArgument"]
    assert answers[-2] == {"reply": "hello", "wire": 1, "name": "plain C++17"}


# ---------------------------------------------------------------- judged as by a user


@pytest.mark.slow
def test_it_passes_the_suites_of_invariants_and_fidelity(suites: Suites, place: str) -> None:
    said = suites("invariants", "fidelity", "--emad-decoder", place)
    assert re.search(r"= \d{2,} passed, 10 skipped", said), said
    assert said.count("SKIPPED [") == said.count(": not applicable ("), said
    assert "free_deferred: this decoder only lowers depth" in said


def test_the_makefile_and_the_readme_build_it_alike() -> None:
    command = "c++ -std=c++17 -O2 -o decoder decoder.cpp"
    assert command in (EXAMPLES / "cpp" / "README.md").read_text(encoding="utf-8")
    assert "-std=c++17 -O2" in (EXAMPLES / "cpp" / "Makefile").read_text(encoding="utf-8")
