"""Which plugin makes the decoder under test: ours, the one foreign provider, or the one ``--emad-backend`` names.

With ``--emad-decoder`` it is none of them: the decoder in the other process is the only one that is asked. Who was
asked, and what came of it, is counted (``origins`` tells whose decoder that makes it).
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

import pytest

from emad_ref.errors import BadArgument, EmadError
from emad_ref.models.anatomy import BACKENDS
from emad_ref.report.providers import ANSWERED, CAME_OF_IT, DECLINED, EXITS, NONE, SAMPLING
from pytest_emad.options import settings

if TYPE_CHECKING:
    from emad_ref.evidence.distant import Distant
    from emad_ref.protocol import Decoder, Request
    from emad_ref.wire.address import Address

HOOK = "pytest_emad_make_decoder"
OURS = "emad-walked"
DISTANT = "emad-distant"

# fields that every point with exits sets, or that are said with the schedule
PLAIN_FIELDS = frozenset({"probes", "thresholds", "schedule", "margin_nats", "period"})

COUNTS = pytest.StashKey[dict[str, dict[str, int]]]()
COUNTED_FEATURES = pytest.StashKey[dict[str, dict[str, list[int]]]]()  # provider → feature → [answered, declined]


class NoDecoder(EmadError):
    """Every provider that had to answer returned None."""


class WalkedBackend:
    """Our own provider, asked last: ``emad_ref.decoding.walked`` over the judge's own model, which it leaves alone."""

    emad_origin = "reference (ours)"

    @pytest.hookimpl(trylast=True)
    def pytest_emad_make_decoder(self, config: pytest.Config, request: Request) -> Decoder:
        from emad_ref.evidence.host import ours  # imports torch: only when a decoder is really wanted

        return ours(request)


class DistantBackend:
    """The provider of ``--emad-decoder``: one connection for the run, made when the first decoder is wanted."""

    def __init__(self, address: Address, seconds: float) -> None:
        self._address, self._seconds = address, seconds
        self.emad_origin = f"process {address}"
        self._distant: Distant | None = None

    def pytest_emad_make_decoder(self, config: pytest.Config, request: Request) -> Decoder:
        if self._distant is None:
            from emad_ref.evidence.distant import Distant  # imports torch, as the model that is asked about has

            self._distant = Distant(self._address, self._seconds)
        return self._distant.make(request)

    def close(self) -> None:
        if self._distant is not None:
            self._distant.close()


def register(config: pytest.Config) -> None:
    """Our provider and, with ``--emad-decoder``, the one of the other process, which ends with the run."""
    config.pluginmanager.register(WalkedBackend(), OURS)
    asked_for = settings(config)
    if asked_for.decoder is not None:
        distant = DistantBackend(asked_for.decoder, asked_for.decoder_timeout)
        config.pluginmanager.register(distant, DISTANT)
        config.add_cleanup(distant.close)


def providers(config: pytest.Config) -> dict[str, object]:
    """Every registered provider by plugin name, ours included, the next to be asked first."""
    found = reversed(getattr(config.hook, HOOK).get_hookimpls())
    return {implementation.plugin_name: implementation.plugin for implementation in found}


def check(config: pytest.Config) -> None:
    """Refuse a run whose decoder is ambiguous or unknown.

    Raises:
        pytest.UsageError: ``--emad-backend`` names no provider; or several foreign ones and no ``--emad-backend``.
    """
    try:
        _chosen(config)
    except BadArgument as error:
        raise pytest.UsageError(str(error)) from error


def named(config: pytest.Config) -> str | None:
    """The provider that the command line names, by address, by name or by how ours walks; None: the usual order."""
    asked_for = settings(config)
    if asked_for.decoder is not None:
        return DISTANT
    return OURS if asked_for.backend in BACKENDS else asked_for.backend


def _chosen(config: pytest.Config) -> str | None:
    """The provider that alone is asked, or None for the usual order."""
    known, wanted = list(providers(config)), named(config)
    if wanted == DISTANT:
        return wanted
    foreign = [name for name in known if name != OURS]
    if wanted is None and len(foreign) > 1:
        raise BadArgument("--emad-backend", None, f"a choice between {', '.join(foreign)}", "name one of them")
    if wanted is not None and wanted not in known:
        raise BadArgument("--emad-backend", wanted, f"a plugin with {HOOK}: {', '.join(known)}", "load it with -p NAME")
    return wanted


def features(request: Request) -> tuple[str, ...]:
    """What ``request`` asks beyond a greedy run at full depth: exits, sampling, and fields of the point by name."""
    point = request.point
    if point.fixed and point.ceiling == point.layers:
        exits: list[str] = []
    else:
        given = [field for field in fields(point) if field.default is not MISSING and field.name not in PLAIN_FIELDS]
        exits = [EXITS, *(field.name for field in given if getattr(point, field.name) != field.default)]
        exits += [f"schedule {point.schedule}"] if point.schedule != "monotone" else []
    return (*exits, *([SAMPLING] if request.temperature else []))


def _count_features(config: pytest.Config, name: str, request: Request, declined: bool) -> tuple[str, ...]:
    counted = config.stash.setdefault(COUNTED_FEATURES, {}).setdefault(name, {})
    for feature in (asked := features(request)):
        counted.setdefault(feature, [0, 0])[declined] += 1
    return asked


def make_decoder(config: pytest.Config, request: Request) -> Decoder:
    """The decoder under test for ``request``; the caller closes it.

    Raises:
        pytest.UsageError: as ``check``.
        emad_ref.protocol.Unsupported: the provider declines; record the claim as ``not applicable``.
        NoDecoder: every provider that is asked, the one of ``--emad-backend`` or all, returned None.
    """
    from emad_ref.protocol import Unsupported

    check(config)
    wanted, known = _chosen(config), providers(config)
    counts = config.stash.setdefault(COUNTS, {})
    for name in known if wanted is None else [wanted]:
        others = [plugin for other, plugin in known.items() if other != name]
        caller = config.pluginmanager.subset_hook_caller(HOOK, remove_plugins=others)
        count = counts.setdefault(name, dict.fromkeys(CAME_OF_IT, 0))
        try:
            decoder: Decoder | None = caller(config=config, request=request)
        except Unsupported as refusal:
            count[DECLINED] += 1
            refusal.features = _count_features(config, name, request, declined=True)
            raise
        count[NONE if decoder is None else ANSWERED] += 1
        if decoder is not None:
            _count_features(config, name, request, declined=False)
            return decoder
    raise NoDecoder(
        f"--emad-backend={wanted or ', '.join(known)} returned no decoder for {request.model.name} at "
        f"{request.point.name!r}; expected a Decoder or Unsupported(reason)"
    )
