"""ONNX Runtime behind the gate: the model exported by ``torch.onnx``, which reads the whole history for each token."""

import io
from functools import cache

import numpy as np
import onnxruntime
import torch

from emad_ref import TokenLogProbs, load
from pytest_emad import Completion, TokenDecoder


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


@cache
def exported(name):
    model, tokens = Logits(load(name).model).eval(), torch.ones(1, 7, dtype=torch.long)
    free = {"ids": {1: torch.export.Dim("tokens")}}
    program = torch.onnx.export(model, (tokens,), input_names=["ids"], dynamic_shapes=free, dynamo=True, verbose=False)
    file = io.BytesIO()
    program.save(file)
    return onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])


class OnnxEngine(TokenDecoder):
    def __init__(self, request):
        super().__init__(request)
        self.session = exported(request.model.name)

    def continued(self, prompt, max_new, stop, seed=0):
        tokens, shown, rng = list(prompt), [], np.random.default_rng(seed)
        while len(shown) < max_new and not (shown and tokens[-1] in stop):
            (logits,) = self.session.run(None, {"ids": np.array(tokens, dtype=np.int64)[None]})
            shown.append(logits[0, -1].astype(np.float64))
            noise = self.temperature * rng.gumbel(size=len(shown[-1]))  # the argmax is a draw at this temperature
            tokens.append(int((shown[-1] + noise).argmax()))
        return np.array(tokens[len(prompt) :]), np.array(shown)

    def complete(self, prompts, max_new, stop):
        rows = [self.continued(each, max_new, stop, self.row_seed(row))[0] for row, each in enumerate(prompts)]
        return [Completion(tokens, int(tokens[-1]) in stop) for tokens in rows]

    def log_probs(self, prompts, max_new, top):
        rows = [self.continued(each.tokens, max_new, ()) for each in prompts]
        return [TokenLogProbs.of_logits(*row, top) for row in rows]


def pytest_emad_make_decoder(config, request):
    return OnnxEngine(request)
