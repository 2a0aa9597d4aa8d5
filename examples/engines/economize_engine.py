"""economize behind the gate: lossless prompt lookup; for claims its CALM, and the saving that its own ledger states."""

import os

import economize
import torch
from economize.techniques.dynamic_depth.calm import CalmConfig
from economize.techniques.lookup import LookupConfig

from emad_ref import StatedRule
from pytest_emad import Completion, TokenDecoder

CALM = CalmConfig(threshold=float(os.environ.get("EMAD_CALM", "0.9")))
PROMPT, NEW = torch.arange(3, 11), 64  # the request of whose ledger the saving is stated


class EconomizeEngine(TokenDecoder):
    def __init__(self, request):
        super().__init__(request)
        technique = CALM if self.own_rule else LookupConfig()
        settings = {} if self.own_rule else {"verifier": "rejection" if self.temperature else "greedy"}
        model = request.model.load().model
        self.engine = economize.apply(model, technique, decoding=economize.DecodeConfig(**settings))
        if self.own_rule:
            share = self.engine.decode(PROMPT, NEW).cost_summary()["relative_layer_tokens"]
            self.stated = StatedRule(f"CALM at {CALM.threshold}", saved_blocks=1 - share)

    def complete(self, prompts, max_new, stop):
        rows, drawn = [torch.tensor(prompt) for prompt in prompts], None
        if self.temperature:
            seeds = [self.row_seed(row) for row in range(len(rows))]
            drawn = [economize.TopPSampler(temperature=self.temperature, seed=seed) for seed in seeds]
        found = self.engine.decode_batch(rows, max_new, selectors=drawn, stop=sorted(stop))
        tokens = [row.tokens.numpy() for row in found]
        return [Completion(row, bool(len(row)) and int(row[-1]) in stop) for row in tokens]


def pytest_emad_make_decoder(config, request):
    return EconomizeEngine(request)
