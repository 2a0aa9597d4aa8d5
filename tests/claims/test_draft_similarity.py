"""EMAD-X8 on a small model: cosines and kept drafts, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emad_ref.models.causal import CausalStepper
from pytest_emad.claims.draft_similarity import gather_draft_similarity
from tests.small_measurements import small_evidence
from tests.small_models import LAYERS, small_model


def test_cosines_and_drafts_are_those_of_the_models_own_states() -> None:
    model = small_model("gpt_neox")
    evidence = small_evidence(CausalStepper(model))
    found = gather_draft_similarity(evidence)
    window = evidence.subject.cut_windows("evaluate", 1)[0]
    states: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, given, out: states.append(out[0] if isinstance(out, tuple) else out))
        for layer in model.gpt_neox.layers
    ]
    with torch.inference_mode():
        model(torch.tensor(window.tokens[None, :-1]))
        each = [state[0, window.first_decided :] for state in states]
        top1 = [
            model.get_output_embeddings()(model.gpt_neox.final_layer_norm(state)).argmax(-1).numpy() for state in each
        ]
    for hook in hooks:
        hook.remove()
    for layer in range(LAYERS - 1):
        a, b = each[layer].double().numpy(), each[-1].double().numpy()
        cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
        assert found.cosine[: len(a), layer] == pytest.approx(cosine, abs=1e-5)
        assert (found.kept[: len(a), layer] == (top1[layer] == top1[-1])).all()
    assert 0 < found.kept.mean() < 1
