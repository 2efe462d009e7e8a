#!/usr/bin/env python3
"""What the cuda backend must show on a card: the same answers as `host`, one text at any setting, memory that is lived in as planned.

    bench/cuda_check.py --engine target/release/ebbtide --tests DIR --out DIR [--parts tests,host,matrix,drafts,shapes,steady,faults,hog,smallest,reload_overlap,sanitizer]

Builds nothing: the engine and, for the part `tests`, the test programs `conformance`, `cuda`, `ops` and `cuda_engine` lie there already,
built with the feature `cuda` for the card's architecture. Each part writes DIR/PART.json and is skipped where that exists. Needs numpy; `shapes` and
`steady` and the parts behind `faults` write synthetic models of 12 to 15 GB to --scratch. Exits 1 where a claim does not hold, after all parts have run.
"""
import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
MODELS = {
    "qwen3moe": os.path.join(ROOT, "assets", "bard-qwen3moe-9m-IQ4_NL.gguf"),
    "qwen35moe": os.path.join(ROOT, "assets", "bard-qwen35moe-22m-mtp-IQ4_NL.gguf"),
}
HELD = os.path.join(ROOT, "assets", "held.u16")
SHAPES = {
    "30b": ["--arch", "qwen3moe", "--shape", "qwen3-30b-a3b", "--skew", "1.2"],
    "35b": ["--arch", "qwen35moe", "--shape", "qwen3.6-35b-a3b", "--mtp", "1", "--skew", "0.6"],
}
QUANT = ["--type", "IQ3_XXS", "--dense-type", "Q8_0", "--head-type", "Q5_K", "--embd-type", "Q5_K"]
FIGURES = ("way", "chunk", "block", "slots", "prefill_tokens_per_s", "decode_tokens_per_s", "lowest_free_bytes", "head_reloads",
           "head_reload_ms", "head_wait_ms", "arena_bytes_in_head", "spill_bytes", "link_bytes", "hits", "misses", "drafts_offered", "drafts_accepted",
           "recaptures")
MIB = 1 << 20


class Checks:
    """Claims with what was found; a part's result."""

    def __init__(self):
        self.failed, self.rows = [], []

    def claim(self, holds, text):
        if not holds:
            self.failed.append(text)
            print("FAILED", text, flush=True)

    def row(self, **figures):
        self.rows.append(figures)
        print(json.dumps(figures), flush=True)


