"""The judge's model is isolated from in-process decoders; remote decoders get a folder with a copy of it."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.bundled import weights_folder
from emad_ref.models.causal import CausalStepper
from emad_ref.models.fingerprint import hash_weights
from emad_ref.models.loading import LoadedModel, load
from emad_ref.models.model_spec import FingerprintMismatch, find_safetensors_source_folder
from emad_ref.models.quantisation import int8_copy
from emad_ref.point import OperatingPoint, full_depth, truncated
from emad_ref.probes.tuned_lens import get_attached_lens
from emad_ref.protocol import ModelRef, Request, Unsupported
from pytest_emad.audit.tolerances import check_declared_noise, tolerance
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.measurements.run_resources import (
    ModelIsolation,
    ModelMutatedError,
    RemoteDecoders,
    RunResources,
    copy_model,
    get_judge_model,
    make_decoder_on_judge_model,
    make_reference_decoder,
    require_unchanged_weights,
)
from pytest_emad.measurements.study import BUDGETS, Study
from pytest_emad.remote.address import parse_address
from pytest_emad.screening.settings import compute_traced_token_flops
from tests.decoders.cached_decoder import CachedDecoder
from tests.decoders.engine_server import Engine, serve
from tests.decoders.foreign_decoder import ForeignDecoder
from tests.decoders.model_mutating import CHANGES, meddling
from tests.decoders.model_mutating import change_a_weight as change
from tests.random_lenses import attached
from tests.small_models import LAYERS, small_model
from tests.unit.remote.scripted_decoder import listening

STUDY = Study(corpus="self")


@pytest.fixture
def nano() -> LoadedModel:
    """Return a fresh emad-nano, because these tests change it."""
    return load("emad-nano")


def under(loaded: LoadedModel, decoder: type, study: Study = STUDY) -> ModelUnderTest:
    """Return ``loaded`` with a foreign decoder, made by a hook."""
    return ModelUnderTest(
        loaded, study, RunResources(lambda request: decoder(request.model.load().model, request.point))
    )


def decoded(subject: ModelUnderTest) -> np.ndarray:
    (prompt,) = subject.make_equal_prompts(1, 4)
    with subject.open_decoder(subject.full_depth_point) as decoder:
        return decoder.generate([prompt], 3, frozenset()).emitted[0]


# ------------------------------------------------------------ the copy


def test_a_decoder_gets_a_copy_that_is_equal_and_nowhere_the_same(nano):
    copy = ModelIsolation(nano).ref.load()
    assert copy.fingerprint == nano.fingerprint
    assert copy.facts == nano.facts
    mine, theirs = ({tensor.data_ptr() for tensor in each.model.parameters()} for each in (nano, copy))
    assert not mine & theirs


def test_the_copy_is_loaded_when_asked_for_and_once(nano):
    asked = []
    lending = ModelIsolation(nano, lambda loaded: asked.append(loaded) or copy_model(loaded))
    assert (asked, lending.loaded_copies) == ([], ())
    assert lending.ref.load() is lending.ref.load() is lending.loaded_copies[0]
    assert asked == [nano]


def test_the_copy_of_random_weights_is_drawn_from_the_same_seed():
    loaded = load("random:emad-nano", seed=7, dtype=torch.float64)
    copy = ModelIsolation(loaded).copied_model
    assert copy.fingerprint == loaded.fingerprint
    assert copy.facts == loaded.facts


def test_files_that_changed_in_between_are_an_error(nano):
    lending = ModelIsolation(dataclasses.replace(nano, fingerprint="0" * 64))
    with pytest.raises(FingerprintMismatch, match=r"name='emad-nano'.*loaded a second time it has the fingerprint"):
        lending.ref.load()


def test_a_model_made_in_memory_is_copied_there(nano):
    int8 = int8_copy(nano)
    subject = ModelMeasurements(nano, STUDY, RunResources()).for_model_copy_in_memory(int8).subject
    copy = subject.isolation.ref.load()
    assert copy.model is not int8.model
    assert copy.fingerprint == int8.fingerprint
    assert copy.stepper.model is copy.model


def test_the_copy_reads_through_the_judges_lenses_and_through_none_of_their_tensors(nano):
    """Whether they were attached before the copy was first requested, or after."""
    lending = ModelIsolation(nano)
    for seed in (0, 1):
        digest = attached(nano.stepper, [1, 2], seed=seed)
        copy = lending.ref.load().stepper
        mine, lent = (get_attached_lens(stepper, digest) for stepper in (nano.stepper, copy))
        state = torch.randn(3, nano.geometry.hidden)
        assert torch.equal(mine(state, 2), lent(state, 2))
        lent.translators[2].bias.zero_()
        assert not torch.equal(mine(state, 2), lent(state, 2))
    assert lending.ref.load().stepper is copy
    assert not get_attached_lens(copy, digest).translators[2].bias.any(), "a decoder may change its own copy"


def test_a_decoder_of_somebody_else_decodes_through_a_lens(nano):
    digest = attached(nano.stepper, [1], scale=0.05)
    layers = nano.stepper.layers
    point = OperatingPoint("p", "fixed_entropy", layers, layers, (1,), ((9.0,),), lens=digest)
    subject = ModelUnderTest(nano, STUDY, RunResources(make_reference_decoder))
    ours_too = ModelUnderTest(nano, STUDY, RunResources(make_decoder_on_judge_model))
    (prompt,) = subject.make_equal_prompts(1, 4)
    emitted = []
    for each in (subject, ours_too):
        with each.open_decoder(point) as decoder:
            emitted.append(decoder.generate([prompt], 6, frozenset()).emitted[0].tolist())
    assert emitted[0] == emitted[1]


def test_a_subject_that_shares_the_model_shares_the_copy():
    evidence = ModelMeasurements(load("emad-nano"), Study(corpus="world:premise"), RunResources())
    assert evidence.on_shifted_corpus.subject.isolation is evidence.subject.isolation


def test_our_own_decoder_walks_the_judges_model_and_asks_for_no_copy(nano):
    subject = ModelUnderTest(nano, STUDY, RunResources(make_decoder_on_judge_model))
    with subject.open_decoder(subject.full_depth_point) as decoder:
        assert isinstance(decoder, WalkedDecoder)
        assert decoder.stepper is nano.stepper
        assert subject.is_reference_decoder(decoder)
    assert subject.has_reference_decoder
    assert subject.audit_share == 1
    assert subject.isolation.loaded_copies == ()
    assert get_judge_model() is None, "only a call of the provider may access it"


def test_ours_in_somebody_elses_hands_walks_a_copy_and_counts_as_theirs(nano):
    subject = ModelUnderTest(nano, STUDY, RunResources(make_reference_decoder))
    with subject.open_decoder(subject.full_depth_point) as decoder:
        assert decoder.stepper.model is subject.isolation.copied_model.model is not nano.model
        assert not subject.is_reference_decoder(decoder)
    assert not subject.has_reference_decoder


def test_of_a_large_model_audits_ask_our_own_decoder_for_less(nano, monkeypatch):
    """With the smoke budget, and only for the reference decoder."""
    flops = compute_traced_token_flops(nano.geometry)
    monkeypatch.setattr("pytest_emad.screening.settings.LARGE_TOKEN_FLOPS", flops / 4)
    large, theirs, more = (
        ModelUnderTest(nano, study, RunResources(make))
        for study, make in (
            (STUDY, make_decoder_on_judge_model),
            (STUDY, make_reference_decoder),
            (dataclasses.replace(STUDY, budget=BUDGETS["standard"]), make_decoder_on_judge_model),
        )
    )
    assert (large.audit_share, theirs.audit_share, more.audit_share) == (0.25, 1, 1)
    assert [large.scale_by_audit_share(16, least) for least in (2, 6, 20)] == [4, 6, 16]
    assert large.audited_window_size == 160 < theirs.audited_window_size == theirs.window_size


def test_what_a_decoder_says_of_itself_is_asked_at_full_depth_and_once(nano):
    opened = []

    def make(request: Request) -> CachedDecoder:
        opened.append(request.point)
        return CachedDecoder(request.model.load().model, request.point)

    subject = ModelUnderTest(nano, STUDY, RunResources(make))
    assert subject.capabilities == CachedDecoder.capabilities
    assert subject.capabilities == CachedDecoder.capabilities
    assert not subject.has_reference_decoder
    assert opened == [subject.full_depth_point]


def test_what_a_request_leads_to_is_not_the_judges_model(nano):
    """A request has a name, access to the copy, and the folder."""
    subject = ModelUnderTest(
        nano, STUDY, RunResources(lambda request: held.append(request) or make_decoder_on_judge_model(request))
    )
    held: list[Request] = []
    decoded(subject)
    (request,) = held
    assert vars(request.model) == {"name": "emad-nano", "load": request.model.load, "locate": request.model.locate}
    assert request.model.folder == str(weights_folder() / "emad-nano")
    assert request.model.load() is not nano


@pytest.mark.parametrize("decoder", [ForeignDecoder, CachedDecoder])
def test_honest_decoders_are_not_complained_of(nano, decoder):
    subject = under(nano, decoder)
    assert (decoded(subject) == decoded(subject)).all()


# ------------------------------------------------------------ the judge's model


@pytest.mark.parametrize("defect", CHANGES)
def test_a_change_of_the_judges_weights_is_named(nano, defect):
    change, named = CHANGES[defect]
    with pytest.raises(ModelMutatedError) as complaint, require_unchanged_weights(nano):
        change(nano.model)
    assert str(complaint.value).startswith("the judge's own model was changed: ")
    assert f"{named} " in str(complaint.value)


def test_a_model_found_among_all_objects_of_the_process_is_no_less_the_judges(nano):
    gc.collect()
    subject = under(nano, meddling(CHANGES["a weight in place"][0], only=nano.model))
    named = r"layers\.1\.mlp\.dense_h_to_4h\.weight of emad-nano no longer hash"
    with pytest.raises(ModelMutatedError, match=named), require_unchanged_weights(nano):
        decoded(subject)


def test_a_run_changes_no_weight_and_a_buffer_that_a_model_rewrites_is_none(nano):
    """Rotary frequencies of some models follow the length; they are no part of the state dict."""
    with require_unchanged_weights(nano):
        decoded(under(nano, CachedDecoder))
        nano.model.gpt_neox.rotary_emb.inv_freq.mul_(2)


def test_an_error_inside_is_not_hidden_by_a_change_of_the_weights(nano):
    def declines(request: Request) -> CachedDecoder:
        change(nano.model)
        raise Unsupported("no room")

    subject = ModelUnderTest(nano, STUDY, RunResources(declines))
    with pytest.raises(Unsupported, match="no room"), require_unchanged_weights(nano):
        decoded(subject)


def test_hooks_on_the_decoders_own_copy_slow_nothing_of_the_judges(nano):
    slept = []

    class Asleep(CachedDecoder):
        def __init__(self, model, point):
            super().__init__(model, point)
            for block in model.gpt_neox.layers:
                block.register_forward_pre_hook(lambda *given: slept.append(1))

    subject = under(nano, Asleep)
    decoded(subject)
    assert slept, "its own blocks sleep"
    slept.clear()
    subject.generate_greedy(subject.make_equal_prompts(1, 4), 3)
    subject.reference_lens(np.arange(5))
    assert not slept


def test_a_request_without_a_subject_is_served_from_what_it_lends(nano):
    request = Request(ModelRef("emad-nano", lambda: nano), ModelUnderTest(nano, STUDY, RunResources()).full_depth_point)
    assert make_decoder_on_judge_model(request).stepper is make_reference_decoder(request).stepper is nano.stepper


def test_a_request_names_the_folder_that_an_engine_loads():
    """A bundled model lies in its own folder; random weights are saved once."""
    bundled, random = (ModelIsolation(load(name)) for name in ("emad-nano", "random:emad-nano"))
    assert bundled.ref.folder == str(weights_folder() / "emad-nano")
    assert random.ref.folder == random.ref.folder != bundled.ref.folder
    assert load(random.ref.folder).fingerprint == random.ref.load().fingerprint
    assert hash_weights(load(random.ref.folder).model) == hash_weights(random.ref.load().model)


def test_a_saved_model_goes_with_the_process():
    names = "from emad_ref import load; from emad_ref.models.model_spec import find_or_save_folder as find"
    code = f"{names}; print(find(load('random:emad-nano')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    folder = Path(done.stdout.splitlines()[-1])
    assert folder.name.startswith("emad-model-")
    assert not folder.exists()


def told_of(distant, asked, loaded):
    """Return the model as the other side received it."""
    distant.make(Request(ModelRef(loaded.name, lambda: loaded), full_depth(loaded.geometry.layers)))
    return asked[-1].header["model"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
def test_a_stated_precision_declares_no_more_noise_than_is_allowed(dtype):
    """The table's row for bfloat16 is 0.8, more than rounding can need on small logits."""
    loaded = load("random:emad-nano")
    with serve(Engine(lambda *request: ([0], False), window=loaded.stepper.max_positions)) as url:
        distant = RemoteDecoders(parse_address(url, Path(), "decoder"), 10, dtype)
        subject = ModelUnderTest(loaded, Study(), RunResources(distant.make))
        with subject.open_decoder(subject.full_depth_point) as decoder:
            noise = decoder.capabilities.logit_noise
        distant.close()
    assert check_declared_noise(noise, subject.max_declarable_noise).passed
    by_table = 0.0 if dtype is None else tolerance("gpt_neox", dtype, "cuda")
    assert noise == min(by_table, subject.max_declarable_noise)
    assert (noise < by_table) == (dtype == "bfloat16")


