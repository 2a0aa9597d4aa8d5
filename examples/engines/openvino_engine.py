"""OpenVINO GenAI behind the gate: continuous batching of the folder that ``optimum-cli`` exports, in float32."""

import os
import subprocess
import tempfile
from functools import cache

import numpy as np
import openvino
import openvino_genai as genai

from pytest_emad import Completion, TokenDecoder

EXPORT = ["export", "openvino", "--task", "text-generation-with-past", "--weight-format", "fp32"]
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


@cache
def started(folder):
    optimum, out = os.environ.get("EMAD_OPTIMUM", "optimum-cli"), tempfile.mkdtemp()  # it needs an older transformers
    subprocess.run([optimum, *EXPORT, "-m", folder, out], check=True, stdout=subprocess.DEVNULL)
    batches = genai.SchedulerConfig()
    batches.cache_size, batches.enable_prefix_caching = 1, "EMAD_PREFIX_CACHING" in os.environ
    return genai.ContinuousBatchingPipeline(out, batches, "CPU", FLOAT32)


class OpenVINOEngine(TokenDecoder):
    def complete(self, prompts, max_new, stop):
        seeds, told = map(self.row_seed, range(len(prompts))), {"max_new_tokens": max_new, "ignore_eos": not stop}
        asked = [genai.GenerationConfig(rng_seed=seed, do_sample=bool(self.temperature), **told) for seed in seeds]
        for config in asked:
            config.temperature, config.stop_token_ids = self.temperature or 1.0, stop
            config.eos_token_id = min(stop, default=-1)  # -1 would end rows at the model's own end of text, too
        found = started(self.request.model.folder).generate([openvino.Tensor(each[None]) for each in prompts], asked)
        rows = [np.array(row.m_generation_ids[0]) for row in found]
        return [Completion(tokens, bool(len(tokens)) and int(tokens[-1]) in stop) for tokens in rows]


def pytest_emad_make_decoder(config, request):
    return OpenVINOEngine(request)
