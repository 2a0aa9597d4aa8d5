"""The layered T5 gives the model's own logits for any sources, depths and rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models import geometry
from emad_ref.models.geometry import geometry_of, published_geometry
from emad_ref.models.kv_cache import MissingEntryError
from emad_ref.models.loading import load
from emad_ref.models.seq2seq import EncodedSources, Seq2SeqKVCache, Seq2SeqStepper
from emad_ref.models.stepper import ModelMismatch
from tests.small_models import in_dtype, small_model

LAYERS, VOCABULARY, HEADS, WIDTH, HIDDEN = 6, 101, 4, 12, 32  # heads · d_kv ≠ d_model, decoder deeper than encoder
KINDS = ("t5", "t5_v1_1")
# RMSNorm takes its mean in float32 even here, but of equal inputs: at most 2.5e-14 in 28,000 readouts
EXACT = 1e-9
START, TOKENS = 0, 12


def small_t5(kind: str = "t5", dtype: torch.dtype = torch.float64, attention: str = "sdpa", **sizes: Any) -> Any:
    """Return a random T5 in eval mode whose layers all matter; v1.1 has a gated MLP and an untied head."""
    options = {"t5": {}, "t5_v1_1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}}[kind]
    base = {
        "vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": WIDTH, "d_ff": 48, "num_layers": 3,
        "num_decoder_layers": LAYERS, "num_heads": HEADS, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20, "decoder_start_token_id": START,
    }  # fmt: skip
    config = hf.T5Config(**{**base, **options, **sizes})
    model = hf.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention)
    if kind == "t5_v1_1":
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.1 * noise)
            elif "shared" in name or "relative" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return in_dtype(model, dtype).eval()


def some_sources(*lengths: int, seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCABULARY, n) for n in lengths]


def some_targets(rows: int, n: int = TOKENS) -> Tensor:
    """Return decoder inputs [rows, n] that begin with the start token."""
    ids = torch.randint(2, VOCABULARY, (rows, n), generator=torch.Generator().manual_seed(3))
    ids[:, 0] = START
    return ids


def theirs(model: Any, sources: list[np.ndarray], targets: Tensor, **options: Any) -> Any:
    """Return the model's own output on padded and masked sources."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(s) for s in sources], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(s), dtype=torch.int64) for s in sources], batch_first=True)
    return model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets, use_cache=False, **options)


def at(first: list[int], n: int = 1) -> np.ndarray:
    return np.array(first)[:, None] + np.arange(n)


def states(stepper: Seq2SeqStepper, cache: Seq2SeqKVCache, ids: Tensor, first: list[int], depth: int) -> Tensor:
    inputs = stepper.prepare_forward(at(first, ids.shape[1]), cache)
    return stepper.run_layers(stepper.embed(ids, inputs), 0, depth, inputs)


def advance(
    stepper: Seq2SeqStepper, cache: Seq2SeqKVCache, ids: Tensor, first: list[int], depth: int = LAYERS
) -> Tensor:
    return stepper.logits(states(stepper, cache, ids, first, depth))


def close(mine: Tensor, other: Tensor) -> None:
    assert mine.shape == other.shape
    assert float((mine - other).abs().max()) <= EXACT


@pytest.fixture(scope="module", params=[(kind, kernel) for kind in KINDS for kernel in ("sdpa", "eager")], ids="-".join)
def model(request: pytest.FixtureRequest) -> Any:
    return small_t5(request.param[0], attention=request.param[1])


@pytest.fixture(scope="module")
def stepper(model: Any) -> Seq2SeqStepper:
    return Seq2SeqStepper(model)


@pytest.fixture(scope="module")
def plain() -> Seq2SeqStepper:
    return Seq2SeqStepper(small_t5())


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


# ---------------------------------------------------------------- the model's own numbers


def test_full_depth_and_every_state_are_the_models_own(stepper: Seq2SeqStepper, model: Any) -> None:
    sources, targets = some_sources(15, 6), some_targets(2)
    own = theirs(model, sources, targets, output_hidden_states=True)
    cache = stepper.open_cache(sources)
    inputs = stepper.prepare_forward(at([0, 0], TOKENS), cache)
    hidden = stepper.embed(targets, inputs)
    for layer, state in enumerate(own.decoder_hidden_states[:-1]):  # the last state is already normed
        close(hidden, state)
        hidden = stepper.run_layers(hidden, layer, layer + 1, inputs)
    close(stepper.logits(hidden), own.logits)


