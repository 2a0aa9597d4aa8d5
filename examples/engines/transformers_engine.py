"""transformers' own ``generate`` behind the gate: ``EMAD_GENERATE`` names a cache (dynamic, static) or bfloat16."""

import os

import torch
from transformers import GenerationConfig

from emad_ref import Capabilities, Completion, TokenDecoder, TokenLogProbs
from emad_ref.audit.tolerances import tolerance


class TransformersEngine(TokenDecoder):
    def __init__(self, request, kind):
        super().__init__(request)
        self.model, self.cache = (
            request.model.load().model,
            {} if kind != "static" else {"cache_implementation": "static"},
        )
        self.model.generation_config = GenerationConfig()  # or its own ends of text would end rows
        if kind == "bfloat16":
            self.model.to(torch.bfloat16)
            noise = tolerance(self.model.config.model_type, "bfloat16", self.model.device.type)
            self.capabilities = Capabilities(counted=False, logit_noise=noise)

    def ask(self, prompt, max_new, stop, seed=0, **settings):
        ids = torch.tensor(prompt, device=self.model.device)[None]
        ends = {"eos_token_id": sorted(stop) or None, "pad_token_id": 0, "max_new_tokens": max_new}
        drawn = {"do_sample": True, "temperature": self.temperature, "top_k": 0} if self.temperature else {}
        config = GenerationConfig(**ends, **drawn, **self.cache, **settings, return_dict_in_generate=True)
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
            best = torch.cat(found.logits).double().log_softmax(dim=-1).topk(top)
            tokens = found.sequences[0, len(prompt.tokens) :].cpu().numpy()
            rows.append(TokenLogProbs(tokens, best.indices.cpu().numpy(), best.values.cpu().numpy()))
        return rows


def pytest_emad_make_decoder(config, request):
    return TransformersEngine(request, os.environ.get("EMAD_GENERATE", "dynamic"))
