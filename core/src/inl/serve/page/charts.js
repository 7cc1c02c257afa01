"use strict";

// Live charts: differences between two readings of /metrics, one a second.
const POINTS = 60;
const CHARTS = {
  "Throughput, tokens/s": (now, last, seconds) => (now.generation_tokens_total - last.generation_tokens_total) / seconds,
  "Running requests": (now) => now.num_requests_running,
  "Waiting requests": (now) => now.num_requests_waiting,
  "KV cache in use, %": (now) => 100 * now.kv_cache_usage_perc,
  "Prefix hits, %": (now, last) => share(now, last, "prefix_cache_hits_total", "prefix_cache_queries_total"),
  "Blocks from host memory, 1/s": (now, last, seconds) => (now["kv_tier_hit_blocks_total host"] - last["kv_tier_hit_blocks_total host"]) / seconds,
  "Blocks from files, 1/s": (now, last, seconds) => (now["kv_tier_hit_blocks_total disk"] - last["kv_tier_hit_blocks_total disk"]) / seconds,
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
  const figure = element("chart").content.firstElementChild.cloneNode(true);
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
    const tier = (labels || "").match(/tier="(\w+)"/);
    const bound = (labels || "").match(/le="([^"]+)"/);
    if (bound) {
      const list = (values.buckets[name.replace(/_bucket$/, "")] ||= []);
      list.push([bound[1] === "+Inf" ? Infinity : Number(bound[1]), Number(value)]);
    } else values[tier ? `${name} ${tier[1]}` : name] = Number(value);
  }
  return values;
}

let previous = null;
element("model").addEventListener("change", () => { previous = null; });

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

measure();
