"""What a dry run found, as a table to read; and the page on hardware from several of them.

    python -m sage_jax.report.dryrun RUN.json ... --page=docs/hardware.md --readme=README.md

A result is the dictionary that `--mode=dryrun` writes as JSON; bytes and seconds throughout.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GIB = 2**30
START, END = "<!-- hardware table -->", "<!-- end of hardware table -->"
PROGRAM_HEAD = (
    "program",
    "compile",
    "args",
    "temp",
    "beside",
    "total GiB",
    "share",
    "fits",
    "FLOPs",
    "collectives",
)
PAGE_HEAD = ("model", "trained", "slice", "mesh", "slots", "rows", "fits", "HBM", "step", "run")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines of equal columns, the first to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as s, min or h."""
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    if seconds >= 0.1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.2g} ms"


def _memory(result: dict[str, Any]) -> str:
    """What the memory of a device is called."""
    return "memory" if result["chip"] == "cpu" else "HBM"


def _devices(result: dict[str, Any]) -> str:
    """How many devices the mesh takes, and of how many where it leaves some out."""
    used = result["devices"]
    present = result.get("present", used)  # older results do not say
    if used < present:
        return f"{used} of {present} devices, each"
    return f"{used} device" if used == 1 else f"{used} devices"


def text(result: dict[str, Any]) -> str:
    """The whole result, one fact a line."""
    mesh = " x ".join(f"{axis} {n}" for axis, n in result["mesh"].items())
    lines = [
        f"dry run of {result['model']} ({result['trained']}) on {result['topology']}: "
        f"{_devices(result)} of {result['hbm'] / GIB:.2f} GiB {_memory(result)}, mesh {mesh}",
        f"rows a step {result['rows']}, {result['slots']} slots, prompts of "
        f"{result['max_prompt']} and responses of {result['max_new']} tokens at most; update: "
        f"{result['micro_rows']} rows of {result['longest']} tokens a pass",
        "",
        *columns([_program_head(result), *(_program_row(p, result) for p in result["programs"])]),
        "",
        "largest buffers",
    ]
    for program in result["programs"]:
        found = "; ".join(f"{size(b['bytes'])} {b['shape']}" for b in program["largest"])
        lines.append(f"  {program['name']}: {found}")
    lines += ["", *_update_lines(result), *_time_lines(result), *_verdict_lines(result)]
    return "\n".join(lines)


def _program_head(result: dict[str, Any]) -> list[str]:
    share = f"of {_memory(result)}"
    return [share if name == "share" else name for name in PROGRAM_HEAD]


def _program_row(program: dict[str, Any], result: dict[str, Any]) -> tuple[str, ...]:
    moved = sum(c["bytes"] for c in program["collectives"])
    count = sum(c["count"] for c in program["collectives"])
    return (
        program["name"],
        f"{program['compile_seconds']:.1f} s",
        *(f"{program[key] / GIB:.2f}" for key in ("arguments", "temporaries", "beside", "total")),
        f"{program['total'] / result['hbm']:.0%}" if result["hbm"] else "-",
        "yes" if program["fits"] else "NO",
        f"{program['flops']:.2e}",
        f"{count}: {size(moved)}" if count else "-",
    )


def _update_lines(result: dict[str, Any]) -> list[str]:
    u, check = result["update"], result["cross_check"]
    lines = [
        f"update: {u['useful_share']:.2f} of all FLOPs are useful; {u['formula']}",
        f"  temporaries {size(u['temporaries'])}, of which the formula explains "
        f"{size(u['temporaries_model'])} (kept of all layers + one layer + one logits chunk)",
    ]
    if u["fsdp_minimum"]:
        ratio = u["collective_bytes"] / u["fsdp_minimum"]
        lines.append(
            f"  a device receives {size(u['collective_bytes'])} a pass, {ratio:.2f} x the least "
            f"that FSDP needs ({size(u['fsdp_minimum'])}: weights twice, gradient once)"
        )
    if check:
        lines.append(
            f"FLOPs of one layer, where no loop hides any: {check['formula']:.3e} by formula, "
            f"{check['compiler']:.3e} counted by the compiler ({check['ratio']:.3f})"
        )
    return lines