def test_layers_sources_and_positions_matter_in_the_test_model(plain: Seq2SeqStepper) -> None:
    """Otherwise these laws would hold without some layers, with another row's source, or without bias."""
    sources, targets = some_sources(15, 6), some_targets(1).expand(2, -1)
    own = theirs(plain.model, sources, targets, output_hidden_states=True)
    for below, above in pairwise(own.decoder_hidden_states[:-1]):
        assert float((above - below).norm() / below.norm()) > 0.05
    assert float((own.logits[0] - own.logits[1]).abs().max()) > 0.1
    plain._bias.relative_attention_bias.weight.mul_(0.5)
    changed = theirs(plain.model, sources, targets).logits
    plain._bias.relative_attention_bias.weight.mul_(2)
    assert float((changed - own.logits).abs().max()) > 0.1


@pytest.mark.parametrize("chunk", [1, 4])
def test_cached_decode_of_ragged_prompts_gives_each_row_what_it_gets_alone(
    stepper: Seq2SeqStepper, model: Any, chunk: int
) -> None:
    """Sources and decoder prompts of three lengths in one batch, compared with the model row by row."""
    sources, lengths = some_sources(15, 6, 1), [1, 5, 3]
    targets = some_targets(3, 5 + 2 * chunk)
    cache = stepper.open_cache(sources, capacity=2)
    inputs = stepper.prepare_forward(at([0, 0, 0], 5), cache, lengths=np.array(lengths))
    prompt = stepper.logits(stepper.run_layers(stepper.embed(targets[:, :5], inputs), 0, LAYERS, inputs))
    decoded = []
    for step in range(0, 2 * chunk, chunk):
        fed = torch.stack([targets[row, n + step : n + step + chunk] for row, n in enumerate(lengths)])
        decoded.append(advance(stepper, cache, fed, [n + step for n in lengths]))
    for row, n in enumerate(lengths):
        alone = theirs(model, [sources[row]], targets[row : row + 1, : n + 2 * chunk]).logits[0]
        close(torch.cat([prompt[row, :n], torch.cat(decoded, dim=1)[row]]), alone)


def test_position_bias_is_the_models_own_beyond_the_first_table(plain: Seq2SeqStepper) -> None:
    inputs = plain.prepare_forward(at([290], 10), plain.open_cache(some_sources(2)))
    own = plain._bias.compute_bias(10, 300, past_seen_tokens=290)
    (arguments,) = inputs.arguments.values()
    mine = arguments["position_bias"]
    seen = torch.ones(10, 300, dtype=torch.bool).tril(290)
    assert torch.equal(mine[0, :, seen], own[0, :, seen])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions_pass_the_check_at_construction(dtype: torch.dtype) -> None:
    for kind in KINDS:
        Seq2SeqStepper(small_t5(kind, dtype))


# ---------------------------------------------------------------- caches


def test_rollback_forgets_targets_and_keeps_sources(plain: Seq2SeqStepper) -> None:
    sources, targets = some_sources(7, 4), some_targets(2)
    cache = plain.open_cache(sources)
    advance(plain, cache, targets[:, :6], [0, 0])
    advance(plain, cache, targets[:, 6:9].flip(1), [6, 6])
    cache.truncate(np.array([6, 4]))
    fed = torch.stack([targets[0, 6:9], targets[1, 4:7]])
    mine = advance(plain, cache, fed, [6, 4])
    own = theirs(plain.model, sources, targets).logits
    close(mine, torch.stack([own[0, 6:9], own[1, 4:7]]))
    assert cache.cross_fills.tolist() == [2 * 7] * LAYERS


def test_dropped_rows_take_their_sources_with_them(plain: Seq2SeqStepper) -> None:
    sources, targets = some_sources(9, 4, 6), some_targets(3)
    cache = plain.open_cache(sources)
    advance(plain, cache, targets[:, :5], [0, 0, 0], depth=2)
    cache.drop_rows(np.array([0]))
    close(
        advance(plain, cache, targets[1:, 5:6], [5, 5], depth=2)[:, 0],
        plain.logits(theirs(plain.model, sources, targets, output_hidden_states=True).decoder_hidden_states[2][1:, 5]),
    )
    assert cache.encoded is not None
    assert cache.encoded.lengths == (4, 6)