def card_name():
    """Name, driver and memory of the card."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def engine(args, *words, timeout=120):
    """Runs a command with --json and returns its object."""
    done = subprocess.run([args.engine, *words, "--json"], capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def tokens_file(args, n, offset=0):
    path = os.path.join(args.scratch, f"held-{offset}-{n}.u16")
    with open(HELD, "rb") as held, open(path, "wb") as out:
        out.write(held.read()[2 * offset:2 * (offset + n)])
    return "@" + path


def digest(report):
    return zlib.crc32(str(report["tokens"]).encode())


def part_tests(args, checks):
    environment = dict(os.environ, EBBTIDE_REAL_GPU="1")
    for name in ("conformance", "cuda", "ops", "cuda_engine"):
        done = subprocess.run([os.path.join(args.tests, name), "--test-threads", "4"], capture_output=True, text=True, env=environment)
        result = [line for line in done.stdout.splitlines() if line.startswith("test result")]
        checks.row(tests=name, result=result[0] if result else "none")
        checks.claim(done.returncode == 0, f"{name}: {done.stdout[-800:]}")


def part_host(args, checks):
    """Teacher-forced over 2,048 held tokens: divergence from `host` in the card's arithmetic, position by position; beside it, without a
    claim, that from `host` in exact arithmetic."""
    for name, model in MODELS.items():
        logits = {}
        # The card reads prompts in 16-bit floats by itself, the host where it is asked to.
        for arm, device, activations in (("host", "host", "f16"), ("exact", "host", "f32"), ("card", "auto", "q8")):
            rows = []
            for piece in range(4):
                out = os.path.join(args.scratch, f"{arm}.npy")
                words = ["logits", "-m", model, "--tokens", tokens_file(args, 512, 512 * piece), "-o", out, "--device", device]
                engine(args, *words, "--kv", "f16", "--activations", activations, timeout=600)
                rows.append(np.load(out).astype(np.float64))
            logits[arm] = np.concatenate(rows)

        def log_softmax(x):
            x = x - x.max(1, keepdims=True)
            return x - np.log(np.exp(x).sum(1, keepdims=True))

        card = log_softmax(logits["card"])
        for arm in ("host", "exact"):
            expected = log_softmax(logits[arm])
            divergence = (np.exp(expected) * (expected - card)).sum(1)
            best = np.sort(logits[arm], 1)
            clear = best[:, -1] - best[:, -2] > 0.1
            same = logits[arm].argmax(1) == logits["card"].argmax(1)
            checks.row(model=name, against={"host": "host, f16", "exact": "host, f32"}[arm], positions=len(divergence), worst_divergence_nats=divergence.max(),
                       above_0_02=int((divergence > 0.02).sum()), mean_divergence_nats=divergence.mean(), best_token_equal=same.mean(),
                       best_token_equal_where_clear=same[clear].mean())
            if arm == "host":
                checks.claim(divergence.max() <= 0.02, f"{name}: divergence of {divergence.max():.4f} nats")
                checks.claim(same[clear].all(), f"{name}: another best token where the host's gap exceeds 0.1")


def part_matrix(args, checks):
    """In --deterministic one text at any slots, chunk, block, alias and drafts."""
    for name, model in MODELS.items():
        texts, accepted, reloads, runs = {}, 0, 0, 0
        drafts_of = ("off", "both") if name == "qwen35moe" else ("off", "lookup")
        settings = itertools.product(("1", "9", "64"), ("64", "256"), ("auto", "chunk"), (False, True), drafts_of)
        for slots, chunk, block, alias, drafts in settings:
            words = ["run", "-m", model, "--tokens", tokens_file(args, 700, 4000), "-n", "40", "--temp", "0", "--ignore-eos", "--deterministic",
                     "--expert-cache", slots, "--prefill", chunk, "--prefill-block", block, "--draft", drafts, "--ctx", "1024"]
            report = engine(args, *words, *(["--prefill-head-alias", "--alias-min-tokens", "0"] if alias else []))
            texts.setdefault(digest(report), []).append(words[9:])
            accepted, reloads, runs = accepted + report["drafts_accepted"], reloads + report["head_reloads"], runs + 1
        checks.row(model=name, runs=runs, texts=len(texts), drafts_accepted=accepted, head_reloads=reloads)
        checks.claim(len(texts) == 1, f"{name}: {len(texts)} texts: {texts}")
        checks.claim(reloads > 0, f"{name}: the head was never lent")


def part_drafts(args, checks):
    """Ten greedy texts of the trained hybrid model, with drafts and without in turns: one text, and its speed."""
    model = MODELS["qwen35moe"]
    for device in ("auto", "host"):
        ratios = []
        for number in range(10):
            speeds, texts, figures = {"off": [], "both": []}, set(), {}
            for repetition in range(3):
                for drafts in ("off", "both") if repetition % 2 else ("both", "off"):
                    report = engine(args, "run", "-m", model, "--tokens", tokens_file(args, 200, 9000 * number), "-n", "400", "--temp", "0",
                                    "--ignore-eos", "--draft", drafts, "--ctx", "1024", "--device", device, "--threads", "8")
                    speeds[drafts].append(report["decode_tokens_per_s"])
                    texts.add(digest(report))
                    figures = report if drafts == "both" else figures
            ratio = np.median(speeds["both"]) / np.median(speeds["off"])
            ratios.append(ratio)
            windows = figures["drafts"]["windows"]
            checks.row(device=device, text=number, off_tokens_per_s=np.median(speeds["off"]), with_drafts=np.median(speeds["both"]), ratio=ratio,
                       offered=figures["drafts_offered"], accepted=figures["drafts_accepted"], tokens_per_window=400 / max(windows, 1))
            checks.claim(len(texts) == 1, f"{device}, text {number}: drafts change it")
            checks.claim(ratio >= 0.98, f"{device}, text {number}: {ratio:.2f} of the speed without drafts")
        checks.row(device=device, least_ratio=min(ratios), median_ratio=np.median(ratios), most_ratio=max(ratios))


class Memory(threading.Thread):
    """The most memory that a process has on the card, as the driver lists it."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most_mib, self.going = 0, True

    def run(self):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while self.going:
            used = subprocess.run(query, capture_output=True, text=True).stdout.split()
            self.most_mib = max([self.most_mib, *map(int, used)])
            time.sleep(0.05)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.going = False
        self.join()


def shape_model(args, shape):
    path = os.path.join(args.scratch, f"{shape}.gguf")
    if not os.path.exists(path):
        maker = os.path.join(ROOT, "tools", "oracle", "make_tiny_model.py")
        subprocess.run([sys.executable, maker, *SHAPES[shape], *QUANT, "--out", path], check=True, capture_output=True)
    return path


