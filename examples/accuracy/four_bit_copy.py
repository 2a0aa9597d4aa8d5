"""Writes a copy of a model whose blocks have weights of four bits, for an honest pair of evaluations.

    python examples/accuracy/four_bit_copy.py emad-tiny tiny-4bit

Each matrix of a block is rounded to GGUF's Q4_0 (32 weights share a scale) and stored as float32 again, so any engine
runs it. Embeddings, output head and norms stay as they are. It needs the extra ``gguf``.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

import emad_ref as emad

KIND = GGMLQuantizationType.Q4_0
BLOCK = 32  # weights that share a scale
WEIGHTS = "model.safetensors"


def write_four_bit_copy(source: Path, target: Path) -> int:
    """Copy the model's folder and round the matrices of its blocks; returns their number."""
    shutil.copytree(source, target)
    tensors = load_file(source / WEIGHTS)
    rounded = [
        name
        for name, tensor in tensors.items()
        if ".layers." in name and tensor.ndim == 2 and tensor.shape[1] % BLOCK == 0
    ]
    for name in rounded:
        values = dequantize(quantize(tensors[name].astype(np.float32), KIND), KIND)
        tensors[name] = np.ascontiguousarray(values.reshape(tensors[name].shape), dtype=np.float32)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return len(rounded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name of a bundled model, or a folder with one model.safetensors")
    parser.add_argument("target", type=Path, help="folder to write")
    arguments = parser.parse_args()
    bundled = emad.weights_folder() / arguments.model
    count = write_four_bit_copy(bundled if bundled.is_dir() else Path(arguments.model), arguments.target)
    print(f"{arguments.target}: {count} matrices in four bits")


if __name__ == "__main__":
    main()
