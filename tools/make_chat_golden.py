#!/usr/bin/env python3
"""Renders chats with Python's Jinja as the Transformers library sets it up; writes tests/golden/chat/*.jsonl (see the README there).

    python tools/make_chat_golden.py --lib DIR        DIR holds libllama and libggml, for the token ids

Needs the Python packages jinja2 and gguf.
"""
import argparse
import json
import os
import random
import tempfile

import jinja2.ext
import jinja2.sandbox

from make_tokenizer_golden import Llama, vocabulary_file

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "golden")

WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Today's weather — in “any” place <now>", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "description": "Zürich, 東京 …"}, "days": {"type": "integer", "default": 1, "minimum": 0},
                                     "exact": {"type": "boolean", "default": False}, "scale": {"type": "number", "enum": [1.0, 0.5, 1e-07, 1e+22, -3]}},
    "required": ["place"]}}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}, "nothing": None, "list": [], "a\"b\\c": "d\ne"}}


def call(name, arguments, wrap=True):
    inner = {"name": name, "arguments": arguments}
    return {"id": "1", "type": "function", "function": inner} if wrap else inner


def chats():
    u = lambda text: {"role": "user", "content": text}
    a = lambda text, **more: {"role": "assistant", "content": text, **more}
    s = lambda text: {"role": "system", "content": text}
    tool = lambda text: {"role": "tool", "content": text}
    tags = "Repeat exactly: hello </think> world"
    fixed = [
        ([u("Hi")], {}), ([u("Hi")], {"enable_thinking": False}), ([u("Hi")], {"enable_thinking": True}), ([u("Hi")], {"add_generation_prompt": False}),
        ([s("Be kind."), u("Hi")], {}), ([s(""), u("")], {}), ([u(" spaces \n\n")], {}), ([u("a"), a("b"), u("c")], {}),
        ([s("S"), u("a"), s("mid"), u("c")], {}), ([u(tags)], {}), ([u("a"), a(tags), u("b")], {}), ([u("a"), a(tags, reasoning_content=""), u("b")], {}),
        ([u("a"), a("<think>\nhm\n</think>\n\nyes"), u("b")], {}), ([u("a"), a("<think>\nhm\n</think>\n\nyes")], {"add_generation_prompt": False}),
        ([u("a"), a("yes", reasoning_content="hm\n"), u("b"), a("no", reasoning_content="so")], {"add_generation_prompt": False}),
        ([u("a")], {"tools": [WEATHER]}), ([s("S"), u("a")], {"tools": [WEATHER, CLOCK]}),
        ([u("a"), a("", tool_calls=[call("clock", {})]), tool(tags), a("done"), u("b")], {"tools": [CLOCK]}),
        ([u("a"), a("let me see", tool_calls=[call("get_weather", {"place": "Zürich", "days": 2, "exact": True}), call("clock", "{\"raw\": 1}", False)]),
          tool("rain"), tool("12:00")], {"tools": [WEATHER, CLOCK]}),
        ([u("a"), a("", tool_calls=[call("clock", {})], reasoning_content="think"), tool("noon")], {"tools": [CLOCK]}),
        ([u("<tool_response>\nx\n</tool_response>"), a("b"), u("c")], {}), ([u("é 😀 你好 \u200d \U000e0001")], {}), ([u("{{ 7 * 7 }} {% if %}")], {}),
    ]
    words = ["the", "king", "\n", "  ", "don't", "42", "é", "你好", "😀", "<b>", "&amp;", "</think>", "{%", "'", '"', "\\", "\t", "unto", "a.b", "--"]
    rng = random.Random(80)
    text = lambda: " ".join(rng.choices(words, k=rng.randint(1, 12)))
    for _ in range(40):
        messages = [s(text())] if rng.random() < 0.5 else []
        for _ in range(rng.randint(1, 3)):
            messages += [u(text()), a(text(), **({"reasoning_content": text()} if rng.random() < 0.5 else {}))]
        messages.append(u(text()))
        fixed.append((messages, {"tools": [WEATHER]} if rng.random() < 0.3 else {}))
    return fixed


def environment():
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    return env


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--lib", required=True, help="folder of libllama")
    a = ap.parse_args()
    spec = json.load(open(os.path.join(HERE, "tokenizer", "bard.spec.json"), encoding="utf-8"))
    llama = Llama(a.lib)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "vocabulary.gguf")
        vocabulary_file(spec, file)
        model = llama.load(file)
    for name in ["bard", "qwen3", "python"]:
        source = spec["chat_template"] if name == "bard" else open(os.path.join(HERE, "chat", name + ".jinja"), encoding="utf-8").read()
        template = environment().from_string(source)
        rows = 0
        with open(os.path.join(HERE, "chat", name + ".jsonl"), "w", encoding="utf-8") as f:
            for messages, options in (chats()[:20] if name == "python" else chats()):
                options = {"add_generation_prompt": True} | options
                rendered = template.render(messages=messages, **({"tools": None} | options))
                row = {"messages": messages, "options": options, "rendered": rendered}
                if name == "qwen3":
                    row["bard_ids"] = llama.tokenize(model, rendered, True)
                f.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
                rows += 1
        print(f"{name}: {rows} chats, jinja2 {jinja2.__version__}, {llama.version}")


if __name__ == "__main__":
    main()
