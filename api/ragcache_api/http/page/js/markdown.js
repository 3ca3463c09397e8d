// Markdown as components, never as HTML: each piece of the text becomes a text node. What begins as
// markup in a document (tags, `javascript:` addresses) is shown as it is written.
import { html } from "./vendor.js";

const DEPTH = 8; // of lists in quotes in lists; deeper ones are shown as text
const REACH = 1000; // characters within which emphasis or a link must end
const PLAIN = /\.(txt|log|py|js|ts|c|h|cpp|java|go|rs|sh|sql|json|ya?ml|toml|ini|cfg|xml|css)$/i;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(?=\S)/;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ROW = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;
const SPECIAL = /[\\`*_~[<]|https?:\/\//g;
// Overrides of the writing direction are shown, so that no text reads otherwise than it is.
const OVERRIDES = /[\u202a-\u202e]/g;

/** Whether a document's lines are shown as they are, by its name. */
export const isPlain = (name) => PLAIN.test(name);

/** The blocks of a text: [{at, level, title, draw(context)}]. level: of a heading, from 1. */
export function blocksOf(text, plainText = false) {
  const lines = [];
  let at = 0;
  for (const line of text.split("\n")) {
    lines.push({ text: line.endsWith("\r") ? line.slice(0, -1) : line, at });
    at += line.length + 1;
  }
  return plainText ? plainBlocks(lines) : parse(lines, 0);
}

const LINES = 40; // of plain text in a block

function plainBlocks(lines) {
  const found = [];
  for (let from = 0; from < lines.length; from += LINES) {
    const some = lines.slice(from, from + LINES);
    found.push({ at: some[0].at, draw: (context) => html`<pre class="plain">${written(some, context)}</pre>` });
  }
  return found;
}

const written = (lines, context) => lines.map((line) => [leaf(line.text, line.at, context), "\n"]);

function parse(lines, depth) {
  const found = [];
  for (let index = 0; index < lines.length; ) {
    if (lines[index].text.trim()) {
      const [block, next] = blockAt(lines, index, depth);
      found.push({ at: lines[index].at, ...block });
      index = next;
    } else index += 1;
  }
  return found;
}

function blockAt(lines, index, depth) {
  const { text } = lines[index];
  if (FENCE.test(text)) return fenced(lines, index);
  if (HEADING.test(text)) return [heading(lines[index]), index + 1];
  if (RULE.test(text)) return [{ draw: () => html`<hr />` }, index + 1];
  if (text.includes("|") && isRule(lines[index + 1]?.text ?? "")) return table(lines, index);
  if (depth < DEPTH && QUOTE.test(text)) return quote(lines, index, depth);
  if (depth < DEPTH && ITEM.test(text)) return list(lines, index, depth);
  return paragraph(lines, index, depth);
}

// The line below the head of a table.
const isRule = (text) => text.length < REACH && ROW.test(text);

// A line without the first `length` characters.
const cut = ({ text, at }, length) => ({ text: text.slice(length), at: at + length });

function fenced(lines, index) {
  const fence = FENCE.exec(lines[index].text)[1];
  let end = index + 1;
  while (end < lines.length && !lines[end].text.trim().startsWith(fence)) end += 1;
  const inside = lines.slice(index + 1, end);
  const draw = (context) => html`<pre tabindex="0"><code>${written(inside, context)}</code></pre>`;
  return [{ draw }, end + 1];
}

function heading(line) {
  const [whole, marks] = HEADING.exec(line.text);
  const rest = cut(line, whole.length);
  const title = rest.text.trimEnd().replace(/[ \t]#+$/, "");
  const draw = (context) => {
    const Level = `h${Math.min(6, context.rank(marks.length))}`;
    return html`<${Level} tabindex="-1">${inline(title, rest.at, context)}<//>`;
  };
  return { level: marks.length, title: title.replace(/[*_`]/g, ""), draw };
}

function table(lines, index) {
  let end = index + 2;
  while (end < lines.length && lines[end].text.includes("|")) end += 1;
  const rows = [lines[index], ...lines.slice(index + 2, end)].map(cells);
  const draw = (context) => {
    const row = (Cell) => (each) =>
      html`<tr>${each.map((cell) => html`<${Cell}>${inline(cell.text, cell.at, context)}<//>`)}</tr>`;
    return html`<div class="scroll" role="group" tabindex="0">
      <table><thead>${row("th")(rows[0])}</thead><tbody>${rows.slice(1).map(row("td"))}</tbody></table>
    </div>`;
  };
  return [{ draw }, end];
}

// What stands between the bars of a row that no backslash escapes.
function cells({ text, at }) {
  const begin = text.startsWith("|") ? 1 : 0;
  const found = [...text.trimEnd().slice(begin).matchAll(/((?:\\.|[^|\\])*)(?:\||$)/g)].slice(0, -1);
  return found.map(({ 1: cell, index }) => ({ text: cell, at: at + begin + index }));
}

function quote(lines, index, depth) {
  let end = index;
  const inside = [];
  for (; end < lines.length && QUOTE.test(lines[end].text); end += 1)
    inside.push(cut(lines[end], QUOTE.exec(lines[end].text)[0].length));
  const blocks = parse(inside, depth + 1);
  return [{ draw: (context) => html`<blockquote>${drawAll(blocks, context)}</blockquote>` }, end];
}

function list(lines, index, depth) {
  const indent = (text) => text.length - text.trimStart().length;
  const [, margin, marker] = ITEM.exec(lines[index].text);
  const ordered = /\d/.test(marker);
  const items = [];
  let end = index;
  while (end < lines.length) {
    const { text } = lines[end];
    const begun = ITEM.exec(text);
    if (begun && begun[1].length <= margin.length + 1 && /\d/.test(begun[2]) === ordered) {
      items.push([cut(lines[end], begun[0].length)]);
    } else if (text.trim() && indent(text) > margin.length) {
      items.at(-1).push(cut(lines[end], Math.min(indent(text), margin.length + marker.length + 1)));
    } else if (!text.trim() && continues(lines, end, margin.length)) {
      items.at(-1).push(lines[end]);
    } else break;
    end += 1;
  }
  const parsed = items.map((item) => parse(item, depth + 1));
  const draw = (context) => {
    const each = parsed.map((blocks) => html`<li>${drawAll(blocks, context)}</li>`);
    return ordered ? html`<ol start=${parseInt(marker, 10)}>${each}</ol>` : html`<ul>${each}</ul>`;
  };
  return [{ draw }, end];
}

// Whether a list goes on behind an empty line.
function continues(lines, index, margin) {
  const next = lines[index + 1]?.text ?? "";
  return ITEM.test(next) ? ITEM.exec(next)[1].length >= margin : /^ /.test(next) && next.trim() !== "";
}

function paragraph(lines, index, depth) {
  let end = index + 1;
  const over = (text) =>
    !text.trim() || FENCE.test(text) || HEADING.test(text) || RULE.test(text) ||
    (depth < DEPTH && (QUOTE.test(text) || ITEM.test(text)));
  while (end < lines.length && !over(lines[end].text)) end += 1;
  const own = lines.slice(index, end);
  const draw = (context) => html`<p>${own.map(({ text, at }) => [inline(text, at, context), "\n"])}</p>`;
  return [{ draw }, end];
}

export const drawAll = (blocks, context) => blocks.map((block) => block.draw(context));

/** What drawing needs. mark: {start, end} in the text; cite: (number) → a component for `[1]`. */
export function contextOf({ mark = null, cite = null }) {
  const open = [];
  // Levels of headings without gaps, below the two of the page.
  const rank = (level) => {
    while (open.length && open.at(-1) >= level) open.pop();
    return open.push(level) + 2;
  };
  return { mark, cite, rank };
}

// A text node, with what is marked of it in an element of its own.
function leaf(text, at, { mark }) {
  const shown = text.replace(OVERRIDES, "\ufffd");
  if (!mark || mark.end <= at || mark.start >= at + text.length) return shown;
  const [from, to] = [Math.max(0, mark.start - at), Math.min(text.length, mark.end - at)];
  return [shown.slice(0, from), html`<mark>${shown.slice(from, to)}</mark>`, shown.slice(to)];
}

function inline(text, at, context, depth = 0) {
  const found = [];
  let from = 0;
  SPECIAL.lastIndex = 0;
  const push = (begin, end) => end > begin && found.push(leaf(text.slice(begin, end), at + begin, context));
  let hit = null;
  while (depth < DEPTH && (hit = SPECIAL.exec(text))) {
    const span = spanAt(text, hit.index, at, context, depth);
    if (!span) {
      SPECIAL.lastIndex = hit.index + 1;
      continue;
    }
    push(from, hit.index);
    found.push(span.node);
    from = span.end;
    SPECIAL.lastIndex = from;
  }
  push(from, text.length);
  return found;
}

function spanAt(text, index, at, context, depth) {
  const sign = text[index];
  const within = (begin, end) => inline(text.slice(begin, end), at + begin, context, depth + 1);
  if (sign === "\\" && /[!-/:-@[-`{-~]/.test(text[index + 1] ?? ""))
    return { node: leaf(text[index + 1], at + index + 1, context), end: index + 2 };
  if (sign === "`") return code(text, index, at, context);
  if (sign === "[") return link(text, index, at, context, within);
  if (sign === "h" || sign === "<") return address(text, index, at, context);
  return sign === "\\" ? null : emphasis(text, index, sign, within);
}

// Where `sign` comes next, within reach.
function closing(text, sign, from) {
  const at = text.slice(from, from + REACH).indexOf(sign);
  return at < 0 ? -1 : from + at;
}

function code(text, index, at, context) {
  const [ticks] = /^`+/.exec(text.slice(index, index + REACH));
  const begin = index + ticks.length;
  const end = closing(text, ticks, begin);
  if (end < 0) return { node: leaf(ticks, at + index, context), end: begin };
  const node = html`<code>${leaf(text.slice(begin, end), at + begin, context)}</code>`;
  return { node, end: end + ticks.length };
}

function emphasis(text, index, sign, within) {
  const double = text[index + 1] === sign;
  if (sign === "~" && !double) return null;
  const ends = double ? sign + sign : sign;
  const begin = index + ends.length;
  const letter = (each) => /[\p{L}\p{N}]/u.test(each ?? "");
  if (/^\s?$/.test(text[begin] ?? "") || (sign === "_" && letter(text[index - 1]))) return null;
  let end = closing(text, ends, begin + 1);
  if (!double && text[end + 1] === sign) end = closing(text, sign, end + 2);
  if (end < 0 || /\s/.test(text[end - 1]) || (sign === "_" && letter(text[end + ends.length])))
    return null;
  const Kind = sign === "~" ? "s" : double ? "strong" : "em";
  return { node: html`<${Kind}>${within(begin, end)}<//>`, end: end + ends.length };
}

// Links lead to the web only, in a tab that knows nothing of this one. Pictures are not fetched.
function link(text, index, at, context, within) {
  const end = closing(text, "]", index + 1);
  if (end < 0) return null;
  const inside = text.slice(index + 1, end);
  if (context.cite && /^\d{1,3}$/.test(inside)) return { node: context.cite(Number(inside)), end: end + 1 };
  const target = /^\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)?)>?(?:\s+"[^"]*")?\s*\)/.exec(
    text.slice(end + 1, end + 1 + REACH),
  );
  if (!target) return null;
  const after = end + 1 + target[0].length;
  const shown = within(index + 1, end);
  return { node: web(target[1]) ? anchor(target[1], shown) : shown, end: after };
}

