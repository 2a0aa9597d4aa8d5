"""vLLM's ``LLM`` behind the gate, in float32; its engine runs in a child process, which ends with the run."""

from functools import cache

import numpy as np
from vllm import LLM, SamplingParams

from emad_ref import TokenLogProbs
from pytest_emad import Completion, TokenDecoder


@cache
def started(folder, config):
    # on a CPU a seeded request whose prompt is read in chunks ends the engine: "CPU Generator does not use offset"
    quick = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28, "enable_chunked_prefill": False}
    engine = LLM(folder, dtype="float32", **quick)
    config.add_cleanup(engine.llm_engine.engine_core.shutdown)
    return engine


class VLLMEngine(TokenDecoder):
    def ask(self, prompts, max_new, stop, **shown):
        shown |= {"temperature": self.temperature, "max_tokens": max_new, "ignore_eos": True, "detokenize": False}
        seeds, ends = map(self.row_seed, range(len(prompts))), sorted(stop)
        rows = [SamplingParams(seed=seed, stop_token_ids=ends, **shown) for seed in seeds]
        return self.engine.generate([{"prompt_token_ids": each.tolist()} for each in prompts], rows, use_tqdm=False)

    def complete(self, prompts, max_new, stop):
        found = [row.outputs[0] for row in self.ask(prompts, max_new, stop)]
        return [Completion(np.array(row.token_ids), row.stop_reason is not None) for row in found]

    def log_probs(self, prompts, max_new, top):
        rows = []
        for row in self.ask([each.tokens for each in prompts], max_new, (), logprobs=top, prompt_logprobs=0):
            new, given = row.outputs[0], zip(row.prompt_token_ids[1:], row.prompt_logprobs[1:], strict=True)
            likeliest = [{token: told.logprob for token, told in each.items()} for each in new.logprobs]
            read = np.array([told[token].logprob for token, told in given])
            rows.append(TokenLogProbs.of_likeliest(np.array(new.token_ids), likeliest, top, read))
        return rows


def pytest_emad_make_decoder(config, request):
    decoder = VLLMEngine(request)
    decoder.engine = started(request.model.folder, config)
    return decoder
