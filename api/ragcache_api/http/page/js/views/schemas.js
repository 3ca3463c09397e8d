// Schemas as PML.
import { everything, get } from "../api.js";
import { h, show } from "../dom.js";
import { empty, fault, loading, panel } from "../parts.js";

export const schemas = {
  id: "schemas",
  title: "Schemas",
  about: "How prompts are laid out: written by hand, or generated from a collection.",
  mount,
};

async function mount({ body, signal, parameters }) {
  show(body, loading());
  try {
    const items = await everything("schemas", { signal });
    if (!items.length) {
      show(
        body,
        empty(
          "No schemas yet",
          "A collection's schema is generated when its first document is ingested.",
          h("a", { href: "#/ingestion", class: "button" }, "Ingest documents"),
        ),
      );
      return;
    }
    browse(body, items, parameters.get("id"), signal);
  } catch (error) {
    if (!signal.aborted) show(body, fault(error));
  }
}

function browse(body, items, wanted, signal) {
  const stage = h("div", { class: "stage" });
  const links = items.map(({ id }) => {
    const [kind, name] = split(id);
    return h(
      "button",
      { class: "ghost", "data-schema": id, onclick: () => open(id) },
      h("span", {}, name),
      h("small", { class: "muted" }, kind),
    );
  });
  const open = async (id) => {
    for (const link of links) link.setAttribute("aria-pressed", String(link.dataset.schema === id));
    show(stage, loading());
    try {
      show(stage, drawn(await get(`schemas/${encodeURIComponent(id)}`, { signal })));
    } catch (error) {
      if (!signal.aborted) show(stage, fault(error));
    }
  };
  show(
    body,
    h(
      "div",
      { class: "browse" },
      h("nav", { class: "picks", "aria-label": "Schemas" }, links),
      stage,
    ),
  );
  open(items.find(({ id }) => id === wanted)?.id ?? items[0].id);
}

const split = (id) => {
  const at = id.indexOf(":");
  return at < 0 ? ["schema", id] : [id.slice(0, at), id.slice(at + 1)];
};

function drawn(schema) {
  return panel(schema.name, {}, h("pre", { class: "text", tabindex: "0" }, schema.text));
}
