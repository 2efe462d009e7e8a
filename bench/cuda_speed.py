#!/usr/bin/env python3
"""How fast the cuda backend is on a card that is played as one of 8 GiB: reading and writing at several lengths of prompts, and what the
head alias and blocks are worth at budgets that leave little room.

    bench/cuda_speed.py --engine target/release/ebbtide --out DIR [--scratch DIR] [--parts speed,sweep]

Builds nothing. Writes synthetic models of 12 to 15 GB to --scratch, where they are not there yet. Each part writes DIR/PART.json and is
skipped where that exists. Needs numpy.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time

from cuda_check import FIGURES, SHAPES, card_name, engine, shape_model, tokens_file

PROMPTS = (512, 2048, 8192, 29854)
# llama.cpp on an H200 of the same kind, bytes of the process within 8,192 MiB or, for reading, everything on the card.
PEERS = {"30b": {"reads all on the card": {8192: 12014, 29854: 8939}, "reads in 8 GiB": {8192: 8122}, "writes beside that": 29, "reads, writes": (2815, 44)}}


def part_speed(args):
    """Each prompt in a fresh process, five times; writing is timed over 128 tokens behind it."""
    rows = []
    for shape in SHAPES:
        model = shape_model(args, shape)
        for prompt in PROMPTS:
            reports = [
                engine(args, "run", "-m", model, "--tokens", tokens_file(args, prompt), "-n", "128", "--temp", "0", "--ignore-eos", "--vram-mib", "8192",
                       "--ctx", "32768", "--draft", "off")
                for _ in range(args.repeat)
            ]
            row = {"shape": shape, "prompt_tokens": prompt, "runs": len(reports)}
            for key in ("prefill_tokens_per_s", "decode_tokens_per_s"):
                row[key] = statistics.median(report[key] for report in reports)
                row[f"{key}_least"] = min(report[key] for report in reports)
            row.update({key: reports[0][key] for key in FIGURES if key not in row})
            print(json.dumps(row), flush=True)
            rows.append(row)
    return {"rows": rows, "llama.cpp on a card of the same kind": PEERS}


def part_sweep(args):
    """The ways of reading beside each other at budgets by their slots; all arms of a row in one run."""
    text = tokens_file(args, 29854)
    words = ["bench", "-m", shape_model(args, "30b"), "--slots", "156,170,210,400,auto", "--prompts", "8192", "--write", "32", "--repeat", "1", "--ctx", "32768",
             "--vram-mib", "8192", "--tokens", text]
    report = engine(args, *words, timeout=500)
    for row in report["rows"]:
        print(json.dumps({key: row.get(key) for key in ("slots_asked", "arm", "way", "slots", "chunk", "block", "prefill_tokens_per_s", "refused")}), flush=True)
    return report


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--engine", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--scratch", default=tempfile.gettempdir())
    ap.add_argument("--repeat", type=int, default=3)
    ap.add_argument("--parts", default="speed,sweep")
    args = ap.parse_args()
    for part in args.parts.split(","):
        path = os.path.join(args.out, f"{part}.json")
        if os.path.exists(path):
            print(f"{part}: there already", flush=True)
            continue
        print(f"== {part}", flush=True)
        started = time.monotonic()
        found = globals()[f"part_{part}"](args)
        with open(path, "w") as out:
            json.dump({"card": card_name(), "seconds": round(time.monotonic() - started, 1), **found}, out, indent=1)


if __name__ == "__main__":
    main()
