"""The official `anthropic` package against a server that plays a script: messages, streams, tools, thinking, counting, errors."""

import sys

from anthropic import Anthropic, BadRequestError

client = Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0)
hello = [{"role": "user", "content": "say hello"}]
tools = [{"name": "read", "description": "reads a file", "input_schema": {
    "type": "object", "properties": {"filePath": {"type": "string"}}, "required": ["filePath"]}}]

message = client.messages.create(model="any", max_tokens=100, messages=hello)
assert message.content[0].text == "Hello from the script." and message.stop_reason == "end_turn", message
assert message.usage.input_tokens == client.messages.count_tokens(model="any", messages=hello).input_tokens, message

with client.messages.stream(model="any", max_tokens=100, messages=hello) as stream:
    assert "".join(stream.text_stream) == "Hello from the script."

request = {"model": "any", "max_tokens": 3000, "system": "You read files.", "tools": tools,
           "thinking": {"type": "enabled", "budget_tokens": 1024}, "messages": [{"role": "user", "content": "think and read note.txt"}]}
whole = client.messages.create(**request)
with client.messages.stream(**request) as stream:
    streamed = stream.get_final_message()
for message in (whole, streamed):
    thinking, use = message.content
    assert thinking.type == "thinking" and thinking.thinking == "I have to read it." and thinking.signature, message
    assert use.type == "tool_use" and use.name == "read" and use.input["filePath"].endswith("note.txt"), message
    assert message.stop_reason == "tool_use", message
    history = request["messages"] + [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "tide tables"}]}]
    answer = client.messages.create(**{**request, "messages": history})
    assert answer.content[-1].text == "It says: tide tables", answer

stopped = client.messages.create(model="any", max_tokens=100, messages=hello, stop_sequences=["the"])
assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "the", "Hello from "), stopped

for bad in ({"messages": []}, {"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}]}]}):
    try:
        client.messages.create(model="any", max_tokens=10, **bad)
        raise SystemExit(f"{bad} was answered")
    except BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error", error
print("anthropic for Python: all well")
