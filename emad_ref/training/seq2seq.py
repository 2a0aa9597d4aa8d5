"""How the bundled encoder-decoders are made: span corruption on the world, then its two tasks.

``emad-t5-tiny``        pre-trained only: words of the world's texts hidden and told (``text/pairs.corrupted``).
``emad-t5-tiny-tuned``  the same weights, tuned on question → span and dialogue → summary.

Both are small T5s (Raffel et al. 2020; ReLU, tied head): 4 encoder layers, 8 decoder layers, the tokenizer of the
causal models with sentinels and a few words of the tasks added. Both stages minimise CALM's layer-weighted loss
(Schuster et al. 2022, §3.4): loss = Σ_i w_i · CE(head(norm(h_i))) with w_i = i / Σ_j j over the decoder's layers, so
that what an early exit reads has been trained; the two models differ in the tuning alone. Tuning stops early on
purpose: after 700 steps every answer is right from layer 1 on, and no exit could cost anything.

This module knows nothing of how text is drawn, and of decoding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, PreTrainedTokenizerFast, T5ForConditionalGeneration

from emad_ref.errors import BadArgument
from emad_ref.text.pairs import SENTINELS, SourceTarget, corrupted, pairs
from emad_ref.training import causal
from emad_ref.training.recipe import END_OF_TEXT, Family, Recipe

PAD, PAD_ID = "<pad>", 512
# Words of the tasks that the causal models' corpus lacks; without them each would be spelt in letters.
WORDS = (
    "question:", " context:", "summarize:", " take", " Take", " you", " lost", " did", " will", " Thank", " Sure",
    " Where", " Who", " What", " meet", " give",
)  # fmt: skip
# What follows an added word is opened by a space of its own; read back, "will ," is "will," again.
AFTER_A_WORD = rf"(?<={'|'.join(word.strip() for word in WORDS)}) (?=[,.!?])"
VOCABULARY = PAD_ID + 1 + len(SENTINELS) + len(WORDS)
IGNORED = -100  # PyTorch's own mark for targets that are not scored
QUESTIONS_PER_DIALOGUE = 3  # a span has four tokens, a summary twenty: in equal shares the loss is about summaries
POOL = 16  # batches sorted by length together: less padding


@dataclass(frozen=True)
class Seq2SeqRecipe(Recipe):
    """A recipe whose ``layers`` are the decoder's; ``starts_from`` names the bundled model that is tuned."""

    family: str = "seq2seq"
    encoder_layers: int = 4
    layers: int = 8
    hidden: int = 128
    heads: int = 4
    head_size: int = 24
    feed_forward: int = 256
    batch: int = 32
    window: int = 128  # longest source in tokens
    matrix_rate: float = 0.02
    other_rate: float = 1e-2
    starts_from: str = ""


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Seq2SeqRecipe("emad-t5-tiny", steps=1500),
        Seq2SeqRecipe("emad-t5-tiny-tuned", steps=240, matrix_rate=0.01, other_rate=5e-3, starts_from="emad-t5-tiny"),
    )
}


def weights_of(name: str) -> Path:
    """The folder of a bundled model."""
    return Path(str(files("emad_ref.models") / "weights")) / name


def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the bundled encoder-decoders."""
    return tokenizer_from(weights_of("emad-tiny"))


def tokenizer_from(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a causal bundled model, with padding, sentinels and words added; ids below 512 stay.

    Every text is opened by a space, so that a word is the same token first and later, and closed by end-of-text.
    """
    bpe = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bpe.add_special_tokens([AddedToken(text, normalized=False) for text in (PAD, *SENTINELS)])
    bpe.add_tokens([AddedToken(text, normalized=False) for text in WORDS])
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace(Regex(AFTER_A_WORD), ""), decoders.Strip(content=" ", left=1, right=0)]
    )
    end = bpe.token_to_id(END_OF_TEXT)
    bpe.post_processor = processors.TemplateProcessing(single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, end)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=PAD, additional_special_tokens=list(SENTINELS)
    )


def layer_weights(layers: int) -> Tensor:
    """CALM's weights of the decoder layers' losses, float32 [layers]: i / Σ_j j."""
    rising = torch.arange(1, layers + 1, dtype=torch.float32)
    return rising / rising.sum()


def initial_model(recipe: Seq2SeqRecipe) -> T5ForConditionalGeneration:
    """Random weights from the recipe's seed; the caller's generator is left as it was."""
    config: Any = AutoConfig.for_model(
        "t5",
        vocab_size=VOCABULARY,
        d_model=recipe.hidden,
        d_kv=recipe.head_size,
        d_ff=recipe.feed_forward,
        num_layers=recipe.encoder_layers,
        num_decoder_layers=recipe.layers,
        decoder_layers=recipe.layers,  # generate() of transformers sizes its cache by this, else by the encoder's depth
        num_heads=recipe.heads,
        feed_forward_proj="relu",
        dropout_rate=0.0,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        decoder_start_token_id=PAD_ID,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return T5ForConditionalGeneration(config)


def first_model(recipe: Seq2SeqRecipe) -> T5ForConditionalGeneration:
    """Where training starts: the bundled model that is tuned, else random weights.

    Raises:
        BadArgument: ``starts_from`` names a folder without weights.
    """
    if not recipe.starts_from:
        return initial_model(recipe)
    folder = weights_of(recipe.starts_from)
    if not (folder / "model.safetensors").is_file():
        raise BadArgument("recipe.starts_from", recipe.starts_from, "a bundled model", "train that one first")
    return T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).train()