def test_a_layer_projects_a_source_when_its_row_first_runs_there(plain: Seq2SeqStepper) -> None:
    """Rows leave, return after a manual fill, and get exactly the layers they reach; padding is charged."""
    sources, targets = some_sources(8, 5), some_targets(2, 2)
    cache = plain.open_cache(sources)
    assert cache.encoder_tokens == 2 * 8
    assert cache.encoder_context == 2 * 8 * 8
    assert cache.cross_fills.tolist() == [0] * LAYERS
    inputs = plain.prepare_forward(at([0, 0]), cache)
    hidden = plain.run_layers(plain.embed(targets[:, :1], inputs), 0, 2, inputs)
    one = inputs.select_rows(inputs.running.keep(np.array([1])))
    plain.run_layers(hidden[1:], 2, 4, one)
    assert cache.cross_fills.tolist() == [16, 16, 8, 8, 0, 0]
    assert cache.cross_context.tolist() == [16, 16, 8, 8, 0, 0]
    assert [layer.row_ids.tolist() for layer in cache.cross] == [[0, 1]] * 2 + [[1]] * 2 + [[]] * 2
    zero = inputs.select_rows(inputs.running.keep(np.array([0])))
    plain.run_layers(hidden[:1], 2, 3, zero)
    assert cache.cross_fills.tolist() == [16, 16, 16, 8, 0, 0]
    assert cache.cross[2].row_ids.tolist() == [0, 1]
    later = plain.prepare_forward(at([1, 1]), cache)
    mine = plain.logits(plain.run_layers(plain.embed(targets[:, 1:], later), 0, 3, later))
    own = theirs(plain.model, sources, targets, output_hidden_states=True).decoder_hidden_states[3]
    close(mine[:, 0], plain.logits(own[:, 1]))
    assert cache.cross_fills.tolist() == [16, 16, 16, 8, 0, 0], "nothing is projected twice"


def test_freed_layers_forget_the_sources_of_rows_above_their_cap(plain: Seq2SeqStepper) -> None:
    sources, targets = some_sources(8, 5), some_targets(2)
    cache = plain.open_cache(sources)
    advance(plain, cache, targets[:, :4], [0, 0])
    cache.free_layers_above(np.array([3, 1]))
    assert [layer.row_ids.tolist() for layer in cache.cross] == [[0, 1], [0], [0], [], [], []]
    inputs = plain.prepare_forward(at([4, 4]), cache)
    hidden = plain.run_layers(plain.embed(targets[:, 4:5], inputs), 0, 1, inputs)
    mine = plain.run_layers(hidden[:1], 1, 3, inputs.select_rows(inputs.running.keep(np.array([0]))))
    close(mine, theirs(plain.model, sources, targets, output_hidden_states=True).decoder_hidden_states[3][:1, 4:5])


def test_a_fill_writes_the_k_and_v_that_a_run_writes(stepper: Seq2SeqStepper) -> None:
    sources, targets = some_sources(7, 3), some_targets(2, 4)
    ran, filled = stepper.open_cache(sources), stepper.open_cache(sources)
    states(stepper, ran, targets, [0, 0], LAYERS)
    hidden = states(stepper, filled, targets, [0, 0], LAYERS - 1)
    stepper.write_kv(hidden, LAYERS, stepper.prepare_forward(at([0, 0], 4), filled))
    for row in range(2):
        for mine, own in zip(filled.layers[-1].row_kv(row), ran.layers[-1].row_kv(row), strict=True):
            close(mine, own)
    assert filled.cross_fills[-1] == 0, "a K/V-only pass does not read the source"
    close(*(advance(stepper, cache, targets[:, :1], [4, 4]) for cache in (filled, ran)))


