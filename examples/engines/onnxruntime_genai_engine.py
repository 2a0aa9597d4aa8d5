"""ONNX Runtime GenAI behind the gate: the float32 graph of its model builder, its K/V cache and its search."""

import subprocess
import sys
import tempfile
from functools import cache

import numpy as np
import onnxruntime_genai as og

from pytest_emad import TokenDecoder

# the builder pads with the end of text, and attention drops such ids at the end of a prompt
SETTINGS = '{"model": {"pad_token_id": -1, "eos_token_id": 0}}'


@cache
def built(folder):
    build = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu", "-i", folder]
    subprocess.run([*build, "-o", (out := tempfile.mkdtemp())], check=True, stdout=subprocess.DEVNULL)
    config = og.Config(out)
    config.overlay(SETTINGS)
    return og.Model(config)


class OnnxRuntimeGenAIEngine(TokenDecoder):
    def continue_row(self, prompt, max_new, stop, seed):
        params, tokens, logits = og.GeneratorParams(model := built(self.request.model.folder)), [], []
        drawn = {"do_sample": True, "temperature": self.temperature, "top_k": 0} if self.temperature else {}
        params.set_search_options(max_length=len(prompt) + max_new, random_seed=seed, **drawn)
        (generator := og.Generator(model, params)).append_tokens(prompt.astype(np.int32))
        while not generator.is_done() and not (tokens and tokens[-1] in stop):
            logits.append(generator.get_logits()[0, -1].copy())
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        if len(tokens) < max_new and tokens[-1] not in stop:  # an end of text, which no setting ignores
            new, more = self.continue_row(np.append(prompt, tokens), max_new - len(tokens), stop, seed + 1)
            return np.append(tokens, new), np.concatenate([logits, more])
        return np.array(tokens), np.array(logits)


def pytest_emad_make_decoder(config, request):
    return OnnxRuntimeGenAIEngine(request)
