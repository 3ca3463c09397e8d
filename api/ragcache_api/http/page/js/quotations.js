// Where an extractive answer stands in the documents: its line, with the answer marked.
import { openDocument } from "./document.js";
import { h } from "./dom.js";

const MOST = 3;
const CONTEXT = 240; // characters: a longer line is cut there, be it within a word

/** The first places of the answer's first choice; each opens its document. */
export function quotations(collection, { text, spans = [] }) {
  const listed = spans.filter(({ choice }) => choice === 0).slice(0, MOST);
  return listed.map((span) =>
    h(
      "p",
      { class: "muted", "data-figure": "quotation" },
      before(span.prefix),
      h("mark", {}, text),
      after(span.suffix),
      " ",
      h(
        "button",
        {
          class: "link",
          title: "Read it in the document",
          onclick: () => openDocument(collection, span.document, span),
        },
        place(span),
      ),
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
