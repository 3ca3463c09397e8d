// The replicas behind the gateway: what each of them holds of the load, and who gets no more of it.
import { get, post } from "../api.js";
import { h, show } from "../dom.js";
import { bytes, count, percent } from "../format.js";
import { empty, fault, loading, panel, plainTable, withheld } from "../parts.js";
import { complain, toast } from "../toasts.js";

const AGAIN = 5000;

export const replicas = {
  id: "replicas",
  title: "Replicas",
  about: "Who answers behind this address. The other views show the replica that got their request.",
  mount,
};

function mount({ body, signal }) {
  show(body, loading());
  const reload = () => read(body, signal, reload);
  reload();
  const timer = setInterval(reload, AGAIN);
  signal.addEventListener("abort", () => clearInterval(timer));
}

async function read(body, signal, reload) {
  try {
    const told = await get("replicas", { signal });
    show(body, told.items.length ? table(told, reload) : none());
  } catch (error) {
    if (signal.aborted) return;
    show(body, error.status === 403 ? withheld("list of replicas") : fault(error));
  }
}

function none() {
  return empty(
    "One process",
    "This service has no replicas. `ragcache serve --replicas N` puts several behind one address.",
  );
}

function table({ items, retried, bytes: routed }, reload) {
  const columns = [
    { title: "Replica", wide: true, cell: ({ name }) => h("code", {}, name) },
    { title: "Requests now", num: true, cell: ({ requests }) => count(requests) },
    { title: "Routed here", num: true, cell: ({ routed: number }) => count(number) },
    { title: "State", cell: stateOf },
    { title: "", num: true, cell: (row) => changeable(row, reload) },
  ];
  const all = routed.held + routed.moved;
  const found = all ? `${percent(routed.held / all)} of ${bytes(all)} were where requests went` : "";
  const again = retried ? `${count(retried)} requests were sent again` : "";
  const note = [found, again].filter(Boolean).join("; ");
  return panel("Replicas", { note }, plainTable(columns, items, "Replicas"));
}

function stateOf({ draining }) {
  return h("span", { class: draining ? "state" : "state ok" }, draining ? "draining" : "serving");
}

function changeable({ name, draining }, reload) {
  const change = draining ? "resume" : "drain";
  return h(
    "button",
    {
      "data-act": change,
      "aria-label": `${draining ? "Resume" : "Drain"} ${name}`,
      onclick: () => changed(name, change, reload),
    },
    draining ? "Resume" : "Drain",
  );
}

async function changed(name, change, reload) {
  try {
    await post(`replicas/${encodeURIComponent(name)}/${change}`);
    toast("ok", change === "drain" ? `${name} gets no more requests` : `${name} gets requests`);
  } catch (error) {
    complain(error);
  }
  reload();
}
