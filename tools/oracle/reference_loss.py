#!/usr/bin/env python3
"""Loss of llama.cpp on a file of tokens: mean over pieces, each read from an empty context.  Needs numpy and libllama.

    reference_loss.py model.gguf held.u16 --piece 512 --pieces 32

Piece i holds tokens i*piece .. (i+1)*piece; every one of its tokens is an input and predicts the next, so the last predicts the first
of the next piece.  The file is little-endian 16-bit token numbers.
"""
import argparse

import numpy as np

import llama_lib


def main():
    ap = argparse.ArgumentParser(description="Loss of llama.cpp on a file of tokens.")
    ap.add_argument("model")
    ap.add_argument("tokens")
    ap.add_argument("--piece", type=int, default=512)
    ap.add_argument("--pieces", type=int, help="this many from the start; default all")
    ap.add_argument("--threads", type=int)
    ap.add_argument("--lib", help="folder of libllama")
    a = ap.parse_args()
    tokens = np.fromfile(a.tokens, "<u2").astype(np.int64)
    most = (len(tokens) - 1) // a.piece
    pieces = min(a.pieces or most, most)
    model = llama_lib.Model(llama_lib.Lib(a.lib), a.model)
    context = model.context(-(-a.piece // 256) * 256, llama_lib.F16, a.threads)
    total = []
    for i in range(pieces):
        part = tokens[i * a.piece:(i + 1) * a.piece + 1]
        context.clear()
        logits = context.decode(part[:-1].tolist()).astype(np.float64)
        top = logits.max(1)
        spread = top + np.log(np.exp(logits - top[:, None]).sum(1))
        total.append((spread - logits[np.arange(a.piece), part[1:]]).mean())
    loss = float(np.mean(total))
    print(f"{pieces} pieces of {a.piece}: loss {loss:.4f} nats a token, perplexity {np.exp(loss):.2f}")


if __name__ == "__main__":
    main()
