"""One training loop for every bundled model; what differs between families is a row of ``FAMILIES``."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from emad_ref.errors import BadArgument, EmadError
from emad_ref.training import causal, seq2seq
from emad_ref.training.recipe import Recipe

RECIPES: dict[str, Recipe] = {**causal.RECIPES, **seq2seq.RECIPES}
FAMILIES = {"causal": causal.FAMILY, "seq2seq": seq2seq.FAMILY}


class Diverged(EmadError):
    """The loss is no longer a number: nothing worth saving is left."""


def rate_at(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a straight line down to 2 % of the peak."""
    return min(1.0, (step + 1) / recipe.warmup) * (1 - 0.98 * step / recipe.steps)


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
    family = FAMILIES[recipe.family]
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
    if name not in RECIPES:
        raise BadArgument("name", name, f"one of {', '.join(RECIPES)}")
    return RECIPES[name]
