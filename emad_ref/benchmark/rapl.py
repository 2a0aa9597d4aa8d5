"""Energy of CPU packages, from the counters that Linux shows of them (RAPL), as a ``EnergyCounter`` of
``benchmark.energy``.

    /sys/class/powercap/intel-rapl:N/{name, energy_uj, max_energy_range_uj}

Intel and AMD processors count microjoules per package, cores and caches included, memory mostly not. The counter is the
package's: whatever else runs there is in it, which nobody can tell apart, and a virtual machine sees none at all. It
wraps at ``max_energy_range_uj``, within minutes under load, so that it must be read more often than that: every reading
adds what was counted since the last. Since 2020 only root may read it on most systems (CVE-2020-8694).
"""

from __future__ import annotations

import os
from pathlib import Path

from emad_ref.benchmark.energy import CounterUnreadable, EnergySource, Unmeasured

POWERCAP = Path("/sys/class/powercap")
RAPL_SOURCE: EnergySource = "CPU package energy"


class RaplCounter:
    """``EnergyCounter`` over package domains; energy since it was opened."""

    source: EnergySource = RAPL_SOURCE

    def __init__(self, domains: list[Path]):
        self._domains = domains
        self._range = [_read_counter(domain / "max_energy_range_uj") for domain in domains]
        self._last = [_read_counter(domain / "energy_uj") for domain in domains]
        self._counted_uj = 0
        self.device = f"{len(domains)} CPU package{'s' * (len(domains) > 1)}"

    def energy_mj(self) -> int:
        now = [_read_counter(domain / "energy_uj") for domain in self._domains]
        for last, read, whole in zip(self._last, now, self._range, strict=True):
            self._counted_uj += read - last if read >= last else read + whole - last
        self._last = now
        return self._counted_uj // 1000

    def power_mw(self) -> int:
        raise CounterUnreadable("RAPL counts energy and shows no power")

    def slowdowns(self) -> int:
        return 0  # nothing here says whether clocks were lowered

    def processes(self) -> frozenset[int]:
        return frozenset({os.getpid()})  # a package has no list of them


def open_rapl(root: Path = POWERCAP) -> RaplCounter | Unmeasured:
    """All packages of this machine, or why their energy cannot be read."""
    domains = sorted(path.parent for path in root.glob("intel-rapl:*/name") if _is_package(path))
    if not domains:
        return Unmeasured("no CPU package shows its energy here (RAPL): a virtual machine, or another processor")
    try:
        return RaplCounter(domains)
    except CounterUnreadable as why:
        return Unmeasured(why.reason)


def _is_package(name: Path) -> bool:
    try:
        return name.read_text().strip().startswith("package")
    except OSError:
        return False


def _read_counter(file: Path) -> int:
    try:
        return int(file.read_text())
    except PermissionError as error:
        reason = f"CPU package energy is for root alone here: sudo chmod o+r {POWERCAP}/*/energy_uj, or run as root"
        raise CounterUnreadable(reason) from error
    except (OSError, ValueError) as error:
        raise CounterUnreadable(f"CPU package energy cannot be read: {error}") from error
