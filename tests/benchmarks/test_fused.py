"""Benchmark: speedup of fused steps within one run: a chunk against single tokens, full depth against ``generate``.

Verification of n drafted tokens is one pass over n tokens, so its cost relative to one token bounds the gain of
self-speculation. Run on request: ``pytest --run-slow -s tests/benchmarks``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.models.fast.weight_layout import lay_out_weights
from emad_ref.models.loading import load
from emad_ref.point import full_depth, truncated
from emad_ref.protocol import Prompt
from pytest_emad.benchmark.clock import WARM_UP, time_pairs
from pytest_emad.statistics.speedup import estimate_speedup_per_request
from pytest_emad.statistics.units import ByPair

pytestmark = pytest.mark.slow

HELD, PAIRS, SKIPPED = 64, 60, 3  # tokens before the chunk; timed pairs; layers that the draft has already run
MOST = {2: 1.35, 4: 1.55, 8: 1.9}  # n → allowed cost of a pass over n tokens, in passes over one token
SMALLS, LARGES = (16, 16, 24), (30, 4, 8)  # pairs, prompt tokens, new tokens: short turns for slow models
SMALL = {"hidden_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4, "vocab_size": 2048}
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 352, "max_position_embeddings": 512}
LARGE = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 50304,
    "num_key_value_heads": 16, "intermediate_size": 2816, "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS = {  # family and size → config, turns, minimum of generate's time over full depth's
    "llama, small": (hf.LlamaConfig(**GROUPED), SMALLS, 1.2),
    "qwen3, small": (hf.Qwen3Config(**GROUPED, head_dim=32), SMALLS, 1.2),
    "olmo2, small": (hf.Olmo2Config(**GROUPED), SMALLS, 1.2),
    "opt, small": (hf.OPTConfig(**SMALL, ffn_dim=512, word_embed_proj_dim=128), SMALLS, 1.2),
    "llama of Pythia-410M's size": (hf.LlamaConfig(**LARGE), LARGES, 1.08),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("first", [0, SKIPPED])
@torch.inference_mode()
def test_a_chunk_takes_little_more_than_one_token(first):
    """Relative to one token, fused; and relative to the same chunk through the modules."""
    model = load("emad-tiny-plain").model
    steppers = {"fast": CausalStepper(model), "walked": CausalStepper(model, backend="walked")}
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(1, model.config.vocab_size, (1, HELD + max(MOST))))
    arms = {}
    for name, stepper in steppers.items():
        cache, layers = stepper.new_cache(1), stepper.layers
        inputs = stepper.prepare_forward(np.arange(HELD)[None], cache)
        stepper.run_layers(stepper.embed(ids[:, :HELD], inputs), 0, layers, inputs)
        for n in (1, *MOST):

            def run(pair, n=n, stepper=stepper, cache=cache):
                with torch.inference_mode():
                    inputs = stepper.prepare_forward(np.arange(HELD, HELD + n)[None], cache)
                    stepper.run_layers(stepper.embed(ids[:, HELD : HELD + n], inputs), first, stepper.layers, inputs)
                    cache.truncate(np.array([HELD]))

            arms[name, n] = run
    seconds = time_pairs(arms, PAIRS, rng, warm_up=5).seconds
    for n, most in MOST.items():
        ratio = estimate_speedup_per_request(ByPair(seconds["fast", n]), ByPair(seconds["fast", 1]), threshold=most)
        modules = estimate_speedup_per_request(ByPair(seconds["walked", n]), ByPair(seconds["fast", n]), threshold=1.0)
        print(f"layers {first + 1}…: {n} tokens take {ratio.value:.2f} of one; the modules {modules.value:.2f} of that")
        assert ratio.value <= most
        assert modules.value >= 1.0


@pytest.mark.parametrize("name", CONFIGS)
def test_full_depth_is_faster_than_generate_and_never_slower_than_the_modules(name):
    config, (pairs, prompt, new), least = CONFIGS[name]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    lay_out_weights(model)  # as after loading
    fast, walked, layers = CausalStepper(model), CausalStepper(model, backend="walked"), config.num_hidden_layers
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, config.vocab_size, (WARM_UP + pairs, prompt))
    decoders = {
        "full": WalkedDecoder(fast, full_depth(layers)),
        "modules": WalkedDecoder(walked, full_depth(layers)),
        "one": WalkedDecoder(fast, truncated(layers, 1)),
        **{depth: WalkedDecoder(fast, truncated(layers, depth)) for depth in shares(layers)},
    }

    def generate(pair):
        ids = torch.from_numpy(prompts[pair])[None]
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)

    def arm(decoder):
        def run(pair):
            decoder.generate([Prompt(prompts[pair])], new)

        return run

    arms = {key: arm(decoder) for key, decoder in decoders.items()} | {"generate": generate}
    seconds = time_pairs(arms, pairs, rng).seconds
    for rival, wanted in (("generate", least), ("modules", 1.0)):
        ratio = estimate_speedup_per_request(ByPair(seconds[rival]), ByPair(seconds["full"]), threshold=wanted)
        print(f"{name}: {rival} / full depth = {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]")
        assert ratio.value >= wanted
    block = (seconds["full"] - seconds["one"]) / (layers - 1)
    for depth in shares(layers):
        line = seconds["one"] + (depth - 1) * block
        ratio = estimate_speedup_per_request(ByPair(seconds[depth]), ByPair(line), threshold=1.1)
        print(f"{name}: depth {depth} of {layers} = {ratio.value:.2f} of its share")
        assert ratio.value <= 1.1


def shares(layers):
    """Return ¾, ½ and ¼ of the layers."""
    return tuple(layers * quarter // 4 for quarter in (3, 2, 1))
