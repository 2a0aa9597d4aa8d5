"""Training of the bundled encoder-decoders: span corruption on the pairs' texts, then their three tasks.

``emad-t5-tiny``        only pre-trained: hidden words of the texts are predicted (``generate_corrupted_pairs``).
``emad-t5-tiny-tuned``  the same weights, tuned on question → answer, dialogue → summary, story → worked chain.

Both are small T5s (Raffel et al. 2020; ReLU, tied head): a shallow encoder, so that the decoder has work to do, and a
decoder deep enough for the paper's minimum layers to lie apart. Both stages minimise CALM's layer-weighted loss
(Schuster et al. 2022, §3.4): loss = Σ_i w_i · CE(head(norm(h_i))) with w_i = i / Σ_j j over the decoder's layers, so
that readouts of early exits are trained; the two models differ only in tuning. Each step reads the last layer and
``early_read`` others, redrawn and weighted so that the expectation is that loss, since heads are expensive here.

The tokenizer has words as pieces, in SentencePiece's form: every word of the texts is one piece, and bytes encode the
rest. Its eight hundred words exceed a pruned vocabulary.

This module is independent of text generation and decoding.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, PreTrainedTokenizerFast, T5ForConditionalGeneration

from emad_ref.errors import BadArgument
from emad_ref.models.bundled import weights_folder
from emad_ref.text.seq2seq_pairs import (
    COLOURS,
    LARGEST_NUMBER,
    NAMES,
    PLACES,
    SENTINELS,
    THINGS,
    TOWNS,
    SourceTarget,
    TextTask,
    generate_corrupted_pairs,
    generate_source_target_pairs,
)
from emad_ref.training import causal
from emad_ref.training.recipe import Recipe, TrainingFamily

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # T5's own, at T5's ids
PAD_ID, END_ID = 0, 1
SPACE = "▁"
WORD = re.compile(r" ?\w+| ?[^\w\s]")
READ_FOR_WORDS = 2000  # pairs of each task whose words become pieces besides the lexicon's
IGNORED = -100  # PyTorch's own mark for targets that are not scored
SHARES: dict[TextTask, int] = {"qa": 4, "summary": 1, "count": 3}  # with equal shares summaries dominate the loss
POOL = 16  # batches sorted by length together, for less padding


@dataclass(frozen=True)
class Seq2SeqRecipe(Recipe):
    """A recipe whose ``layers`` are the decoder's; ``starts_from`` names the bundled model that is tuned."""

    family: str = "seq2seq"
    encoder_layers: int = 2
    layers: int = 10
    hidden: int = 128
    heads: int = 4
    head_size: int = 24
    feed_forward: int = 160
    early_read: int = 3  # layers below the last with a loss in one step
    batch: int = 32
    window: int = 128  # longest source in tokens
    matrix_rate: float = 0.02
    other_rate: float = 1e-2
    starts_from: str = ""


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Seq2SeqRecipe("emad-t5-tiny", steps=600),
        Seq2SeqRecipe("emad-t5-tiny-tuned", steps=2600, starts_from="emad-t5-tiny"),
    )
}


def bundled_folder(name: str) -> Path:
    """The folder of a bundled model."""
    return weights_folder() / name


@cache
def tokenizer_pieces() -> tuple[str, ...]:
    """Every piece in the order of its id: T5's special tokens, sentinels, bytes, the lexicon, other words."""
    numbers = tuple(map(str, range(LARGEST_NUMBER + 1)))
    lexicon = [f" {word}" for word in dict.fromkeys((*NAMES, *THINGS, *TOWNS, *PLACES, *COLOURS, *numbers))]
    seen: Counter[str] = Counter()
    for task in SHARES:
        for pair in generate_source_target_pairs(task, "train", READ_FOR_WORDS):
            seen.update(WORD.findall(f" {pair.source}"))
            seen.update(WORD.findall(f" {pair.target}"))
    # no pair has the sentence about a home
    seen.update(WORD.findall(" is from."))
    others = sorted(set(seen) - set(lexicon))
    known = (PAD, END, UNKNOWN, *SENTINELS, *(f"<0x{byte:02X}>" for byte in range(256)))
    words = (piece.replace(" ", SPACE) for piece in (" ", *lexicon, *others))
    return (*known, *words)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer of the bundled encoder-decoders: a unigram model like T5's, with equally likely pieces.

    It splits a text into the fewest pieces. A space opens the text, so that its first word is the same token as
    elsewhere, and the end-of-text token closes it.
    """
    model = Tokenizer(models.Unigram([(piece, -1.0) for piece in tokenizer_pieces()], unk_id=2, byte_fallback=True))
    # a sentinel includes the space before it, which otherwise is a separate piece
    model.add_special_tokens([AddedToken(text, lstrip=True, normalized=False) for text in SENTINELS])
    model.add_special_tokens([AddedToken(text, normalized=False) for text in (PAD, END, UNKNOWN)])
    model.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    model.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    model.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, END_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=list(SENTINELS),
    )


def layer_loss_weights(layers: int) -> Tensor:
    """CALM's weights of the decoder layers' losses, float32 [layers]: i / Σ_j j."""
    rising = torch.arange(1, layers + 1, dtype=torch.float32)
    return rising / rising.sum()


def create_initial_model(recipe: Seq2SeqRecipe) -> T5ForConditionalGeneration:
    """Random weights from the recipe's seed, without changing the caller's generator."""
    config: Any = AutoConfig.for_model(
        "t5",
        vocab_size=len(tokenizer_pieces()),
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
        eos_token_id=END_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return T5ForConditionalGeneration(config)


def load_starting_model(recipe: Seq2SeqRecipe) -> T5ForConditionalGeneration:
    """The starting model of training: the bundled model to tune, else random weights.

    Raises:
        BadArgument: ``starts_from`` names a folder without weights.
    """
    if not recipe.starts_from:
        return create_initial_model(recipe)
    folder = bundled_folder(recipe.starts_from)
    if not (folder / "model.safetensors").is_file():
        raise BadArgument("recipe.starts_from", recipe.starts_from, "a bundled model", "train that one first")
    return T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).train()


@dataclass(frozen=True)
class Seq2SeqBatch:
    """``source``, ``mask`` int64 [batch, s], mask 1 = real; ``fed``, ``target`` int64 [batch, t], fed one later."""

    source: Tensor
    mask: Tensor
    fed: Tensor
    target: Tensor


def iterate_training_pairs(recipe: Seq2SeqRecipe) -> Iterator[SourceTarget]:
    """Endless training pairs of the recipe's stage."""
    if not recipe.starts_from:
        yield from generate_corrupted_pairs("train", None, recipe.seed)
    streams = {task: generate_source_target_pairs(task, "train", None, recipe.seed) for task in SHARES}
    while True:
        for task, share in SHARES.items():
            yield from islice(streams[task], share)


