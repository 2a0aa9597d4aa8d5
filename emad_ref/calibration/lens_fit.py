"""Fit of a tuned lens to the model's final distribution (Belrose et al., 2303.08112), as a resumable stream.

    minimise over A_ℓ, b_ℓ:  mean over tokens of KL(p_L ‖ q_ℓ) = Σ_v p_L(v)·(log p_L(v) − log q_ℓ(v))
    q_ℓ = softmax(head(norm(h_ℓ + A_ℓ·h_ℓ + b_ℓ))),  p_L the model's own final distribution

Adam, with a cosine decay of its rate; every layer starts as the identity, and layers are independent. One batch of text
is in memory at a time; a text that ends is read again from its first window. A share of the documents, drawn by
``seed``, is held out: nothing is fitted on them, and the first of them measure the divergences of both readouts.

After ``every`` batches the state goes into a checkpoint, written completely or not at all. A resumed run reads the
earlier text again without running the model, continues only if it is the same text, and ends with the same bits.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from emad_ref.calibration.calibration_run import BadCheckpoint, limit_tokens, window_to_bytes
from emad_ref.calibration.lens_files import FittedLens
from emad_ref.calibration.profile import library_versions
from emad_ref.calibration.trace import EmptyCorpus, iterate_states_after
from emad_ref.calibration.windows import TokenSequence, iterate_batches
from emad_ref.errors import BadArgument
from emad_ref.files import open_for_atomic_write, read_bytes, require_writable
from emad_ref.models.stepper import Stepper
from emad_ref.probes.signal_values import kl_divergence_nats
from emad_ref.probes.tuned_lens import Translator, TunedLens
from emad_ref.record import Floats
from emad_ref.signals import NotFinite, log_probabilities

WindowSource = Callable[[], Iterable[TokenSequence]]
EMPTY_DIGEST = hashlib.sha256().hexdigest()
BATCHES_PER_CHECKPOINT = 25  # batches between two checkpoints: seconds


@dataclass(frozen=True)
class LensPlan:
    """Plan of a lens fit; runs with equal plans and texts have equal lenses.

    ``layers``  to translate, ascending, below the last. ``rank``  r of each A = U·Vᵀ; None: full.
    ``window``  tokens of a window, for the record. ``steps``, ``tokens_per_step``, ``rate`` of Adam.
    ``held_out``  share of documents; ``held_out_tokens``  positions of them to measure on.
    ``seed``  draws V of low ranks, and the held-out documents.

    Raises:
        BadArgument: counts below 1, no or unordered layers, a rate that is not positive, a share outside 0–1.
    """

    model: str
    fingerprint: str
    dtype: str
    corpus: str
    window: int
    layers: tuple[int, ...]
    rank: int | None = None
    steps: int = 800
    tokens_per_step: int = 512
    rate: float = 2e-3
    held_out: float = 0.2
    held_out_tokens: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "tokens_per_step", "held_out_tokens"):
            if getattr(self, name) < 1:
                raise BadArgument(name, getattr(self, name), "a count ≥ 1")
        if self.rank is not None and self.rank < 1:
            raise BadArgument("rank", self.rank, "a rank ≥ 1, or None for full matrices")
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise BadArgument("layers", self.layers, "ascending layers, each once")
        if not 0 < self.rate < math.inf:
            raise BadArgument("rate", self.rate, "a finite number > 0")
        if not 0 < self.held_out < 1:
            raise BadArgument("held_out", self.held_out, "a share of documents between 0 and 1, both excluded")

    def to_json(self) -> dict[str, Any]:
        """Every field by name as JSON, and the libraries' versions, which change the last digits."""
        return dict(json.loads(json.dumps(asdict(self) | {"versions": library_versions()})))

    def is_held_out(self, document: int) -> bool:
        """Whether a document is held out, which depends only on seed and number."""
        digest = hashlib.sha256(f"{self.seed} {document}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.held_out * 2**64


@dataclass
class LensFitState:
    """State of a fit after ``steps`` training batches and some held-out ones, of text with these digests.

    ``factors``: by layer, the tensors of its translator, bias last. ``moments``: Adam's own. ``nats`` [2, layers]: sums
    over the ``tokens`` held out.
    """

    factors: dict[int, list[Tensor]]
    moments: dict[str, Any]
    steps: int = 0
    held_out_batches: int = 0
    tokens: int = 0
    nats: Floats = field(default_factory=lambda: np.zeros((2, 0)))
    training_digest: str = EMPTY_DIGEST
    held_out_digest: str = EMPTY_DIGEST


def fit_lens(
    stepper: Stepper,
    plan: LensPlan,
    windows: WindowSource,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    every: int = BATCHES_PER_CHECKPOINT,
    progress: str | None = None,
) -> FittedLens:
    """Fit a tuned lens to the model's final distribution.

    Parameters
    ----------
    stepper : Stepper
        The model, layer by layer.
    plan : LensPlan
        Layers, rank and optimiser settings.
    windows : callable
        Returns an iterator over the same ``TokenSequence`` windows at every call.
    checkpoint : Path or None
        File to write after ``every`` batches; the caller removes it once the lens is kept.
    resume : bool
        Continue from the checkpoint if it exists.
    every : int
        Batches between two checkpoints.
    progress : str or None
        Name of the progress bar; None shows none.

    Returns
    -------
    FittedLens
        Lens, plan, and divergences on held-out documents in nats.

    Raises
    ------
    BadArgument
        Layers or a rank that this model lacks; ``every`` below 1.
    BadCheckpoint
        A checkpoint exists but ``resume`` is not set, or it is damaged, of another plan or of another text.
    EmptyCorpus
        No window to fit on, or none held out.
    NotFinite
        A divergence that is not a number.

    References
    ----------
    Belrose et al., "Eliciting Latent Predictions from Transformers with the Tuned Lens", 2303.08112.
    """
    require_plan_fits_model(stepper, plan)
    if every < 1:
        raise BadArgument("every", every, "a count ≥ 1")
    state = _initial_state(stepper, plan)
    if next(held_out_windows(plan, windows), None) is None:  # before the long fit
        raise _nothing_held_out(plan)
    if checkpoint is not None:
        require_writable(checkpoint, "checkpoint")
        state = _load_state(checkpoint, plan, resume) or state

    def keep(done: int) -> None:
        if checkpoint is not None and done % every == 0:
            _save_state(checkpoint, plan, state)

    bar_options = {"disable": progress is None, "initial": state.steps, "total": plan.steps, "unit": "step"}
    with tqdm(desc=progress, **bar_options) as bar:
        for number, divergence in enumerate(_fit_steps(stepper, plan, windows, state), start=1):
            bar.set_postfix(nats=f"{divergence:.4f}", refresh=False)
            bar.update()
            keep(number)
    keep(0)
    lens = build_lens(stepper, plan, state)
    return fitted_lens_with_divergences(stepper, plan, windows, state, lens, progress, keep)


def fitted_lens_with_divergences(
    stepper: Stepper,
    plan: LensPlan,
    windows: WindowSource,
    state: LensFitState,
    lens: TunedLens,
    progress: str | None,
    keep: Callable[[int], None] = lambda batches: None,
) -> FittedLens:
    """The fitted lens with the divergences of both readouts on held-out documents, in nats.

    ``keep``: called with the number of batches after each of them. Raises EmptyCorpus if no document is held out.
    """
    with tqdm(
        desc=f"{progress}, held out",
        disable=progress is None,
        initial=state.tokens,
        total=plan.held_out_tokens,
        unit="tok",
        unit_scale=True,
    ) as bar:
        for number, tokens in enumerate(_measure_batches(stepper, plan, windows, state, lens), start=1):
            bar.update(tokens)
            keep(number)
    if state.tokens == 0:
        raise _nothing_held_out(plan)
    raw, tuned = (dict(zip(plan.layers, (row / state.tokens).tolist(), strict=True)) for row in state.nats)
    return FittedLens(lens, plan.to_json(), raw, tuned, state.tokens)


def _nothing_held_out(plan: LensPlan) -> EmptyCorpus:
    return EmptyCorpus(
        f"corpus={plan.corpus!r} has no document to hold out, but expected at least one; use more text, or hold "
        f"out more than a share of {plan.held_out:g}"
    )


def _fit_steps(stepper: Stepper, plan: LensPlan, windows: WindowSource, state: LensFitState) -> Iterator[float]:
    """Yield the mean divergence of each further step, and update ``state``."""
    adam = make_adam(plan, state)
    if state.moments:
        adam.load_state_dict(state.moments)
    training = iterate_batches(_endless_windows(plan, windows), plan.tokens_per_step)
    digest = _skip_batches(training, state.steps, state.training_digest, plan)
    for batch in islice(training, plan.steps - state.steps):
        states, final = states_and_final_log_probs(stepper, plan.layers, batch)
        losses = partial(_full_divergence, stepper, states, final)
        divergence = take_adam_step(adam, plan, state, state.steps, losses)
        digest.update(_batch_bytes(batch))
        state.steps, state.training_digest, state.moments = state.steps + 1, digest.hexdigest(), adam.state_dict()
        yield divergence


def _full_divergence(
    stepper: Stepper, states: dict[int, Tensor], final: Tensor, layer: int, translator: Translator
) -> Tensor:
    return kl_divergence_nats(final, stepper.logits(translator(states[layer]))).mean()


def make_adam(plan: LensPlan, state: LensFitState) -> torch.optim.Adam:
    """Adam over the factors of all layers."""
    return torch.optim.Adam([tensor for factors in state.factors.values() for tensor in factors], lr=plan.rate)


@torch.enable_grad()  # a decoder under test may have switched gradients off for the process
def take_adam_step(
    adam: torch.optim.Adam,
    plan: LensPlan,
    state: LensFitState,
    step: int,
    loss_of: Callable[[int, Translator], Tensor],
) -> float:
    """Take ``step`` of the plan, from 0, at its rate on the cosine; the mean over layers of ``loss_of(layer, T)``.

    Raises:
        NotFinite: a loss that is not a number.
    """
    for group in adam.param_groups:
        group["lr"] = plan.rate * (1 + math.cos(math.pi * step / plan.steps)) / 2
    total = 0.0
    for layer, factors in state.factors.items():
        loss = loss_of(layer, Translator(tuple(factors[:-1]), factors[-1]))
        total += float(loss.detach())
        # not backward(): the model's own weights need no gradients
        for tensor, gradient in zip(factors, torch.autograd.grad(loss, factors), strict=True):
            tensor.grad = gradient
    if not math.isfinite(total):
        raise NotFinite(f"divergence={total} at step {step}, but expected a finite number; lower rate ({plan.rate:g})")
    adam.step()
    return total / len(plan.layers)


def _measure_batches(
    stepper: Stepper, plan: LensPlan, windows: WindowSource, state: LensFitState, lens: TunedLens
) -> Iterator[int]:
    """Yield the tokens of each further held-out batch, and add its divergences to ``state``."""
    batches = iterate_batches(limit_tokens(held_out_windows(plan, windows), plan.held_out_tokens), plan.tokens_per_step)
    digest = _skip_batches(batches, state.held_out_batches, state.held_out_digest, plan)
    for batch in batches:
        states, final = states_and_final_log_probs(stepper, plan.layers, batch)
        with torch.inference_mode():
            sums = [
                [
                    float(kl_divergence_nats(final, stepper.logits(h)).double().sum())
                    for h in (hidden, lens(hidden, layer))
                ]
                for layer, hidden in states.items()
            ]
        digest.update(_batch_bytes(batch))
        state.nats = state.nats + np.array(sums).T
        state.held_out_batches, state.held_out_digest = state.held_out_batches + 1, digest.hexdigest()
        state.tokens += len(final)
        yield len(final)


def states_and_final_log_probs(
    stepper: Stepper, layers: Sequence[int], batch: Sequence[TokenSequence]
) -> tuple[dict[int, Tensor], Tensor]:
    """(states [tokens, D] after each of ``layers``, final log-probabilities [tokens, V]) of all decided positions.

    Detached from the model, so they may enter a graph.
    """
    with torch.inference_mode():
        states = dict(enumerate(iterate_states_after(stepper, batch), start=1))
        final = log_probabilities(stepper.logits(states[stepper.layers]))
    return {layer: states[layer].clone() for layer in layers}, final.clone()


def held_out_windows(plan: LensPlan, windows: WindowSource) -> Iterator[TokenSequence]:
    """Windows of the held-out documents of ``plan``, for divergences and for fitting a gate."""
    return (window for window in windows() if plan.is_held_out(window.document))


def training_windows(plan: LensPlan, windows: WindowSource) -> Iterator[TokenSequence]:
    """Windows of the documents to fit on.

    Raises:
        EmptyCorpus: there are none.
    """
    has_window = False
    for window in windows():
        if not plan.is_held_out(window.document):
            has_window = True
            yield window
    if not has_window:
        raise EmptyCorpus(
            f"corpus={plan.corpus!r} has no window to fit on, but expected at least one; use more text, or hold "
            f"out less than a share of {plan.held_out:g}"
        )


def _endless_windows(plan: LensPlan, windows: WindowSource) -> Iterator[TokenSequence]:
    """Windows of the documents to fit on, in an endless loop."""
    while True:
        yield from training_windows(plan, windows)


def _initial_state(stepper: Stepper, plan: LensPlan) -> LensFitState:
    """The identity at every layer: A = 0, or U = 0 with random V, since two zero factors have no gradient."""
    width, generator = stepper.geometry.hidden, torch.Generator().manual_seed(plan.seed)
    dtype = torch.float64 if stepper.dtype == torch.float64 else torch.float32

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=stepper.device)

    def identity() -> list[Tensor]:
        if plan.rank is None:
            return [zeros(width, width), zeros(width)]
        basis = torch.randn(width, plan.rank, generator=generator) / width**0.5
        return [zeros(width, plan.rank), basis.to(stepper.device, dtype), zeros(width)]

    factors = {layer: [tensor.requires_grad_() for tensor in identity()] for layer in plan.layers}
    return LensFitState(factors, {}, nats=np.zeros((2, len(plan.layers))))


