// The official `openai` package for Node against a server that plays a script.
import assert from "node:assert";
import { createRequire } from "node:module";

const require = createRequire(process.argv[3] + "/package.json");
const { default: OpenAI } = require("openai");
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "say hello" }];

const answer = await client.chat.completions.create({ model: "any", messages });
assert.equal(answer.choices[0].message.content, "Hello from the script.");

let text = "";
for await (const chunk of await client.chat.completions.create({ model: "any", messages, stream: true })) {
    text += chunk.choices[0].delta.content ?? "";
}
assert.equal(text, "Hello from the script.");

// The helper runs the tool and sends its result back.
const tools = [{
    type: "function",
    function: {
        name: "read",
        parse: JSON.parse,
        parameters: { type: "object", properties: { filePath: { type: "string" } } },
        function: ({ filePath }) => (filePath.endsWith("note.txt") ? "tide tables" : "nothing"),
    },
}];
const runner = client.chat.completions.runTools({ model: "any", messages: [{ role: "user", content: "read note.txt" }], tools, stream: true });
assert.equal(await runner.finalContent(), "It says: tide tables");

const stream = await client.responses.create({ model: "any", input: "say hello", stream: true });
let written = "";
let last;
for await (const event of stream) {
    if (event.type === "response.output_text.delta") written += event.delta;
    last = event.type;
}
assert.deepEqual([written, last], ["Hello from the script.", "response.completed"]);

await assert.rejects(client.chat.completions.create({ model: "any", messages: [] }), OpenAI.BadRequestError);
const endless = await client.chat.completions.create({ model: "any", messages: [{ role: "user", content: "write without end" }], stream: true });
for await (const chunk of endless) break;
assert.equal((await client.chat.completions.create({ model: "any", messages })).choices[0].message.content, "Hello from the script.");
console.log("openai for Node: all well");
