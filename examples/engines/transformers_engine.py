"""transformers' own ``generate``; ``EMAD_GENERATE``: dynamic, static, lookup, early-exit, int8 or bfloat16."""

import os

import torch
from transformers import GenerationConfig

from emad_ref import Capabilities, TokenLogProbs
from emad_ref.models.quantisation import int8_copy
from pytest_emad import Completion, TokenDecoder
from pytest_emad.audit.tolerances import tolerance

SETTINGS = {
    "static": {"cache_implementation": "static"},
    "lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2},
    "early-exit": {"assistant_early_exit": 1},
}


class TransformersEngine(TokenDecoder):
    def __init__(self, request, kind):
        super().__init__(request)
        loaded = request.model.load()
        self.model, self.settings = (int8_copy(loaded) if kind == "int8" else loaded).model, SETTINGS.get(kind, {})
        self.model.generation_config = GenerationConfig()  # or its own ends of text would end rows
        if kind == "bfloat16":
            self.model.to(torch.bfloat16)
        if kind in ("bfloat16", "int8"):  # what bfloat16 needs is the most that may be declared
            noise = tolerance(self.model.config.model_type, "bfloat16", self.model.device.type)
            self.capabilities = Capabilities(counted=False, logit_noise=noise)

    def ask(self, prompt, max_new, stop, seed=0, **settings):
        ids = torch.tensor(prompt, device=self.model.device)[None]
        ends = {"eos_token_id": sorted(stop) or None, "pad_token_id": 0, "max_new_tokens": max_new}
        drawn = {"do_sample": True, "temperature": self.temperature, "top_k": 0} if self.temperature else {}
        config = GenerationConfig(**ends, **drawn, **self.settings, **settings, return_dict_in_generate=True)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            return self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)

    def complete(self, prompts, max_new, stop):
        rows = [self.ask(each, max_new, stop, self.row_seed(row)).sequences[0] for row, each in enumerate(prompts)]
        new = [row[len(each) :].cpu().numpy() for row, each in zip(rows, prompts, strict=True)]
        return [Completion(tokens, int(tokens[-1]) in stop) for tokens in new]

    def log_probs(self, prompts, max_new, top):
        rows = []
        for prompt in prompts:
            found = self.ask(prompt.tokens, max_new, frozenset(), output_logits=True)
            logits = torch.cat(found.logits).double().cpu().numpy()
            tokens = found.sequences[0, len(prompt.tokens) :].cpu().numpy()
            rows.append(TokenLogProbs.of_logits(tokens, logits, top))
        return rows


def pytest_emad_make_decoder(config, request):
    return TransformersEngine(request, os.environ.get("EMAD_GENERATE", "dynamic"))