def build_lens(stepper: Stepper, plan: LensPlan, state: LensFitState) -> TunedLens:
    translators = {}
    for layer, factors in state.factors.items():
        *matrices, bias = (tensor.detach().cpu().clone() for tensor in factors)
        translators[layer] = Translator(tuple(matrices), bias)
    return TunedLens(plan.fingerprint, plan.dtype, stepper.layers, translators)


def require_plan_fits_model(stepper: Stepper, plan: LensPlan) -> None:
    """Raise BadArgument for layers or a rank of ``plan`` that the model does not have."""
    if not all(1 <= layer < stepper.layers for layer in plan.layers):
        expected = f"layers in 1–{stepper.layers - 1} of this model"
        raise BadArgument("layers", plan.layers, expected, "the last is what a lens is fitted to")
    if plan.rank is not None and plan.rank > stepper.geometry.hidden:
        expected = f"a rank of at most {stepper.geometry.hidden}, the width of this model"
        raise BadArgument("rank", plan.rank, expected, "a full matrix has no rank to choose")


# ---------------------------------------------------------------- position in the text, and the checkpoint


def _skip_batches(batches: Iterator[list[TokenSequence]], count: int, digest: str, plan: LensPlan) -> Any:
    """The running digest of the first ``count`` batches, which are skipped; raises BadCheckpoint if it differs."""
    running = hashlib.sha256()
    for batch in islice(batches, count):
        running.update(_batch_bytes(batch))
    if running.hexdigest() != digest:
        raise BadCheckpoint(
            f"corpus={plan.corpus!r}: its first {count} batches are another text than at the checkpoint, but expected "
            "the same; delete the checkpoint to start anew"
        )
    return running


