"""Loading a model by name: folder, hub, bundled or random, and errors for unknown names; without network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from emad_ref.calibration.trace import compute_layer_logits
from emad_ref.errors import BadArgument
from emad_ref.models import bundled, loading
from emad_ref.models.bundled import bundled_model_names
from emad_ref.models.causal import CausalStepper
from emad_ref.models.fingerprint import fingerprint_of
from emad_ref.models.geometry import published_geometry
from emad_ref.models.loading import load
from emad_ref.models.model_spec import ModelSpec
from emad_ref.models.names import HUB, ModelUnavailable, require_weights_available
from emad_ref.models.stepper import Stepper
from tests.devices import FIRST, SECOND, two_devices
from tests.small_models import small_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "mine"
    small_model("gpt_neox", torch.float32).save_pretrained(place)
    tokens = {f"t{i}": i for i in range(100)} | {"<end>": 100}
    backend = Tokenizer(models.WordLevel(tokens, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(place)
    return place


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use an empty cache and offline mode, as with HF_HUB_OFFLINE=1 (read when huggingface_hub is imported)."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))


class TestFolder:
    def test_weights_tokenizer_and_geometry(self, folder: Path) -> None:
        loaded = load(str(folder))
        ids = torch.arange(5)[None]
        with torch.inference_mode():
            assert torch.equal(loaded.model(ids).logits, small_model("gpt_neox", torch.float32)(ids).logits)
        assert loaded.tokenizer.eos_token_id == 100
        assert not loaded.model.training
        assert loaded.trained
        assert loaded.geometry.layers == 6
        assert json.loads(json.dumps(loaded.provenance))["source"] == "folder"
        facts = json.loads(json.dumps(loaded.facts))
        assert facts.items() >= loaded.provenance.items()
        assert (facts["fingerprint"], facts["layers"], facts["trained"]) == (loaded.fingerprint, 6, True)
        assert facts["parameters"] == sum(p.numel() for p in loaded.model.parameters())
        CausalStepper(loaded.model)

    def test_a_backend_is_kept_and_said(self, folder: Path) -> None:
        for backend, steps in (("fast", True), ("eager", True), ("walked", False)):
            loaded = load(str(folder), backend=backend)
            assert loaded.facts["backend"] == loaded.provenance["backend"] == backend
            assert all((step is not None) == steps for step in loaded.stepper._steps)
        again = ModelSpec.from_loaded(loaded).load()
        assert again.provenance["backend"] == "walked"
        with pytest.raises(BadArgument, match="backend='other', but expected one of fast, eager, walked"):
            load(str(folder), backend="other")

    def test_float32_unless_asked(self, folder: Path) -> None:
        assert load(str(folder)).model.dtype == torch.float32
        loaded = load(str(folder), dtype=torch.float64)
        assert loaded.model.dtype == torch.float64
        assert loaded.provenance["dtype"] == "float64"

    def test_experts_load_in_float64_too(self, tmp_path: Path) -> None:
        """Their default, one grouped product, has no float64 kernel."""
        small_model("mixtral", torch.float32).save_pretrained(tmp_path / "experts")
        ids = torch.arange(9)[None]
        double, single = (load(str(tmp_path / "experts"), dtype=dtype) for dtype in (torch.float64, torch.float32))
        with torch.inference_mode():
            assert (double.model(ids).logits - single.model(ids).logits).abs().max() < 1e-4
        assert double.stepper.geometry.experts == 4

    def test_without_a_tokenizer_it_is_none(self, tmp_path: Path) -> None:
        small_model("gpt_neox", torch.float32).save_pretrained(tmp_path / "bare")
        assert load(str(tmp_path / "bare")).tokenizer is None

    def test_bin_weights_are_read_without_running_code(self, folder: Path) -> None:
        state = small_model("gpt_neox", torch.float32).state_dict()
        (folder / "model.safetensors").unlink()
        torch.save(state, folder / "pytorch_model.bin")
        assert load(str(folder)).geometry.layers == 6

        class Payload:
            def __reduce__(self) -> Any:
                return sys.exit, ("a pickle ran",)

        torch.save({**state, "x": Payload()}, folder / "pytorch_model.bin")
        with pytest.raises(BadArgument, match="tensors and nothing else"):
            load(str(folder))

    def test_missing_weights_are_named(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(
            ModelUnavailable, match=r"weights \(model\.safetensors or its shards\) are missing: fetch it"
        ):
            load(str(folder))

    def test_a_family_that_cannot_be_walked_is_refused_before_its_weights(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "bloom", "hidden_size": 32}')
        with pytest.raises(BadArgument, match=r"model_type='bloom'.*gpt_neox.*add its row to .*families\.py"):
            load(str(tmp_path))
        (tmp_path / "config.json").write_text('{"model_type": "falcon", "alibi": true}')
        with pytest.raises(BadArgument, match="alibi=True, but expected False: only its rotary variants"):
            load(str(tmp_path))

    def test_a_family_that_needs_foreign_code_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "brand_new"}')
        with pytest.raises(BadArgument, match="without code from the repository"):
            load(str(tmp_path))

    def test_a_revision_belongs_to_the_hub(self, folder: Path) -> None:
        with pytest.raises(BadArgument, match="revision='main', but expected none, for only the hub has revisions"):
            load(str(folder), revision="main")
        for name in (f"{folder}@main", "random:pythia-70m@main", "control:identity-upper@main"):
            with pytest.raises(BadArgument, match=r"revision='main'.*is not on the hub"):
                load(name)

    def test_a_folder_may_have_an_at_in_its_name(self, folder: Path) -> None:
        renamed = folder.rename(folder.parent / "mine@home")
        assert load(str(renamed)).provenance["source"] == "folder"

    def test_shards_are_one_model_and_a_missing_one_is_named(self, folder: Path) -> None:
        whole = load(str(folder)).fingerprint
        (folder / "model.safetensors").unlink()
        small_model("gpt_neox", torch.float32).save_pretrained(folder, max_shard_size="50KB")
        shards = sorted(folder.glob("model-*.safetensors"))
        assert len(shards) > 2
        assert load(str(folder)).fingerprint == whole
        shards[1].unlink()
        with pytest.raises(
            ModelUnavailable, match=rf"index\.json names {shards[1].name}, not in the folder \(1 missing\)"
        ):
            load(str(folder))


class TestPlacement:
    """``device="auto"``. Further devices are simulated: other plans replace accelerate's."""

    @pytest.fixture(autouse=True)
    def planned(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        accelerate = pytest.importorskip("accelerate", reason="an optional package")
        plan: dict[str, Any] = {"": "cpu"}
        monkeypatch.setattr(accelerate, "infer_auto_device_map", lambda *_, **__: dict(plan))
        return plan

    def test_without_an_accelerator_it_is_the_model_on_the_cpu(self, folder: Path) -> None:
        loaded, plain = load(str(folder), device="auto"), load(str(folder))
        assert loaded.fingerprint == plain.fingerprint
        assert loaded.provenance["placement"] == {"": "cpu"} == plain.provenance["placement"]
        ids = torch.arange(5)[None]
        with torch.inference_mode():
            assert torch.equal(loaded.model(ids).logits, plain.model(ids).logits)
        assert loaded.stepper.device.type == "cpu"

    def test_what_does_not_fit_is_refused_and_not_offloaded(
        self, folder: Path, planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        planned.clear()
        planned.update({"gpt_neox": "cpu", "embed_out": "disk"})
        with pytest.raises(BadArgument, match=r"device='auto', but expected memory for all.*no room for embed_out;"):
            load(str(folder), device="auto")
        monkeypatch.setattr("accelerate.utils.get_balanced_memory", lambda *_, **__: {0: 1, "cpu": 1})
        planned.update({"gpt_neox": 0, "embed_out": "cpu"})
        with pytest.raises(BadArgument, match="no room for embed_out;"):
            load(str(folder), device="auto")

    def test_spread_over_devices_it_is_walked(self, folder: Path, planned: dict[str, Any]) -> None:
        """accelerate's plan for two devices, on tensors that carry their device."""
        planned.clear()
        planned.update({"gpt_neox": str(FIRST), "lm_head": str(SECOND)})
        plain = load(str(folder))
        ids = np.arange(6)
        with two_devices():
            spread = load(str(folder), device="auto")
            assert spread.fingerprint == plain.fingerprint
            assert spread.provenance["placement"] == planned == spread.facts["placement"]
            assert spread.stepper.device == SECOND
            mine = compute_layer_logits(spread.stepper, ids)
        assert np.array_equal(mine, compute_layer_logits(plain.stepper, ids))

    def test_without_accelerate_it_is_named(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loading, "find_spec", lambda name: None)
        with pytest.raises(BadArgument, match=r"device='auto', but expected the package accelerate; pip install"):
            load(str(folder), device="auto")


class TestHub:
    @pytest.mark.parametrize(
        ("refusal", "said"),
        [
            (GatedRepoError, r"it is gated: accept its terms.*hf auth login"),
            (RepositoryNotFoundError, r"the hub has no such repository, or it is private.*hf auth login"),
            (RevisionNotFoundError, r"it has no such branch, tag or commit"),
        ],
    )
    def test_what_the_hub_refuses_is_explained(self, monkeypatch: pytest.MonkeyPatch, refusal: Any, said: str) -> None:
        def refuse(*_: Any, **__: Any) -> str:
            raise refusal("403 Client Error.", response=SimpleNamespace(headers={}, request=None))

        monkeypatch.setattr(loading, "is_hub_reachable", lambda: True)
        monkeypatch.setattr(loading, "hf_hub_download", refuse)
        with pytest.raises(ModelUnavailable, match=rf"hub repository owner/model could not be read: {said}") as caught:
            load("owner/model")
        assert "download it elsewhere" in str(caught.value)

    @pytest.mark.parametrize("name", ["pythia-410m", "somebody/some-model"])
    def test_an_unreachable_hub_says_what_to_do(self, no_hub: None, name: str) -> None:
        with pytest.raises(ModelUnavailable, match=r"download it elsewhere.*pass the folder") as caught:
            load(name)
        assert name in str(caught.value)
        assert HUB.get(name, name) in str(caught.value)

    def test_a_revision_may_stand_behind_the_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def refuse(place: str, file: str, **where: Any) -> str:
            asked.append((place, where["revision"]))
            raise RevisionNotFoundError("404 Client Error.", response=SimpleNamespace(headers={}, request=None))

        monkeypatch.setattr(loading, "hf_hub_download", refuse)
        for name, revision in (("pythia-410m@step3000", None), ("a/b@refs/pr/1", None), ("pythia-410m@x", "x")):
            with pytest.raises(ModelUnavailable, match="it has no such branch, tag or commit"):
                load(name, revision=revision)
        assert asked == [("EleutherAI/pythia-410m", "step3000"), ("a/b", "refs/pr/1"), ("EleutherAI/pythia-410m", "x")]

    def test_a_revision_is_named_once_and_not_left_empty(self) -> None:
        with pytest.raises(BadArgument, match=r"revision='y', but expected 'x', as the name pythia-410m@x says"):
            load("pythia-410m@x", revision="y")
        with pytest.raises(BadArgument, match=r"name='pythia-410m@', but expected a branch, tag or commit"):
            load("pythia-410m@")

    @pytest.mark.parametrize("name", ["pythia-41m", "./nowhere", "/nowhere/else", "", " ", "x" * 300, "a\0b"])
    def test_an_unknown_name_lists_the_known(self, name: str) -> None:
        with pytest.raises(BadArgument, match=r"pythia-410m.*random:NAME"):
            load(name)

    def test_every_short_name_has_a_geometry(self) -> None:
        for name in HUB:
            assert published_geometry(name).layers > 0


class TestBundled:
    @pytest.fixture
    def bundle(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(bundled, "weights_folder", lambda: folder.parent)
        return folder.name

    def test_named_by_folder(self, bundle: str) -> None:
        assert bundled_model_names() == (bundle,)
        loaded = load(bundle)
        assert loaded.bundled
        assert loaded.trained

    def test_random_weights_keep_its_tokenizer(self, bundle: str) -> None:
        loaded = load(f"random:{bundle}")
        assert loaded.tokenizer is not None
        assert not loaded.trained
        assert loaded.geometry == load(bundle).geometry
        assert loaded.fingerprint != load(bundle).fingerprint

    def test_the_control_reads_with_its_tokenizer(self, bundle: str) -> None:
        assert load("control:identity-upper").tokenizer is not None


def test_every_bundled_model_that_can_be_walked_is() -> None:
    for name in bundled_model_names():
        loaded = load(name)
        assert loaded.stepper.layers == loaded.geometry.layers
        assert loaded.tokenizer is not None


def test_a_bundled_model_loads_without_a_bar_and_others_keep_theirs(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load("emad-nano")
    assert "Loading weights" not in capfd.readouterr().err
    load(str(folder))
    assert "Loading weights" in capfd.readouterr().err


class TestRandom:
    def test_published_geometry_without_a_download(self, no_hub: None) -> None:
        loaded = load("random:pythia-70m")
        assert loaded.geometry == published_geometry("pythia-70m")
        assert not loaded.trained
        assert loaded.tokenizer is None
        assert loaded.provenance["seed"] == 0

    def test_layers_matter(self) -> None:
        stepper = CausalStepper(load("control:identity-upper", dtype=torch.float64).model)
        states = control_states(stepper)
        for layer in range(1, loading.IDENTITY_ABOVE + 1):
            assert float((states[layer] - states[layer - 1]).norm() / states[layer - 1].norm()) > 0.05

    def test_the_seed_draws_the_weights_and_touches_no_global_state(self) -> None:
        torch.manual_seed(5)
        before = torch.random.get_rng_state()
        first, again, other = (load("control:identity-upper", seed=seed).fingerprint for seed in (0, 0, 1))
        assert first == again != other
        assert torch.equal(before, torch.random.get_rng_state())

    def test_an_unknown_geometry_is_refused(self) -> None:
        with pytest.raises(BadArgument, match=r"random: and one of.*pythia-70m"):
            load("random:pythia-71m")
        with pytest.raises(BadArgument, match=r"--emad-model='random:emad-nan', .*; nearest: random:emad-nano"):
            require_weights_available("random:emad-nan", "--emad-model")


def control_states(stepper: Stepper) -> list[torch.Tensor]:
    with torch.inference_mode():
        inputs = stepper.prepare_forward(np.arange(6)[None], None)
        states = [stepper.embed(torch.arange(6)[None], inputs)]
        for layer in range(1, stepper.layers + 1):
            states.append(stepper.run_layers(states[-1], layer - 1, layer, inputs))
    return states


def test_the_control_loses_nothing_above_layer_four() -> None:
    states = control_states(CausalStepper(load("control:identity-upper").model))
    assert all(torch.equal(state, states[-1]) for state in states[4:])
    assert not torch.equal(states[3], states[4])


class TestFingerprint:
    def test_one_weight_one_config_value_one_token(self, folder: Path) -> None:
        loaded = load(str(folder))
        seen = {loaded.fingerprint}
        with torch.no_grad():
            loaded.model.get_output_embeddings().weight[0, 0] += 1
        seen.add(fingerprint_of(loaded.model, loaded.tokenizer))
        loaded.model.config.layer_norm_eps *= 2
        seen.add(fingerprint_of(loaded.model, loaded.tokenizer))
        loaded.tokenizer.add_tokens(["new"])
        seen.add(fingerprint_of(loaded.model, loaded.tokenizer))
        assert len(seen) == 4

    def test_the_same_wherever_it_lies(self, folder: Path, tmp_path: Path) -> None:
        moved = tmp_path / "moved"
        loaded = load(str(folder))
        folder.rename(moved)
        assert load(str(moved)).fingerprint == loaded.fingerprint
