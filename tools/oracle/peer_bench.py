#!/usr/bin/env python3
"""Speed of llama.cpp's shared library, as a peer to measure against: prompt reading and generation.

    peer_bench.py model.gguf --lib DIR --gpu --experts-in-ram 48 --pinned --ubatch 2048 --prompt 8192 --generate 64

--json prints one object: version, prompt, generate and a list of runs with prefill_tokens_per_s and decode_tokens_per_s.
The folder of a CUDA build needs libcudart and libcublas on LD_LIBRARY_PATH.
"""
import argparse
import json
import time

import numpy as np

import llama_lib


def prompt_tokens(below, count):
    return np.random.default_rng(1).integers(0, below, count).tolist()


def measure(context, tokens, n_generate):
    """Speed of one prompt and its greedy continuation, in tokens a second."""
    context.clear()
    t0 = time.time()
    last = context.decode(tokens, want="last")[0]
    t1 = time.time()
    for i in range(n_generate):
        last = context.decode([int(last.argmax())], len(tokens) + i)[0]
    t2 = time.time()
    return dict(prefill_tokens_per_s=len(tokens) / (t1 - t0), decode_tokens_per_s=n_generate / (t2 - t1))


def main():
    ap = argparse.ArgumentParser(description="Prompt and generation speed of llama.cpp's library.")
    ap.add_argument("model")
    ap.add_argument("--lib")
    ap.add_argument("--gpu", action="store_true", help="put all layers on the GPU")
    ap.add_argument("--experts-in-ram", type=int, default=0, help="layers whose routed experts stay in host memory")
    ap.add_argument("--pinned", action="store_true", help="page-locked host memory, the fast way for prompts")
    ap.add_argument("--prompt", type=int, default=512)
    ap.add_argument("--below", type=int, default=100000, help="prompt tokens are below this and the vocabulary's size")
    ap.add_argument("--generate", type=int, default=64)
    ap.add_argument("--ubatch", type=int, default=512)
    ap.add_argument("--repeat", type=int, default=2)
    ap.add_argument("--threads", type=int)
    ap.add_argument("--flash", action="store_true")
    ap.add_argument("--verbose", action="store_true")
    ap.add_argument("--json", action="store_true")
    a = ap.parse_args()
    t0 = time.time()
    lib = llama_lib.Lib(a.lib, quiet=not a.verbose)
    m = llama_lib.Model(lib, a.model, gpu_layers=999 if a.gpu else 0, experts_in_ram=a.experts_in_ram,
                        pinned=a.pinned)
    c = m.context(a.prompt + a.generate + 64, llama_lib.F16, a.threads, flash=a.flash, ubatch=a.ubatch)
    if not a.json:
        print(f"{lib.version()}: loaded in {time.time() - t0:.1f} s", flush=True)
    toks = prompt_tokens(min(m.n_vocab, a.below), a.prompt)
    c.decode(toks[:32], want="last")
    runs = []
    for r in range(a.repeat):
        run = measure(c, toks, a.generate)
        runs.append(run)
        if not a.json:
            print(f"run {r}: prompt of {a.prompt}: {run['prefill_tokens_per_s']:.1f} tokens/s;"
                  f" {a.generate} generated: {run['decode_tokens_per_s']:.1f} tokens/s", flush=True)
    if a.json:
        print(json.dumps(dict(version=lib.version(), prompt=a.prompt, generate=a.generate, runs=runs)))


if __name__ == "__main__":
    main()
