"""One training loop for every bundled model, and its checkpoint; ``FAMILIES`` holds the differences.

Data and rates depend only on the recipe and the step, and training draws no random number, so weights, optimisers and
the step are a complete checkpoint. It is read weights-only, so it runs no code.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import (
    open_for_atomic_write,
    read_bytes,
    remove_file,
    replace_folder_atomically,
    require_replaceable_folder,
    require_writable,
)
from emad_ref.training import causal, seq2seq
from emad_ref.training.recipe import Recipe


class BadTrainingState(EmadError):
    """Raised for a training checkpoint that cannot be read, or belongs to another training."""


@dataclass(frozen=True)
class TrainingState:
    """``step`` steps are done; ``smooth`` the running mean loss, nats per token; ``weights`` and ``optimisers`` as
    their ``state_dict`` gives them.
    """

    step: int
    smooth: float
    weights: dict[str, Any]
    optimisers: list[dict[str, Any]]

    @staticmethod
    def from_training(
        step: int, smooth: float, model: nn.Module, optimisers: Sequence[torch.optim.Optimizer]
    ) -> TrainingState:
        return TrainingState(step, smooth, model.state_dict(), [optimiser.state_dict() for optimiser in optimisers])

    def restore_into(self, model: nn.Module, optimisers: Sequence[torch.optim.Optimizer]) -> tuple[int, float]:
        """Load this state into model and optimisers; returns (steps done, running mean loss).

        Raises:
            BadTrainingState: tensors of another model.
        """
        try:
            model.load_state_dict(self.weights)
            for optimiser, state in zip(optimisers, self.optimisers, strict=True):
                optimiser.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadTrainingState(
                f"checkpoint of step {self.step} does not fit the model of its recipe ({str(error)[:200]}); "
                "delete it to start anew"
            ) from error
        return self.step, self.smooth


def save_state(path: Path, recipe: Recipe, state: TrainingState) -> None:
    """Write the state to ``path``; the file is complete or unchanged. Raises BadFile."""
    with open_for_atomic_write(path, "checkpoint") as file:
        torch.save(
            {
                "of": _recipe_key(recipe),
                **{name: getattr(state, name) for name in TrainingState.__annotations__},
            },
            file,
        )


def load_state(path: Path, recipe: Recipe, resume: bool) -> TrainingState | None:
    """The saved state to continue from; None without a checkpoint.

    Raises:
        BadTrainingState: one is there but ``resume`` is not set, or it cannot be read, or is of another recipe or
            torch.
    """
    if not path.exists():
        return None
    if not resume:
        raise BadTrainingState(
            f"checkpoint={str(path)!r} holds an unfinished training, but expected none; pass resume (--resume) to go "
            "on with it, or delete it"
        )
    try:
        held = torch.load(io.BytesIO(read_bytes(path, "checkpoint")), weights_only=True)
        of = held.pop("of")
        state = TrainingState(**held)
    except Exception as error:  # a damaged archive may raise any error of zip, pickle or torch
        raise BadTrainingState(
            f"checkpoint={str(path)!r} cannot be read ({type(error).__name__}: {str(error)[:200]}), but expected one "
            "that `emad train` wrote; delete it to start anew"
        ) from error
    if of != _recipe_key(recipe):
        raise BadTrainingState(
            f"checkpoint={str(path)!r} is of {str(of)[:200]}, but expected {_recipe_key(recipe)}; train with the same "
            "recipe and torch, or delete it to start anew"
        )
    return state


def _recipe_key(recipe: Recipe) -> str:
    return json.dumps(asdict(recipe) | {"torch": torch.__version__}, sort_keys=True)


RECIPES: dict[str, Recipe] = {**causal.RECIPES, **seq2seq.RECIPES}
FAMILIES = {"causal": causal.FAMILY, "seq2seq": seq2seq.FAMILY}

STEPS_PER_CHECKPOINT = 200  # steps between two checkpoints, some minutes
SAVED_FILES = frozenset(
    ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
)


class TrainingDiverged(EmadError):
    """Raised if the loss is not a number, so that no useful state is left."""


def learning_rate_factor_at_step(recipe: Recipe, step: int) -> float:
    """Learning rate at ``step``: linear warm-up, then a straight line down to 2 % of the peak."""
    return min(1.0, (step + 1) / recipe.warmup) * (1 - 0.98 * step / recipe.steps)


def train(recipe: Recipe, out: Path, *, resume: bool = False, every: int = STEPS_PER_CHECKPOINT) -> float:
    """Train one model and write weights, config and tokenizer to ``out``; returns the last mean loss in nats/token.

    About an hour on one CPU core for the 12-layer models, half of that for the encoder-decoders. The result depends
    only on the recipe, up to floating-point summation order (thread count, torch build). A complete folder replaces
    ``out``.

    After ``every`` steps the state goes into ``out``.checkpoint, from which ``resume`` continues if it exists: batches
    up to its step are drawn again, and the result is that of an uninterrupted run.

    Raises:
        BadArgument: no steps; ``out`` holds anything but a saved model, or cannot be written.
        BadTrainingState: a checkpoint is there but ``resume`` is not set, or it is damaged, or of another recipe
            or torch.
        TrainingDiverged: a loss that is not finite; nothing is written.
    """
    if recipe.steps < 1:
        raise BadArgument("recipe.steps", recipe.steps, "at least one step", "an untrained model is not saved")
    checkpoint = out.with_name(out.name + ".checkpoint")
    require_replaceable_folder(out, SAVED_FILES, "out")
    require_writable(checkpoint, "checkpoint")
    held = load_state(checkpoint, recipe, resume)
    family = FAMILIES[recipe.family]
    tokenizer = family.tokenizer()
    model = family.model(recipe)
    optimizers = family.optimisers(model, recipe)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    done, smooth = 0, math.nan
    if held is not None:
        done, smooth = held.restore_into(model, optimizers)
    steps = islice(zip(range(recipe.steps), family.batches(recipe, tokenizer), strict=False), done, None)
    progress = tqdm(steps, total=recipe.steps, initial=done, desc=recipe.name)
    for step, batch in progress:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * learning_rate_factor_at_step(recipe, step)
        loss, last = family.loss(model, recipe, batch)
        if not torch.isfinite(loss):
            raise TrainingDiverged(
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
            save_state(checkpoint, recipe, TrainingState.from_training(step + 1, smooth, model, optimizers))
    with replace_folder_atomically(out, "out") as folder:
        model.eval().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    remove_file(checkpoint, "checkpoint")
    return smooth


def get_recipe(name: str) -> Recipe:
    """The recipe of a bundled model."""
    if name not in RECIPES:
        raise BadArgument("name", name, f"one of {', '.join(RECIPES)}")
    return RECIPES[name]