def test_depth_that_rises_is_refused_before_anything_is_written(plain: Seq2SeqStepper) -> None:
    cache, targets = plain.open_cache(some_sources(5)), some_targets(1)
    states(plain, cache, targets[:, :1], [0], 3)
    with pytest.raises(MissingEntryError, match="layer=4"):
        states(plain, cache, targets[:, 1:2], [1], 4)
    assert [int(layer.row_lengths[0]) for layer in cache.layers] == [1, 1, 1, 0, 0, 0]
    assert cache.cross_fills.tolist() == [5, 5, 5, 0, 0, 0]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], r"sources=\[\], but expected at least one source"),
        ([np.array([4]), None], r"sources\[1\]=None.*T5 reads a source"),
        ([np.array([], dtype=np.int64)], r"sources\[0\]=\[\], but expected integers of shape \[s ≥ 1\]"),
        ([np.array([1.5])], r"sources\[0\]=\[1.5\], but expected integers"),
        ([np.array([[1]])], r"sources\[0\]=\[\[1\]\]"),
        ([np.array([3, VOCABULARY])], rf"sources\[0\]={VOCABULARY}, but expected ids in 0–{VOCABULARY - 1}"),
        ([np.array([-1])], r"sources\[0\]=-1"),
    ],
)
def test_sources_that_cannot_be_read_are_refused(plain: Seq2SeqStepper, sources: Any, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        plain.open_cache(sources)


def test_a_cache_needs_sources(plain: Seq2SeqStepper) -> None:
    for cache in (None, plain.new_cache(1)):
        with pytest.raises(BadArgument, match=r"a cache that holds sources; make it with open_cache\(sources\)"):
            plain.prepare_forward(at([0]), cache)


def test_layers_outside_the_decoder_are_refused(plain: Seq2SeqStepper) -> None:
    cache = plain.open_cache(some_sources(4))
    inputs = plain.prepare_forward(at([0]), cache)
    hidden = plain.embed(some_targets(1, 1), inputs)
    with pytest.raises(BadArgument, match="first, last"):
        plain.run_layers(hidden, 0, LAYERS + 1, inputs)
    with pytest.raises(BadArgument, match=f"layer={LAYERS + 1}"):
        plain.write_kv(hidden, LAYERS + 1, inputs)


def test_models_that_cannot_be_walked_are_refused() -> None:
    with pytest.raises(BadArgument, match="model_type='gpt_neox', but expected t5"):
        Seq2SeqStepper(small_model("gpt_neox"))
    with pytest.raises(BadArgument, match="eval mode"):
        Seq2SeqStepper(small_t5().train())


ENCODE = Seq2SeqStepper.encode
DEFECTS: dict[str, Any] = {
    "position_bias": lambda self, distances: distances.new_zeros(1, HEADS, *distances.shape[1:], dtype=self.dtype),
    "encode": lambda self, sources: EncodedSources(
        (whole := ENCODE(self, sources)).states, (whole.padded_length,) * len(sources)
    ),  # padding of the source is read
    "apply_final_norm": lambda self, hidden: self._final_norm(hidden),  # a tied head without its scale
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_walk_that_is_not_the_models_fails_at_construction(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_t5()
    Seq2SeqStepper(model)
    monkeypatch.setattr(Seq2SeqStepper, name, DEFECTS[name])
    with pytest.raises(ModelMismatch):
        Seq2SeqStepper(model)


# ---------------------------------------------------------------- sizes and loading


@pytest.mark.parametrize("kind", KINDS)
def test_geometry_is_that_of_the_built_model(kind: str) -> None:
    model = small_t5(kind)
    sizes = geometry_of(model.config)
    assert sizes.parameter_count() == sum(p.numel() for p in model.parameters())
    assert (sizes.layers, sizes.encoder_layers, sizes.head_dim, sizes.gated) == (LAYERS, 3, WIDTH, kind != "t5")


def test_published_sizes() -> None:
    """Compares parameters of the checkpoints on the hub."""
    assert {name: published_geometry(f"t5-{name}").parameter_count() for name in ("small", "base", "large")} == {
        "small": 60_506_624, "base": 222_903_552, "large": 737_668_096,
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_loads_with_its_stepper(kind: str, tmp_path: Path) -> None:
    model = small_t5(kind, torch.float32)
    model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path), dtype=torch.float64)
    assert isinstance(loaded.stepper, Seq2SeqStepper)
    assert loaded.opening_token_id == START
    assert loaded.geometry == geometry_of(model.config)
    sources, targets = some_sources(5, 2), some_targets(2)
    mine = advance(loaded.stepper, loaded.stepper.open_cache(sources), targets, [0, 0])
    close(mine, theirs(model.double(), sources, targets).logits)


def test_random_weights_of_a_published_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {**geometry._PUBLISHED["t5-small"], "d_model": 16, "d_ff": 32, "num_heads": 2, "vocab_size": 50}
    monkeypatch.setitem(geometry._PUBLISHED, "t5-small", tiny)
    one, again, other = (load("random:t5-small", dtype=torch.float64, seed=seed) for seed in (0, 0, 1))
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert not one.trained
    assert one.tokenizer is None
    assert one.opening_token_id == 0
    assert one.geometry == published_geometry("t5-small")
    states_ = theirs(one.model, [np.arange(9)], torch.arange(7)[None], output_hidden_states=True).decoder_hidden_states
    for below, above in pairwise(states_[:-1]):
        assert float((above - below).norm() / below.norm()) > 0.05
    assert one.stepper.layers == 6
