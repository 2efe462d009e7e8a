#!/usr/bin/env python3
"""Hold the engine against llama.cpp and plain mathematics on models made here.  Needs numpy, gguf and libllama.

    check_engine.py --engine ../../target/release/ebbtide [--seeds 1,2,3] [--keep DIR]

For each seed a small qwen3moe model in F32, in Q4_K, and in IQ3_XXS with a Q5_K head; then the bundled model's loss on held-out text.
Every check prints a line with its figure and its bound (README.md, 'How close is right'); exits 1 where one is past it.
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
N_PROMPT, N_GREEDY, N_CTX = 40, 48, 256
LOGIT_TOLERANCE_F32, LOGIT_TOLERANCE_EXACT = 1e-4, 1e-3
RMS_ROUNDED, SAME_BEST_ROUNDED = 0.4, 0.8
BARD_LOSS, BARD_PIECES, LOSS_TOLERANCE = 3.5882, 32, 0.01
TYPES = {"f32": "--type F32", "q4_k": "--type Q4_K", "iq3_xxs": "--type IQ3_XXS --head-type Q5_K"}


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

    def logits(self, model, tokens, *flags):
        out = os.path.join(self.folder, "mine.npy")
        call([self.path, "logits", "-m", model, "--tokens", tokens, "-o", out, "--ctx", str(N_CTX), *flags])
        return np.load(out)

    def json(self, command, model, *flags):
        return json.loads(call([self.path, command, "-m", model, "--json", *flags]))


def check_model(checks, engine, folder, seed, kind):
    name, model = f"seed {seed}, {kind}", os.path.join(folder, "model.gguf")
    reference, plain = os.path.join(folder, "llama.npz"), os.path.join(folder, "numpy.npz")
    script("make_tiny_model.py", "--shape", "micro", "--seed", str(seed), *TYPES[kind].split(), "--out", model)
    script("reference_logits.py", model, "--random", str(N_PROMPT), "--greedy", str(N_GREEDY), "--out", reference)
    llama = np.load(reference)
    tokens = ",".join(map(str, llama["tokens"]))
    exact = engine.logits(model, tokens)
    if kind == "f32":
        checks.at_most(f"{name}: logits against llama.cpp", np.abs(exact - llama["logits"]).max(), LOGIT_TOLERANCE_F32)
        wrote = engine.json("run", model, "--tokens", tokens, "-n", str(N_GREEDY), "--temp", "0", "--ignore-eos", "--kv", "f32",
                            "--ctx", str(N_CTX))["tokens"]
        same = sum(a == b for a, b in zip(wrote, llama["greedy"]))
        checks.note(f"{name}: greedy continuation", wrote == llama["greedy"].tolist(), f"{same} of {N_GREEDY} tokens as llama.cpp")
        return
    script("numpy_forward.py", model, "--tokens", tokens, "--out", plain)
    difference = np.abs(exact - np.load(plain)["logits"]).max()
    checks.at_most(f"{name}: float activations against exact mathematics", difference, LOGIT_TOLERANCE_EXACT)
    rounded = engine.logits(model, tokens, "--activations", "q8")
    rms = np.sqrt(((rounded - llama["logits"]) ** 2).mean())
    checks.at_most(f"{name}: 8-bit activations against llama.cpp, root mean square", rms, RMS_ROUNDED)
    same = (rounded.argmax(1) == llama["logits"].argmax(1)).mean()
    checks.note(f"{name}: the same best token", same >= SAME_BEST_ROUNDED, f"{same:.0%} of positions (at least {SAME_BEST_ROUNDED:.0%})")


def check_loss(checks, engine):
    report = engine.json("perplexity", os.path.join(ASSETS, "bard-qwen3moe-9m-IQ4_NL.gguf"), "--tokens", os.path.join(ASSETS, "held.u16"),
                         "--pieces", str(BARD_PIECES))
    apart = abs(report["loss"] - BARD_LOSS)
    checks.note("bundled model: loss on held-out text", apart <= LOSS_TOLERANCE,
                f"{report['loss']:.4f} nats ({BARD_LOSS} by llama.cpp, at most {LOSS_TOLERANCE} apart)")


def main():
    ap = argparse.ArgumentParser(description="Hold the engine against its oracles.")
    ap.add_argument("--engine", required=True, help="the ebbtide program")
    ap.add_argument("--seeds", default="1,2,3")
    ap.add_argument("--keep", help="folder for the files; else one that is removed")
    a = ap.parse_args()
    checks = Checks()
    with tempfile.TemporaryDirectory() as scratch:
        folder = a.keep or scratch
        os.makedirs(folder, exist_ok=True)
        engine = Engine(os.path.abspath(a.engine), folder)
        for seed in map(int, a.seeds.split(",")):
            for kind in TYPES:
                check_model(checks, engine, folder, seed, kind)
        check_loss(checks, engine)
    print(f"{checks.passed} checks passed, {checks.failed} failed")
    raise SystemExit(1 if checks.failed else 0)


if __name__ == "__main__":
    main()
