"use strict";

// Conversations and parameters, kept in this browser. Each conversation is an entry of
// its own, so that two tabs do not overwrite each other's.
const chats = (() => {
  const PREFIX = "inl-chat:";
  const MOST = 50;

  function read(key) {
    try {
      return JSON.parse(localStorage.getItem(key));
    } catch {
      return null; // not ours, or the browser keeps nothing
    }
  }

  // The newest first.
  function list() {
    let keys = [];
    try {
      keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    } catch { /* the browser keeps nothing */ }
    const found = keys.map(read).filter((chat) => chat && Array.isArray(chat.messages));
    return found.sort((one, other) => other.changed - one.changed);
  }

  function remove(id) {
    try {
      localStorage.removeItem(PREFIX + id);
    } catch { /* the browser keeps nothing */ }
  }

  // Returns whether the entry was kept; the oldest conversations make room for it.
  function write(key, value) {
    for (const old of [null, ...list().reverse()]) {
      if (old && PREFIX + old.id === key) continue;
      if (old) remove(old.id);
      try {
        localStorage.setItem(key, JSON.stringify(value));
        return true;
      } catch (error) {
        if (error.name !== "QuotaExceededError") return false;
      }
    }
    return false;
  }

  function save(chat) {
    chat.changed = Date.now();
    // One photo would take the room of many conversations.
    const messages = chat.messages.map(({ images, ...rest }) => (images ? { ...rest, unkept: images.length } : rest));
    const isKept = write(PREFIX + chat.id, { ...chat, messages });
    for (const old of list().slice(MOST)) remove(old.id);
    return isKept;
  }

  // An id without crypto.randomUUID, which needs TLS.
  const create = () => ({ id: `${Date.now()}-${Math.floor(Math.random() * 1e9)}`, title: "", messages: [] });

  function asMarkdown(chat, system) {
    const parts = [`# ${chat.title}`];
    if (system) parts.push(`## system\n\n${system}`);
    for (const { role, content, cut } of chat.messages) {
      parts.push(`## ${role}\n\n${content}${cut ? `\n\n[${cut}]` : ""}`);
    }
    return `${parts.join("\n\n")}\n`;
  }

  function download(name, kind, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  function exportAs(kind, chat, parameters) {
    const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation";
    if (kind === "json") {
      const { title, messages } = chat;
      download(`${name}.json`, "application/json", `${JSON.stringify({ title, parameters, messages }, null, 2)}\n`);
    } else download(`${name}.md`, "text/markdown", asMarkdown(chat, parameters.system));
  }

  return { list, read, write, save, remove, create, exportAs };
})();
