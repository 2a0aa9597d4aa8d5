"""``emad lens``: a tuned lens of a model, fitted on a corpus."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from emad_ref.cli.parsing import examples
from emad_ref.errors import BadArgument
from emad_ref.files import remove, require_writable
from emad_ref.text.documents import CORPUS

FULL = "full"


def lens(args: argparse.Namespace) -> None:
    """Fit a tuned lens: a translator per layer, so that a readout there says what the model says at its end."""
    from emad_ref.calibration.gate import fit_gate
    from emad_ref.calibration.lens_file import save_lens
    from emad_ref.calibration.trace import window_of
    from emad_ref.calibration.tuning import LensPlan, fit_lens, held_out
    from emad_ref.models.loading import load
    from emad_ref.models.required import require_documents
    from emad_ref.readout.tuned import attach_lens
    from emad_ref.tuning import windows_of

    require_writable(args.out, "out")  # bad input is refused before the long pass, not after it
    rank = rank_of(args.rank)
    loaded = load(args.model)
    require_documents(loaded)
    stepper = loaded.stepper
    plan = LensPlan(
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        dtype=str(stepper.dtype).removeprefix("torch."),
        corpus=args.corpus,
        window=window_of(stepper.max_positions),
        layers=tuple(args.layers or range(1, stepper.layers)),
        rank=rank,
        steps=args.steps,
        rate=args.rate,
        held_out_tokens=args.held_out,
        seed=args.seed,
    )
    read = partial(windows_of, loaded, args.corpus, "calibrate", data=args.data, limit=args.documents)
    read()  # a misspelled corpus is refused before anything is written
    checkpoint = args.out.with_name(args.out.name + ".checkpoint")
    label = f"{args.model}: {args.corpus}"
    fitted = fit_lens(stepper, plan, read, checkpoint=checkpoint, resume=args.resume, progress=label)
    if args.gate:
        name, unseen = attach_lens(stepper, fitted.lens, loaded.fingerprint), held_out(plan, read)
        gate = fit_gate(stepper, unseen, plan.layers, name, tokens=args.held_out, progress="gate")
        fitted = replace(fitted, gate=gate)
    save_lens(args.out, fitted)
    remove(checkpoint, "checkpoint")  # only now: until the lens is kept, it is all there is
    for layer in plan.layers:
        raw, tuned = fitted.raw_nats[layer], fitted.tuned_nats[layer]
        print(f"layer {layer:3d}  KL to the final distribution {tuned:7.4f} nats, of the model's own head {raw:7.4f}")
    print(f"{fitted.tokens} held-out tokens; lens {fitted.lens.digest[:12]} written to {args.out}")


def rank_of(text: str) -> int | None:
    """Raises BadArgument for anything but ``full`` and a whole number."""
    if text == FULL:
        return None
    if not text.isdecimal():
        raise BadArgument("rank", text, f"{FULL}, or a rank ≥ 1")
    return int(text)


def lens_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="bundled name, folder or hub name")
    sub.add_argument("out", type=Path, metavar="OUT", help="a .safetensors file to write")
    sub.add_argument("--corpus", default=CORPUS, metavar="CORPUS", help=f"text to fit on; {CORPUS} by default")
    sub.add_argument("--data", type=Path, metavar="DIR", help="folder with data sets, read before the hub")
    sub.add_argument("--documents", type=int, metavar="N",
                     help="windows to read of the corpus, again and again; all by default")  # fmt: skip
    sub.add_argument("--layers", type=int, nargs="+", metavar="L", help="to translate; all below the last by default")
    sub.add_argument("--rank", default=FULL, metavar="R", help=f"of the translators: {FULL}, the default, or a number")
    sub.add_argument("--steps", type=int, default=800, metavar="N", help="of 512 tokens; 800 by default")
    sub.add_argument("--rate", type=float, default=2e-3, metavar="R", help="of Adam; 2e-3 by default")
    sub.add_argument("--held-out", type=int, default=20_000, metavar="TOKENS",
                     help="to measure on, of a fifth of the documents; 20,000 by default")  # fmt: skip
    sub.add_argument("--gate", action="store_true", help="fit a gate on the held-out text, too")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of low ranks, and of what is held out; 0")
    sub.add_argument("--resume", action="store_true", help="go on from OUT.checkpoint, if an interrupted run left one")
    examples(
        sub,
        "emad lens emad-tiny-plain plain.safetensors --corpus world:mixed",
        "emad lens emad-tiny-plain low.safetensors --rank 16 --layers 4 8 --gate --steps 400 --rate 1e-3 --seed 1",
        "emad lens ./llama llama.safetensors --corpus wikitext --data ./data --documents 900 --held-out 50000 --resume",
    )
