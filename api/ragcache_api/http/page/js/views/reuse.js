// Which modules were reused when.
import { get, withQuery } from "../api.js";
import { heatMap } from "../charts/heat.js";
import { h, show } from "../dom.js";
import { empty, fault, loading, panel, segmented } from "../parts.js";
import { poll } from "../polling.js";
import { complain } from "../toasts.js";

const PERIOD = 10;
const MODULES = 40;
const TIMES = [
  [15, "15 min"],
  [60, "1 h"],
  [360, "6 h"],
  [1440, "24 h"],
];

export const reuse = {
  id: "reuse",
  title: "Reuse",
  about: "The most used modules over time: the stronger the color, the more often a prompt held them.",
  mount,
};

function mount({ body, actions, signal }) {
  let minutes = 60;
  let map = null;
  const read = async () => {
    const heat = await get(withQuery("heat", { minutes, modules: MODULES }), { signal });
    if (heat.modules.length) {
      map ??= drawn(body, signal);
      map.update(heat);
    } else {
      map = null;
      show(body, unused());
    }
  };
  const failed = (error) => (map ? complain(error) : show(body, fault(error)));
  const chosen = (value) => {
    minutes = value;
    read().catch(failed);
  };
  show(actions, segmented("Time shown", TIMES, minutes, chosen));
  show(body, loading());
  poll(signal, PERIOD, read, failed);
}

function drawn(body, signal) {
  const host = h("div", { class: "heathost" });
  show(body, panel("Module × time", { note: `at most ${MODULES}`, aside: scale() }, host));
  const chosen = (name) => (location.hash = withQuery("#/modules", { search: name }));
  return heatMap(host, { signal, chosen });
}

function unused() {
  return empty(
    "No module was reused in this time",
    "Modules appear here when questions use them.",
    h("a", { href: "#/ask", class: "button" }, "Ask a question"),
  );
}

function scale() {
  return h(
    "span",
    { class: "heatscale", "aria-hidden": "true" },
    "none",
    [0, 1, 2, 3, 4, 5].map((each) => h("i", { class: `cell l${each}` })),
    "most",
  );
}
