// A question, its answer as it comes, and what the answer cost.
import { events, everything, request } from "../api.js";
import { h, show } from "../dom.js";
import { icon } from "../icons.js";
import { empty } from "../parts.js";
import { complain } from "../toasts.js";
import { account } from "../answers.js";

const MODES = [
  ["rooted", "rooted: after the preamble"],
  ["isolated", "isolated: each module alone"],
  ["linked:4", "linked:4: first 4 tokens anew"],
  ["linked:16", "linked:16: first 16 tokens anew"],
  ["exact", "exact: nothing reused"],
];

export const ask = {
  id: "ask",
  title: "Ask",
  about: "A question, the modules its answer used, and where the time went.",
  mount,
};

function mount({ body, signal, parameters }) {
  const stage = h(
    "div",
    { class: "stage" },
    empty("Nothing was asked yet", "Ask twice: the second time, the states are there."),
  );
  const collection = h(
    "select",
    { name: "collection", required: true },
    h("option", { value: "" }, "Choose a collection"),
  );
  everything("../v1/collections", { signal })
    .then((items) =>
      offered(
        collection,
        items.map(({ name }) => name),
        parameters.get("collection"),
      ),
    )
    .catch(complain);
  show(body, form(collection, stage, signal), stage);
}

function offered(select, names, wanted) {
  select.append(...names.map((value) => h("option", { value }, value)));
  if (names.includes(wanted)) select.value = wanted;
  else if (names.length === 1) [select.value] = names;
}

function form(collection, stage, signal) {
  const question = h("textarea", {
    name: "question",
    required: true,
    rows: 2,
    placeholder: "How long is the grace period?",
    "aria-label": "Question",
  });
  const k = h("input", { name: "k", type: "number", min: 1, max: 64, value: 4 });
  const mode = h(
    "select",
    { name: "mode" },
    MODES.map(([value, label]) => h("option", { value }, label)),
  );
  const go = h("button", { type: "submit", class: "primary" }, "Ask");
  const stop = h("button", { type: "button", hidden: true }, icon("stop"), "Stop");
  const field = (label, control) => h("label", { class: "field" }, h("span", {}, label), control);
  const node = h(
    "form",
    { class: "askform panel" },
    question,
    h(
      "div",
      { class: "row" },
      field("Collection", collection),
      field("Modules (k)", k),
      field("Mode", mode),
      h("span", { class: "buttons" }, stop, go),
    ),
  );
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    if (!go.disabled) node.requestSubmit();
  });
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    const stopped = new AbortController();
    stop.onclick = () => stopped.abort();
    busy(go, stop, true);
    await answered(
      stage,
      {
        question: question.value.trim(),
        collection: collection.value,
        k: Number(k.value),
        mode: mode.value,
        stream: true,
      },
      AbortSignal.any([signal, stopped.signal]),
    );
    busy(go, stop, false);
  });
  return node;
}

function busy(go, stop, on) {
  go.disabled = on;
  stop.hidden = !on;
}

async function answered(stage, body, signal) {
  const shown = account(stage, body.question);
  try {
    const response = await request("POST", "../v1/answers", {
      body,
      signal,
      headers: { Accept: "text/event-stream" },
    });
    for await (const { event, data } of events(response)) {
      if (event === "sources") shown.sources(data);
      else if (event === "token") shown.token(data);
      else if (event === "answer") shown.answer(data);
      else if (event === "error") shown.failed(data);
    }
  } catch (error) {
    if (error.name === "AbortError") shown.stopped();
    else shown.failed({ title: error.title, detail: error.message });
  }
  shown.ended();
}
