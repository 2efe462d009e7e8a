#!/usr/bin/env python3
"""Hold the engine against llama.cpp and plain mathematics on models made here.  Needs numpy, gguf and libllama.

    check_engine.py --engine ../../target/release/ebbtide [--arch qwen3moe,qwen35moe] [--seeds 1,2,3] [--drafts] [--keep DIR]

For each architecture and seed a small model in F32, in Q4_K, and in IQ3_XXS with a Q5_K head; then the bundled model's loss on held-out
text.  Models of qwen35moe have a draft block, whose logits are held as closely as the trunk's; with --drafts the engine also writes with
it, which may change no token.  Every check prints a line with its figure and its bound (README.md, 'How close is right'); exits 1 where
one is past it.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ASSETS = os.path.join(HERE, "../../assets")
# A hybrid model's prompt crosses two borders of the delta net's chunks of 64 tokens.
N_PROMPT, N_GREEDY, N_CTX = {"qwen3moe": 40, "qwen35moe": 150}, 48, 256
LOGIT_TOLERANCE_F32, LOGIT_TOLERANCE_EXACT = 1e-4, 1e-3
RMS_ROUNDED, SAME_BEST_ROUNDED = 0.4, 0.8
TYPES = {"f32": "--type F32", "q4_k": "--type Q4_K", "iq3_xxs": "--type IQ3_XXS --head-type Q5_K"}
# Figures of llama.cpp by reference_loss.py --pieces 32 --mtp: (name in the report, figure, unit).
BARD = {"qwen3moe": ("bard-qwen3moe-9m-IQ4_NL.gguf", [("loss", 3.5882, "nats")]),
        "qwen35moe": ("bard-qwen35moe-22m-mtp-IQ4_NL.gguf",
                      [("loss", 3.6318, "nats"), ("draft_loss", 3.7122, "nats"), ("draft_agreement", 0.529, "of 1")])}
BARD_PIECES, BARD_TOLERANCE = 32, 0.01


class Checks:
    """Prints every figure with its bound and counts those past it."""

    def __init__(self):
        self.passed = self.failed = 0

    def note(self, what, good, figure):
        self.passed += bool(good)
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {what}: {figure}", flush=True)

    def at_most(self, what, figure, bound):
        self.note(what, figure <= bound, f"{figure:.3e} (at most {bound:g})")


def call(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited {done.returncode}: {(done.stderr or done.stdout).strip()[-800:]}")
    return done.stdout


def script(name, *arguments):
    return call([sys.executable, os.path.join(HERE, name), *arguments])


class Engine:
    """The program under test, in the little memory that the models need."""

    def __init__(self, path, folder):
        self.path, self.folder = path, folder

    def logits(self, model, tokens, mtp, *flags):
        """The trunk's logits and the draft block's, None without one, by their names in an npz of the references."""
        out, draft_out = (os.path.join(self.folder, name) for name in ("mine.npy", "mine-drafts.npy"))
        call([self.path, "logits", "-m", model, "--tokens", tokens, "-o", out, "--ctx", str(N_CTX), *(["--mtp-out", draft_out] if mtp else []),
              *flags])
        return {"logits": np.load(out), **({"mtp_logits": np.load(draft_out)} if mtp else {})}

    def write(self, model, tokens, *flags):
        return self.json("run", model, "--tokens", tokens, "-n", str(N_GREEDY), "--temp", "0", "--ignore-eos", "--ctx", str(N_CTX), *flags)

    def json(self, command, model, *flags):
        return json.loads(call([self.path, command, "-m", model, "--json", *flags]))


def check_model(checks, engine, folder, arch, seed, kind, drafts):
    name, model, mtp = f"{arch}, seed {seed}, {kind}", os.path.join(folder, "model.gguf"), arch == "qwen35moe"
    reference, plain = os.path.join(folder, "llama.npz"), os.path.join(folder, "numpy.npz")
    mtp_flag = ["--mtp"] if mtp else []
    script("make_tiny_model.py", "--arch", arch, "--shape", "micro", "--seed", str(seed), *TYPES[kind].split(),
           *(["--mtp", "1"] if mtp else []), "--out", model)
    n_greedy = N_GREEDY if kind == "f32" else 0
    # One thread: models so small gain nothing from more, and threads that wait for each other in turn cost seconds on busy cores.
    script("reference_logits.py", model, "--random", str(N_PROMPT[arch]), "--greedy", str(n_greedy), "--threads", "1", *mtp_flag,
           "--out", reference)
    llama = np.load(reference)
    tokens = ",".join(map(str, llama["tokens"]))
    exact = engine.logits(model, tokens, mtp)
    if kind == "f32":
        for key, mine in exact.items():
            checks.at_most(f"{name}: {key} against llama.cpp", np.abs(mine - llama[key]).max(), LOGIT_TOLERANCE_F32)
        ways = {"": ["--kv", "f32"], **({" with drafts": ["--kv", "f32", "--draft", "mtp"]} if mtp and drafts else {})}
        for way, flags in ways.items():
            wrote = engine.write(model, tokens, *flags)["tokens"]
            same = sum(a == b for a, b in zip(wrote, llama["greedy"]))
            checks.note(f"{name}: greedy continuation{way}", wrote == llama["greedy"].tolist(), f"{same} of {N_GREEDY} tokens as llama.cpp")
        return
    script("numpy_forward.py", model, "--tokens", tokens, *mtp_flag, "--out", plain)
    exact_maths, rounded = np.load(plain), engine.logits(model, tokens, mtp, "--activations", "q8")
    for key, mine in exact.items():
        difference = np.abs(mine - exact_maths[key]).max()
        checks.at_most(f"{name}: {key} of float activations against exact mathematics", difference, LOGIT_TOLERANCE_EXACT)
        rms = np.sqrt(((rounded[key] - llama[key]) ** 2).mean())
        checks.at_most(f"{name}: {key} of 8-bit activations against llama.cpp, root mean square", rms, RMS_ROUNDED)
        same = (rounded[key].argmax(1) == llama[key].argmax(1)).mean()
        checks.note(f"{name}: the same best token of {key}", same >= SAME_BEST_ROUNDED,
                    f"{same:.0%} of positions (at least {SAME_BEST_ROUNDED:.0%})")


def check_loss(checks, engine, arch):
    file, figures = BARD[arch]
    report = engine.json("perplexity", os.path.join(ASSETS, file), "--tokens", os.path.join(ASSETS, "held.u16"),
                         "--piece", "512", "--pieces", str(BARD_PIECES))
    for key, expected, unit in figures:
        figure = report[key]
        good = figure is not None and abs(figure - expected) <= BARD_TOLERANCE
        checks.note(f"bundled {arch}: {key} on held-out text", good,
                    f"{'none' if figure is None else f'{figure:.4f}'} {unit} ({expected} by llama.cpp, at most {BARD_TOLERANCE} apart)")


def check_drafts(checks, engine):
    """A trained draft block is right about half of the time; what is written is the same without it."""
    model = os.path.join(ASSETS, BARD["qwen35moe"][0])
    tokens = ",".join(map(str, np.fromfile(os.path.join(ASSETS, "held.u16"), "<u2")[:N_PROMPT["qwen35moe"]]))
    plain, drafted = (engine.write(model, tokens, "--deterministic", "--draft", who) for who in ("off", "mtp"))
    same = sum(a == b for a, b in zip(plain["tokens"], drafted["tokens"]))
    checks.note("bundled qwen35moe: tokens written with drafts", plain["tokens"] == drafted["tokens"], f"{same} of {N_GREEDY} as without")
    offered, accepted = drafted["drafts_offered"], drafted["drafts_accepted"]
    checks.note("bundled qwen35moe: drafts are offered and some accepted", 0 < accepted <= offered, f"{accepted} of {offered}")


def main():
    ap = argparse.ArgumentParser(description="Hold the engine against its oracles.")
    ap.add_argument("--engine", required=True, help="the ebbtide program")
    ap.add_argument("--arch", default=",".join(BARD), help="architectures, with commas; all of them by default")
    ap.add_argument("--seeds", default="1,2,3")
    ap.add_argument("--drafts", action="store_true", help="write with the draft block, too")
    ap.add_argument("--keep", help="folder for the files; else one that is removed")
    a = ap.parse_args()
    archs = a.arch.split(",")
    if unknown := set(archs) - set(BARD):
        ap.error(f"--arch: no {', '.join(sorted(unknown))}")
    checks = Checks()
    with tempfile.TemporaryDirectory() as scratch:
        folder = a.keep or scratch
        os.makedirs(folder, exist_ok=True)
        engine = Engine(os.path.abspath(a.engine), folder)
        for arch in archs:
            for seed in map(int, a.seeds.split(",")):
                for kind in TYPES:
                    check_model(checks, engine, folder, arch, seed, kind, a.drafts)
            check_loss(checks, engine, arch)
        if a.drafts and "qwen35moe" in archs:
            check_drafts(checks, engine)
    print(f"{checks.passed} checks passed, {checks.failed} failed")
    raise SystemExit(1 if checks.failed else 0)


if __name__ == "__main__":
    main()
