"""tide-inference (PyPI, 0.2.1) behind the gate: its exit rule, and the speed-up that it logs, stated as its claim."""

import tempfile
from functools import cache
from itertools import islice
from unittest.mock import patch

import numpy as np
import TIDE
import torch

from emad_ref import StatedRule, Unsupported, load
from emad_ref.text.corpora import iterate_corpus_documents as documents
from pytest_emad import Completion, TokenDecoder

CONVERGED = 0.4  # cosine to the last state; at its default of 0.98 the bundled models never exit early


@cache
def routers(name, layers):
    path, loaded = tempfile.mkdtemp() + "/router.pt", load(name)
    loaded.tokenizer.pad_token = loaded.tokenizer.eos_token
    config = TIDE.TIDEConfig(checkpoint_interval=max(1, layers // 4), min_layers=0, convergence_threshold=CONVERGED)
    texts = {"_load_calibration_texts": lambda *_: list(islice(documents("world:premise", "calibrate"), 200))}
    with patch.dict(TIDE.calibrate.__globals__, texts):
        TIDE.calibrate(loaded.model, loaded.tokenizer, config=config, save_path=path)
    return path


class TideEngine(TokenDecoder):
    def __init__(self, request):
        super().__init__(request)
        if request.temperature:
            raise Unsupported("greedy only: it draws from the process's own generator")
        config = TIDE.TIDEConfig(exit_threshold=0.85 if self.own_rule else 2, min_layers=0)
        layers = request.point.layers
        self.engine = TIDE.TIDE(request.model.load().model, routers(request.model.name, layers), config)
        if self.own_rule:  # what it logs of a request
            self.continue_row(np.arange(3, 11), 64, frozenset(), 0)
            exits, tokens = (log := self.engine.last_stats).exits_per_layer, log.total_tokens
            share = 1 - sum((layers - layer - 1) * n for layer, n in exits.items()) / (layers * tokens)
            self.stated = StatedRule("exit at 0.85", saved_blocks=1 - share, speedup=1 / share)

    def continue_row(self, prompt, max_new, stop, seed):
        tokens, end = torch.tensor(np.asarray(prompt))[None], len(prompt) + max_new
        while tokens.shape[1] < end:  # it ends at token 2, whatever that is
            tokens = self.engine.generate(tokens, max_new_tokens=end - tokens.shape[1], temperature=0.0)
        return Completion.cut_at_stop(tokens[0, len(prompt) :].numpy(), stop).tokens, None


def pytest_emad_make_decoder(config, request):
    return TideEngine(request)
