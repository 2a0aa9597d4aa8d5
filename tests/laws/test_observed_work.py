"""Observed matrix products equal the reference decoder's counts in every family; uncounted ones are named by layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.models.fast.weight_layout import packed_view
from emad_ref.models.matmul_counter import MatmulCounter
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import HEAD
from pytest_emad.audit.finding import Finding
from pytest_emad.audit.work import ObservedRequest, check_observed_work
from tests.decoders.audited_model import drawn, spread_point, tiny_neox
from tests.decoders.cached_decoder import CachedDecoder
from tests.decoders.planted_defects import DEFECTS, AllLayersThenRoute, ReadsEveryLayer
from tests.small_models import EXPERTS, FAMILIES, LAYERS, VOCABULARY, lay_out_as_large, small_model
from tests.unit.models.test_seq2seq import small_t5, some_sources

pytestmark = pytest.mark.each_value

NEW = 5
UNSAID = {
    "full-depth tokens under shallow depths", "full-depth tokens in generate only", "probes left out of the work"
}  # fmt: skip
ALWAYS = 1e9  # a threshold that every signal passes


def prompts(rows: int = 2, length: int = 6) -> list[Prompt]:
    drawn = np.random.default_rng(4).integers(3, VOCABULARY, (rows, length))
    return [Prompt(tokens) for tokens in drawn]


def at_two(schedule: str = "monotone", layers: int = LAYERS) -> OperatingPoint:
    """Return a point at which every token exits after layer 2."""
    return OperatingPoint("two", "quantile", layers, layers, (2,), ((ALWAYS,),), schedule=schedule)


def watched(model: object, decoder: Decoder, asked: list[Prompt], new: int = NEW) -> ObservedRequest:
    with MatmulCounter(model) as executed:
        record = decoder.generate(asked, new, frozenset())
    return ObservedRequest(asked, executed.rows_by_matrix(), record.work[0])


def found(model: object, decoder: Decoder, asked: list[Prompt], new: int = NEW) -> Finding:
    return check_observed_work([watched(model, decoder, asked, new)])


@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_our_decoder_counts_is_seen(family: str) -> None:
    model = small_model(family, torch.float64)
    decoder = WalkedDecoder(CausalStepper(model), at_two(), max_rows=2)
    seen = watched(model, decoder, prompts())
    assert check_observed_work([seen]).passed is True
    assert seen.work.tokens.tolist() == [2 * (5 + NEW)] * 2 + [2 * 5] * (LAYERS - 2)
    assert max(rows for (layer, _), rows in seen.rows.items() if layer == HEAD) == 2 * NEW
    per_layer = {layer: {rows for (at, _), rows in seen.rows.items() if at == layer} for layer in (1, LAYERS)}
    assert per_layer == {1: {20}, LAYERS: {10}} or family in EXPERTS, "every matrix, not only the most used one"


@pytest.mark.parametrize("schedule", ["free_eager", "free_deferred", "copying"])
def test_fills_are_seen_where_keys_and_values_are_made(schedule: str) -> None:
    model = small_model("gpt_neox")
    seen = watched(model, WalkedDecoder(CausalStepper(model), at_two(schedule), max_rows=2), prompts())
    assert check_observed_work([seen]).passed is True
    if schedule != "free_deferred":
        assert seen.work.fills.sum() > 0
        assert seen.rows[LAYERS, "attention.query_key_value.weight"] > seen.rows[LAYERS, "attention.dense.weight"]


def test_an_encoder_decoders_layers_are_seen_and_its_source_is_no_token() -> None:
    model = small_t5()
    decoder = WalkedDecoder(Seq2SeqStepper(model), at_two(layers=model.config.num_decoder_layers), max_rows=2)
    asked = [Prompt(prompt.tokens, source) for prompt, source in zip(prompts(), some_sources(15, 15), strict=True)]
    assert found(model, decoder, asked).passed is True


def test_packed_weights_taken_apart_are_one_row_each() -> None:
    model = tiny_neox()
    mix = model.gpt_neox.layers[0].attention.query_key_value
    states = torch.ones(4, mix.in_features, dtype=torch.float64)
    with torch.inference_mode(), MatmulCounter(model) as executed:
        for part in mix.weight.chunk(3):
            states @ part.T
        torch.einsum("nd,od->no", states, mix.weight)
        torch.addmm(mix.bias, states, mix.weight.T)
        torch.bmm(states[:, None], mix.weight.T.expand(4, -1, -1))
        mix.weight @ states[0]
    assert executed.rows_by_matrix()[1, "attention.query_key_value.weight"] == pytest.approx(4 + 4 + 4 + 4 + 1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "opt", "gpt_neox"])
def test_weights_side_by_side_are_a_row_each(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference decoder multiplies a single token with all of them at once."""
    model = small_model(family, torch.float32)
    lay_out_as_large(model, monkeypatch)
    seen = watched(model, WalkedDecoder(CausalStepper(model), at_two()), prompts(rows=1))
    assert check_observed_work([seen]).passed is True
    rows = {layer: {rows for (at, _), rows in seen.rows.items() if at == layer} for layer in (1, LAYERS, HEAD)}
    assert rows == {1: {5 + NEW}, LAYERS: {5}, HEAD: {NEW}}


