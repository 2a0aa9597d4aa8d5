"""How the bundled models are made: one tokenizer, one corpus, short trainings, all from a seed.

``emad-tiny``        12 layers, with an early-exit loss at the probe layers (LayerSkip, Elhoushi et al. 2024, §4.1,
                     in small): loss = CE(last layer) + Σ_ℓ w_ℓ · CE(head(norm(h_ℓ))).
``emad-tiny-plain``  the same without that loss: what EMAD meets on an ordinary model.
``emad-nano``        4 narrow layers: the small partner of a pair.

Matrices of the blocks are trained by Muon, everything else by AdamW: on this corpus Muon needs about half the tokens.

The loop serves the encoder-decoders of ``seq2seq`` too: what differs between families is a table row (``Family``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from emad_ref.errors import BadArgument, EmadError
from emad_ref.text import world

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 512
TOKENIZER_DOCUMENTS = 20_000


class Diverged(EmadError):
    """The loss is no longer a number: nothing worth saving is left."""


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a bundled model."""

    name: str
    layers: int = 12
    hidden: int = 128
    heads: int = 4
    early_exit: tuple[tuple[int, float], ...] = ()  # (layer counted from 1, loss weight)
    steps: int = 4000
    batch: int = 16
    window: int = 192
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup: int = 100
    seed: int = 0
    family: str = "causal"  # a key of FAMILIES


@dataclass(frozen=True)
class Family:
    """What the training loop needs of a kind of model; ``loss`` gives (to minimise, last layer's nats per token)."""

    tokenizer: Callable[[], PreTrainedTokenizerFast]
    model: Callable[[Any], Any]
    batches: Callable[[Any, PreTrainedTokenizerFast], Iterator[Any]]
    loss: Callable[[Any, Any, Any], tuple[Tensor, Tensor]]
    optimisers: Callable[[Any, Any], list[torch.optim.Optimizer]]


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("emad-tiny", early_exit=((4, 0.25), (8, 0.25))),
        Recipe("emad-tiny-plain", steps=2000),
        Recipe("emad-nano", layers=4, hidden=64, steps=3000),
    )
}


def train_tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer that all bundled models share; end-of-text opens every document."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    stream = world.documents("world:curriculum", "train")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((next(stream) for _ in range(TOKENIZER_DOCUMENTS)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def batches(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[Tensor]:
    """Endless int64 [batch, window + 1]: documents of the curriculum, each opened by end-of-text, packed end to end."""
    stream = world.documents("world:curriculum", "train", recipe.seed + 1)
    need = recipe.batch * (recipe.window + 1)
    ids: list[int] = []
    while True:
        while len(ids) < need:
            for encoding in tokenizer.backend_tokenizer.encode_batch([next(stream) for _ in range(256)]):
                ids += [tokenizer.bos_token_id, *encoding.ids]
        yield torch.tensor(ids[:need]).view(recipe.batch, -1)
        ids = ids[need:]


def initial_model(recipe: Recipe) -> GPTNeoXForCausalLM:
    """Random weights from the recipe's seed; the caller's generator is left as it was."""
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        intermediate_size=4 * recipe.hidden,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return GPTNeoXForCausalLM(config)


def loss_of(model: GPTNeoXForCausalLM, recipe: Recipe, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(loss to minimise, cross-entropy of the last layer in nats per token) on ids int64 [batch, window + 1]."""
    body = model.gpt_neox(ids[:, :-1], output_hidden_states=bool(recipe.early_exit), use_cache=False)
    target = ids[:, 1:].reshape(-1)

    def cross_entropy(normed: Tensor) -> Tensor:
        return F.cross_entropy(model.get_output_embeddings()(normed).flatten(0, 1), target)

    last = cross_entropy(body.last_hidden_state)
    total = last
    for layer, weight in recipe.early_exit:
        total = total + weight * cross_entropy(model.gpt_neox.final_layer_norm(body.hidden_states[layer]))
    return total, last.detach()


def optimisers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """[Muon for the blocks' matrices, AdamW for embedding, head, norms, biases and tables of position biases]."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layer" in n and "bias" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_at(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a straight line down to 2 % of the peak."""
    return min(1.0, (step + 1) / recipe.warmup) * (1 - 0.98 * step / recipe.steps)


def _causal() -> Family:
    return Family(train_tokenizer, initial_model, batches, loss_of, optimisers)


def _seq2seq() -> Family:
    from emad_ref.training import seq2seq  # it builds on this module

    return Family(seq2seq.tokenizer, seq2seq.first_model, seq2seq.batches, seq2seq.loss_of, seq2seq.optimisers)


FAMILIES: dict[str, Callable[[], Family]] = {"causal": _causal, "seq2seq": _seq2seq}


def train(recipe: Recipe, out: Path) -> float:
    """Train one model and write weights, config and tokenizer to ``out``; returns the last mean loss in nats/token.

    About an hour on one CPU core for the 12-layer models, half of that for the encoder-decoders. The result depends
    on the recipe alone, up to floating-point summation order (thread count, torch build).

    Raises:
        BadArgument: no steps.
        Diverged: a loss that is not finite; nothing is written.
    """
    if recipe.steps < 1:
        raise BadArgument("recipe.steps", recipe.steps, "at least one step", "an untrained model is not saved")
    family = FAMILIES[recipe.family]()
    tokenizer = family.tokenizer()
    model = family.model(recipe)
    optimizers = family.optimisers(model, recipe)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    smooth = math.nan
    steps = zip(range(recipe.steps), family.batches(recipe, tokenizer), strict=False)
    progress = tqdm(steps, total=recipe.steps, desc=recipe.name)
    for step, batch in progress:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * rate_at(recipe, step)
        loss, last = family.loss(model, recipe, batch)
        if not torch.isfinite(loss):
            raise Diverged(
                f"loss={float(loss.detach())} at step {step} of {recipe.name}, but expected a finite number; "
                f"lower matrix_rate ({recipe.matrix_rate}) or other_rate ({recipe.other_rate})"
            )
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        smooth = float(last) if math.isnan(smooth) else 0.98 * smooth + 0.02 * float(last)
        progress.set_postfix(nats=f"{smooth:.4f}", refresh=False)
    model.eval().save_pretrained(out)
    tokenizer.save_pretrained(out)
    return smooth


def recipe_named(name: str) -> Recipe:
    """The recipe of a bundled model."""
    from emad_ref.training.seq2seq import SEQ2SEQ_RECIPES  # it builds on this module

    known = {**RECIPES, **SEQ2SEQ_RECIPES}
    if name not in known:
        raise BadArgument("name", name, f"one of {', '.join(known)}")
    return known[name]
