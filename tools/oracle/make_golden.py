#!/usr/bin/env python3
"""Write the stored logits that the engine's tests compare with.  Needs numpy, gguf and libllama.

    make_golden.py [--arch qwen3moe] [--out ../../tests/golden/logits]

For each model: llama.cpp's logits (CPU, float32 KV cache) of the prompt's last rows and its greedy continuation; for quantised
models also the logits of numpy_forward.py, which rounds no activation.  A draft block's logits are kept beside the trunk's.
index.json (qwen3moe) and hybrid.json (qwen35moe) list the models; `greedy_gaps` are the differences of the two best logits behind
each greedy token, so that a test can stop where rounding may rightly choose another.  Of the trained model the exact continuation is
kept, too, which takes 2 minutes: numpy_forward.py has no cache.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

import llama_lib
import numpy_forward

HERE = os.path.dirname(os.path.abspath(__file__))
ASSETS = os.path.join(HERE, "../../assets")
N_GREEDY = 48
N_SHORT, N_LONG = 40, 150      # the long prompt crosses two borders of the delta net's chunks of 64 tokens
ALL_ROWS, LAST_ROWS, LAST_ROWS_BARD = None, 8, 4
MIXED = (("f32", "--type F32"), ("q4_k", "--type Q4_K"), ("iq3_xxs", "--type IQ3_XXS --head-type Q5_K"))
# (name, arguments of make_tiny_model.py, tokens of the prompt, rows kept)
QWEN3MOE = [(f"micro-seed{seed}-{name}", f"--shape micro --seed {seed} {types}", N_SHORT, ALL_ROWS if name == "f32" else LAST_ROWS)
            for seed in (1, 2, 3) for name, types in MIXED]
QWEN3MOE.append(("tiny-seed1-q8_0", "--shape tiny --seed 1 --type Q8_0", N_SHORT, LAST_ROWS))
QWEN35MOE = [(f"hybrid-{shape}-seed{seed}-{name}", f"--arch qwen35moe --shape {shape} --seed {seed} {types} --mtp 1", n_prompt, rows)
             for shape, seed, name, types, n_prompt, rows in (
                 ("micro", 1, "f32", "--type F32", N_SHORT, ALL_ROWS),
                 ("micro", 2, "f32", "--type F32", N_LONG, LAST_ROWS),
                 ("micro", 3, "f32", "--type F32", N_LONG, LAST_ROWS),
                 ("micro", 1, "iq4_nl", "--type IQ4_NL", N_LONG, LAST_ROWS),
                 ("micro", 2, "q4_k", "--type Q4_K", N_LONG, LAST_ROWS),
                 ("micro", 3, "iq3_xxs", "--type IQ3_XXS --head-type Q5_K", N_LONG, LAST_ROWS),
                 ("tiny", 1, "q8_0", "--type Q8_0", N_LONG, LAST_ROWS))]
BARD = "bard-qwen35moe-22m-mtp-IQ4_NL"


def prompt(n):
    """The tokens of `reference_logits.py --random N`."""
    return [int(t) for t in (np.arange(n, dtype=np.int64) * 7919 + 13) ** 2 % 500]


def best_and_gap(row):
    second, best = np.sort(row)[-2:]
    return int(row.argmax()), round(float(best - second), 4)


def from_llama(lib, path, tokens, mtp):
    """Logits, draft logits or None, the greedy continuation and its gaps."""
    model = llama_lib.Model(lib, path, mtp=mtp)
    context = model.context(256, llama_lib.F32, threads=2, nextn=mtp)
    logits, drafts, greedy, gaps = context.decode(tokens), None, [], []
    if mtp:
        block = model.context(256, llama_lib.F32, threads=2, mtp=True)
        drafts = block.decode(tokens[1:] + [int(logits[-1].argmax())], 1, context.nextn_rows(len(tokens)))
    last = logits[-1]
    for i in range(N_GREEDY):
        token, gap = best_and_gap(last)
        greedy.append(token)
        gaps.append(gap)
        last = context.decode([token], len(tokens) + i)[0]
    return logits, drafts, greedy, gaps


def from_numpy(path, tokens, mtp):
    weights = numpy_forward.Weights(path)
    hidden, logits = numpy_forward.RUN[weights.arch](weights, tokens)
    drafts = numpy_forward.run_mtp(weights, tokens[1:] + [int(logits[-1].argmax())], hidden) if mtp else None
    return logits, drafts


def exact_greedy(path, tokens, last):
    """What plain mathematics writes, with the gaps; `last` is the prompt's last row."""
    weights, read, greedy, gaps = numpy_forward.Weights(path), list(tokens), [], []
    for i in range(N_GREEDY):
        token, gap = best_and_gap(last)
        greedy.append(token)
        gaps.append(gap)
        read.append(token)
        if i + 1 < N_GREEDY:
            last = numpy_forward.RUN[weights.arch](weights, read)[1][-1]
    return greedy, gaps