@pytest.mark.parametrize("how", ["by columns", "by rows"])
def test_a_product_with_parts_of_weights_side_by_side_counts_by_each_ones_share(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("llama", torch.float32)  # 32 queries, 16 keys, 16 values of 32 inputs
    attention = model.model.layers[1].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    if how == "by columns":
        lay_out_as_large(model, monkeypatch)
        whole = packed_view([layer.weight for layer in layers])
        assert whole is not None
        assert whole.stride(1) > 64, "with gaps"
    else:
        whole = torch.cat([layer.weight.detach() for layer in layers])
        for layer, part in zip(layers, whole.split([32, 16, 16]), strict=True):
            layer.weight.data = part
    states, names = torch.ones(4, 32), [f"self_attn.{name}_proj.weight" for name in "qkv"]

    def met(weight: torch.Tensor, rows: torch.Tensor) -> list[float]:
        with torch.inference_mode(), MatmulCounter(model) as executed:
            rows @ weight.T if rows.dim() > 1 else weight @ rows
        found = executed.rows_by_matrix()
        assert sum(rows > 0 for rows in found.values()) == sum(found[2, name] > 0 for name in names)
        return [found[2, name] for name in names]

    assert met(whole, states) == pytest.approx([4, 4, 4])
    assert met(whole, states[0]) == pytest.approx([1, 1, 1])
    assert met(whole[:32], states) == pytest.approx([4, 0, 0])
    assert met(whole[24:40], states) == pytest.approx([4 * 8 / 32, 4 * 8 / 16, 0])
    assert met(whole[40:], states) == pytest.approx([0, 4 * 8 / 16, 4])
    assert met(whole[:, 8:], states[:, 8:]) == pytest.approx([3, 3, 3])
    assert met(whole[48:, 16:], states[:, 16:]) == pytest.approx([0, 0, 2])
    assert met(layers[1].weight, states) == pytest.approx([0, 4, 0])
    assert met(layers[2].weight[3:4, 31:], states[:, 31:]) == pytest.approx([0, 0, 4 / 16 / 32])


@pytest.mark.parametrize("name", ["honest", *DEFECTS])
def test_an_honest_decoder_is_witnessed(name: str) -> None:
    """Of the other defects, exactly those that run uncounted work are refuted here too."""
    decoder = (CachedDecoder if name == "honest" else DEFECTS[name][0])(tiny_neox(), spread_point())
    asked, _ = drawn((7,), 1)
    finding = found(tiny_neox(), decoder, asked, 16)
    assert (finding.passed is False) == (name in UNSAID), finding.detail
    if name == "honest":
        assert finding.passed is True


def test_layers_that_all_run_before_a_router_chooses_are_named() -> None:
    decoder = AllLayersThenRoute(tiny_neox(), spread_point(0.5))
    asked, _ = drawn((7,), 1)
    finding = found(tiny_neox(), decoder, asked, 16)
    assert finding.passed is False
    assert "request 0: layer 3 ran for 22 tokens (through " in finding.detail
    assert "but its record counts " in finding.detail


def test_readouts_of_every_layer_are_named() -> None:
    asked, _ = drawn((7,), 1)
    finding = found(tiny_neox(), ReadsEveryLayer(tiny_neox(), spread_point(0.5)), asked, 16)
    assert finding.passed is False
    assert "request 0: the head ran for " in finding.detail


def test_what_runs_elsewhere_is_neither_shown_nor_refuted() -> None:
    other = small_model("gpt_neox", seed=1)
    finding = found(other, WalkedDecoder(CausalStepper(small_model("gpt_neox")), at_two(), max_rows=2), prompts())
    assert finding.passed is None
    assert "of 20 runs of layer 1, 0 were seen" in finding.detail


@pytest.mark.parametrize("layer", range(1, LAYERS + 1))
def test_one_run_more_or_less_than_counted_decides(layer: int) -> None:
    model = small_model("gpt_neox")
    seen = watched(model, WalkedDecoder(CausalStepper(model), at_two(), max_rows=2), prompts())
    for more, passed in ((1, None), (-1, False)):
        tokens = seen.work.tokens.copy()
        tokens[layer - 1] += more
        finding = check_observed_work(
            [seen, ObservedRequest(seen.prompts, seen.rows, replace(seen.work, tokens=tokens))]
        )
        assert finding.passed is passed
        assert f"request 1: {'layer' if more < 0 else 'of'}" in finding.detail
        assert f"layer {layer}" in finding.detail
