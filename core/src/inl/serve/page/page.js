"use strict";

const element = (id) => document.getElementById(id);
const PARAMETERS = ["model", "system", "temperature", "top_p", "max_tokens", "seed"];
let chat = chats.list()[0] || chats.create();
let controller = null;
let isLoaded = {}; // of each model
let defaults = {}; // sampling of each model, once it is loaded

// The key is kept for this tab only.
element("key").value = sessionStorage.getItem("inl-key") || "";
element("key").addEventListener("change", (event) => {
  sessionStorage.setItem("inl-key", event.target.value);
});

function headers() {
  const key = element("key").value;
  return key ? { authorization: `Bearer ${key}` } : {};
}

function parameters() {
  return Object.fromEntries(PARAMETERS.map((id) => [id, element(id).value]));
}

const kept = chats.read("inl-parameters") || {};
for (const id of PARAMETERS) if (id !== "model" && typeof kept[id] === "string") element(id).value = kept[id];

// Without a list of models, the chosen one stays the last that was kept.
function keepParameters() {
  const now = parameters();
  chats.write("inl-parameters", { ...now, model: now.model || kept.model || "" });
}

function report(text, isBad) {
  element("status").textContent = text;
  element("status").className = isBad ? "bad" : "";
}

function make(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text || "";
  if (className) made.className = className;
  return made;
}

function action(text, run, label) {
  const button = make("button", text, "small");
  button.type = "button";
  if (label) button.setAttribute("aria-label", label);
  button.addEventListener("click", run);
  return button;
}

