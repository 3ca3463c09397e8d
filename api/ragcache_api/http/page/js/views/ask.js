// A question, its answer as it comes, and what the answer cost.
import { events, everything, request, withQuery } from "../api.js";
import { h, show } from "../dom.js";
import { icon } from "../icons.js";
import { empty } from "../parts.js";
import { complain } from "../toasts.js";
import { account } from "../answers.js";

const MODES = [
  ["rooted", "rooted: after the preamble"],
  ["primed", "primed: later modules behind other text"],
  ["primed:16", "primed:16: the same, first 16 tokens anew"],
  ["isolated", "isolated: each module alone"],
  ["linked:4", "linked:4: first 4 tokens anew"],
  ["linked:16", "linked:16: first 16 tokens anew"],
  ["blend:15", "blend:15: the 15 % that change most anew"],
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
    {
      name: "collection",
      required: true,
      onchange: ({ target }) => remember(target.value),
    },
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

// The address names the collection, so that it is chosen again.
const remember = (collection) =>
  history.replaceState(null, "", withQuery("#/ask", { collection }));

function offered(select, names, wanted) {
  select.append(...names.map((value) => h("option", { value }, value)));
  if (names.includes(wanted)) select.value = wanted;
  else if (names.length === 1) [select.value] = names;
}

function form(collection, stage, signal) {
  const go = h("button", { type: "submit", class: "primary" }, "Ask");
  const stop = h("button", { type: "button", hidden: true }, icon("stop"), "Stop");
  const node = h(
    "form",
    { class: "askform panel" },
    questionBox(go),
    h(
      "div",
      { class: "row" },
      field("Collection", collection),
      h("span", { class: "buttons" }, stop, go),
    ),
    options(),
  );
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    const stopped = new AbortController();
    stop.onclick = () => stopped.abort();
    busy(go, stop, true);
    await answered(stage, asked(new FormData(node)), AbortSignal.any([signal, stopped.signal]));
    busy(go, stop, false);
  });
  return node;
}

function asked(form) {
  return {
    question: form.get("question").trim(),
    collection: form.get("collection"),
    k: Number(form.get("k")),
    mode: form.get("mode"),
    filters: JSON.parse(form.get("filters").trim() || "null"),
    stream: true,
  };
}

// Enter asks, with Shift it makes a new line.
function questionBox(go) {
  const onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    if (!go.disabled) event.target.form.requestSubmit();
  };
  return h("textarea", {
    name: "question",
    required: true,
    rows: 2,
    placeholder: "How long is the grace period?",
    "aria-label": "Question",
    onkeydown,
  });
}

const field = (label, control) => h("label", { class: "field" }, h("span", {}, label), control);

// On a telephone they are folded, so that the answer is in sight.
function options() {
  const k = h("input", { name: "k", type: "number", min: 1, max: 64, value: 4 });
  const modes = MODES.map(([value, label]) => h("option", { value }, label));
  const filters = h("input", {
    name: "filters",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: '{"year": {"$gte": 2020}}',
    oninput: ({ target }) => target.setCustomValidity(objection(target.value.trim())),
  });
  return h(
    "details",
    { open: matchMedia("(min-width: 641px)").matches },
    h("summary", {}, "Options"),
    h(
      "div",
      { class: "row" },
      field("Modules (k)", k),
      field("Mode", h("select", { name: "mode" }, modes)),
      field("Filters on metadata", filters),
    ),
  );
}

function objection(text) {
  try {
    const given = JSON.parse(text || "{}");
    if (given && typeof given === "object" && !Array.isArray(given)) return "";
  } catch {
    // the message below says it
  }
  return 'Filters are a JSON object, such as {"page": 2}.';
}

function busy(go, stop, on) {
  go.disabled = on;
  stop.hidden = !on;
}

async function answered(stage, body, signal) {
  const shown = account(stage, body);
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