def _time_lines(result: dict[str, Any]) -> list[str]:
    if not result["steps"]:
        return [f"no times: the rates of {result['chip']} are not known"]
    lines = [
        "",
        "time of a step at the peak rates of the chip: a bound, expect several times more; without "
        "verifiers, host, validation and checkpoints",
    ]
    for step in result["steps"]:
        parts = ", ".join(f"{n} {duration(s)}" for n, s in step["seconds"].items() if s)
        lines.append(
            f"  {step['load']}: {duration(step['total'])} ({parts}); "
            f"{step['new_tokens'] / step['total']:.0f} new tokens/s, "
            f"{step['hours']:.1f} h for {result['train_steps']} steps"
        )
    return lines


def _verdict_lines(result: dict[str, Any]) -> list[str]:
    lines = [""]
    within = f"{result['share']:.0%} of {_memory(result)}"
    for choice in result["recommended"]:
        sure = "compiled" if choice["confirmed"] else "interpolated"
        lines.append(f"at most {choice['field']}={choice['value']} fits, all else equal ({sure})")
    if result["fits"]:
        return [*lines, f"fits: every program within {within}"]
    refused = {p["name"]: p["error"] for p in result["programs"] if p.get("error")}
    or_refused = " or refused by the compiler" if refused else ""
    lines.append(f"DOES NOT FIT: {', '.join(result['misfits'])} above {within}{or_refused}")
    lines += [f"  the compiler on {name}: {words}" for name, words in refused.items()]
    if change := result["change"]:
        flags = " ".join(f"--config.{name}={value}" for name, value in change.items())
        lines.append(f"the smallest change that was found to fit, compiled: {flags}")
    else:
        lines.append(
            "no change of slots, rows a pass, remat or mesh was found to fit: take a larger "
            "slice, a smaller model, or train an adapter (lora.rank)"
        )
    return lines


def page_row(result: dict[str, Any]) -> tuple[str, ...]:
    """One line of the page on hardware."""
    top = max(result["programs"], key=lambda p: p["total"])
    step = result["steps"][0] if result["steps"] else None
    return (
        result["model"].split("/")[-1],
        result["trained"],
        result["topology"],
        "x".join(str(n) for n in result["mesh"].values()),
        str(result["slots"]),
        str(result["micro_rows"]),
        "yes" if result["fits"] else "no",
        f"{top['total'] / GIB:.1f} of {result['hbm'] / GIB:.1f} GiB ({top['name']})",
        duration(step["total"]) if step else "-",
        f"{step['hours']:.0f} h" if step else "-",
    )


def table(results: Sequence[dict[str, Any]]) -> str:
    """A markdown table, a line a result."""
    rows = [PAGE_HEAD, ("---",) * len(PAGE_HEAD), *map(page_row, results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def page(results: Sequence[dict[str, Any]]) -> str:
    """The page docs/hardware.md."""
    parts = [
        "# Hardware\n",
        "Made by `python -m sage_jax.report.dryrun` from dry runs; do not edit. Nothing here was "
        "measured on a chip: memory is what the compiler for the chip allots, a step's time what "
        "peak rates allow when every prompt and response is at its limit, verifiers and host not "
        "counted. Expect several times more. Compile seconds are those of two busy cores.\n",
        table(results),
    ]
    for result in results:
        title = f"{result['model'].split('/')[-1]}, {result['trained']}, {result['topology']}"
        parts.append(f"## {title}\n\n    {result['command']}\n\n```\n{text(result)}\n```\n")
    return "\n".join(parts)


def fill(readme: str, content: str) -> str:
    """The text with what stands between the two markers replaced. ValueError without markers."""
    head, start, rest = readme.partition(START)
    _, end, tail = rest.partition(END)
    if not (start and end):
        raise ValueError(f"no '{START}' ... '{END}' to put the table between")
    return f"{head}{START}\n{content}{END}{tail}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--readme", type=Path)
    args = parser.parse_args(argv)
    results = [json.loads(path.read_text()) for path in args.results]
    if args.page:
        args.page.write_text(page(results))
    if args.readme:
        args.readme.write_text(fill(args.readme.read_text(), table(results)))
    for path in filter(None, (args.page, args.readme)):
        print(f"wrote {path}")
    if not (args.page or args.readme):
        print(table(results), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
