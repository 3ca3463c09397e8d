// A question with its answer: the text, its quotations and sources, and what it cost.
import { fixed, percent, plain, seconds, t } from "./format.js";
import { growing, Markdown } from "./markdown.js";
import { Bar, Button, Fault, html, part, Tier, useState, useStore } from "./ui.js";

const QUOTED = 3;
const EXCERPT = 320; // characters of a found text
const [GLIMPSE, HEADINGS] = [90, /^(#+ .*\n+)+(?=\S)/]; // of a source, whose place has its headings
const CONTEXT = 240; // characters: the server cuts longer lines there, be it within a word
const STAGES = { retrieve: "remote", assemble: "disk", queued: "shared", prefill: "encoded", decode: "host" }; // colors

/** exchange: {id, kind, question, status, answer, hits, error}; live: a store of the text that
 *  arrives; open(document, place) shows a document. */
export function Exchange({ exchange, live, open, edit, again, busy }) {
  const { kind, question, status, error, answer, hits } = exchange;
  const headed = kind === "search" ? t("searched") : t("asked");
  return html`<section class="exchange" data-status=${status} aria-label=${`${headed}: ${plain(question)}`}>
    <div class="question">
      <p dir="auto"><span class="unseen">${headed}: </span>${plain(question)}</p>
      <${Button} kind="ghost" icon="edit" label=${t("edit")} disabled=${busy} onClick=${edit} />
      <${Button} kind="ghost" icon="again" label=${t("again")} disabled=${busy} onClick=${again} />
    </div>
    <div class="heard" aria-live="polite" aria-busy=${String(status === "streaming")}>
      ${kind === "search" ? html`<${Hits} hits=${hits} status=${status} said=${question} open=${open} />` : html`<${Said} status=${status} question=${question} answer=${answer} live=${live} open=${open} />`}
    </div>
    ${error && html`<${Fault} error=${error} />`}
    ${status === "stopped" && html`<p class="muted stopped">${t("stopped")}</p>`}
  </section>`;
}

function Said({ status, question, answer, live, open }) {
  if (status === "streaming") return html`<${Live} live=${live} />`;
  if (!answer) return null;
  const { text, finish, confidence, spans = [], sources = [] } = answer;
  const refused = finish === "no_answer" || finish === "no_documents";
  const marked = new Map(spans.filter(({ mark }) => mark != null).map((span) => [span.mark, span]));
  const cite = (number) => {
    const span = marked.get(number);
    if (!span) return `[${number}]`;
    return html`<button type="button" class="cite" aria-label=${t("source_n", { number })} onClick=${() => open(span.document, span)}>${number}</button>`;
  };
  const quoted = spans.filter(({ mark, choice }) => mark == null && choice === 0).slice(0, QUOTED);
  return html`<div class="said ${refused ? "refused" : ""}">
      ${text.trim() ? html`<${Markdown} text=${text} cite=${marked.size ? cite : null} />` : html`<p class="muted">${t("said_nothing")}</p>`}
      ${refused && html`<p class="muted why">${finish === "no_documents" ? t("refused_no_documents") : t("refused_no_answer", { share: percent(confidence) })}</p>`}
    </div>
    ${!refused && quoted.map((span) => html`<${Quotation} span=${span} text=${text} open=${open} />`)}
    ${sources.length > 0 && html`<${Sources} sources=${sources} said=${refused ? question : text} open=${open} shown=${refused || !(quoted.length || marked.size)} />`}
    ${answer.reuse && html`<${Cost} answer=${answer} />`}`;
}

// Only this is drawn as tokens arrive.
function Live({ live }) {
  const text = useStore(live);
  const [draw] = useState(growing);
  return html`<div class="said streaming">
    ${text ? html`<div class="markdown" dir="auto">${draw(text)}</div>` : html`<p class="muted">${t("reading")}</p>`}
  </div>`;
}

const before = (text) => (text.length < CONTEXT ? text : `…${text.slice(text.search(/\s/))}`);
const excerpt = (text, length) => `${plain(text.replace(/^#+ /gm, "").trim().slice(0, length))} …`;
const after = (text) => (text.length < CONTEXT ? text : text.replace(/\s\S*$/, " …"));

/** Where a place is, in words. */
function placeOf({ document, page, headings = [] }) {
  const parts = [document, page != null && t("page", { page }), headings.join(" › ")];
  return parts.filter(Boolean).map(plain).join(" · ");
}

function Quotation({ span, text, open }) {
  return html`<figure class="quotation" data-figure="quotation">
    <blockquote dir="auto">${plain(before(span.prefix))}<mark>${plain(text)}</mark>${plain(after(span.suffix))}</blockquote>
    <figcaption><button type="button" class="link" title=${t("read_in_document")} onClick=${() => open(span.document, span)}>${placeOf(span)}</button></figcaption>
  </figure>`;
}

// The sources; shown at once where no place in a document is.
function Sources({ sources, said, open, shown }) {
  return html`<details class="sources" open=${shown}>
    <summary>${t("sources", { n: sources.length })}</summary>
    <ol aria-label=${t("modules_used")}>${sources.map((source) => html`<li data-module=${source.module}>
      <button type="button" class="link" title=${t("read_in_document")} onClick=${() => open(source.document, { text: source.text, said })}>${placeOf(source)}</button>
      <${Tier} id=${source.tier} /> <span class="muted">${excerpt(source.text.replace(HEADINGS, ""), GLIMPSE)}</span>
    </li>`)}</ol>
  </details>`;
}

function Cost({ answer: { reuse, timings, mode, confidence } }) {
  if (!reuse.prompt_tokens) return html`<p class="cost muted">${t("not_asked")}</p>`;
  const kept = reuse.cached_tokens + (reuse.shared_tokens ?? 0);
  const parts = [
    part(t("cached"), "device", reuse.cached_tokens),
    part(t("shared"), "shared", reuse.shared_tokens ?? 0),
    part(t("computed"), "computed", reuse.computed_tokens),
  ];
  const times = { first: seconds(timings.first_token), total: seconds(timings.total) };
  const line = t("cost", { share: percent(kept / reuse.prompt_tokens), n: reuse.prompt_tokens, ...times });
  return html`<details class="cost muted">
    <summary data-figure="cost">${line}</summary>
    <${Bar} label=${t("prompt_tokens")} parts=${parts} format=${String} />
    <${Times} timings=${timings} />
    <p>${t("mode")} ${plain(mode)}${confidence != null && html` · <span data-figure="confidence">${t("confidence")} ${percent(confidence)}</span>`}</p>
  </details>`;
}

function Times({ timings: { retrieve, assemble, first_token: first, total, queued = 0 } }) {
  const begun = retrieve + assemble;
  const waited = Math.min(queued, Math.max(0, first - begun));
  const lengths = [retrieve, assemble, waited, first - begun - waited, total - first];
  const parts = Object.entries(STAGES).map(([stage, color], index) => part(t(`stage_${stage}`), color, lengths[index]));
  return html`<${Bar} label=${t("times")} parts=${parts} format=${seconds} />`;
}

function Hits({ hits, status, said, open }) {
  if (status === "streaming") return html`<p class="muted">${t("searching")}</p>`;
  if (!hits) return null;
  if (!hits.length) return html`<p class="said">${t("nothing_found")}</p>`;
  return html`<ol class="hits" aria-label=${t("found")}>${hits.map(({ document, text, score }) => html`<li>
    <button type="button" class="link" title=${t("read_in_document")} onClick=${() => open(document, { text, said })}>${plain(document)}</button>
    ${" "}<span class="muted num">${fixed(score)}</span>
    <p dir="auto">${excerpt(text, EXCERPT)}</p>
  </li>`)}</ol>`;
}

/** An answer of the texts, and of the service's own fields in the last event of a chat. */
export function answerOf(text, { finish_reason: finish, ...own }, sources) {
  return {
    ...own,
    text,
    finish,
    sources: sources.map(({ source, document, metadata }) => ({ ...metadata[0], document: source.id, text: document[0] })),
  };
}

