// Small views of the service: requests, modes, replicas.
import { get, post } from "../api.js";
import { bytes, count, fixed, percent, plain, seconds, t, word } from "../format.js";
import { acting, attempt, column, Facts, figured, html, Listed, Moment, Name, named, Panel, Polled, Tier, usePolled } from "../ui.js";

const PERIOD = 1;
const LIST_PERIOD = 5;

const worded = (id, kind = id) => column(id, id, (row) => word(kind, row[id]));
const RUNNING = [
  worded("kind"),
  named("collection"),
  column("state", "state", ({ state }) => html`<span class="state running">${word("request", state)}</span>`),
  figured("age", "age", seconds),
  figured("prompt_tokens", "prompt"),
  figured("generated", "generated"),
];
const outcome = ({ outcome: name, request }) =>
  html`<span class="state ${name}" title=${request}>${word("outcome", name)}</span>`;
const used = ({ name, tier }) => html`<span class="pair"><${Name} text=${name} /> <${Tier} id=${tier} /></span>`;
const RECENT = [
  column("at", "when", ({ at }) => html`<${Moment} at=${at} />`),
  worded("kind"),
  named("collection"),
  column("outcome", "outcome", outcome),
  figured("cached_tokens", "cached"),
  figured("computed_tokens", "computed"),
  figured("ttft", "first_token", seconds),
  figured("total", "total", seconds),
  column("modules", "modules_used", ({ modules }) => html`<span class="chips">${modules.map(used)}</span>`),
];

export function Requests() {
  const state = usePolled((signal) => get("admin/requests", { signal }), PERIOD);
  return html`
    <${Listed} title=${t("requests_running")} state=${state} rows=${({ running }) => running} columns=${RUNNING} empty="none_running" />
    <${Listed} title=${t("requests_recent")} state=${state} rows=${({ recent }) => recent} columns=${RECENT} empty="none_ended" />`;
}

const sized = ({ documents, module_tokens: tokens, equal_answers: equal }) =>
  html`<span class="chip">${`${count(documents)} × ${count(tokens)}: ${percent(equal)}`}</span>`;

export function Modes() {
  const state = usePolled((signal) => get("admin/state", { signal }), LIST_PERIOD);
  const forced = state.value?.force_modes;
  const verdict = ({ passes }) =>
    html`<span class="state ${passes ? "ok" : ""}">${t(passes ? "serves" : forced ? "forced" : "refused")}</span>`;
  const columns = [
    named("mode"),
    column("verdict", "verdict", verdict),
    figured("kl_divergence", "distance", (nats) => fixed(nats, 3)),
    figured("limit", "limit", fixed),
    figured("other_documents", "other_documents", fixed),
    column("agreement", "agreement", ({ agreement, prompts: n }) => t("agreement_of", { share: percent(agreement), n }), { num: true }),
    figured("equal_answers", "equal_answers", percent),
    column("sizes", "equal_by_size", ({ sizes }) => html`<span class="chips">${sizes.map(sized)}</span>`),
  ];
  const facts = ({ model, device, dtype, states_dtype, window, default_mode }) =>
    Object.entries({ model, device, dtype, states_dtype, window: count(window), default_mode }).map(([name, told]) => [t(name), plain(told)]);
  return html`
    <${Listed} title=${t("gate")} note=${t("gate_note")} state=${state} rows=${({ modes }) => modes} columns=${columns}
      row=${({ mode }) => ({ "data-mode": mode })}
      empty=${forced ? "every_mode" : "not_measured"} text=${forced ? "every_mode_text" : "not_measured_text"} />
    <${Panel} title=${t("model")}>
      <${Polled} state=${state}>${(value) => html`<${Facts} facts=${facts(value)} />`}<//>
    <//>`;
}

export function Replicas() {
  const state = usePolled((signal) => get("admin/replicas", { signal }), LIST_PERIOD);
  const change = async ({ name, draining }) => {
    const path = `admin/replicas/${encodeURIComponent(name)}/${draining ? "resume" : "drain"}`;
    await attempt(() => post(path), t(draining ? "resumed_name" : "drained_name", { name }));
    state.again();
  };
  const serving = ({ draining }) =>
    html`<span class="state ${draining ? "" : "ok"}">${t(draining ? "draining" : "serving")}</span>`;
  const drain = acting("drain", "drain", "drain_name", change, "small");
  const resume = acting("resume", "resume", "resume_name", change, "small");
  const columns = [
    named("name"),
    column("state", "state", serving),
    figured("requests", "requests_open"),
    figured("routed", "routed"),
    named("session"),
    { ...drain, cell: (row) => (row.draining ? resume : drain).cell(row) },
  ];
  const { items = [], retried, bytes: moved } = state.value ?? {};
  const note = items.length > 0 && t("replicas_note", { n: retried, held: bytes(moved.held), moved: bytes(moved.moved) });
  return html`<${Listed} title=${t("view_replicas")} note=${note} state=${state} columns=${columns} empty="no_replicas" text="no_replicas_text" />`;
}