def save(path, array):
    with open(path, "wb") as f:
        np.lib.format.write_array(f, np.ascontiguousarray(array, "<f4"), version=(1, 0), allow_pickle=False)


def record(lib, folder, name, path, tokens, rows_kept, is_float, mtp):
    """The entry of a model, whose matrices are written to `folder`."""
    logits, drafts, greedy, gaps = from_llama(lib, path, tokens, mtp)
    exact, exact_drafts = from_numpy(path, tokens, mtp)
    numpy_forward.compare(name, exact, logits)
    first = 0 if rows_kept is None else len(tokens) - rows_kept
    entry = dict(first_row=first, llama=f"{name}.llama.npy", numpy=None if is_float else f"{name}.numpy.npy", tokens=tokens,
                 greedy=greedy, greedy_gaps=gaps)
    save(os.path.join(folder, entry["llama"]), logits[first:])
    if not is_float:
        save(os.path.join(folder, entry["numpy"]), exact[first:])
    if mtp:
        numpy_forward.compare(f"{name}, drafts", exact_drafts, drafts)
        entry["drafts"] = dict(llama=f"{name}.drafts.llama.npy", numpy=None if is_float else f"{name}.drafts.numpy.npy")
        save(os.path.join(folder, entry["drafts"]["llama"]), drafts[first:])
        if not is_float:
            save(os.path.join(folder, entry["drafts"]["numpy"]), exact_drafts[first:])
    return entry, exact


def write_index(path, index):
    with open(path, "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(entry) for entry in index) + "\n]\n")


def main():
    ap = argparse.ArgumentParser(description="Write the stored logits of the engine's tests.")
    ap.add_argument("--arch", choices=("qwen3moe", "qwen35moe"), help="this architecture only")
    ap.add_argument("--out", default=os.path.join(HERE, "../../tests/golden/logits"))
    ap.add_argument("--lib", help="folder of libllama")
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    lib = llama_lib.Lib(a.lib)
    for arch, models, file in (("qwen3moe", QWEN3MOE, "index.json"), ("qwen35moe", QWEN35MOE, "hybrid.json")):
        if a.arch not in (None, arch):
            continue
        index = []
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.gguf")
            for name, args, n_prompt, rows_kept in models:
                subprocess.run([sys.executable, os.path.join(HERE, "make_tiny_model.py"), *args.split(), "--out", path],
                               check=True, stdout=subprocess.DEVNULL)
                entry, _ = record(lib, a.out, name, path, prompt(n_prompt), rows_kept, name.endswith("f32"), "--mtp" in args)
                index.append(dict(name=name, args=args, **entry))
        if arch == "qwen35moe":
            path = os.path.join(ASSETS, f"{BARD}.gguf")
            tokens = np.fromfile(os.path.join(ASSETS, "held.u16"), "<u2")[:N_LONG].tolist()
            entry, exact = record(lib, a.out, BARD, path, tokens, LAST_ROWS_BARD, False, True)
            greedy, gaps = exact_greedy(path, tokens, exact[-1])
            same = next((i for i, (one, other) in enumerate(zip(greedy, entry["greedy"])) if one != other), N_GREEDY)
            print(f"{BARD}: the first {same} greedy tokens are llama.cpp's, least gap {min(gaps)}")
            index.append(dict(name=BARD, args=None, **entry, exact_greedy=greedy, exact_greedy_gaps=gaps))
        write_index(os.path.join(a.out, file), index)
        print(f"{lib.version()}, numpy {np.__version__}: {len(index)} models of {arch} written to {a.out}")


if __name__ == "__main__":
    main()
