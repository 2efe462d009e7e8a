"""The official `openai` package against a server that plays a script: chat, tools, responses, errors, cancel."""

import json
import sys

from openai import BadRequestError, NotFoundError, OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="unused", max_retries=0)
hello = [{"role": "user", "content": "say hello"}]
tools = [{"type": "function", "function": {"name": "read", "parameters": {
    "type": "object", "properties": {"filePath": {"type": "string"}}, "required": ["filePath"]}}}]

answer = client.chat.completions.create(model="any", messages=hello)
assert answer.choices[0].message.content == "Hello from the script.", answer
assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 0, answer

# A plain loop over a stream meets no chunk without a choice, and the usage chunk comes only where it is asked for.
text = ""
for chunk in client.chat.completions.create(model="any", messages=hello, stream=True):
    text += chunk.choices[0].delta.content or ""
assert text == "Hello from the script.", text
chunks = list(client.chat.completions.create(model="any", messages=hello, stream=True, stream_options={"include_usage": True}))
assert [len(chunk.choices) for chunk in chunks][-2:] == [1, 0] and chunks[-1].usage.total_tokens > 0, chunks

for stream in (False, True):
    if stream:
        with client.chat.completions.stream(model="any", messages=[{"role": "user", "content": "read note.txt"}], tools=tools) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "read note.txt"}], tools=tools).choices[0].message
    call = message.tool_calls[0]
    assert call.function.name == "read" and json.loads(call.function.arguments)["filePath"].endswith("note.txt"), call
    history = [{"role": "user", "content": "read note.txt"}, message.model_dump(exclude_none=True),
               {"role": "tool", "tool_call_id": call.id, "content": "tide tables"}]
    answer = client.chat.completions.create(model="any", messages=history, tools=tools)
    assert answer.choices[0].message.content == "It says: tide tables", answer

response = client.responses.create(model="any", input="say hello", instructions="Be brief.")
assert response.output_text == "Hello from the script." and response.status == "completed", response
with client.responses.stream(model="any", input="read note.txt", tools=[{"type": "function", **tools[0]["function"], "strict": False}]) as events:
    kinds = [event.type for event in events]
    final = events.get_final_response()
assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
assert final.output[0].type == "function_call" and final.output[0].name == "read", final

text = client.completions.create(model="any", prompt="say hello").choices[0].text
assert text == "Hello from the script.", text

for bad in ({"messages": []}, {"messages": hello, "temperature": -1}, {"messages": hello, "response_format": {"type": "json_shema"}}):
    try:
        client.chat.completions.create(model="any", **bad)
        raise SystemExit(f"{bad} was answered")
    except BadRequestError as error:
        assert error.body["message"] and error.param, error
try:
    client.models.retrieve("missing")
    raise SystemExit("a model that is not there was found")
except NotFoundError:
    pass

# A client that leaves in the middle frees the worker for the next one.
stream = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "write without end"}], stream=True)
next(iter(stream))
stream.close()
answer = client.chat.completions.create(model="any", messages=hello, timeout=10)
assert answer.choices[0].message.content == "Hello from the script.", answer
print("openai for Python: all well")
