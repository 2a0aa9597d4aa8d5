"""transformers' own ``generate``; ``EMAD_GENERATE``: dynamic, static, lookup, early-exit, int8 or bfloat16."""

import os

import torch
from transformers import GenerationConfig

from emad_ref import Capabilities
from emad_ref.models.quantisation import int8_copy
from pytest_emad import TokenDecoder
from pytest_emad.audit.tolerances import tolerance

LOOKUP = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}
SETTINGS = {"static": {"cache_implementation": "static"}, "lookup": LOOKUP, "early-exit": {"assistant_early_exit": 1}}


class TransformersEngine(TokenDecoder):
    def __init__(self, request, kind):
        super().__init__(request)
        loaded = request.model.load()
        self.model, self.settings = (int8_copy(loaded) if kind == "int8" else loaded).model, SETTINGS.get(kind, {})
        self.model.generation_config = GenerationConfig()  # or its own ends of text would end rows
        if kind in ("bfloat16", "int8"):  # what bfloat16 needs is the most that may be declared
            self.model.to(torch.bfloat16 if kind == "bfloat16" else self.model.dtype)
            noise = tolerance(self.model.config.model_type, "bfloat16", self.model.device.type)
            self.capabilities = Capabilities(counted=False, logit_noise=noise)

    def continue_row(self, prompt, max_new, stop, seed):
        ids = torch.tensor(prompt, device=self.model.device)[None]
        ends = {"eos_token_id": sorted(stop) or None, "pad_token_id": 0, "max_new_tokens": max_new}
        drawn = {"do_sample": True, "temperature": self.temperature, "top_k": 0} if self.temperature else {}
        config = GenerationConfig(**ends, **drawn, **self.settings, output_logits=True, return_dict_in_generate=True)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            found = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return found.sequences[0, len(prompt) :].cpu().numpy(), torch.cat(found.logits).double().cpu().numpy()


def pytest_emad_make_decoder(config, request):
    return TransformersEngine(request, os.environ.get("EMAD_GENERATE", "dynamic"))
