"""CTranslate2 behind the gate: ``generate_batch`` of the converted folder, for prompts of one length together."""

import json
import tempfile
from functools import cache
from pathlib import Path

import ctranslate2
import numpy as np

from pytest_emad import Completion, TokenDecoder


@cache
def converted(folder):
    out = ctranslate2.converters.TransformersConverter(folder).convert(tempfile.mkdtemp(), force=True)
    return out, json.loads(Path(out, "vocabulary.json").read_text())


class CTranslate2Engine(TokenDecoder):
    def ask(self, prompts, max_new, stop, **settings):
        folder, names = converted(self.request.model.folder)
        engine = ctranslate2.Generator(folder, compute_type="float32", intra_threads=1)  # it reads the seed once
        settings |= {"max_length": max_new, "include_prompt_in_result": False, "return_end_token": True}
        words = [[names[token] for token in prompt] for prompt in prompts]
        return engine.generate_batch(words, end_token=sorted(stop), **settings)

    def continue_row(self, prompt, max_new, stop, seed):
        ctranslate2.set_random_seed(seed)
        drawn = {"sampling_topk": 0, "sampling_temperature": self.temperature} if self.temperature else {}
        row = self.ask([prompt], max_new, stop, return_logits_vocab=True, **drawn)[0]
        return np.array(row.sequences_ids[0]), np.array([np.array(step) for step in row.logits[0]])

    def complete(self, prompts, max_new, stop):
        if self.temperature or len({len(prompt) for prompt in prompts}) > 1:
            return super().complete(prompts, max_new, stop)  # of a ragged batch it returns the ends of longer prompts
        found = self.ask(prompts, max_new, stop)
        return [Completion(np.array(row.sequences_ids[0]), row.sequences_ids[0][-1] in stop) for row in found]


def pytest_emad_make_decoder(config, request):
    return CTranslate2Engine(request)
