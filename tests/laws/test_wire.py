"""The reference decoder behind ``emad serve``, over a pipe or a socket, equals the one in this process, bit for bit.

Tokens, depths, logits, signals, lengths, caps and work are compared without any tolerance.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emad_ref.calibration.lens_files import FittedLens, save_lens
from emad_ref.errors import BadArgument
from emad_ref.models.loading import LoadedModel, load
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.probes.tuned_lens import attach_lens
from emad_ref.protocol import Decoder, InadmissibleDepth, ModelRef, Prompt, Request, Session, Step, Unsupported
from emad_ref.record import Record, Work
from pytest_emad.measurements.run_resources import RemoteDecoders, make_reference_decoder
from pytest_emad.remote.address import parse_address
from pytest_emad.remote.client import DecoderFailed
from tests.random_lenses import drawn_lens

ROOT = Path(__file__).parents[2]
SERVE = [sys.executable, "-m", "pytest_emad", "serve"]
MODEL, SOURCED = "emad-nano", "emad-t5-tiny"
SECONDS = 120.0
ADAPTIVE = OperatingPoint("exits", "emad", 4, 4, (1, 2, 3), ((2.0, 1.5, 1.0),))
DEFERRED = OperatingPoint("deferred", "emad", 4, 4, (1, 2), ((9.0, 9.0),), schedule="free_deferred")
NEVER = OperatingPoint("never", "emad", 4, 3, (2,), ((-np.inf,),))
PROMPTS = [Prompt(np.arange(3, 9)), Prompt(np.array([40, 2])), Prompt(np.array([7]))]
TOKENS = np.array([[5, 6, 300], [9, 9, 11], [100, 4, 3]])

Make = Callable[[Request], Decoder]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(MODEL)


@pytest.fixture(scope="module")
def listening() -> Iterator[str]:
    """Yield the address of a server that runs as long as these tests, and then exits cleanly."""
    server = subprocess.Popen(
        [*SERVE, MODEL, SOURCED, "--tcp", "127.0.0.1:0"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    try:
        found = next(found for line in server.stderr if (found := re.search(r"listening on (tcp:\S+)", line)))
        yield found[1]
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert "Traceback" not in server.stderr.read()
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


@pytest.fixture(scope="module")
def piped() -> Iterator[RemoteDecoders]:
    """Connect to a server started for these decoders."""
    distant = RemoteDecoders(parse_address(f"exec:{' '.join(SERVE)} {MODEL}", ROOT, "decoder"), SECONDS)
    yield distant
    distant.close()


@pytest.fixture(scope="module")
def dialled(listening: str) -> Iterator[RemoteDecoders]:
    """Connect to the server that listens."""
    distant = RemoteDecoders(parse_address(listening, ROOT, "decoder"), SECONDS)
    yield distant
    distant.close()


def asked(loaded: LoadedModel, point: OperatingPoint, **more: Any) -> Request:
    return Request(ModelRef(loaded.name, lambda: loaded), point, **{"max_rows": 3} | more)


@contextmanager
def closing(decoder: Decoder) -> Iterator[Decoder]:
    try:
        yield decoder
    finally:
        decoder.close()


def seen(step: Step) -> list[Any]:
    return [step.logits, step.depth, step.signal]


def held(session: Session) -> list[Any]:
    return [session.length, session.cap, session.work]


def said(record: Record) -> list[Any]:
    columns = [getattr(record.tokens, field.name) for field in fields(record.tokens)]
    return [*columns, record.signal, *record.emitted, record.stop, record.work, record.prompt_work]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype, place
            np.testing.assert_array_equal(ours, theirs, err_msg=f"item {place}", strict=True)
        elif isinstance(theirs, Work):
            assert ours == theirs, f"item {place}: {ours.describe_difference(theirs)}"
        else:
            assert ours == theirs, place


def a_session(make: Make, loaded: LoadedModel) -> list[Any]:
    """Run free and forced feeds, rollback, commit, drop, and a refusal that changes nothing."""
    with closing(make(asked(loaded, ADAPTIVE))) as decoder:
        session, step = decoder.start(PROMPTS)
        found = [decoder.capabilities, *seen(step), *held(session)]
        found += seen(session.feed(TOKENS)) + held(session)
        session.rollback(np.array([7, 3, 2]))
        found += held(session)
        found += seen(session.feed(TOKENS[:, :2], np.stack([session.cap, [1, 1, 1]], axis=1))) + held(session)
        with pytest.raises(InadmissibleDepth) as refused:
            session.feed(TOKENS[:, :1], session.cap[:, None] + 1)
        found += [str(refused.value), *held(session)]
        with pytest.raises(BadArgument) as refused_length:
            session.rollback(np.array([99, 1, 1]))
        found += [str(refused_length.value), *held(session)]
        session.commit(np.array([8, 4, 3]))
        session.drop(np.array([1]))
        found += held(session)
        found += seen(session.feed(TOKENS[:2], last=1)) + held(session)
        found += seen(session.feed(TOKENS[:2], last=0)) + held(session)
        session.close()
        return found


def a_deepened_session(make: Make, loaded: LoadedModel) -> list[Any]:
    with closing(make(asked(loaded, DEFERRED))) as decoder:
        session, step = decoder.start(PROMPTS[:2])
        found = [*seen(step), *seen(session.feed(TOKENS[:2])), *held(session)]
        return found + seen(session.deepen(session.length - 3)) + held(session)


def interleaved_sessions(make: Make, loaded: LoadedModel) -> list[Any]:
    """Feed two sessions of one decoder and one of another in turns."""
    with closing(make(asked(loaded, ADAPTIVE))) as first, closing(make(asked(loaded, NEVER))) as second:
        sessions = [first.start(PROMPTS[:1])[0], first.start(PROMPTS[1:])[0], second.start(PROMPTS)[0]]
        found: list[Any] = []
        for column in range(3):
            for session in sessions:
                found += seen(session.feed(TOKENS[: len(session.length), [column]])) + held(session)
        sessions[0].rollback(np.array([7]))
        first.synchronize()
        return found + [value for session in sessions for value in held(session)]


def generated(make: Make, loaded: LoadedModel) -> list[Any]:
    """Generate greedily, and sample with two seeds."""
    found: list[Any] = []
    for more in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 2}):
        for point in (ADAPTIVE, full_depth(4)):
            with closing(make(asked(loaded, point, **more))) as decoder:
                found += said(decoder.generate(PROMPTS, 9, frozenset({0, 199})))
    return found


@pytest.mark.parametrize("way", ["piped", "dialled"])
@pytest.mark.parametrize("talk", [a_session, a_deepened_session, interleaved_sessions, generated])
def test_a_decoder_elsewhere_is_the_one_here(
    request: pytest.FixtureRequest, loaded: LoadedModel, way: str, talk: Callable[..., list[Any]]
) -> None:
    distant: RemoteDecoders = request.getfixturevalue(way)
    assert_same(talk(distant.make, loaded), talk(make_reference_decoder, loaded))


def test_the_points_of_this_law_exit_early_and_seeds_differ(loaded: LoadedModel) -> None:
    """Otherwise the law would test little."""
    with closing(make_reference_decoder(asked(loaded, ADAPTIVE))) as decoder:
        session, _ = decoder.start(PROMPTS)
        assert len({*session.feed(TOKENS).depth.ravel().tolist()}) > 1
    emitted = []
    for seed in (1, 2):
        with closing(make_reference_decoder(asked(loaded, full_depth(4), temperature=1.0, seed=seed))) as decoder:
            emitted.append([row.tolist() for row in decoder.generate(PROMPTS, 9, frozenset()).emitted])
    assert emitted[0] != emitted[1]


def test_sources_travel_with_their_prompts(dialled: RemoteDecoders) -> None:
    """With an encoder-decoder, whose encoder work is counted, too."""
    model = load(SOURCED)
    prompts = [Prompt(np.array([0, 5]), np.arange(4, 12)), Prompt(np.array([0]), np.arange(20, 23))]

    def talk(make: Make) -> list[Any]:
        with closing(make(asked(model, full_depth(model.geometry.layers)))) as decoder:
            session, step = decoder.start(prompts)
            assert session.work is not None
            assert session.work.encoder_tokens > 0
            return [*seen(step), *held(session), *said(decoder.generate(prompts, 5, frozenset()))]

    assert_same(talk(dialled.make), talk(make_reference_decoder))


def test_models_that_are_not_served_are_declined_by_name(dialled: RemoteDecoders) -> None:
    """Another model is not applicable; the same model with other weights is an error."""
    random = load(f"random:{MODEL}")
    with pytest.raises(Unsupported, match=f"emad serve serves {MODEL}, {SOURCED}, not random:{MODEL}; add random"):
        dialled.make(asked(random, full_depth(4)))
    renamed = LoadedModel(**{field.name: getattr(random, field.name) for field in fields(random)} | {"name": MODEL})
    with pytest.raises(BadArgument, match=r"model\.fingerprint=.*the emad-nano of this server; start emad serve with"):
        dialled.make(asked(renamed, full_depth(4)))


def test_two_judges_are_served_at_once(listening: str, dialled: RemoteDecoders, loaded: LoadedModel) -> None:
    """Their decoders and sessions have equal numbers, but are distinct."""
    other = RemoteDecoders(parse_address(listening, ROOT, "decoder"), SECONDS)
    with closing(dialled.make(asked(loaded, ADAPTIVE))) as first, closing(other.make(asked(loaded, NEVER))) as second:
        ours, theirs = first.start(PROMPTS[:1])[0], second.start(PROMPTS[:2])[0]
        ours.feed(TOKENS[:1])
        assert (ours.length.tolist(), theirs.length.tolist()) == ([9], [6, 2])
        assert theirs.feed(TOKENS[:2]).depth.tolist() == [[3] * 3] * 2
    other.close()


def test_a_server_killed_within_a_call_is_one_clear_failure(piped: RemoteDecoders, loaded: LoadedModel) -> None:
    """Last test, because it stops the server of all others. SIGKILL during a feed."""
    session, _ = piped.make(asked(loaded, ADAPTIVE)).start(PROMPTS)
    process = piped._remote._connection._transport._process  # type: ignore[union-attr]
    process.send_signal(signal.SIGSTOP)  # the server cannot answer before it dies
    killer = threading.Timer(0.2, process.kill)
    killer.start()
    with pytest.raises(DecoderFailed, match=r"call 'feed': no reply: it was killed by SIGKILL(.|\n)*serving emad-nano"):
        session.feed(TOKENS)
    killer.join()


def test_a_tuned_lens_is_served_where_it_was_given_and_declined_elsewhere(
    loaded: LoadedModel, piped: RemoteDecoders, tmp_path: Path
) -> None:
    lens = replace(drawn_lens(loaded.stepper, (1, 2, 3), 4), fingerprint=loaded.fingerprint)
    save_lens(tmp_path / "l.safetensors", FittedLens(lens, {}, *[dict.fromkeys((1, 2, 3), 0.5)] * 2, 1))
    point = replace(ADAPTIVE, lens=attach_lens(loaded.stepper, lens, loaded.fingerprint))
    with pytest.raises(BadArgument, match=r"point\.lens=.*attached to this model \(none is\)"):
        piped.make(asked(loaded, point))
    serve = f"exec:{' '.join(SERVE)} {MODEL} --lens {tmp_path / 'l.safetensors'}"
    distant = RemoteDecoders(parse_address(serve, ROOT, "decoder"), SECONDS)
    records = []
    for make in (distant.make, make_reference_decoder):
        with closing(make(asked(loaded, point))) as decoder:
            records.append(decoder.generate(PROMPTS, 6))
    distant.close()
    assert_same(*map(said, records))
    assert records[0].work[0].readout_macs.any()
