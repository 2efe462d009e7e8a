#!/usr/bin/env python3
"""Write the stored logits that the engine's tests compare with.  Needs numpy, gguf and libllama.

    make_golden.py [--out ../../tests/golden/logits]

For each model: llama.cpp's logits (CPU, float32 KV cache) of the prompt's last rows and its greedy continuation; for quantised
models also the logits of numpy_forward.py, which rounds no activation.  Every position is kept for F32 models, the last 8 for the
others.  index.json lists the models; its `greedy_gaps` are the differences of the two best logits behind each greedy token, so that
a test can stop where rounding may rightly choose another.
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
N_PROMPT, N_GREEDY, ROWS_KEPT = 40, 48, 8
MODELS = [(f"micro-seed{seed}-{name}", f"--shape micro --seed {seed} {types}")
          for seed in (1, 2, 3)
          for name, types in (("f32", "--type F32"), ("q4_k", "--type Q4_K"), ("iq3_xxs", "--type IQ3_XXS --head-type Q5_K"))]
MODELS.append(("tiny-seed1-q8_0", "--shape tiny --seed 1 --type Q8_0"))


def prompt():
    """The tokens of `reference_logits.py --random 40`."""
    return [int(t) for t in (np.arange(N_PROMPT, dtype=np.int64) * 7919 + 13) ** 2 % 500]


def from_llama(lib, path, tokens):
    model = llama_lib.Model(lib, path)
    context = model.context(256, llama_lib.F32, threads=2)
    logits = context.decode(tokens)
    greedy, gaps, last = [], [], logits[-1]
    for i in range(N_GREEDY):
        second, best = np.sort(last)[-2:]
        greedy.append(int(last.argmax()))
        gaps.append(round(float(best - second), 4))
        last = context.decode([greedy[-1]], len(tokens) + i)[0]
    return logits, greedy, gaps


def save(path, array):
    with open(path, "wb") as f:
        np.lib.format.write_array(f, np.ascontiguousarray(array, "<f4"), version=(1, 0), allow_pickle=False)


def main():
    ap = argparse.ArgumentParser(description="Write the stored logits of the engine's tests.")
    ap.add_argument("--out", default=os.path.join(HERE, "../../tests/golden/logits"))
    ap.add_argument("--lib", help="folder of libllama")
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    lib, tokens, index = llama_lib.Lib(a.lib), prompt(), []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.gguf")
        for name, args in MODELS:
            subprocess.run([sys.executable, os.path.join(HERE, "make_tiny_model.py"), *args.split(), "--out", path],
                           check=True, stdout=subprocess.DEVNULL)
            logits, greedy, gaps = from_llama(lib, path, tokens)
            weights = numpy_forward.Weights(path)
            exact = numpy_forward.RUN[weights.arch](weights, tokens)[1]
            numpy_forward.compare(name, exact, logits)
            is_float = name.endswith("f32")
            first = 0 if is_float else N_PROMPT - ROWS_KEPT
            entry = dict(name=name, args=args, first_row=first, llama=f"{name}.llama.npy", numpy=None if is_float else f"{name}.numpy.npy",
                         tokens=tokens, greedy=greedy, greedy_gaps=gaps)
            save(os.path.join(a.out, entry["llama"]), logits[first:])
            if entry["numpy"]:
                save(os.path.join(a.out, entry["numpy"]), exact[first:])
            index.append(entry)
    with open(os.path.join(a.out, "index.json"), "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(entry) for entry in index) + "\n]\n")
    print(f"{lib.version()}, numpy {np.__version__}: {len(index)} models written to {a.out}")


if __name__ == "__main__":
    main()
