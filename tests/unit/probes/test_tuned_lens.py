"""A tuned lens names the model that it belongs to, and every other model refuses it by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.probes.tuned_lens import Translator, TunedLens, attach_lens, get_attached_lens
from emad_ref.replay.replay import replay
from pytest_emad.audit.reference_logits import LogitLens, compute_reference
from tests.random_lenses import FINGERPRINT, drawn_lens
from tests.small_models import LAYERS, VOCABULARY, small_model

POINT = OperatingPoint("p", "f", LAYERS, LAYERS, (2, 4), ((0.5, 0.5),))
TEXT = [TokenSequence(np.arange(20) % VOCABULARY)]


@pytest.fixture
def stepper():
    return CausalStepper(small_model("gpt_neox"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprint": "beef"}, r"^lens\.fingerprint='beef', but expected f00d of this model; fit one"),
        ({"dtype": "float32"}, r"^lens\.dtype='float32', but expected float64 of this model"),
        ({"layers": 12}, r"^lens\.layers=12, but expected 6 of this model"),
    ],
)
def test_a_lens_of_another_model_is_one_clear_error(stepper, change, said):
    with pytest.raises(BadArgument, match=said):
        attach_lens(stepper, replace(drawn_lens(stepper, (2, 4)), **change), FINGERPRINT)
    wider = TunedLens(FINGERPRINT, "float64", LAYERS, {2: Translator((torch.zeros(8, 8),), torch.zeros(8))})
    with pytest.raises(BadArgument, match=r"^lens\.width=8, but expected 32 of this model"):
        attach_lens(stepper, wider, FINGERPRINT)


@pytest.mark.parametrize(
    ("factors", "bias"), [(((3, 4),), 3), (((3, 2), (4, 2)), 3), (((3, 2), (3, 1)), 3), (((3, 0), (3, 0)), 3)]
)
def test_factors_that_make_no_square_matrix_are_refused(factors, bias):
    with pytest.raises(BadArgument, match=r"^translator\.factors="):
        Translator(tuple(torch.zeros(*shape) for shape in factors), torch.zeros(bias))


@pytest.mark.parametrize("layers", [(), (0,), (LAYERS,), (4, 2)])
def test_translators_stand_at_ascending_layers_below_the_last(layers):
    plain = Translator((torch.zeros(3, 3),), torch.zeros(3))
    with pytest.raises(BadArgument, match=r"^lens\.translators=.* some layers in 1–5, ascending"):
        TunedLens("f", "float64", LAYERS, dict.fromkeys(layers, plain))


def test_translators_are_of_one_kind():
    full, low = Translator((torch.zeros(3, 3),), torch.zeros(3)), Translator((torch.zeros(3, 1),) * 2, torch.zeros(3))
    with pytest.raises(BadArgument, match="one width, rank and dtype"):
        TunedLens("f", "float64", LAYERS, {1: full, 2: low})


def test_its_name_depends_on_every_number_and_on_its_model(stepper):
    one = drawn_lens(stepper, (2, 4))
    assert one.digest == drawn_lens(stepper, (2, 4)).digest
    bias = one.translators[4].bias.clone()
    bias[-1] += 1e-9
    changed = replace(one, translators={2: one.translators[2], 4: replace(one.translators[4], bias=bias)})
    moved = replace(one, translators={2: one.translators[2], 5: one.translators[4]})
    others = (changed, moved, replace(one, fingerprint="beef"), replace(one, dtype="float32"), replace(one, layers=7))
    assert len({each.digest for each in (one, *others)}) == 6


def test_a_point_whose_lens_is_not_attached_cannot_be_read(stepper):
    for read in (lambda p: WalkedDecoder(stepper, p), lambda p: take_trace(stepper, TEXT, lens=p.lens)):
        with pytest.raises(BadArgument, match=r"^point\.lens='0123456789ab', .* attached to this model \(none is\)"):
            read(replace(POINT, lens="0123456789abcdef"))
    name = attach_lens(stepper, drawn_lens(stepper, (2, 4)), FINGERPRINT)
    with pytest.raises(BadArgument, match=name[:12]):
        get_attached_lens(stepper, "feed")
    with pytest.raises(BadArgument, match=r"^point\.lens='feed'"):
        get_attached_lens(CausalStepper(stepper.model), "feed")


def test_a_probe_without_a_translator_is_refused(stepper):
    name = attach_lens(stepper, drawn_lens(stepper, (2,)), FINGERPRINT)
    with pytest.raises(BadArgument, match=r"^point\.probes=\[4\], but expected layers that its lens translates \(2\)"):
        WalkedDecoder(stepper, replace(POINT, lens=name))


def test_a_trace_decides_points_of_its_own_lens_alone(stepper):
    name = attach_lens(stepper, drawn_lens(stepper, (2, 4)), FINGERPRINT)
    raw, tuned = take_trace(stepper, TEXT), take_trace(stepper, TEXT, lens=name)
    with pytest.raises(BadArgument, match=r"^point\.lens=None, .* the lens of this trace"):
        replay(tuned, POINT)
    with pytest.raises(BadArgument, match=r"take one through its lens"):
        replay(raw, replace(POINT, lens=name))
    assert replay(tuned, full_depth(LAYERS)).depth.tolist() == [LAYERS] * 19, "the last layer is the same in both"
    with pytest.raises(BadArgument, match=r"^rules="):
        take_trace(stepper, TEXT, lens=name, rules=[POINT])


def test_logits_alone_cannot_lead_a_lens():
    lens = LogitLens(lambda tokens: np.zeros((len(tokens), LAYERS, VOCABULARY)))
    with pytest.raises(BadArgument, match="entropy_nats/full/tuned lens"):
        compute_reference(lens, TEXT[0].tokens, replace(POINT, lens="ab"))
