"""CTranslate2 behind the gate: ``generate_batch`` of the converted folder, for prompts of one length together."""

import json
import tempfile
from functools import cache
from itertools import groupby
from pathlib import Path

import ctranslate2
import numpy as np

from emad_ref import TokenLogProbs
from pytest_emad import Completion, TokenDecoder


@cache
def converted(name):
    return Path(ctranslate2.converters.TransformersConverter(name).convert(tempfile.mkdtemp(), force=True))


class CTranslate2Engine(TokenDecoder):
    def __init__(self, request):
        super().__init__(request)
        self.folder = converted(request.model.name)
        self.names = json.loads((self.folder / "vocabulary.json").read_text())
        self.engine = self.started()

    def started(self):
        return ctranslate2.Generator(str(self.folder), compute_type="float32", intra_threads=1, inter_threads=1)

    def ask(self, prompts, max_new, stop, **settings):
        start, ends = [[self.names[token] for token in prompt] for prompt in prompts], sorted(stop)
        settings |= {"max_length": max_new, "return_end_token": True, "include_prompt_in_result": False}
        return self.engine.generate_batch(start, end_token=ends, **settings)

    def complete(self, prompts, max_new, stop):
        found, order = {}, sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        for _, rows in groupby(order, key=lambda row: (len(prompts[row]), self.temperature and row)):
            together, drawn = list(rows), {}  # of a ragged batch it returns the end of longer prompts, too
            if self.temperature:
                ctranslate2.set_random_seed(self.row_seed(together[0]))
                self.engine = self.started()  # its thread reads the seed once
                drawn = {"sampling_topk": 0, "sampling_temperature": self.temperature}
            found |= zip(together, self.ask([prompts[row] for row in together], max_new, stop, **drawn), strict=True)
        tokens = [np.array(found[row].sequences_ids[0]) for row in range(len(prompts))]
        return [Completion(row, int(row[-1]) in stop) for row in tokens]

    def log_probs(self, prompts, max_new, top):
        rows = [self.ask([each.tokens], max_new, (), return_logits_vocab=True)[0] for each in prompts]
        logits = [np.array([np.array(step) for step in row.logits[0]]) for row in rows]
        tokens = [np.array(row.sequences_ids[0]) for row in rows]
        return [TokenLogProbs.of_logits(*row, top) for row in zip(tokens, logits, strict=True)]


def pytest_emad_make_decoder(config, request):
    return CTranslate2Engine(request)
