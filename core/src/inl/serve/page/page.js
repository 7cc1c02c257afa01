"use strict";

const element = (id) => document.getElementById(id);
const messages = [];
let controller = null;

// The key is kept for this tab only.
element("key").value = sessionStorage.getItem("inl-key") || "";
element("key").addEventListener("change", (event) => {
  sessionStorage.setItem("inl-key", event.target.value);
});

function headers() {
  const key = element("key").value;
  return key ? { authorization: `Bearer ${key}` } : {};
}

function show(role) {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  const thoughts = document.createElement("details");
  const title = document.createElement("summary");
  title.textContent = "Reasoning";
  const thought = document.createElement("span");
  thoughts.append(title, thought);
  thoughts.hidden = true;
  const text = document.createElement("span");
  box.append(thoughts, text);
  element("log").append(box);
  return {
    add(content, reasoning) {
      text.append(content || "");
      if (reasoning) {
        thoughts.hidden = false;
        thought.append(reasoning);
      }
      element("log").scrollTop = element("log").scrollHeight;
    },
    remove: () => box.remove(),
  };
}

function report(text, isBad) {
  element("status").textContent = text;
  element("status").className = isBad ? "bad" : "";
}

function request() {
  const number = (id) => (element(id).value === "" ? undefined : Number(element(id).value));
  const system = element("system").value.trim();
  const start = system ? [{ role: "system", content: system }] : [];
  return {
    model: element("model").value || undefined,
    messages: [...start, ...messages],
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    stream: true,
    stream_options: { include_usage: true },
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

async function answer() {
  controller = new AbortController();
  busy(true);
  const box = show("assistant");
  const began = performance.now();
  let text = "";
  let first = null;
  let count = 0;
  const rate = () => {
    const seconds = (performance.now() - first) / 1000;
    return count > 1 && seconds > 0 ? `${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
  };
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify(request()),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) count = chunk.usage.completion_tokens;
      const delta = chunk.choices.length ? chunk.choices[0].delta : {};
      const reasoning = delta.reasoning_content;
      if (!delta.content && !reasoning) continue;
      if (first === null) first = performance.now();
      count += 1;
      text += delta.content || "";
      box.add(delta.content, reasoning);
      report(rate());
    }
    const wait = first === null ? "" : `first token after ${Math.round(first - began)} ms`;
    report([`${count} tokens`, rate(), wait].filter(Boolean).join(", "));
  } catch (error) {
    const stopped = error.name === "AbortError";
    report(stopped ? `stopped after ${count} tokens` : error.message, !stopped);
  }
  if (text) messages.push({ role: "assistant", content: text });
  else box.remove();
  busy(false);
}

function busy(is) {
  element("send").disabled = is;
  element("stop").disabled = !is;
  if (!is) {
    controller = null;
    element("prompt").focus();
  }
}

function stop() {
  if (controller) controller.abort();
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("prompt").value.trim();
  if (!text || controller) return;
  element("prompt").value = "";
  messages.push({ role: "user", content: text });
  show("user").add(text);
  answer();
});
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
  stop();
  messages.length = 0;
  element("log").replaceChildren();
  report("");
  element("prompt").focus();
});
element("toggle").addEventListener("click", () => {
  const side = element("side");
  side.hidden = !side.hidden;
  element("toggle").setAttribute("aria-expanded", String(!side.hidden));
});

// Live charts: differences between two readings of /metrics, one a second.
const POINTS = 60;
const CHARTS = {
  "Throughput, tokens/s": (now, last, seconds) => (now.generation_tokens_total - last.generation_tokens_total) / seconds,
  "Running requests": (now) => now.num_requests_running,
  "Waiting requests": (now) => now.num_requests_waiting,
  "KV cache in use, %": (now) => 100 * now.kv_cache_usage_perc,
  "Prefix hits, %": (now, last) => share(now, last, "prefix_cache_hits_total", "prefix_cache_queries_total"),
  "Drafts accepted, %": (now, last) => share(now, last, "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
  "First token, mean ms": (now, last) => mean(now, last, "time_to_first_token_seconds"),
  "Between tokens, mean ms": (now, last) => mean(now, last, "inter_token_latency_seconds"),
  "First token, 95th percentile ms": (now) => percentile(now, "time_to_first_token_seconds", 0.95),
  "Between tokens, 95th percentile ms": (now) => percentile(now, "inter_token_latency_seconds", 0.95),
};

function share(now, last, part, all) {
  const total = now[all] - last[all];
  if (Number.isNaN(total)) return total; // not exported
  return total > 0 ? (100 * (now[part] - last[part])) / total : null;
}

function mean(now, last, name) {
  const count = now[`${name}_count`] - last[`${name}_count`];
  return count > 0 ? (1000 * (now[`${name}_sum`] - last[`${name}_sum`])) / count : null;
}

function percentile(now, name, part) {
  const buckets = now.buckets[name] || [];
  const total = now[`${name}_count`];
  const found = total > 0 && buckets.find(([, count]) => count >= part * total);
  return found && Number.isFinite(found[0]) ? 1000 * found[0] : null;
}

const charts = Object.entries(CHARTS).map(([title, read]) => {
  const figure = document.createElement("figure");
  figure.innerHTML = "<figcaption><b></b><span></span></figcaption>"
    + "<svg viewBox='0 0 60 20' preserveAspectRatio='none' role='img'><polyline /></svg>";
  figure.querySelector("b").textContent = title;
  figure.querySelector("svg").setAttribute("aria-label", title);
  figure.hidden = true;
  element("charts").append(figure);
  return { figure, read, values: [] };
});

function draw(chart, value) {
  const { figure, values } = chart;
  if (Number.isNaN(value)) return;
  figure.hidden = false;
  values.push(value);
  if (values.length > POINTS) values.shift();
  const most = Math.max(1e-9, ...values.map((each) => each || 0));
  const points = values.map((each, at) => `${at + POINTS - values.length},${19 - (18 * (each || 0)) / most}`);
  figure.querySelector("polyline").setAttribute("points", points.join(" "));
  const shown = values.findLast((each) => each !== null);
  figure.querySelector("span").textContent = shown === undefined ? "" : shown.toFixed(1);
}

function parse(text) {
  const values = { buckets: {}, time: performance.now() };
  for (const line of text.split("\n")) {
    const found = line.match(/^inl:(\w+)(?:\{(.*)\})? (\S+)$/);
    if (!found) continue;
    const [, name, labels, value] = found;
    const model = (labels || "").match(/model_name="((?:[^"\\]|\\.)*)"/);
    if (model && model[1].replace(/\\(.)/g, "$1") !== element("model").value) continue;
    const bound = (labels || "").match(/le="([^"]+)"/);
    if (bound) {
      const list = (values.buckets[name.replace(/_bucket$/, "")] ||= []);
      list.push([bound[1] === "+Inf" ? Infinity : Number(bound[1]), Number(value)]);
    } else values[name] = Number(value);
  }
  return values;
}

let previous = null;
async function measure() {
  if (!document.hidden && !element("side").hidden) {
    try {
      const response = await fetch("metrics", { headers: headers() });
      if (response.ok) {
        const now = parse(await response.text());
        if (previous) {
          const seconds = (now.time - previous.time) / 1000;
          for (const chart of charts) {
            const value = chart.read(now, previous, seconds);
            draw(chart, value === undefined ? NaN : value);
          }
        }
        previous = now;
      }
    } catch { /* the server is stopping; the next reading may succeed */ }
  }
  setTimeout(measure, 1000);
}

async function name() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    const listed = await response.json();
    if (listed.data) element("model").replaceChildren(...listed.data.map((each) => new Option(each.id, each.id)));
    else report(listed.error.message, true);
  } catch (error) {
    report(error.message, true);
  }
}

if (window.matchMedia("(max-width: 50rem)").matches) element("toggle").click();
element("key").addEventListener("change", () => { report(""); name(); });
element("model").addEventListener("change", () => { previous = null; });
name();
measure();