def collate_batch(rows: list[tuple[list[int], list[int]]], pad: int) -> Seq2SeqBatch:
    """One padded batch of (source ids, target ids) rows; the decoder starts from padding, as in T5."""
    source = pad_sequence([torch.tensor(s) for s, _ in rows], batch_first=True, padding_value=pad)
    target = pad_sequence([torch.tensor(t) for _, t in rows], batch_first=True, padding_value=IGNORED)
    fed = torch.cat([torch.full((len(rows), 1), pad), target[:, :-1].masked_fill(target[:, :-1] == IGNORED, pad)], 1)
    return Seq2SeqBatch(source, (source != pad).long(), fed, target)


def iterate_batches(recipe: Seq2SeqRecipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[Seq2SeqBatch]:
    """Endless batches of pairs of similar length; the seed draws the order of batches."""
    stream = iterate_training_pairs(recipe)
    rng = random.Random(f"order/{recipe.seed}")
    encode = tokenizer.backend_tokenizer.encode_batch
    while True:
        pool = list(islice(stream, POOL * recipe.batch))
        sources = [e.ids[: recipe.window] for e in encode([p.source for p in pool])]
        targets = [e.ids[: recipe.window] for e in encode([p.target for p in pool])]
        rows = sorted(zip(sources, targets, strict=True), key=lambda row: (len(row[0]), len(row[1])))
        cut = [rows[i : i + recipe.batch] for i in range(0, len(rows), recipe.batch)]
        rng.shuffle(cut)
        yield from (collate_batch(part, tokenizer.pad_token_id) for part in cut)


def sample_loss_layers_and_weights(recipe: Seq2SeqRecipe, batch: Seq2SeqBatch) -> tuple[list[int], Tensor]:
    """(layers from 1, the last one last; weights float32 of their losses): CALM's loss in expectation.

    The batch determines the drawn layers below the last, so that training needs no separate generator.
    """
    weights, below = layer_loss_weights(recipe.layers), recipe.layers - 1
    drawn = sorted(random.Random(f"layers/{batch.target.sum().item()}").sample(range(1, below + 1), recipe.early_read))
    scale = torch.tensor([below / recipe.early_read] * recipe.early_read + [1.0])
    layers = [*drawn, recipe.layers]
    return layers, weights[[layer - 1 for layer in layers]] * scale


def compute_loss(
    model: T5ForConditionalGeneration, recipe: Seq2SeqRecipe, batch: Seq2SeqBatch
) -> tuple[Tensor, Tensor]:
    """(CALM's weighted loss as sampled, cross-entropy of the last layer in nats per target token)."""
    encoded = model.encoder(input_ids=batch.source, attention_mask=batch.mask).last_hidden_state
    decoder = model.decoder
    body = decoder(
        input_ids=batch.fed,
        encoder_hidden_states=encoded,
        encoder_attention_mask=batch.mask,
        output_hidden_states=True,
        use_cache=False,
    )
    layers, weights = sample_loss_layers_and_weights(recipe, batch)
    early = [decoder.final_layer_norm(body.hidden_states[layer]) for layer in layers[:-1]]  # [0] is the embedding
    real = batch.target != IGNORED
    states = torch.stack([*early, body.last_hidden_state])[:, real]  # [layers, tokens, hidden]
    logits = model.lm_head(states * model.config.d_model**-0.5)  # tied head, scaled as in T5
    target = batch.target[real].expand(len(states), -1)
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape).mean(dim=1)
    return (weights * each).sum(), each[-1].detach()


def create_optimisers(model: T5ForConditionalGeneration, recipe: Seq2SeqRecipe) -> list[torch.optim.Optimizer]:
    """Create optimisers as for the causal models, but with the queries' rate divided by √head_size.

    T5 does not divide attention scores by √head_size, which its small initial queries replace. Muon's steps have a
    fixed size and undo this at the full rate. In a trial attention then saturated on single tokens, the encoder's table
    of position biases stayed at noise, and the model confused the rivals of a span (exact match 0.34 after 2,000 steps
    of tuning).
    """
    muon, adam = causal.create_optimisers(model, recipe)
    queries = [parameter for name, parameter in model.named_parameters() if name.endswith(".q.weight")]
    slow = {id(parameter) for parameter in queries}
    (group,) = muon.param_groups
    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in slow]
    muon.add_param_group({"params": queries, "lr": recipe.matrix_rate * recipe.head_size**-0.5})
    return [muon, adam]


FAMILY = TrainingFamily(build_tokenizer, load_starting_model, iterate_batches, compute_loss, create_optimisers)
