// What the scripts of all clients of Node share, as cases.py for Python.
import assert from "node:assert/strict";

export const [url, model] = process.argv.slice(2);
export const QUESTION = "What is the capital of France?";
export const MESSAGES = [{ role: "user", content: QUESTION }];
export const TOKENS = 24;
export const WEATHER = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
export const COLOR = {
  type: "object",
  properties: {
    name: { type: "string", enum: ["red", "green", "blue"] },
    is_warm: { type: "boolean" },
  },
  required: ["name", "is_warm"],
  additionalProperties: false,
};

export function checkColor(value) {
  if (typeof value === "string") value = JSON.parse(value);
  assert.deepEqual(Object.keys(value).sort(), ["is_warm", "name"]);
  assert(["red", "green", "blue"].includes(value.name));
  assert.equal(typeof value.is_warm, "boolean");
}

export function checkCity(value) {
  if (typeof value === "string") value = JSON.parse(value);
  assert.deepEqual(Object.keys(value), ["city"]);
  assert(["Rome", "Oslo"].includes(value.city));
}

export async function run(...cases) {
  let failed = 0;
  for (const each of cases) {
    let result = "ok";
    try {
      await each();
    } catch (error) {
      console.error(error);
      failed += 1;
      result = `failed: ${String(error).replaceAll("\n", " ").slice(0, 300)}`;
    }
    console.log(`case ${each.name} ${result}`);
  }
  process.exit(failed > 0 ? 1 : 0);
}
