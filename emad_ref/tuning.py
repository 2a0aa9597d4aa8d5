"""From a loaded model to an operating point in two calls: a profile of one text, then a margin chosen on other text.

    calibrate on one split → profile: E*[H_ℓ] → margin m on a second: τ_ℓ = E*[H_ℓ] − m → use or judge it on a third

Reading, grid and bounds are those of docs/methods.md, on the requested amount of text. This module gives no interval of
the saving or the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from emad_ref.absent import Absent
from emad_ref.calibration.calibration_run import CalibrationPlan, calibrate
from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.windows import TokenSequence, cut_windows, window_size
from emad_ref.decoding.self_corpus import iterate_sampled_documents
from emad_ref.errors import EmadError, require_instance, require_whole
from emad_ref.exit_rules import default_probes
from emad_ref.models.loading import LoadedModel, get_required_tokenizer, require_decoder_only
from emad_ref.models.tokenizers import describe_loss_above_chance
from emad_ref.record import Ints
from emad_ref.replay.grids import SETTINGS_PER_FAMILY, NetSavingFunction, margin_points
from emad_ref.replay.losses import (
    MAX_PERPLEXITY_POINTS,
    MAX_RELATIVE_RISE,
    PointLoss,
    choose_margin_point,
    replay_losses,
)
from emad_ref.text.corpora import (
    LazyDocumentTokens,
    group_of_document,
    iterate_corpus_documents,
    require_corpus_with_fields,
    tokenize_without_special_tokens,
)
from emad_ref.text.documents import DEFAULT_CORPUS, DEFAULT_DOCUMENTS, Documents, Split

CHECKED_TOKENS = 128  # tokens of the first window, for checking that model and tokenizer match

log = logging.getLogger(__name__)


class NoMargin(EmadError):
    """Raised if every margin with exits loses more than the bounds allow."""


def take_profile(
    model: LoadedModel, corpus: str = DEFAULT_CORPUS, documents: int = DEFAULT_DOCUMENTS, *, data: Path | None = None
) -> Profile:
    """Calibrate the entropy profile of a model on a corpus, with probes at the default layers.

    Parameters
    ----------
    model : LoadedModel
        A decoder-only model with a tokenizer.
    corpus : str
        A corpus by name, or a file of documents.
    documents : int
        Most windows of the calibration split that are read.
    data : Path, optional
        Folder of downloaded corpora.

    Returns
    -------
    Profile
        Mean entropy of each bin and probe, nats.

    Raises
    ------
    BadArgument
        An encoder-decoder, a model without a tokenizer, an unknown corpus, no window.
    EmptyCorpus
        A corpus without a window of two tokens.

    References
    ----------
    EMAD, "Calibration details".
    """
    require_whole("documents", documents, 1)
    require_instance("corpus", corpus, str, "name a corpus, or a path as text")
    stepper = model.stepper
    plan = CalibrationPlan(
        model=model.name,
        fingerprint=model.fingerprint,
        dtype=str(stepper.dtype).removeprefix("torch."),
        window=window_size(stepper.max_positions),
        probes=default_probes(stepper.layers),
        documents=int(documents),
    )
    reading = partial(windows_of, model, corpus, "calibrate", data=data, limit=documents)
    return calibrate(stepper, plan, {corpus: reading})


def choose_margin(
    model: LoadedModel,
    profile: Profile,
    corpus: str = DEFAULT_CORPUS,
    documents: int = DEFAULT_DOCUMENTS,
    *,
    data: Path | None = None,
) -> PointLoss:
    """Choose the cheapest margin whose loss on validation text is surely within the bounds of ``docs/methods.md``.

    An upper bound of the loss decides (one-sided 95 %, over documents), not its estimate.

    Parameters
    ----------
    model : LoadedModel
        The model of the profile.
    profile : Profile
        From ``take_profile`` or ``load_profile``.
    corpus, documents, data
        As for ``take_profile``; the validation split is read.

    Returns
    -------
    PointLoss
        ``point``: the chosen operating point. ``net_reduction`` (fraction of FLOPs) and ``perplexity_rise`` (fraction)
        are those on validation text.

    Raises
    ------
    BadProfile
        The profile of another model.
    NoMargin
        No margin is surely within the bounds, as with few documents.
    BadArgument, EmptyCorpus
        As ``take_profile``.

    References
    ----------
    EMAD, "Calibration details".
    """
    require_instance("profile", profile, Profile, "take_profile and load_profile return one")
    require_whole("documents", documents, 1)
    require_instance("corpus", corpus, str, "name a corpus, or a path as text")
    profile.require(model.fingerprint, str(model.stepper.dtype).removeprefix("torch."))
    trace = take_trace(model.stepper, windows_of(model, corpus, "validate", data=data, limit=documents))
    margins = margin_points(profile, NetSavingFunction(trace, model.geometry), SETTINGS_PER_FAMILY)
    losses = replay_losses(trace, model.geometry, margins)
    chosen = choose_margin_point(losses)
    if isinstance(chosen, Absent):
        raise NoMargin(
            f"corpus={corpus!r}, but no margin is sure to lose at most {MAX_PERPLEXITY_POINTS:g} perplexity points and "
            f"{MAX_RELATIVE_RISE:.0%} on its {len(losses.tokens)} documents; full depth is what this model needs"
        )
    return chosen


def windows_of(
    model: LoadedModel,
    corpus: str,
    split: Split,
    *,
    data: Path | None = None,
    limit: int | None = None,
    per_document: int | None = None,
    longest: int | None = None,
    corpus_group: str | None = None,
    told: Callable[[Documents], None] | None = None,
) -> Iterator[TokenSequence]:
    """At most ``limit`` windows of ``corpus``, or of the model's own samples for ``self``.

    ``longest``: the most tokens of a window; None: 512, or the model's positions. ``per_document``: most windows of one
    document, its first; None: all. ``corpus_group``: the field of a .jsonl file that names the group of a document;
    a group counts as one document. ``told`` receives the texts: a ``text.corpora.DistinctDocumentIterator`` counts the
    ones it dropped.

    Raises:
        BadArgument: an encoder-decoder; an unknown corpus or split; a corpus of text for a model without a tokenizer.
    """
    require_decoder_only(model)
    stepper = model.stepper
    window = window_size(stepper.max_positions, longest)
    documents: Iterator[Ints | LazyDocumentTokens]
    group_of = None
    if corpus == "self":
        require_corpus_with_fields(corpus, corpus_group)
        documents = iterate_sampled_documents(
            stepper, model.opening_token_id, min(window, 256) - 1, split, ends=model.end_token_ids
        )
    else:
        tokenizer = get_required_tokenizer(model)
        texts = iterate_corpus_documents(corpus, split, data=data, corpus_group=corpus_group)
        group_of = None if corpus_group is None else partial(group_of_document, texts)
        if told is not None:
            told(texts)
        documents = (tokenize_without_special_tokens(tokenizer, text) for text in texts)
    found = cut_windows(documents, window, model.opening_token_id, limit, per_document, group_of)
    return _warn_of_mismatch(model, corpus, found) if corpus != "self" and split == "calibrate" else found


def _warn_of_mismatch(model: LoadedModel, corpus: str, found: Iterator[TokenSequence]) -> Iterator[TokenSequence]:
    """The windows, with a warning if the model predicts the first worse than a guess."""
    for number, window in enumerate(found):
        if number == 0:
            loss = float(
                take_trace(model.stepper, [replace(window, tokens=window.tokens[:CHECKED_TOKENS])])
                .nll_nats[:, -1]
                .mean()
            )
            if said := describe_loss_above_chance(loss, model.stepper.vocabulary_size):
                log.warning("%s on %s: %s", model.name, corpus, said)
        yield window
