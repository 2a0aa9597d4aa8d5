"""ONNX Runtime behind the gate: the model exported by ``torch.onnx``, which reads the whole history for each token."""

import io
from functools import cache

import numpy as np
import onnxruntime
import torch

from emad_ref import load
from pytest_emad import TokenDecoder


@cache
def exported(folder):
    asked = {"input_ids": torch.ones(1, 7, dtype=torch.long), "use_cache": False}
    free, file = {"input_ids": {1: torch.export.Dim("tokens")}, "use_cache": None}, io.BytesIO()
    torch.onnx.export(load(folder).model, kwargs=asked, dynamic_shapes=free, dynamo=True, verbose=False).save(file)
    return onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])


class OnnxEngine(TokenDecoder):
    def continue_row(self, prompt, max_new, stop, seed):
        session, tokens, logits = exported(self.request.model.folder), list(prompt), []
        rng = np.random.default_rng(seed)
        while len(logits) < max_new and not (logits and tokens[-1] in stop):
            (scores,) = session.run(["logits"], {"input_ids": np.array(tokens, dtype=np.int64)[None]})
            logits.append(scores[0, -1].astype(np.float64))
            noise = self.temperature * rng.gumbel(size=len(logits[-1]))  # the argmax is a draw at this temperature
            tokens.append(int((logits[-1] + noise).argmax()))
        return np.array(tokens[len(prompt) :]), np.array(logits)


def pytest_emad_make_decoder(config, request):
    return OnnxEngine(request)
