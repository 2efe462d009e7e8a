#!/usr/bin/env python3
"""Loss of llama.cpp on a file of tokens: mean over pieces, each read from an empty context.  Needs numpy and libllama.

    reference_loss.py model.gguf held.u16 --piece 512 --pieces 32 [--mtp] [--exact]

Piece i holds tokens i*piece .. (i+1)*piece; every one of its tokens is an input and predicts the next, so the last predicts the first
of the next piece.  The file is little-endian 16-bit token numbers.

--mtp adds the draft block's figures.  It reads hidden row i and token i+1 and predicts token i+2, for all i of a piece but the last:
that one would need the next piece's first token as input.  `agreement` is the share of its rows whose best token is the trunk's best
one for the same place.

--exact takes plain mathematics on exactly dequantised weights in place of llama.cpp, which needs gguf and not libllama.
"""
import argparse

import numpy as np


def loss(logits, targets):
    logits = logits.astype(np.float64)
    top = logits.max(1)
    spread = top + np.log(np.exp(logits - top[:, None]).sum(1))
    return (spread - logits[np.arange(len(logits)), targets]).mean()


def llama(path, piece, mtp, threads, lib):
    """A function that reads tokens with llama.cpp and returns the trunk's rows and the draft block's, one less."""
    import llama_lib
    model, n_ctx = llama_lib.Model(llama_lib.Lib(lib), path, mtp=mtp), -(-piece // 256) * 256
    context = model.context(n_ctx, llama_lib.F16, threads, nextn=mtp)
    draft = model.context(n_ctx, llama_lib.F16, threads, mtp=True) if mtp else None

    def read(tokens, mtp):
        context.clear()
        logits = context.decode(tokens)
        if not mtp:
            return logits, None
        draft.clear()
        return logits, draft.decode(tokens[1:], 1, context.nextn_rows(len(tokens))[:-1])

    return read


def exact(path):
    """The same with plain mathematics."""
    import numpy_forward
    weights = numpy_forward.Weights(path)

    def read(tokens, mtp):
        hidden, logits = numpy_forward.RUN[weights.arch](weights, tokens)
        return logits, numpy_forward.run_mtp(weights, tokens[1:], hidden[:-1]) if mtp else None

    return read


def main():
    ap = argparse.ArgumentParser(description="Loss of llama.cpp on a file of tokens.")
    ap.add_argument("model")
    ap.add_argument("tokens")
    ap.add_argument("--piece", type=int, default=512)
    ap.add_argument("--pieces", type=int, help="this many from the start; default all")
    ap.add_argument("--mtp", action="store_true", help="the draft block's loss, too")
    ap.add_argument("--exact", action="store_true", help="plain mathematics instead of llama.cpp")
    ap.add_argument("--threads", type=int)
    ap.add_argument("--lib", help="folder of libllama")
    a = ap.parse_args()
    tokens = np.fromfile(a.tokens, "<u2").astype(np.int64)
    most = (len(tokens) - 1) // a.piece
    pieces = min(a.pieces or most, most)
    read = exact(a.model) if a.exact else llama(a.model, a.piece, a.mtp, a.threads, a.lib)
    trunk_losses, draft_losses, agreed = [], [], []
    for i in range(pieces):
        part = tokens[i * a.piece:(i + 1) * a.piece + 1]
        logits, drafts = read(part[:-1].tolist(), a.mtp)
        trunk_losses.append(loss(logits, part[1:]))
        if a.mtp:
            draft_losses.append(loss(drafts, part[2:]))
            agreed.append((drafts.argmax(1) == logits[1:].argmax(1)).mean())
    mean = float(np.mean(trunk_losses))
    print(f"{pieces} pieces of {a.piece}: loss {mean:.4f} nats a token, perplexity {np.exp(mean):.2f}")
    if a.mtp:
        print(f"draft block: loss {np.mean(draft_losses):.4f}, best token as the trunk's at {100 * np.mean(agreed):.1f} %")


if __name__ == "__main__":
    main()
