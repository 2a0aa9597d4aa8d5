"""The smallest decoder that can be judged: a model of transformers with its DynamicCache, every token at full depth."""

import numpy as np
import torch
from transformers import DynamicCache

from emad_ref.protocol import Capabilities, Step, Unsupported
from emad_ref.record import DECODE, PROMPT, Record, TokenTable


class Session:  # rows one by one: nothing is padded, and none can depend on another
    work, commit, close = None, lambda self, length: None, lambda self: None  # counts nothing, frees nothing early
    length = property(lambda self: np.array([cache.get_seq_length() for cache in self.caches]))
    cap = property(lambda self: np.full(len(self.caches), self.model.config.num_hidden_layers))

    def __init__(self, model, prompts):
        self.model, self.caches = model, [DynamicCache(config=model.config) for _ in prompts]

    @torch.inference_mode()
    def feed(self, tokens, depth=None, last=None, n=None):  # n: prompts differ in length, and a step shows their ends
        if depth is not None:
            raise Unsupported("forced depths: every token runs all layers")
        fed, n = [torch.tensor(row, device=self.model.device)[None] for row in tokens], n or tokens.shape[1]
        out = [self.model(row, past_key_values=cache).logits[0] for row, cache in zip(fed, self.caches, strict=True)]
        logits = [row[len(row) - (n if last is None else last) :].double().cpu().numpy() for row in out]
        return Step(np.array(logits), np.tile(self.cap[:, None], n), np.empty((len(fed), n, 0)))

    def rollback(self, length):
        for cache, gone in zip(self.caches, self.length - length, strict=True):
            if gone:  # crop(0) would remove everything
                cache.crop(-int(gone))

    def drop(self, rows):
        self.caches = [cache for row, cache in enumerate(self.caches) if row not in rows]


class Decoder:
    capabilities, synchronize, close = Capabilities(max_feed=8, counted=False), lambda self: None, lambda self: None

    def start(self, prompts):
        return (session := Session(self.model, prompts)), session.feed([prompt.tokens for prompt in prompts], n=1)

    def generate(self, prompts, max_new, stop=frozenset()):
        table, emitted, ends = [], [], []
        for row, prompt in enumerate(prompts):
            session, new, last = Session(self.model, [prompt]), [], len(prompt.tokens) - 1
            rng = np.random.default_rng([self.seed, row])
            while not new or (len(new) < max_new and new[-1] not in stop):
                logits = session.feed(np.array([new[-1:] or prompt.tokens]), last=1).logits  # Gumbel: softmax(·/T)
                new.append(int((logits + self.temperature * rng.gumbel(size=logits.shape)).argmax()))
            for at, token in enumerate([*prompt.tokens, *new[:-1]]):  # then depth, cap, phase, model, kept
                table.append((row, at, token, *session.cap, *session.cap, PROMPT if at < last else DECODE, 0, True))
            emitted, ends = [*emitted, np.array(new)], [*ends, "stop token" if new[-1] in stop else "length"]
        return Record(TokenTable(*map(np.array, zip(*table, strict=True))), np.empty((len(table), 0)), emitted, ends)


def pytest_emad_make_decoder(config, request):
    decoder, point = Decoder(), request.point
    decoder.model, decoder.temperature, decoder.seed = request.model.load().model, request.temperature, request.seed
    if not point.has_fixed_depth or point.ceiling < point.layers or decoder.model.config.is_encoder_decoder:
        raise Unsupported(f"{point.name}: at full depth alone, of causal models")
    return decoder
