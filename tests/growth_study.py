"""A run that dies in FP16 and finishes under autoprec: `python -m tests.growth_study [NAME ...] [--seeds 3]
[--picture FILE]`

A transformer with squared-ReLU gated MLPs is trained on the standard library's sources. Its MLPs
have a high learning rate, so that the products of their three growing weights, which the residual stream adds up, pass
FP16's largest value, 65504, by training alone; in FP32 the run is healthy. The same run in FP32, in BF16 and in FP16 as
people do it (torch.autocast, or FP16 weights with FP32 masters; torch's GradScaler), and under two policies of autoprec
that decide for FP16. Gradients are clipped by their norm everywhere. Exit code 1 if FP16 alone survives, autoprec does
not finish with FP32's loss, does not take FP16 early where values grow, or lets a parameter become non-finite.

The largest activation of a step is told from outside: an FP32 copy of the model makes the same forward pass with the
weights of the moment, and every result of every function in it counts.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Generator

from autoprec.formats import format_named
from autoprec.plans import Event
from autoprec.reporting.histories import Span, spans_of
from autoprec.reporting.pictures import as_svg
from autoprec.reporting.timelines import COLOURS
from autoprec.serial.values import event_from_json_line
from tests.bench.measure import one_thread
from tests.bench.workloads import conclude
from tests.growth_contestants import AUTOCAST, CONTESTANTS, FP32, HALF, OURS, OURS_BF16, Probe, Setting, Trainer

LARGEST = format_named("fp16").max_value
SEEDS = 3
UNSEEN = 32


# Runs ----------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Run:
    """What became of one contestant.

    Attributes:
        losses, largest, clock: of every attempt: the loss, the largest activation, and how many updates were before it.
        skipped: attempts that changed no weight.
        died: the first of the attempts for which the run was given up (`Setting.patience`); None if it finished.
        nonfinite: attempts after which a parameter was not finite.
        told: what the contestant says of its end.
        loss: on unseen batches, in the contestant's own arithmetic.
        seconds: of this process's CPU time, for every attempt; planning is part of some.
        events: lines of the session's file.
    """

    name: str
    seed: int
    losses: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    clock: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    nonfinite: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    died: int | None = None
    told: str = ""
    loss: float = math.nan
    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind."""
        return [e for e in self.events if e["kind"] == kind]

    def line(self) -> str:
        """For people."""
        end = f"died at {self.died}" if self.died is not None else "finished"
        took = f"{statistics.median(self.seconds) * 1e3:4.0f} ms a step, {sum(self.seconds):4.0f} s"
        counts = f"{len(self.skipped):4} skipped {len(self.of('promoted')):3} promoted {len(self.of('demoted')):3} back"
        return (
            f"{self.name:24} {self.seed}  {end:12} loss {self.loss:.4f} {counts}  largest {max(self.largest):7.0f}"
            f"  {took}  {self.told}"
        )


