"use strict";

// Markdown as elements of the document. Text becomes text nodes only, so an answer
// cannot bring markup; images become links, so it cannot fetch anything either.
const markdown = (() => {
  const DEPTH = 8; // of nested quotes and lists; deeper ones stay text
  const REACH = 2000; // characters in which a mark may close
  const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
  const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
  const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
  const QUOTE = /^ {0,3}> ?/;
  const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
  const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
  const ADDRESS = /^(?:https?:\/\/|mailto:)[^\s<>"]+$/i;
  const BARE = /https?:\/\/[^\s<>"'`*)\]]+[^\s<>"'`*)\].,;:!?]/iy;
  const MARKS = [["***", "strong"], ["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

  function make(tag, ...children) {
    const made = document.createElement(tag);
    made.append(...children);
    return made;
  }

  function link(address, ...children) {
    const made = make("a", ...children);
    made.href = address;
    made.target = "_blank";
    made.rel = "noopener noreferrer";
    return made;
  }

  // Where `mark` closes the text that starts at `start`; -1 if it does not.
  function closing(text, mark, start) {
    if (!text[start] || /\s/.test(text[start])) return -1;
    const end = Math.min(text.length, start + REACH);
    for (let at = start + 1; at < end; at += 1) {
      if (text[at] === "\\") at += 1;
      else if (text.startsWith(mark, at) && !/\s/.test(text[at - 1])) {
        const next = text[at + mark.length] || "";
        const longer = mark.length < 2 && next === mark;
        if (longer) at += 1;
        else if (mark[0] !== "_" || !/\w/.test(next)) return at;
      }
    }
    return -1;
  }

  // One inline element at `at`, as [element, where it ends]; null for plain text.
  function inlineAt(text, at, depth) {
    const sign = text[at];
    if (sign === "`") {
      const ticks = /`+/y;
      ticks.lastIndex = at;
      const mark = ticks.exec(text)[0];
      const start = at + mark.length;
      const end = text.slice(start, start + REACH).indexOf(mark);
      if (end < 0) return [mark, start];
      return [make("code", text.slice(start, start + end).trim()), start + end + mark.length];
    }
    if (sign === "[" || (sign === "!" && text[at + 1] === "[")) {
      const found = /^!?\[([^\][]{0,1000})\]\(<?([^\s()<>]{1,2000}(?:\([^\s()]*\)[^\s()<>]*)?)>?(?:\s+"[^"]*")?\)/
        .exec(text.slice(at, at + 2 * REACH));
      if (!found || !ADDRESS.test(found[2])) return null;
      return [link(found[2], inline(found[1] || found[2], depth + 1, true)), at + found[0].length];
    }
    if (sign === "*" || sign === "_" || sign === "~") {
      if (sign === "_" && /\w/.test(text[at - 1] || "")) return null;
      for (const [mark, tag] of MARKS) {
        if (!text.startsWith(mark, at)) continue;
        const end = closing(text, mark, at + mark.length);
        if (end < 0) continue;
        const inner = inline(text.slice(at + mark.length, end), depth + 1);
        const made = mark === "***" ? make("strong", make("em", inner)) : make(tag, inner);
        return [made, end + mark.length];
      }
    }
    return null;
  }

  function inline(text, depth = 0, inLink = false) {
    const out = document.createDocumentFragment();
    if (depth > DEPTH) {
      out.append(text);
      return out;
    }
    let plain = "";
    let at = 0;
    const put = (found) => {
      if (plain) out.append(plain);
      plain = "";
      out.append(found[0]);
      [, at] = found;
    };
    while (at < text.length) {
      const sign = text[at];
      if (sign === "\\" && /[\\`*_{}[\]()#+\-.!~|<>]/.test(text[at + 1] || "")) {
        plain += text[at + 1];
        at += 2;
        continue;
      }
      if (sign === "h" && !inLink && !/\w/.test(text[at - 1] || "")) {
        BARE.lastIndex = at;
        const found = BARE.exec(text);
        if (found) {
          put([link(found[0], found[0]), BARE.lastIndex]);
          continue;
        }
      }
      const found = "`[!*_~".includes(sign) && !(inLink && "[!".includes(sign)) && inlineAt(text, at, depth);
      if (found) put(found);
      else {
        plain += sign;
        at += 1;
      }
    }
    if (plain) out.append(plain);
    return out;
  }

  function codeBlock(code, language) {
    const head = make("div", make("span", language || "code"), copyButton("Copy code", () => code));
    head.className = "code-head";
    const pre = make("pre", make("code", code));
    pre.tabIndex = 0; // a keyboard scrolls it sideways
    const block = make("div", head, pre);
    block.className = "code";
    return block;
  }

  function cells(line) {
    const trimmed = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
    return trimmed.split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
  }

  function row(tag, line, count) {
    const texts = cells(line);
    return make("tr", ...Array.from({ length: count }, (_, at) => make(tag, inline(texts[at] || ""))));
  }

  function list(lines, start, depth) {
    const [, indent, mark] = ITEM.exec(lines[start]);
    const isOrdered = /\d/.test(mark);
    const made = document.createElement(isOrdered ? "ol" : "ul");
    if (isOrdered) made.start = Number.parseInt(mark, 10);
    let at = start;
    while (at < lines.length) {
      const item = ITEM.exec(short(lines[at]));
      if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== isOrdered || RULE.test(short(lines[at]))) break;
      if (item[1].length < indent.length) break;
      const width = item[1].length + 2; // anything indented further belongs to the item
      const inner = [lines[at].slice(item[0].length)];
      at += 1;
      while (at < lines.length) {
        const line = lines[at];
        const deep = line.search(/\S/);
        if (deep < 0) {
          const next = lines[at + 1] || "";
          if (next.search(/\S/) < width) break;
          inner.push("");
        } else if (deep >= width) inner.push(line.slice(Math.min(deep, item[0].length)));
        else if (starts(line) || inner.at(-1) === "") break;
        else inner.push(line);
        at += 1;
      }
      const content = blocks(inner, depth + 1);
      // A tight item's only paragraph is its text.
      if (content.firstChild?.tagName === "P") content.firstChild.replaceWith(...content.firstChild.childNodes);
      made.append(make("li", content));
      while (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at += 1;
    }
    return [made, at];
  }

  // Patterns that backtrack are asked about short lines only.
  const short = (line) => (line.length < 1000 ? line : "");
  const starts = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((each) => each.test(short(line)));

  function blocks(lines, depth) {
    const out = document.createDocumentFragment();
    if (depth > DEPTH) {
      out.append(lines.join("\n"));
      return out;
    }
    let at = 0;
    while (at < lines.length) {
      const line = lines[at];
      let found;
      if (!line.trim()) at += 1;
      else if ((found = FENCE.exec(short(line)))) {
        const [, fence, language] = found;
        const indent = line.search(/\S/);
        const code = [];
        for (at += 1; at < lines.length; at += 1) {
          const end = lines[at].trim();
          if (end.startsWith(fence) && !end.replaceAll(fence[0], "")) break;
          code.push(lines[at].slice(Math.min(indent, Math.max(0, lines[at].search(/\S|$/)))));
        }
        at += 1;
        out.append(codeBlock(code.join("\n"), language.trim().split(/\s/)[0]));
      } else if ((found = HEADING.exec(short(line)))) {
        // The page's own heading is the first level.
        out.append(make(`h${Math.min(6, found[1].length + 1)}`, inline(found[2])));
        at += 1;
      } else if (RULE.test(short(line))) {
        out.append(make("hr"));
        at += 1;
      } else if (QUOTE.test(line)) {
        const inner = [];
        for (; at < lines.length && QUOTE.test(lines[at]); at += 1) inner.push(lines[at].replace(QUOTE, ""));
        out.append(make("blockquote", blocks(inner, depth + 1)));
      } else if (ITEM.test(short(line))) {
        const [made, end] = list(lines, at, depth);
        out.append(made);
        at = end;
      } else if (line.includes("|") && DIVIDER.test(short(lines[at + 1] || "")) && cells(lines[at + 1]).length === cells(line).length) {
        const count = cells(line).length;
        const body = make("tbody");
        const table = make("table", make("thead", row("th", line, count)), body);
        for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) body.append(row("td", lines[at], count));
        const box = make("div", table);
        box.className = "table";
        box.tabIndex = 0;
        out.append(box);
      } else {
        const text = [line.trim()];
        for (at += 1; at < lines.length && lines[at].trim() && !starts(lines[at]); at += 1) text.push(lines[at].trim());
        out.append(make("p", inline(text.join("\n"))));
      }
    }
    return out;
  }

  return (text) => blocks(text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n"), 0);
})();

// A page without TLS has no clipboard API, but for the machine's own.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  if (!isDone) throw new Error("the browser refused to copy");
}

function copyButton(label, read) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "small";
  button.textContent = "Copy";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    try {
      await copy(read());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not copied";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
