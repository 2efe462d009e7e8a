#!/usr/bin/env python3
"""Plays a program that takes more and more of a card's memory, holds it, and gives it back.

    bench/hog.py --leave-mib 300 --step-mib 64 --steps 10 --every-s 1.5 --hold-s 6 [--device 0]

First it takes all that is free but --leave-mib, then --step-mib more at each step, then nothing for --hold-s seconds, and then it frees the
steps one by one, and everything at the end. A line of JSON on stdout tells of each change: what it holds and what is free. Needs NVIDIA's
driver and nothing else.
"""
import argparse
import ctypes
import json
import sys
import time

MIB = 1 << 20


class Card:
    def __init__(self, number):
        self.cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), number)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} answers {code}")

    def free_mib(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value // MIB

    def take(self, mib):
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(mib * MIB))
        return address

    def give_back(self, address):
        self.call("cuMemFree_v2", address)


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--device", type=int, default=0)
    ap.add_argument("--leave-mib", type=int, required=True)
    ap.add_argument("--step-mib", type=int, default=64)
    ap.add_argument("--steps", type=int, default=10)
    ap.add_argument("--every-s", type=float, default=1.5)
    ap.add_argument("--hold-s", type=float, default=6.0)
    args = ap.parse_args()
    card, taken, began = Card(args.device), [], time.monotonic()

    def tell(what):
        held = sum(mib for _, mib in taken)
        print(json.dumps({"s": round(time.monotonic() - began, 2), "what": what, "held_mib": held, "free_mib": card.free_mib()}), flush=True)

    def take(what, mib):
        try:
            taken.append((card.take(mib), mib))
        except RuntimeError as refusal:
            what = f"{what}: {refusal}"
        tell(what)

    first = card.free_mib() - args.leave_mib
    if first > 0:
        take("first", first)
    for _ in range(args.steps):
        time.sleep(args.every_s)
        take("step", args.step_mib)
    time.sleep(args.hold_s)
    while taken:
        card.give_back(taken.pop()[0])
        tell("given back")
        time.sleep(args.every_s)


if __name__ == "__main__":
    main()
