"""Where a training stands, in a file: weights, optimisers, step; taken up again bit for bit.

Data and rates follow from the recipe and the step alone, and training draws no random number, so this is all there is.
Read weights-only: a checkpoint runs no code.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from emad_ref.errors import EmadError
from emad_ref.files import read_bytes, writing
from emad_ref.training.recipe import Recipe


class BadState(EmadError):
    """A checkpoint of a training that cannot be read, or belongs to another one."""


@dataclass(frozen=True)
class State:
    """``step`` steps are done; ``smooth`` the running mean loss, nats per token; ``weights`` and ``optimisers`` as
    their ``state_dict`` gives them.
    """

    step: int
    smooth: float
    weights: dict[str, Any]
    optimisers: list[dict[str, Any]]

    @staticmethod
    def of(step: int, smooth: float, model: nn.Module, optimisers: Sequence[torch.optim.Optimizer]) -> State:
        return State(step, smooth, model.state_dict(), [optimiser.state_dict() for optimiser in optimisers])

    def put_into(self, model: nn.Module, optimisers: Sequence[torch.optim.Optimizer]) -> tuple[int, float]:
        """Go on from here: (steps done, running mean loss).

        Raises:
            BadState: tensors of another model.
        """
        try:
            model.load_state_dict(self.weights)
            for optimiser, state in zip(optimisers, self.optimisers, strict=True):
                optimiser.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadState(
                f"checkpoint of step {self.step} does not fit the model of its recipe ({str(error)[:200]}); "
                "delete it to start anew"
            ) from error
        return self.step, self.smooth


def keep(path: Path, recipe: Recipe, state: State) -> None:
    """Write; the file is complete or as it was. Raises BadFile."""
    with writing(path, "checkpoint") as file:
        torch.save({"of": _of(recipe), **{name: getattr(state, name) for name in State.__annotations__}}, file)


def opened(path: Path, recipe: Recipe, resume: bool) -> State | None:
    """The state to go on from; None where there is no checkpoint.

    Raises:
        BadState: one is there but ``resume`` is not set, or it cannot be read, or is of another recipe or torch.
    """
    if not path.exists():
        return None
    if not resume:
        raise BadState(
            f"checkpoint={str(path)!r} holds an unfinished training, but expected none; pass resume (--resume) to go "
            "on with it, or delete it"
        )
    try:
        held = torch.load(io.BytesIO(read_bytes(path, "checkpoint")), weights_only=True)
        of = held.pop("of")
        state = State(**held)
        fits = type(state.step) is int and 0 < state.step < recipe.steps
    except Exception as error:  # a damaged archive raises whatever zip, pickle and torch raise
        raise BadState(
            f"checkpoint={str(path)!r} cannot be read ({type(error).__name__}: {str(error)[:200]}), but expected one "
            "that `emad train` wrote; delete it to start anew"
        ) from error
    if of != _of(recipe) or not fits:
        raise BadState(
            f"checkpoint={str(path)!r} is of {str(of)[:200]}, step {state.step}, but expected {_of(recipe)}; train "
            "with the same recipe and torch, or delete it to start anew"
        )
    return state


def _of(recipe: Recipe) -> str:
    return json.dumps(asdict(recipe) | {"torch": torch.__version__}, sort_keys=True)