// Whether the newest text is in view; who has scrolled up is left there.
function isReadAtEnd() {
  const log = element("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

// A message and the buttons below it. While it streams, `update` draws it again, at most
// a fifth of the time.
function show(message, at) {
  const turn = make("article", "", "turn");
  turn.setAttribute("aria-label", message.role === "user" ? "You" : "Model");
  const box = make("div", "", `message ${message.role}`);
  const thoughts = document.createElement("details");
  const thought = make("div", "", "plain");
  thoughts.append(make("summary", "Reasoning"), thought);
  const text = make("div", "", message.role === "user" ? "plain" : "markdown");
  box.append(thoughts, text);
  turn.append(box);
  element("log").append(turn);
  let timer = null;
  let cost = 0;

  function draw() {
    timer = null;
    const began = performance.now();
    const log = element("log");
    const isAtEnd = isReadAtEnd();
    thoughts.hidden = !message.reasoning;
    thought.textContent = message.reasoning || "";
    if (message.role === "user") {
      const missing = message.unkept ? [make("p", `${message.unkept} image${message.unkept === 1 ? "" : "s"}, which this browser does not keep`, "cut")] : [];
      text.replaceChildren(...(message.images || []).map((url, place) => images.picture(url, place + 1)), ...missing, message.content);
    }
    else text.replaceChildren(markdown(message.content));
    if (isAtEnd) log.scrollTop = log.scrollHeight;
    cost = performance.now() - began;
  }

  function edit() {
    if (controller) return;
    const area = document.createElement("textarea");
    area.value = message.content;
    area.rows = Math.min(12, message.content.split("\n").length + 1);
    area.setAttribute("aria-label", "Edited message");
    const buttons = make("div", "", "actions");
    const send = action("Send again", () => {
      if (!area.value.trim() || controller) return;
      message.content = area.value.trim();
      chat.messages.length = at + 1;
      answer();
    });
    buttons.append(send, action("Cancel", () => render()));
    turn.replaceChildren(area, buttons);
    area.focus();
  }

  function actions() {
    const isLast = at === chat.messages.length - 1;
    const row = make("div", "", "actions");
    if (message.cut) row.append(make("span", message.cut, "cut"));
    row.append(copyButton("Copy message", () => message.content));
    if (message.role === "user") row.append(action("Edit", edit, "Edit message"));
    if (message.role === "user" && isLast) row.append(action("Try again", () => answer()));
    if (message.role === "assistant" && isLast) {
      if (message.cut && message.content) row.append(action("Continue", () => answer(message)));
      row.append(action("Regenerate", () => {
        if (controller) return;
        chat.messages.pop();
        answer();
      }));
    }
    turn.append(row);
  }

  draw();
  return { actions, update: () => { timer ||= setTimeout(draw, Math.max(16, 5 * cost)); }, finish: () => { clearTimeout(timer); draw(); } };
}

// Draw the conversation and the list of conversations.
function render(streamed) {
  element("log").replaceChildren();
  let last = null;
  chat.messages.forEach((message, at) => {
    last = show(message, at);
    if (message !== streamed) last.actions();
  });
  element("log").scrollTop = element("log").scrollHeight;
  renderChats();
  return last;
}

function renderChats() {
  element("chats").replaceChildren(...chats.list().map((each) => {
    const item = document.createElement("li");
    const open = action(each.title, () => choose(each));
    open.className = "title";
    if (each.id === chat.id) open.setAttribute("aria-current", "true");
    item.append(
      open,
      action("Rename", () => rename(each), `Rename ${each.title}`),
      action("Delete", () => drop(each), `Delete ${each.title}`),
    );
    return item;
  }));
  const isEmpty = chat.messages.length === 0;
  for (const id of ["export-md", "export-json"]) element(id).disabled = isEmpty;
}

function choose(other) {
  if (other.id === chat.id) return;
  stop();
  chat = other;
  report("");
  render();
}

function rename(other) {
  const title = window.prompt("Title of the conversation", other.title);
  if (!title || !title.trim()) return;
  // The one shown may hold messages that the list does not have yet.
  const named = other.id === chat.id ? chat : other;
  named.title = title.trim().slice(0, 80);
  chats.save(named);
  renderChats();
}

function drop(other) {
  if (!window.confirm(`Delete "${other.title}"?`)) return;
  chats.remove(other.id);
  if (other.id !== chat.id) return renderChats();
  stop();
  chat = chats.list()[0] || chats.create();
  report("");
  render();
}

// continued: the answer that goes on, the last message.
function request(messages, continued) {
  const number = (id) => (element(id).value === "" ? undefined : Number(element(id).value));
  const system = element("system").value.trim();
  const start = system ? [{ role: "system", content: system }] : [];
  const said = messages.map((message) => ({
    role: message.role,
    content: message.images?.length ? [
      ...message.images.map((url) => ({ type: "image_url", image_url: { url } })),
      { type: "text", text: message.content },
    ] : message.content,
    reasoning_content: (message === continued && message.reasoning) || undefined,
  }));
  return {
    model: element("model").value || undefined,
    messages: [...start, ...said],
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    stream: true,
    stream_options: { include_usage: true },
    ...(continued ? { continue_final_message: true, add_generation_prompt: false } : {}),
  };
}

async function* events(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += decoder.decode(value, { stream: true });
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

// The error of a refused request, with what to do about it.
async function refusal(response) {
  let text = `status ${response.status}`;
  try {
    text = (await response.json()).error.message;
  } catch { /* a proxy's page, not this server's answer */ }
  const seconds = response.headers.get("retry-after");
  if (response.status === 401) text += ": enter the API key under Menu, Parameters";
  else if (seconds) text += `: try again in ${seconds} s`;
  return new Error(text);
}

// Show that nothing has come yet, and whether the model is being loaded; returns what
// ends it.
function waiting() {
  const began = performance.now();
  const model = element("model").value;
  const tell = () => {
    const seconds = Math.round((performance.now() - began) / 1000);
    const what = isLoaded[model] === false ? `loading ${model}` : "waiting for the first token";
    report(seconds < 1 ? what : `${what}: ${seconds} s`);
  };
  element("loading").hidden = false;
  tell();
  const timer = setInterval(tell, 1000);
  return () => {
    clearInterval(timer);
    element("loading").hidden = true;
  };
}

async function answer(continued) {
  if (controller) return;
  const mine = new AbortController();
  controller = mine;
  busy(true);
  keepParameters();
  const owner = chat; // another may be chosen before this answer ends
  const messages = owner.messages;
  const body = JSON.stringify(request(messages, continued));
  const message = continued || { role: "assistant", content: "" };
  const before = { content: message.content.length, reasoning: (message.reasoning || "").length };
  delete message.cut;
  const isKept = chats.save(owner);
  if (!continued) messages.push(message);
  const view = render(message);
  const endWait = waiting();
  const began = performance.now();
  let first = null;
  let count = 0;
  let reason = null;
  const rate = () => {
    const seconds = (performance.now() - first) / 1000;
    return count > 1 && seconds > 0 ? `${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
  };
  let said = "";
  let isBad = false;
  try {
    let response;
    try {
      response = await fetch("v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json", ...headers() },
        body,
        signal: mine.signal,
      });
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error(`the server does not answer: ${error.message}`);
    }
    if (!response.ok) {
      if (response.status === 401) askKey();
      throw await refusal(response);
    }
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) count = chunk.usage.completion_tokens;
      const choice = chunk.choices[0] || { delta: {} };
      reason = choice.finish_reason || reason;
      const { content, reasoning_content: reasoning } = choice.delta;
      if (!content && !reasoning) continue;
      if (first === null) {
        first = performance.now();
        endWait();
      }
      count += 1;
      message.content += content || "";
      if (reasoning) message.reasoning = (message.reasoning || "") + reasoning;
      view.update();
      report(rate());
    }
    if (reason === null) throw new Error("the connection ended before the answer did");
    if (reason === "length") message.cut = `stopped at ${count} tokens, the maximum`;
    const wait = first === null ? "" : `first token after ${Math.round(first - began)} ms`;
    said = [message.cut || `${count} tokens`, rate(), wait].filter(Boolean).join(", ");
    if (!isKept) said += ". This browser does not keep the conversation";
  } catch (error) {
    isBad = error.name !== "AbortError";
    said = isBad ? error.message : `stopped after ${count} tokens`;
    const hasGrown = message.content.length > before.content || (message.reasoning || "").length > before.reasoning;
    if (hasGrown || continued) message.cut = isBad ? "the answer is not whole" : said;
  }
  endWait();
  if (!message.content && !message.reasoning) messages.pop();
  controller = null;
  // A conversation deleted meanwhile stays so.
  if (chat === owner || chats.list().some((each) => each.id === owner.id)) chats.save(owner);
  view.finish();
  const top = chat === owner && !isReadAtEnd() ? element("log").scrollTop : Number.MAX_SAFE_INTEGER;
  render();
  report(chat === owner ? said : "", chat === owner && isBad);
  element("log").scrollTop = Math.min(top, element("log").scrollHeight);
  busy(false);
  listModels().catch(() => {}); // the next answer says what is wrong
}

// A page that is left keeps what has come.
window.addEventListener("pagehide", () => {
  const last = chat.messages.at(-1);
  if (!controller || last.role !== "assistant" || !(last.content || last.reasoning)) return;
  chats.save({ ...chat, messages: [...chat.messages.slice(0, -1), { ...last, cut: "the page was left" }] });
});

function askKey() {
  if (element("side").hidden) element("toggle").click();
  element("key").focus();
}

const isTouched = window.matchMedia("(pointer: coarse)").matches;

function busy(is) {
  element("send").disabled = is;
  element("stop").disabled = !is;
  // A screen reader reads an answer once it is whole.
  element("log").setAttribute("aria-busy", String(is));
  // On a phone the focus would raise the keyboard over the answer.
  if (!is && !isTouched && document.activeElement !== element("key")) element("prompt").focus();
}

function stop() {
  if (controller) controller.abort();
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("prompt").value.trim();
  if (!text || controller || images.isReading()) return;
  element("prompt").value = "";
  chat.title ||= text.replace(/\s+/g, " ").slice(0, 60);
  const taken = images.take();
  chat.messages.push({ role: "user", content: text, ...(taken.length ? { images: taken } : {}) });
  answer();
});
images.listen(report);
element("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
element("stop").addEventListener("click", stop);
element("clear").addEventListener("click", () => {
  choose(chats.create());
  element("prompt").focus();
});
element("toggle").addEventListener("click", () => {
  const side = element("side");
  side.hidden = !side.hidden;
  element("toggle").setAttribute("aria-expanded", String(!side.hidden));
});
for (const kind of ["md", "json"]) {
  element(`export-${kind}`).addEventListener("click", () => chats.exportAs(kind, chat, parameters()));
}

async function listModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await refusal(response);
  const { data } = await response.json();
  isLoaded = Object.fromEntries(data.map((each) => [each.id, each.is_loaded]));
  defaults = Object.fromEntries(data.map((each) => [each.id, each.sampling_defaults || {}]));
  const select = element("model");
  const ids = data.map((each) => each.id);
  if (ids.join("\n") === [...select.options].map((each) => each.value).join("\n")) return;
  const chosen = select.value || kept.model;
  select.replaceChildren(...ids.map((id) => new Option(id, id)));
  if (ids.includes(chosen)) select.value = chosen;
}

async function showModels() {
  const before = element("status").textContent;
  try {
    await listModels();
    const model = element("model").value;
    // An empty field is not sent: the server uses the model's own value.
    for (const id of ["temperature", "top_p"]) element(id).placeholder = defaults[model]?.[id] ?? "of the model";
    // What was reported meanwhile stays.
    if (!controller && element("status").textContent === before) {
      report(isLoaded[model] === false ? `${model} is not loaded: the first message loads it` : "");
    }
  } catch (error) {
    report(error.message, true);
  }
}

if (window.matchMedia("(max-width: 50rem)").matches) element("toggle").click();
element("side").addEventListener("change", keepParameters);
element("key").addEventListener("change", showModels);
element("model").addEventListener("change", () => {
  keepParameters();
  showModels();
});
render();
showModels();