function address(text, index, at, context) {
  const found = /^<?(https?:\/\/[^\s<>"'`]+)>?/.exec(text.slice(index, index + REACH));
  if (!found) return null;
  const framed = text[index] === "<";
  const href = framed ? found[1] : found[1].replace(/[.,;:!?)\]}*_]+$/, "");
  if (!web(href)) return null;
  const begin = index + Number(framed);
  const end = framed ? index + found[0].length : begin + href.length;
  return { node: anchor(href, leaf(href, at + begin, context)), end };
}

export function web(target) {
  try {
    return /^https?:\/\//i.test(target) && /^https?:$/.test(new URL(target).protocol);
  } catch {
    return false;
  }
}

const anchor = (href, shown) =>
  html`<a href=${href} target="_blank" rel="noopener noreferrer nofollow">${shown}</a>`;

/** Draws a text that only grows: the blocks before its last one are parsed and drawn once. */
export function growing() {
  const context = contextOf({});
  let [settled, from] = [[], 0];
  return (text) => {
    const blocks = blocksOf(text.slice(from));
    const drawn = drawAll(blocks, context);
    settled = [...settled, ...drawn.slice(0, -1)];
    from += blocks.at(-1)?.at ?? 0;
    return [...settled, ...drawn.slice(-1)];
  };
}

/** A short text, such as an answer. */
export const Markdown = ({ text, cite }) =>
  html`<div class="markdown" dir="auto">${drawAll(blocksOf(text), contextOf({ cite }))}</div>`;
