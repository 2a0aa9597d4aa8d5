"""One training loop for every bundled model; what differs between families is a row of ``FAMILIES``."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import remove, replacing_folder, require_replaceable, require_writable
from emad_ref.training import causal, seq2seq
from emad_ref.training.recipe import Recipe
from emad_ref.training.state import State, keep, opened

RECIPES: dict[str, Recipe] = {**causal.RECIPES, **seq2seq.RECIPES}
FAMILIES = {"causal": causal.FAMILY, "seq2seq": seq2seq.FAMILY}

EVERY = 200  # steps between two checkpoints: some minutes
SAVED = frozenset(
    ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
)


class Diverged(EmadError):
    """The loss is no longer a number: nothing worth saving is left."""


def rate_at(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a straight line down to 2 % of the peak."""
    return min(1.0, (step + 1) / recipe.warmup) * (1 - 0.98 * step / recipe.steps)


def train(recipe: Recipe, out: Path, *, resume: bool = False, every: int = EVERY) -> float:
    """Train one model and write weights, config and tokenizer to ``out``; returns the last mean loss in nats/token.

    About an hour on one CPU core for the 12-layer models, half of that for the encoder-decoders. The result depends
    on the recipe alone, up to floating-point summation order (thread count, torch build). The folder is filled beside
    ``out`` and takes its place when it is whole.

    After ``every`` steps the state goes into ``out``.checkpoint, which ``resume`` goes on from where it is there:
    batches are drawn anew up to its step, and the result is that of a run that was never interrupted.

    Raises:
        BadArgument: no steps; ``out`` holds anything but a saved model, or cannot be written.
        BadState: a checkpoint is there but ``resume`` is not set, or it is damaged, or of another recipe or torch.
        Diverged: a loss that is not finite; nothing is written.
    """
    if recipe.steps < 1:
        raise BadArgument("recipe.steps", recipe.steps, "at least one step", "an untrained model is not saved")
    checkpoint = out.with_name(out.name + ".checkpoint")
    require_replaceable(out, SAVED, "out")
    require_writable(checkpoint, "checkpoint")
    held = opened(checkpoint, recipe, resume)
    family = FAMILIES[recipe.family]
    tokenizer = family.tokenizer()
    model = family.model(recipe)
    optimizers = family.optimisers(model, recipe)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    done, smooth = 0, math.nan
    if held is not None:
        done, smooth = held.put_into(model, optimizers)
    steps = islice(zip(range(recipe.steps), family.batches(recipe, tokenizer), strict=False), done, None)
    progress = tqdm(steps, total=recipe.steps, initial=done, desc=recipe.name)
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
        if (step + 1) % every == 0 and step + 1 < recipe.steps:
            keep(checkpoint, recipe, State.of(step + 1, smooth, model, optimizers))
    with replacing_folder(out, "out") as folder:
        model.eval().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    remove(checkpoint, "checkpoint")
    return smooth


def recipe_named(name: str) -> Recipe:
    """The recipe of a bundled model."""
    if name not in RECIPES:
        raise BadArgument("name", name, f"one of {', '.join(RECIPES)}")
    return RECIPES[name]
