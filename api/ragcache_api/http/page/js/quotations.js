// Where an extractive answer stands in the documents: its line, with the answer marked.
import { h } from "./dom.js";

const MOST = 3;
const CONTEXT = 240; // characters: a longer line is cut there, be it within a word

/** The first places of the answer's first choice. */
export function quotations({ text, spans = [] }) {
  const listed = spans.filter(({ choice }) => choice === 0).slice(0, MOST);
  return listed.map((span) =>
    h(
      "p",
      { class: "muted", "data-figure": "quotation" },
      before(span.prefix),
      h("mark", {}, text),
      after(span.suffix),
      ` (${place(span)})`,
    ),
  );
}

const before = (text) => (text.length < CONTEXT ? text : `…${text.slice(text.search(/\s/))}`);
const after = (text) => (text.length < CONTEXT ? text : text.replace(/\s\S*$/, " …"));

function place({ document, page, start, end }) {
  const parts = [document];
  if (page != null) parts.push(`page ${page}`);
  if (start != null) parts.push(`characters ${start} to ${end}`);
  return parts.join(", ");
}