@dataclass(frozen=True)
class Batch:
    """``source``, ``mask`` int64 [batch, s], mask 1 = real; ``fed``, ``target`` int64 [batch, t], fed one later."""

    source: Tensor
    mask: Tensor
    fed: Tensor
    target: Tensor


def drawn(recipe: Seq2SeqRecipe) -> Iterator[SourceTarget]:
    """Endless training pairs of the recipe's stage."""
    if not recipe.starts_from:
        yield from corrupted("train", None, recipe.seed)
    qa, summary = pairs("qa", "train", None, recipe.seed), pairs("summary", "train", None, recipe.seed)
    while True:
        yield from islice(qa, QUESTIONS_PER_DIALOGUE)
        yield next(summary)


def batch_of(rows: list[tuple[list[int], list[int]]], pad: int) -> Batch:
    """(source ids, target ids) rows → one padded batch; the decoder starts from padding, as T5 does."""
    source = pad_sequence([torch.tensor(s) for s, _ in rows], batch_first=True, padding_value=pad)
    target = pad_sequence([torch.tensor(t) for _, t in rows], batch_first=True, padding_value=IGNORED)
    fed = torch.cat([torch.full((len(rows), 1), pad), target[:, :-1].masked_fill(target[:, :-1] == IGNORED, pad)], 1)
    return Batch(source, (source != pad).long(), fed, target)


def batches(recipe: Seq2SeqRecipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Endless batches; pairs of like length together, the order of batches drawn from the seed."""
    stream = drawn(recipe)
    rng = random.Random(f"order/{recipe.seed}")
    encode = tokenizer.backend_tokenizer.encode_batch
    while True:
        pool = list(islice(stream, POOL * recipe.batch))
        sources = [e.ids[: recipe.window] for e in encode([p.source for p in pool])]
        targets = [e.ids[: recipe.window] for e in encode([p.target for p in pool])]
        rows = sorted(zip(sources, targets, strict=True), key=lambda row: (len(row[0]), len(row[1])))
        cut = [rows[i : i + recipe.batch] for i in range(0, len(rows), recipe.batch)]
        rng.shuffle(cut)
        yield from (batch_of(part, tokenizer.pad_token_id) for part in cut)


def loss_of(model: T5ForConditionalGeneration, recipe: Seq2SeqRecipe, batch: Batch) -> tuple[Tensor, Tensor]:
    """(CALM's weighted loss, cross-entropy of the last layer in nats per target token)."""
    encoded = model.encoder(input_ids=batch.source, attention_mask=batch.mask).last_hidden_state
    decoder = model.decoder
    body = decoder(
        input_ids=batch.fed,
        encoder_hidden_states=encoded,
        encoder_attention_mask=batch.mask,
        output_hidden_states=True,
        use_cache=False,
    )
    early = [decoder.final_layer_norm(state) for state in body.hidden_states[1:-1]]  # [0] is the embedding
    real = batch.target != IGNORED
    states = torch.stack([*early, body.last_hidden_state])[:, real]  # [layers, tokens, hidden]
    logits = model.lm_head(states * model.config.d_model**-0.5)  # tied head: scaled as T5 does
    target = batch.target[real].expand(len(states), -1)
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape).mean(dim=1)
    return (layer_weights(len(each)) * each).sum(), each[-1].detach()


def optimisers(model: T5ForConditionalGeneration, recipe: Seq2SeqRecipe) -> list[torch.optim.Optimizer]:
    """As for the causal models, but queries at a rate divided by √head_size.

    T5 does not divide attention scores by √head_size: its small initial queries do that. Muon's steps have a size of
    their own and undo it at the full rate. Tried: attention then saturates on single tokens, the encoder's table of
    position biases stays at noise, and the rivals of a span are not told apart (exact match 0.34 after
    2,000 steps of tuning).
    """
    muon, adam = causal.optimisers(model, recipe)
    queries = [parameter for name, parameter in model.named_parameters() if name.endswith(".q.weight")]
    slow = {id(parameter) for parameter in queries}
    (group,) = muon.param_groups
    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in slow]
    muon.add_param_group({"params": queries, "lr": recipe.matrix_rate * recipe.head_size**-0.5})
    return [muon, adam]


FAMILY = Family(tokenizer, first_model, batches, loss_of, optimisers)
