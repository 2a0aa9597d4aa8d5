"""Which plugin makes the decoder under test: ours, the one foreign provider, or the one ``--emad-backend`` names."""

from __future__ import annotations

import pytest

from emad_ref.errors import BadArgument, EmadError
from emad_ref.protocol import Decoder, Request
from pytest_emad.options import settings

HOOK = "pytest_emad_make_decoder"
OURS = "emad-walked"


class NoDecoder(EmadError):
    """The provider that had to answer returned None."""


class WalkedBackend:
    """Our own provider, asked last: ``emad_ref.decoding.walked`` over the judge's own model, which it leaves alone."""

    @pytest.hookimpl(trylast=True)
    def pytest_emad_make_decoder(self, config: pytest.Config, request: Request) -> Decoder:
        from emad_ref.evidence.host import ours  # imports torch: only when a decoder is really wanted

        return ours(request)


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


def _chosen(config: pytest.Config) -> str | None:
    """The provider that alone is asked, or None for the usual order."""
    known, wanted = list(providers(config)), settings(config).backend
    foreign = [name for name in known if name != OURS]
    if wanted is None and len(foreign) > 1:
        raise BadArgument("--emad-backend", None, f"a choice between {', '.join(foreign)}", "name one of them")
    if wanted is not None and wanted not in known:
        raise BadArgument("--emad-backend", wanted, f"a plugin with {HOOK}: {', '.join(known)}", "load it with -p NAME")
    return wanted


def make_decoder(config: pytest.Config, request: Request) -> Decoder:
    """The decoder under test for ``request``; the caller closes it.

    Raises:
        pytest.UsageError: as ``check``.
        emad_ref.protocol.Unsupported: the provider declines; record the claim as ``not applicable``.
        NoDecoder: the provider named by ``--emad-backend`` returned None.
    """
    check(config)
    wanted = _chosen(config)
    others = [plugin for name, plugin in providers(config).items() if wanted is not None and name != wanted]
    caller = config.pluginmanager.subset_hook_caller(HOOK, remove_plugins=others)
    decoder: Decoder | None = caller(config=config, request=request)
    if decoder is None:
        raise NoDecoder(
            f"--emad-backend={wanted} returned no decoder for {request.model.name} at {request.point.name!r}; "
            "expected a Decoder or Unsupported(reason)"
        )
    return decoder