def compete(name: str, seed: int, setting: Setting, folder: Path) -> Run:
    """One run from the first step to the last, or to its death. The folder gets the events."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    events = folder / f"{name} {seed}.jsonl"
    trainer = CONTESTANTS[name](setting, events)
    probe, generator, run = Probe(trainer.model), Generator().manual_seed(seed), Run(name=name, seed=seed)
    updated = list[bool]()
    for number in range(setting.steps):
        tokens = setting.batch(generator)
        run.largest.append(probe.largest(tokens))
        run.clock.append(sum(updated))
        begin = time.process_time()
        loss, changed = trainer.attempt(number, tokens)
        run.seconds.append(time.process_time() - begin)
        run.losses.append(loss)
        updated.append(changed)
        if not all(bool(p.isfinite().all()) for p in trainer.model.parameters()):
            run.nonfinite.append(number)
        last = updated[-setting.patience :]
        if len(last) == setting.patience and sum(last) < setting.patience / 10:
            run.died = number + 1 - setting.patience
            break
    run.skipped = [number for number, changed in enumerate(updated) if not changed]
    run.told, run.loss = trainer.told(run.losses), unseen_loss(trainer, setting)
    lines = events.read_text().splitlines() if events.exists() else []
    run.events = [asdict(event_from_json_line(line)) for line in lines]
    return run


@torch.no_grad()
def unseen_loss(trainer: Trainer, setting: Setting) -> float:
    """Mean over batches that are the same for all."""
    generator = Generator().manual_seed(7)
    return statistics.mean(float(trainer.loss(setting.batch(generator, unseen=True))) for _ in range(UNSEEN))


# What is claimed -----------------------------------------------------------------------------------------------------


def missed(runs: Sequence[Run]) -> list[str]:
    """Claims that do not hold."""
    plain = {r.seed: r for r in runs if r.name == FP32}
    spread = spread_of(plain.values())
    found = []
    for r in runs:
        if r.name in (AUTOCAST, HALF):
            wrong = {"did not die": r.died is None}
        else:
            wrong = {"died": r.died is not None, "stayed below FP16's largest value": max(r.largest) <= LARGEST}
        if r.name in (OURS, OURS_BF16):
            wrong |= wrong_in_ours(r, plain.get(r.seed), spread)
        found += [f"{r.name}, seed {r.seed}: {what}" for what, so in wrong.items() if so]
    return found


def wrong_in_ours(run: Run, plain: Run | None, spread: float | None) -> dict[str, bool]:
    first = {e["op"]: e["now"] for e in run.of("assigned") if e["role"] == "output" and e["step"] == first_step(run)}
    grown = [e for e in run.of("promoted") if e["role"] == "output"]
    wrong = {
        "a parameter was not finite": bool(run.nonfinite),
        "no op was promoted because of its values": not grown,
        "an op that was promoted did not have FP16 at first": any(first.get(e["op"]) != "fp16" for e in grown),
    }
    if plain is not None and spread is not None:
        off = abs(run.loss - plain.loss)
        wrong[f"its loss is {off:.4f} from FP32's, beyond the spread over seeds, {spread:.4f}"] = not off <= spread
    return wrong


def first_step(run: Run) -> int:
    """Of the first plan."""
    return min((int(e["step"]) for e in run.of("assigned")), default=-1)


def spread_of(runs: Iterable[Run]) -> float | None:
    """From the lowest to the highest loss; None of fewer than three."""
    losses = [r.loss for r in runs]
    return max(losses) - min(losses) if len(losses) >= 3 else None


def report(runs: Sequence[Run]) -> None:
    """The losses beside FP32's."""
    plain = {r.seed: r.loss for r in runs if r.name == FP32}
    spread = spread_of(r for r in runs if r.name == FP32)
    print(f"\nFP32's spread over seeds: {'of fewer than three seeds none' if spread is None else f'{spread:.4f}'}")
    for name in dict.fromkeys(r.name for r in runs):
        own = [r for r in runs if r.name == name]
        off = ", ".join(f"{r.loss - plain[r.seed]:+.4f}" for r in own if r.seed in plain)
        print(f"{name:24} loss {', '.join(f'{r.loss:.4f}' for r in own)}; to FP32 of the same seed {off or 'unknown'}")
        why = [e["trigger"] for r in own for e in r.of("promoted")]
        if why:
            print(f"{'':24} promoted by {', '.join(f'{why.count(t)} {t}' for t in dict.fromkeys(why))}")


# The picture ---------------------------------------------------------------------------------------------------------

VETOED = "#d62728"


def picture(run: Run, others: Sequence[Run], setting: Setting) -> str:
    """SVG: the largest activation of each step, and below it the format of every op's result, by the file of events."""
    spans = spans_of((Event(**e) for e in run.events), setting.steps)

    def draw(figure: Figure) -> None:
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 0.135 * len(spans)))
        draw_largest(top, run, others)
        draw_formats(figure, below, run, spans)
        top.set_title(f"{run.name}, seed {run.seed}", fontsize=9)
        below.set_xlim(0, setting.steps)
        below.set_xlabel("step")

    with matplotlib.rc_context({"font.size": 8}):
        found = as_svg("autoprec", (8.0, 2.2 + 0.135 * len(spans)), draw)
    return "\n".join(line.rstrip() for line in found.splitlines()) + "\n"