def _batch_bytes(batch: Sequence[TokenSequence]) -> bytes:
    return b"".join(window_to_bytes(window) for window in batch)


def _save_state(path: Path, plan: LensPlan, state: LensFitState) -> None:
    """Write the state; the file is complete or unchanged."""
    contents = {name: getattr(state, name) for name in LensFitState.__annotations__} | {
        "factors": {layer: [tensor.detach() for tensor in factors] for layer, factors in state.factors.items()},
        "nats": torch.from_numpy(state.nats),
        "of": json.dumps(plan.to_json(), sort_keys=True),
    }
    with open_for_atomic_write(path, "checkpoint") as file:
        torch.save(contents, file)


def _load_state(path: Path, plan: LensPlan, resume: bool) -> LensFitState | None:
    """The state to continue from; None without a checkpoint."""
    if not path.exists():
        return None
    if not resume:
        raise BadCheckpoint(
            f"checkpoint={str(path)!r} holds an unfinished fit, but expected none; pass resume (--resume) to go on "
            "with it, or delete it"
        )
    try:
        contents = torch.load(io.BytesIO(read_bytes(path, "checkpoint")), weights_only=True)
        of = contents.pop("of")
        state = LensFitState(**contents | {"nats": contents["nats"].numpy()})
        for factors in state.factors.values():
            factors[:] = [tensor.requires_grad_() for tensor in factors]
    except Exception as error:  # a damaged archive may raise any error of zip, pickle or torch
        raise BadCheckpoint(
            f"checkpoint={str(path)!r} cannot be read ({type(error).__name__}: {str(error)[:200]}), but expected one "
            "that `emad lens` wrote; delete it to start anew"
        ) from error
    theirs, mine = json.loads(of), plan.to_json()
    for name in mine:
        if theirs.get(name) != mine[name]:
            raise BadCheckpoint(
                f"checkpoint={str(path)!r} has {name}={theirs.get(name)!r}, but expected {mine[name]!r} as in this "
                "run; fit with the same settings, or delete it to start anew"
            )
    return state
