"""Distil a small partner of a decoder-only model: some of its layers, its own embeddings and its tokenizer.

    python examples/student/distil.py smollm2-135m student/ --data DATA --corpus gsm8k,wikitext

The student starts as the chosen layers of the teacher between the teacher's embedding and head, which stay as they are.
It learns the teacher's final states (squared error, relative) and, at a quarter of the positions, its distribution
(KL divergence, Hinton et al. 2015, at temperature 1). It reads the text that profiles are calibrated on and no other,
so every verdict about the pair rests on text that it never saw: ``pytest suites/ --emad-pair student/,smollm2-135m``.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from emad_ref.models.loading import LoadedModel, load
from emad_ref.text.corpora import iterate_corpus_documents

WINDOW, BATCH = 128, 8  # tokens of a window, and windows of a step
POSITIONS = 0.25  # share of positions whose distribution is learned: a head is as expensive as several layers
MATRIX_RATE, OTHER_RATE = 4e-3, 3e-4  # of Muon and AdamW
WARM_UP, LAST_RATE = 50, 0.02  # steps of warm-up; share of the rate that the last step has


def student_of(teacher: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """``teacher`` with its layers ``kept`` (from 0) alone; embedding and head are not trained."""
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in kept]
    student = AutoModelForCausalLM.from_config(config, dtype=teacher.dtype)
    weights, taken = teacher.state_dict(), {}
    for name in student.state_dict():
        body, found, rest = name.partition(".layers.")
        layer, _, part = rest.partition(".")
        taken[name] = weights[f"{body}.layers.{kept[int(layer)]}.{part}" if found else name]
    student.load_state_dict(taken)
    for part in (student.get_input_embeddings(), student.get_output_embeddings()):
        part.requires_grad_(False)
    return student


def windows_of(loaded: LoadedModel, corpora: Sequence[str], documents: int, data: Path | None = None) -> Tensor:
    """int64 [windows, WINDOW]: so many calibration documents of each corpus, each behind its opening token."""
    rows, opening = [], loaded.tokenizer.bos_token_id
    for corpus in corpora:
        ids: list[int] = []
        for text in islice(iterate_corpus_documents(corpus, "calibrate", data=data), documents):
            ids += [] if opening is None else [opening]
            ids += loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        rows.append(torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW))
    return torch.cat(rows)


def batches(windows: Tensor, rng: torch.Generator) -> Iterator[Tensor]:
    """int64 [BATCH]: windows in random order, drawn anew when all were read."""
    while True:
        yield from torch.randperm(len(windows), generator=rng).split(BATCH)


def final_states(teacher: PreTrainedModel, windows: Tensor, rows: Tensor, read: dict[int, Tensor]) -> Tensor:
    """float [rows, WINDOW, width]: the teacher's final states, read once per window and kept as float16."""
    new = [row for row in rows.tolist() if row not in read]
    if new:
        with torch.no_grad():
            states = teacher.base_model(windows[new]).last_hidden_state.half()
        read |= dict(zip(new, states, strict=True))
    return torch.stack([read[row] for row in rows.tolist()]).to(teacher.dtype)


def loss_of(student: PreTrainedModel, ids: Tensor, taught: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """(loss to minimise, KL divergence in nats per token) against the teacher's final states ``taught``."""
    states = student.base_model(ids).last_hidden_state
    apart = (states - taught).square().mean() / taught.square().mean()
    chosen = torch.randperm(ids.numel(), generator=rng)[: int(ids.numel() * POSITIONS)]
    head = student.get_output_embeddings()
    with torch.no_grad():
        target = head(taught.flatten(0, 1)[chosen]).log_softmax(-1)
    divergence = F.kl_div(head(states.flatten(0, 1)[chosen]).log_softmax(-1), target, log_target=True, reduction="sum")
    divergence = divergence / len(chosen)
    return divergence + apart, divergence.detach()


def distil(loaded: LoadedModel, kept: Sequence[int], windows: Tensor, steps: int, seed: int = 0) -> PreTrainedModel:
    """The trained student of ``loaded``; the same seed and torch give the same one, up to the order of sums."""
    teacher, rng, read = loaded.model.eval(), torch.Generator().manual_seed(seed), {}
    student = student_of(teacher, kept)
    trained = [weight for weight in student.parameters() if weight.requires_grad]
    matrices = [weight for weight in trained if weight.ndim == 2]
    optimisers = [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.0),
        torch.optim.AdamW([weight for weight in trained if weight.ndim != 2], lr=OTHER_RATE, weight_decay=0.0),
    ]
    peaks = [group["lr"] for optimiser in optimisers for group in optimiser.param_groups]
    smooth = None
    progress = tqdm(zip(range(steps), batches(windows, rng), strict=False), total=steps, desc="distil")
    for step, rows in progress:
        share = min(1.0, (step + 1) / WARM_UP) * max(LAST_RATE, 1 - step / steps)
        groups = [group for optimiser in optimisers for group in optimiser.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * share
        loss, divergence = loss_of(student, windows[rows], final_states(teacher, windows, rows, read), rng)
        student.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for optimiser in optimisers:
            optimiser.step()
        smooth = float(divergence) if smooth is None else 0.98 * smooth + 0.02 * float(divergence)
        progress.set_postfix(kl=f"{smooth:.3f}", refresh=False)
    return student.eval()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", help="a decoder-only model: a name or a folder")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--corpus", default="gsm8k,wikitext", help="comma list of corpora, as --emad-corpus takes them")
    parser.add_argument("--documents", type=int, default=8000, help="of each corpus, at most")
    parser.add_argument("--data", type=Path, help="folder that holds published corpora")
    parser.add_argument(
        "--layers", default="0,1,8,15,22,29", help="layers of the teacher to start from, the first is 0"
    )
    parser.add_argument("--steps", type=int, default=880, help=f"of {BATCH} windows of {WINDOW} tokens")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    loaded = load(args.teacher)
    windows = windows_of(loaded, args.corpus.split(","), args.documents, args.data)
    student = distil(loaded, [int(layer) for layer in args.layers.split(",")], windows, args.steps, args.seed)
    student.save_pretrained(args.out)
    loaded.tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