def draw_largest(axes: Axes, run: Run, others: Sequence[Run]) -> None:
    axes.semilogy(run.clock, run.largest, color="black", linewidth=0.8)
    axes.axhline(LARGEST, color=VETOED, linewidth=0.8, linestyle="--")
    axes.annotate("65504", (0.0, LARGEST), xytext=(3, 3), textcoords="offset points", color=VETOED)
    for e in run.of("bad_step"):
        axes.axvline(int(e["step"]), color=VETOED, linewidth=0.7)
    for height, r in enumerate(r for r in others if r.died is not None):
        assert r.died is not None
        axes.axvline(r.died, color="0.4", linewidth=0.8, linestyle=":")
        at = (r.died, 10.0 ** (1.9 - 0.7 * height))
        axes.annotate(
            f"end of {r.name}", at, xytext=(4, 0), textcoords="offset points", color="0.3", backgroundcolor="w"
        )
    axes.set_ylabel("largest |activation|")
    axes.grid(alpha=0.3)


def draw_formats(figure: Figure, axes: Axes, run: Run, spans: Mapping[str, Sequence[Span]]) -> None:
    rows = {op: row for row, op in enumerate(spans)}
    for op, known in spans.items():
        for fmt in dict.fromkeys(s.format for s in known):
            bars = [(s.begin, s.end - s.begin) for s in known if s.format == fmt]
            axes.broken_barh(bars, (rows[op] - 0.42, 0.84), color=COLOURS[fmt], linewidth=0.0)
    for e in run.of("bad_step"):
        axes.axvline(int(e["step"]), color=VETOED, linewidth=0.7)
    for kind, role, marker, face, _ in MARKS:
        at = [(int(e["step"]), rows[e["op"]]) for e in run.of(kind) if (e["role"] == "output") == role]
        if at:
            axes.scatter(
                *zip(*at, strict=True), s=16, marker=marker, c=face, edgecolors="black", linewidths=0.6, zorder=3
            )
    axes.set_yticks(range(len(rows)), [label_of(op) for op in rows], fontsize=6.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    used = {s.format for known in spans.values() for s in known}
    patches: list[Any] = [Patch(color=colour, label=fmt) for fmt, colour in COLOURS.items() if fmt in used]
    patches += [mark(m, f, told) for kind, role, m, f, told in MARKS if marked(run, kind, role)]
    if run.of("bad_step"):
        patches.append(Line2D([], [], color=VETOED, linewidth=0.7, label="step without effect"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)


#: Kind of event, whether it is about the op's result (not a gradient), marker, colour, legend.
MARKS = (
    ("promoted", True, "^", "white", "promoted: values"),
    ("promoted", False, "v", "white", "promoted: gradients"),
    ("demoted", False, "o", "white", "given back"),
)


def marked(run: Run, kind: str, of_values: bool) -> bool:
    return any((e["role"] == "output") == of_values for e in run.of(kind))


def mark(marker: str, face: str, told: str) -> Line2D:
    return Line2D([], [], linestyle="", marker=marker, markersize=4, markerfacecolor=face, markeredgecolor="black",
                  markeredgewidth=0.6, label=told)  # fmt: skip


def label_of(op: str) -> str:
    """ "blocks.0.down:linear#0" → "0 down", "blocks.0:add#1" → "0 add 2"."""
    module, _, call = op.partition(":")
    kind, _, number = call.partition("#")
    name = module.removeprefix("blocks.").replace(".", " ")
    if kind in ("linear", "layer_norm", "embedding"):
        return name
    kind = "attention" if kind == "scaled_dot_product_attention" else kind
    return f"{name} {kind}{f' {int(number) + 1}' if kind == 'add' and module else ''}".strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.growth_study", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CONTESTANTS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--picture", type=Path, help="SVG of the first seed's run under fp32 and fp16")
    given = parser.parse_args()
    if unknown := [n for n in given.names if n not in CONTESTANTS]:
        parser.error(f"unknown contestant {unknown[0]!r}; there are {', '.join(CONTESTANTS)}")
    setting, runs = Setting(), list[Run]()
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            for name in given.names or CONTESTANTS:
                runs.append(compete(name, seed, setting, Path(folder)))
                print(runs[-1].line(), flush=True)
    report(runs)
    if given.picture is not None:
        of_seed = [r for r in runs if r.seed == 0]
        for run in (r for r in of_seed if r.name == OURS):
            given.picture.write_text(picture(run, of_seed, setting))
    conclude(missed(runs), "FP16 alone dies, autoprec finishes with FP32's loss")


if __name__ == "__main__":
    main()