def test_a_bundled_model_lies_where_it_is():
    loaded = load("emad-nano", dtype=torch.float64)
    with listening() as (where, asked):
        distant = RemoteDecoders(where, 10)
        assert told_of(distant, asked, loaded) == {
            "name": "emad-nano",
            "folder": str(weights_folder() / "emad-nano"),
            "fingerprint": loaded.fingerprint,
            "dtype": "float64",
            "device": "cpu",
        }
        distant.close()


def test_a_folder_is_named_absolutely(tmp_path, monkeypatch):
    load("random:emad-nano").model.save_pretrained(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert find_safetensors_source_folder(load("mine")) == tmp_path / "mine"
    monkeypatch.chdir("/")


@pytest.mark.parametrize("name", ["random:emad-nano", "control:identity-upper"])
def test_a_model_that_lies_nowhere_is_saved_once(name):
    loaded = load(name, seed=3)
    with listening() as (where, asked):
        distant = RemoteDecoders(where, 10)
        folder = Path(told_of(distant, asked, loaded)["folder"])
        saved = load(str(folder))
        weights, found = loaded.model.state_dict(), saved.model.state_dict()
        assert weights.keys() == found.keys()
        assert all(torch.equal(weights[key], found[key]) for key in weights)
        assert told_of(distant, asked, loaded)["folder"] == str(folder)
        other = Path(told_of(distant, asked, load(name, seed=4))["folder"])
        assert other != folder
        distant.close()


def test_a_checkpoint_of_another_format_is_saved_again(tmp_path):
    """A plain reader cannot read weights in a pickle."""
    loaded = load("random:emad-nano")
    loaded.model.config.save_pretrained(tmp_path)
    torch.save(loaded.model.state_dict(), tmp_path / "pytorch_model.bin")
    assert find_safetensors_source_folder(load(str(tmp_path))) is None


def test_every_part_of_a_request_reaches_our_decoder() -> None:
    stepper = CausalStepper(small_model("gpt_neox"))
    model = ModelRef("small", lambda: SimpleNamespace(stepper=stepper))
    request = Request(model, truncated(LAYERS, 2), seed=3, max_rows=5, temperature=0.7)
    decoder = RunResources().make_decoder(request)
    assert isinstance(decoder, WalkedDecoder)
    assert (decoder.stepper, decoder.point) == (stepper, request.point)
    assert (decoder.seed, decoder.max_rows, decoder.temperature) == (3, 5, 0.7)