def part_shapes(args, checks):
    """Real shapes in 8 GiB: the head lent and kept write one text, and the card holds no more than was allowed."""
    for shape in SHAPES:
        model = shape_model(args, shape)
        limits = ["--vram-mib", "8192", "--ctx", "32768"]
        plan = engine(args, "plan", "-m", model, *limits)
        owners = {part["owner"]: part["bytes"] for part in plan["decode"]["owners"]}
        checks.row(shape=shape, planned_bytes=plan["decode"]["total_bytes"], context_bytes=owners.get("context", 0), slots=plan["slots"])
        for prompt in (512, 2048, 8192):
            texts = set()
            for alias in ([], ["--prefill-head-alias", "--alias-min-tokens", "0"]):
                with Memory() as memory:
                    report = engine(args, "run", "-m", model, "--tokens", tokens_file(args, prompt), "-n", "48", "--temp", "0", "--ignore-eos",
                                    "--deterministic", *limits, *alias)
                texts.add(digest(report))
                checks.row(shape=shape, prompt_tokens=prompt, alias=bool(alias), most_mib=memory.most_mib,
                           **{key: report[key] for key in FIGURES})
                checks.claim(memory.most_mib <= 8192 - 256 + 64, f"{shape}: {memory.most_mib} MiB on the card, a reserve of 256 of 8,192 was to stay free")
                checks.claim(report["recaptures"] == 0, f"{shape}: {report['recaptures']} re-captures")
            checks.claim(len(texts) == 1, f"{shape}, {prompt} tokens: the alias changes the text")


def part_steady(args, checks):
    """300 alternating short and long requests on one engine."""
    model = shape_model(args, "35b")
    requests = os.path.join(args.scratch, "requests.jsonl")
    held = np.fromfile(HELD, dtype="<u2").tolist()
    with open(requests, "w") as out:
        for number in range(300):
            n, start = (40, 97 * number) if number % 2 else (1024, 131 * number)
            print(json.dumps({"tag": "short" if number % 2 else "long", "prompt_tokens": held[start:start + n], "output_tokens": 8}), file=out)
    words = ["replay", requests, "-m", model, "--vram-mib", "8192", "--ctx", "8192", "--trials", "1", "--arms", "alias"]
    with Memory() as memory:
        report = engine(args, *words, timeout=500)
    with open(os.path.join(args.out, "steady-replay.json"), "w") as out:
        json.dump(report, out)
    checks.row(requests=300, most_mib=memory.most_mib)
    checks.claim(memory.most_mib <= 8192 - 256 + 64, f"{memory.most_mib} MiB on the card")


