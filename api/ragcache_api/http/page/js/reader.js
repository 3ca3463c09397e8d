// A document in the page: its text with a place marked, its headings and pages, and its original.
import { documentPath, get, request, withQuery } from "./api.js";
import { plain, t } from "./format.js";
import { blocksOf, contextOf, drawAll, isPlain, web } from "./markdown.js";
import { Button, complain, Facts, html, metadataOf, Polled, useEffect, useMemo, usePolled, useRef, useState } from "./ui.js";

const SHOWN = 400; // blocks at once, around the mark
const OUTLINED = 200;
const SHORTEST = 24; // characters of a line by which a text is found in its document

/** place: {start, end} in characters, or the {text} of a module to mark: its sentence nearest to what was {said}. */
export function Reader({ collection, id, place = {}, onClose }) {
  const path = withQuery(documentPath(collection, id), { text: true });
  const state = usePolled((signal) => get(path, { signal }), 0, [path]);
  return html`<article class="reader" aria-label=${plain(id)}>
    <header>
      <h2><bdi>${plain(id)}</bdi></h2>
      <div class="actions">
        ${state.value && html`<${Original} collection=${collection} document=${state.value} />`}
        ${onClose && html`<${Button} kind="ghost" icon="close" label=${t("close")} onClick=${onClose} />`}
      </div>
    </header>
    <div class="inside">
      <${Polled} state=${state}>${(document) => html`<${Facts} facts=${metadataOf(document)} /><${Text} document=${document} place=${place} />`}<//>
    </div>
  </article>`;
}

function Original({ collection, document: { id, uri, text, has_original: kept } }) {
  const name = (uri && !web(uri) ? uri : id).split("/").at(-1);
  const save = async () => offer(await (await request("GET", documentPath(collection, id, "originals"))).blob(), name);
  return html`
    ${web(uri) && html`<a class="button" href=${uri} target="_blank" rel="noopener noreferrer">${t("original_open")}</a>`}
    ${kept && html`<${Button} data-act="original" onClick=${() => save().catch(complain)}>${t("original_save")}<//>`}
    <${Button} onClick=${() => offer(text, `${id.split("/").at(-1)}.md`)}>${t("text_save")}<//>
  `;
}

function offer(content, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
  link.download = plain(name);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function Text({ document: { id, text, pages }, place }) {
  const scrolled = useRef(null);
  const blocks = useMemo(() => blocksOf(text, isPlain(id)), [text]);
  const mark = useMemo(() => nearest(text, markOf(text, place), place.said), [text, place]);
  const paged = useMemo(() => Object.entries(pages ?? {}).map(([page, start]) => ({ page, at: position(text, start) })), [text]);
  const first = mark ? Math.max(0, blocks.findLastIndex(({ at }) => at <= mark.start)) : 0;
  const [shown, show] = useState([0, 0]);
  const around = (index) => show([Math.max(0, index - SHOWN / 4), index + SHOWN]);
  useEffect(() => around(first), [first, text]);
  const aim = useRef(null); // the block that the outline leads to
  useEffect(() => {
    const block = scrolled.current.querySelector(`[data-at="${aim.current}"]`);
    block?.scrollIntoView({ block: "start" });
    block?.querySelector("[tabindex]")?.focus({ preventScroll: true });
    if (!block) scrolled.current.querySelector("mark")?.scrollIntoView({ block: "center" });
    aim.current = null;
  }, [mark, shown]);
  const lead = (at) => {
    const index = Math.max(0, blocks.findLastIndex((each) => each.at <= at));
    aim.current = blocks[index].at;
    around(index);
  };
  const begins = (block, index) => paged.filter(({ at }) => at >= block.at && at < (blocks[shown[0] + index + 1]?.at ?? Infinity));
  const context = contextOf({ mark });
  return html`
    <${Outline} blocks=${blocks} pages=${paged} lead=${lead} />
    <div class="text markdown ${place.text && !mark?.near ? "whole" : ""}" dir="auto" ref=${scrolled} tabindex="0" role="region" aria-label=${t("text_of", { name: plain(id) })}>
      ${shown[0] > 0 && html`<${Button} onClick=${() => show([Math.max(0, shown[0] - SHOWN), shown[1]])}>${t("earlier")}<//>`}
      ${blocks.slice(...shown).map((block, index) => html`<div class="block" data-at=${block.at} key=${block.at}>
        ${begins(block, index).map(({ page }) => html`<span class="page">${t("page", { page })}</span>`)}
        ${block.draw(context)}
      </div>`)}
      ${shown[1] < blocks.length && html`<${Button} onClick=${() => show([shown[0], shown[1] + SHOWN])}>${t("later")}<//>`}
    </div>`;
}

function Outline({ blocks, pages, lead }) {
  const headings = blocks.filter(({ title }) => title).slice(0, OUTLINED);
  if (headings.length + pages.length < 2) return null;
  const to = (at) => (event) => (event.preventDefault(), lead(at));
  return html`<details class="outline">
    <summary>${t("outline")}</summary>
    ${pages.length > 0 && html`<p class="pages">${pages.map(({ page, at }) => html`<a href="#at-${at}" onClick=${to(at)}>${t("page", { page })}</a> `)}</p>`}
    <ul>${headings.map(({ at, title, level }) => html`<li class="level-${Math.min(level, 4)}"><a href="#at-${at}" onClick=${to(at)}><bdi>${plain(title)}</bdi></a></li>`)}</ul>
  </details>`;
}

// The server counts characters; a string of JavaScript counts some of them twice.
function position(text, characters) {
  let at = 0;
  for (; characters > 0 && at < text.length; characters -= 1) at += text.codePointAt(at) > 0xffff ? 2 : 1;
  return at;
}

function markOf(text, { start, end, text: wanted }) {
  if (start != null) {
    const from = position(text, start);
    return { start: from, end: from + position(text.slice(from), end - start) };
  }
  if (!wanted) return null;
  const whole = wanted.trim();
  const at = text.indexOf(whole);
  if (at >= 0) return { start: at, end: at + whole.length };
  // Modules repeat headings and heads of tables: their own lines are marked, first to last.
  const lines = whole.split("\n").map((line) => line.trim()).filter(({ length }) => length >= SHORTEST);
  const from = lines.map((line) => text.indexOf(line)).find((each) => each >= 0);
  if (from === undefined) return null;
  const last = lines.findLast((line) => text.indexOf(line, from) >= 0);
  return { start: from, end: text.indexOf(last, from) + last.length };
}

const wordsOf = (text) => [...new Set(text.toLowerCase().match(/[\p{L}\p{N}]{3,}/gu))];

// The sentence of a module that says the same as what was said: of the shorter one's words both have two fifths.
function nearest(text, mark, said = "") {
  const wanted = wordsOf(said);
  const sentences = mark ? [...text.slice(mark.start, mark.end).matchAll(/\S[^]*?(?:[.!?](?=\s)|\n\s*\n|$)/g)] : [];
  return sentences.reduce((best, { 0: sentence, index }) => {
    const [words, start] = [wordsOf(sentence), mark.start + index];
    const shared = words.filter((word) => wanted.includes(word)).length;
    const near = shared > 2 && shared >= 0.4 * Math.min(words.length, wanted.length) ? shared ** 2 / words.length : 0;
    return near > (best.near ?? 0) ? { near, start, end: start + sentence.trimEnd().length } : best;
  }, mark);
}
