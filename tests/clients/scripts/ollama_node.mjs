// npm: ollama
// Ollama's client for Node.
import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { COLOR, MESSAGES, TOKENS, WEATHER } from "./cases.mjs";
import { checkColor, model, run, url } from "./cases.mjs";

const client = new Ollama({ host: url });
const options = { temperature: 0, num_predict: TOKENS };
const asked = { model, messages: MESSAGES, options };
const tool = { type: "function", function: { name: "weather", parameters: WEATHER } };

async function plain() {
  const answer = await client.chat(asked);
  assert.match(answer.message.content, /Paris/);
  const text = await client.generate({ model, prompt: "Once", options });
  assert(text.response);
}

async function stream() {
  const whole = await client.chat(asked);
  let text = "";
  let last;
  for await (const part of await client.chat({ ...asked, stream: true })) {
    text += part.message.content;
    last = part;
  }
  assert.equal(text, whole.message.content);
  assert.equal(last.done, true);
}

async function tools() {
  // Ollama's API cannot force a call: the small model may answer in words.
  const answer = await client.chat({ ...asked, tools: [tool] });
  assert(answer.message.content || answer.message.tool_calls.length);
}

async function structured() {
  checkColor((await client.chat({ ...asked, format: COLOR })).message.content);
}

async function models() {
  const { models } = await client.list();
  assert(models.some((each) => each.name.startsWith(model)));
  assert((await client.show({ model })).capabilities.includes("completion"));
  assert((await client.ps()).models.length > 0);
}

async function embeddings() {
  const { embeddings } = await client.embed({ model, input: ["a", "b"] });
  assert.equal(embeddings.length, 2);
}

async function errors() {
  await assert.rejects(client.chat({ ...asked, model: "not-served" }), /not-served/);
}

await run(plain, stream, tools, structured, models, embeddings, errors);