def part_faults(args, checks):
    """A prompt that is stopped, and a process that is killed: the card is empty afterwards."""
    model = shape_model(args, "30b")
    used = lambda: int(subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True,
                                      text=True).stdout.split()[0])
    before = used()
    for name, number, code in (("stopped", signal.SIGINT, 130), ("killed", signal.SIGKILL, -9)):
        run = subprocess.Popen([args.engine, "run", "-m", model, "--tokens", tokens_file(args, 8192), "-n", "8000", "--ignore-eos", "--vram-mib",
                                "8192", "--ctx", "32768", "--prefill-head-alias", "--alias-min-tokens", "0"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(6)
        held = used()
        run.send_signal(number)
        returned, left = run.wait(timeout=30), used()
        deadline = time.monotonic() + 10
        while left > before + 64 and time.monotonic() < deadline:
            time.sleep(0.1)
            left = used()
        checks.row(fault=name, held_mib=held, exit_code=returned, left_mib=left)
        checks.claim(returned == code, f"{name}: exit code {returned}")
        checks.claim(held > before + 1000 and left <= before + 64, f"{name}: {held} MiB held, {left} left, {before} before")
    # A second start on a card that another program fills.
    hog = subprocess.Popen([args.engine, "run", "-m", model, "--tokens", tokens_file(args, 512), "-n", "4000", "--ignore-eos", "--ctx", "32768",
                            "--expert-cache", "6144"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(8)
    report = engine(args, "run", "-m", model, "--tokens", tokens_file(args, 512), "-n", "8", "--ignore-eos", "--vram-mib", "8192", "--ctx", "8192")
    hog.send_signal(signal.SIGINT)
    hog.wait(timeout=30)
    checks.row(fault="beside another", tokens=len(report["tokens"]))
    checks.claim(len(report["tokens"]) == 8, "nothing was written beside another program")


def card_numbers(what):
    done = subprocess.run(["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"], capture_output=True, text=True)
    return int(done.stdout.split()[0])


def write_requests(path, lengths, output_tokens):
    held = np.fromfile(HELD, dtype="<u2").tolist()
    with open(path, "w") as out:
        for number, n in enumerate(lengths):
            start = 131 * number
            print(json.dumps({"prompt_tokens": held[start:start + n], "output_tokens": output_tokens}), file=out)


def part_hog(args, checks):
    """A program that takes the card step by step while requests run: slots go, nothing fails, and slots come back when it ends."""
    model, reserve = shape_model(args, "35b"), 256
    requests = os.path.join(args.scratch, "hog.jsonl")
    write_requests(requests, [40, 512] * 90, 8)
    replay = subprocess.Popen([args.engine, "replay", requests, "-m", model, "--vram-mib", "8192", "--ctx", "8192", "--trials", "1", "--arms", "alias",
                               "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines, told = [], threading.Thread(target=lambda: lines.extend((time.monotonic(), line.rstrip()) for line in replay.stderr), daemon=True)
    told.start()
    out = []
    reader = threading.Thread(target=lambda: out.append(replay.stdout.read()), daemon=True)
    reader.start()
    # The engine stands when it takes no more.
    last, since, deadline = -1, time.monotonic(), time.monotonic() + 120
    while time.monotonic() - since < 3 and time.monotonic() < deadline and replay.poll() is None:
        used = card_numbers("memory.used")
        if used < 2000 or abs(used - last) > 64:
            last, since = used, time.monotonic()
        time.sleep(0.3)
    began = time.monotonic()
    hog = subprocess.run([sys.executable, os.path.join(HERE, "hog.py"), "--leave-mib", str(reserve + 200), "--step-mib", "256", "--steps", "8",
                          "--every-s", "1.5", "--hold-s", "4"], capture_output=True, text=True, timeout=120)
    replay_ended = replay.wait(timeout=300)
    reader.join(10)
    told.join(10)
    steps = [json.loads(line) for line in hog.stdout.splitlines()]
    gave = [line for _, line in lines if "slots back" in line]
    took = [line for _, line in lines if "slots again" in line]
    checks.row(hog_s=round(time.monotonic() - began, 1), hog=steps, gave=gave, took=took, other_lines=[line for _, line in lines if line not in gave + took][-10:])
    checks.claim(hog.returncode == 0 and len(steps) > 8, f"the hog itself failed: {hog.stderr[-300:]}")
    checks.claim(replay_ended == 0, f"replay ends with {replay_ended} beside a hog: {[line for _, line in lines][-3:]}")
    checks.claim(gave, "no slots were given back")
    checks.claim(took, "no slots were taken again")
    if replay_ended == 0 and out:
        report = json.loads(out[0])
        answered = sum(1 for request in report["requests"] if request["results"])
        checks.row(requests=len(report["requests"]), answered=answered, ended=report["ended"])
        checks.claim(answered == 180 and report["ended"] == "done", f"{answered} of 180 requests were answered")


def part_smallest(args, checks):
    """The smallest budget that can be planned, found by halving, and a run in it."""
    for shape in SHAPES:
        model = shape_model(args, shape)
        words = ["-m", model, "--ctx", "8192", "--prefill-head-alias"]

        def plan(mib):
            done = subprocess.run([args.engine, "plan", *words, "--vram-mib", str(mib), "--json"], capture_output=True, text=True, timeout=60)
            return json.loads(done.stdout) if done.returncode == 0 else None

        refused, fits = 256, 16384
        while fits - refused > 1:
            middle = (refused + fits) // 2
            refused, fits = (refused, middle) if plan(middle) else (middle, fits)
        planned = plan(fits)
        with Memory() as memory:
            report = engine(args, "run", *words, "--vram-mib", str(fits), "--alias-min-tokens", "0", "--tokens", tokens_file(args, 1024), "-n", "16", "--temp",
                            "0", "--ignore-eos", timeout=400)
        checks.row(shape=shape, smallest_mib=fits, planned_bytes=planned["decode"]["total_bytes"], reserve_bytes=planned["reserve_bytes"],
                   most_mib=memory.most_mib, **{key: report[key] for key in FIGURES})
        checks.claim(len(report["tokens"]) == 16, f"{shape}: {len(report['tokens'])} of 16 tokens in {fits} MiB")
        checks.claim(memory.most_mib <= fits, f"{shape}: {memory.most_mib} MiB on the card, {fits} were allowed")
        most = planned["decode"]["total_bytes"] / MIB + min(64, planned["decode"]["total_bytes"] / MIB / 20)
        checks.claim(memory.most_mib <= most, f"{shape}: {memory.most_mib} MiB on the card, {most:.0f} planned with what is allowed beside")


def part_reload_overlap(args, checks):
    """How much of the head's copy is hidden behind the first window's layers: its time less what the head product waited for it."""
    for shape in SHAPES:
        model = shape_model(args, shape)
        for prompt in (64, 512, 2048):
            shares = []
            for repetition in range(5):
                report = engine(args, "run", "-m", model, "--vram-mib", "8192", "--ctx", "8192", "--prefill-head-alias", "--alias-min-tokens", "0", "--tokens",
                                tokens_file(args, prompt, 97 * repetition), "-n", "2", "--temp", "0", "--ignore-eos")
                copy, waited = report["head_reload_ms"], report["head_wait_ms"]
                checks.claim(report["head_reloads"] == 1 and copy > 0, f"{shape}, {prompt} tokens: the head was not lent")
                first_token_ms = report["prompt_tokens"] / report["prefill_tokens_per_s"] * 1e3
                shares.append(1 - waited / max(copy, 1e-9))
                checks.row(shape=shape, prompt_tokens=prompt, copy_ms=copy, waited_ms=waited, hidden=shares[-1], first_token_ms=first_token_ms)
            hidden = float(np.median(shares))
            checks.row(shape=shape, prompt_tokens=prompt, median_hidden=hidden)
            checks.claim(hidden >= 0.8, f"{shape}, {prompt} tokens: {hidden:.0%} of the head's copy are hidden")


def part_sanitizer(args, checks):
    """compute-sanitizer's memcheck over the operations, the engine's tests and the program; says so where the tool is not there."""
    folders = [os.path.join(root, "bin") for root in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda") if root]
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    if not tool:
        checks.row(sanitizer="not run: compute-sanitizer is neither in PATH nor in CUDA_HOME/bin nor in /usr/local/cuda/bin")
        return
    environment = dict(os.environ, EBBTIDE_REAL_GPU="1")
    model = MODELS["qwen35moe"]
    run = ["run", "-m", model, "--tokens", tokens_file(args, 96), "-n", "8", "--temp", "0", "--ignore-eos", "--ctx", "512", "--vram-mib", "1024",
           "--prefill-head-alias", "--alias-min-tokens", "0"]
    calls = [("run", [args.engine, *run])]
    calls += [(name, [os.path.join(args.tests, name), "--test-threads", "1", *rest]) for name, rest in (("ops", ["cuda::"]), ("cuda_engine", ["synthetic"]))
              if args.tests and os.path.exists(os.path.join(args.tests, name))]
    for name, words in calls:
        started = time.monotonic()
        try:
            done = subprocess.run([tool, "--tool", "memcheck", "--error-exitcode", "9", *words], capture_output=True, text=True, env=environment,
                                  timeout=150)
        except subprocess.TimeoutExpired:
            checks.row(sanitizer=name, result="not finished in 150 s")
            continue
        text = done.stdout + done.stderr
        summary = re.findall(r"ERROR SUMMARY: (\d+)", text)
        checks.row(sanitizer=name, seconds=round(time.monotonic() - started, 1), exit_code=done.returncode, errors=summary, tail=text[-300:])
        checks.claim(done.returncode == 0 and summary and all(count == "0" for count in summary), f"{name} under memcheck: {text[-800:]}")


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--engine", required=True)
    ap.add_argument("--tests", default="")
    ap.add_argument("--out", required=True)
    ap.add_argument("--scratch", default=tempfile.gettempdir())
    ap.add_argument("--parts", default="tests,host,matrix,drafts,shapes,steady,faults,hog,smallest,reload_overlap,sanitizer")
    args = ap.parse_args()
    card = card_name()
    failed = []
    for part in args.parts.split(","):
        path = os.path.join(args.out, f"{part}.json")
        if os.path.exists(path):
            print(f"{part}: there already", flush=True)
            continue
        print(f"== {part}", flush=True)
        checks, started = Checks(), time.monotonic()
        try:
            globals()[f"part_{part}"](args, checks)
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            checks.claim(False, f"{part}: {error}")
        seconds = round(time.monotonic() - started, 1)
        with open(path, "w") as out:
            json.dump({"card": card, "seconds": seconds, "failed": checks.failed, "rows": checks.rows}, out, indent=1)
        print(f"{part}: {seconds} s, {len(checks.failed)} failed", flush=True)
        failed += checks.failed
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
