"use strict";

// The engines behind this server, if it has several: health, open requests and cache.
const ROWS = 50;

function health(each) {
  const slow = each.slowness > 1 ? `, ${each.slowness.toFixed(1)} times slower` : "";
  return `${each.state}${slow}`;
}

function replicaRow(each) {
  const row = make("tr", "", each.state === "ready" ? "" : "idle");
  const name = make("th", each.address);
  name.scope = "row";
  if (each.device) name.append(make("small", each.device));
  const state = make("td", health(each));
  if (each.reason) state.append(make("small", each.reason));
  const cached = each.prompt_tokens ? `${Math.round((100 * each.cached_tokens) / each.prompt_tokens)} %` : "";
  row.append(name, state, make("td", `${each.open} of ${each.places}`), make("td", cached));
  return row;
}

function showReplicas(replicas) {
  const rank = (each) => (each.state !== "ready" ? 0 : each.slowness > 1 ? 1 : 2);
  const count = replicas.filter((each) => each.state === "ready").length;
  // Of many, those that somebody should look at, and then the busiest.
  const shown = replicas.length <= ROWS ? replicas
    : [...replicas].sort((a, b) => rank(a) - rank(b) || b.open - a.open).slice(0, ROWS);
  const rest = shown.length < replicas.length ? `, ${shown.length} shown` : "";
  element("replicas").hidden = false;
  element("replicas-title").textContent = `${count} of ${replicas.length} engines are ready${rest}`;
  element("replica-rows").replaceChildren(...shown.map(replicaRow));
}

async function watchReplicas() {
  if (!document.hidden && !element("side").hidden) {
    try {
      const response = await fetch("load", { headers: headers() });
      if (response.ok) {
        const { replicas } = await response.json();
        if (!replicas) return; // one engine has nothing to show
        showReplicas(replicas);
      }
    } catch { /* the server is stopping; the next reading may succeed */ }
  }
  setTimeout(watchReplicas, 1000);
}

watchReplicas();
