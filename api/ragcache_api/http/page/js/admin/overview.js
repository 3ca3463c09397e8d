// The state of the service at a glance.
import { get, withQuery } from "../api.js";
import { themed } from "../shell.js";
import { bytes, compact, count, fixed, percent, plain, seconds, span, t, word } from "../format.js";
import { Bar, column, Empty, Figure, figured, html, keptShare, Name, Panel, part, Polled, sourceOf, sources, Table, Tier, timed, useEffect, usePolled, useRef, useState, useStore } from "../ui.js";

const PERIOD = 5; // seconds, of the service's series too
const EVICTIONS = 6;
const HEIGHT = 220;
const LINES = [
  ["ttft_hit_p50", "hit_p50", "--device", []],
  ["ttft_hit_p95", "hit_p95", "--device", [5, 4]],
  ["ttft_miss_p50", "miss_p50", "--computed", []],
  ["ttft_miss_p95", "miss_p95", "--computed", [5, 4]],
];

// A key of one namespace may not see what all of them share.
const unlessForbidden = (error) => (error.status === 403 ? null : Promise.reject(error));

async function read(signal) {
  const [stats, memory, evictions] = await Promise.all([
    get("admin/stats", { signal }),
    get("admin/memory", { signal }).catch(unlessForbidden),
    get(withQuery("admin/evictions", { limit: EVICTIONS }), { signal }),
  ]);
  return { stats, memory, latest: evictions.items };
}

export function Overview() {
  const state = usePolled(read, PERIOD);
  return html`<${Polled} state=${state}>${({ stats, memory, latest }) => html`
    <${Figures} stats=${stats} />
    <div class="panels">
      <${Panel} title=${t("tokens_by_source")} note=${t("last_hour")}><${Tokens} series=${stats.series} /><//>
      <${Panel} title=${t("time_to_first")} note=${t("last_hour")}><${FirstTokens} series=${stats.series} /><//>
      <${Panel} title=${t("tiers")} note=${t("tiers_note")}>
        ${memory ? memory.tiers.map((tier) => html`<${TierLine} tier=${tier} />`) : html`<${Empty} title=${t("not_for_key")} />`}
      <//>
      <${Panel} title=${t("memory")}>
        ${memory ? html`<${Memory} memory=${memory} />` : html`<${Empty} title=${t("not_for_key")} />`}
      <//>
      <${Panel} title=${t("evictions")}><${Evictions} stats=${stats} latest=${latest} /><//>
      <${Panel} title=${t("engine")}><${Counters} stats=${stats} /><//>
    </div>`}<//>`;
}

function Figures({ stats: { ttft, tokens, requests, collections } }) {
  const { hit, miss } = ttft;
  const all = Object.values(tokens).reduce((sum, each) => sum + each, 0);
  const documents = Object.values(collections).reduce((sum, each) => sum + each, 0);
  const faster = hit.p50 && miss.p50 ? t("times_faster", { times: (miss.p50 / hit.p50).toFixed(1) }) : t("none_to_compare");
  return html`<dl class="figures">
    <${Figure} name="kept" label=${t("not_computed")} value=${percent(keptShare(tokens))} note=${t("of_tokens", { n: all })} />
    <${Figure} label=${t("first_hit")} value=${seconds(hit.p50)} note=${faster} />
    <${Figure} label=${t("first_miss")} value=${seconds(miss.p50)} note=${miss.count ? `p95 ${seconds(miss.p95)}` : t("none_yet")} />
    <${Figure} name="running" label=${t("requests_now")} value=${count(requests.running)} note=${t("waiting", { n: requests.waiting })} />
    <${Figure} name="documents" label=${t("documents")} value=${count(documents)} note=${t("in_collections", { n: Object.keys(collections).length })} />
  </dl>`;
}

// A point for every period of the last hour, empty ones too.
function slotsOf(series) {
  const end = Math.floor(Date.now() / 1000 / PERIOD) * PERIOD;
  const length = 3600 / PERIOD;
  const known = new Map(series.map((point) => [Math.round(point.at / PERIOD), point]));
  const times = Array.from({ length }, (_, index) => end - (length - 1 - index) * PERIOD);
  return { times, points: times.map((at) => known.get(Math.round(at / PERIOD)) ?? null) };
}

// Each source is drawn up to the sum of those below it, the highest first.
function Tokens({ series }) {
  const { times, points } = slotsOf(series);
  const order = [...sources].reverse();
  const values = order.map(({ id }) => points.map((point) => point?.tokens[id] ?? 0));
  const sums = values.map((_, index) => times.map((_, at) => values.slice(index).reduce((sum, each) => sum + each[at], 0)));
  const drawn = order.map(({ label, id }) => ({ label, color: `--${id}`, bars: true }));
  if (!sums[0].some(Boolean)) return html`<${Empty} title=${t("nothing_asked")}>${t("nothing_asked_text")}<//>`;
  return html`<${Chart} label=${t("tokens_chart")} data=${[times, ...sums]} drawn=${drawn} values=${values} format=${compact} />`;
}

function FirstTokens({ series }) {
  const { times, points } = slotsOf(series);
  const values = LINES.map(([name]) => points.map((point) => point?.[name] ?? null));
  const drawn = LINES.map(([, label, color, dash]) => ({ label: t(label), color, dash }));
  if (!values.flat().some(Boolean)) return html`<${Empty} title=${t("no_first_tokens")}>${t("nothing_asked_text")}<//>`;
  return html`<${Chart} label=${t("times_chart")} data=${[times, ...values]} drawn=${drawn} values=${values} format=${seconds} />`;
}

// A color of the style sheet as a canvas understands it.
function painted(node, name) {
  node.style.color = `var(${name})`;
  const { color } = getComputedStyle(node);
  node.style.color = "";
  return color;
}

/** data: as uPlot takes it; drawn: [{label, color, bars, dash}]; values: what is read out of each.
 *  Arrow keys move the cursor, whose values are read out below the plot. */
function Chart({ label, data, drawn, values, format }) {
  const node = useRef(null);
  const plot = useRef(null);
  const [at, point] = useState(null);
  const theme = useStore(themed);
  useEffect(() => {
    const host = node.current;
    const axis = { stroke: painted(host, "--muted"), grid: { stroke: painted(host, "--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const series = drawn.map(({ color, bars, dash }) => {
      const paint = painted(host, color);
      return bars ? { fill: paint, width: 0, paths: uPlot.paths.bars({ size: [1] }), points: { show: false } } : { stroke: paint, dash, width: 2, spanGaps: true, points: { show: true, size: 5, fill: paint } };
    });
    plot.current = new uPlot(
      {
        width: host.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: { y: false, drag: { x: false } },
        scales: { y: { range: (_, low, high) => [0, high || 1] } },
        axes: [{ ...axis, size: 30, values: "{HH}:{mm}" }, { ...axis, size: 64, values: (_, ticks) => ticks.map(format) }],
        series: [{}, ...series],
        hooks: { setCursor: [({ cursor }) => point(cursor.idx ?? null)] },
      },
      data,
      host,
    );
    const watcher = new ResizeObserver(() => plot.current.setSize({ width: host.clientWidth, height: HEIGHT }));
    watcher.observe(host);
    return () => (watcher.disconnect(), plot.current.destroy());
  }, [theme, drawn.length]);
  useEffect(() => plot.current.setData(data), [data]);
  const moved = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const last = data[0].length - 1;
    const next = Math.min(last, Math.max(0, (at ?? last + (step < 0 ? 1 : 0)) + step));
    plot.current.setCursor({ left: plot.current.valToPos(data[0][next], "x"), top: 10 });
  };
  return html`<div class="plot" ref=${node} tabindex="0" role="img" aria-label=${label} onKeyDown=${moved}></div>
    <ul class="legend readout" aria-live="polite">
      ${at != null && html`<li>${new Date(data[0][at] * 1000).toLocaleTimeString()}</li>`}
      ${drawn.map((each, index) => html`<li><i style=${{ background: `var(${each.color})`, opacity: each.dash?.length ? 0.5 : 1 }}></i>${each.label}${at != null && html` <b>${format(values[index][at])}</b>`}</li>`).reverse()}
    </ul>`;
}

function TierLine({ tier }) {
  const { label } = sourceOf(tier.name);
  const { used_bytes: used, budget_bytes: budget, pinned_bytes: pinned, conversation_bytes: talks } = tier;
  const parts = [
    part(t("pinned"), tier.name, pinned, "pinned"),
    part(t("conversations"), tier.name, Math.min(talks, used - pinned), "talks"),
    part(t("others"), tier.name, used - pinned - talks),
  ];
  return html`<div class="tier" data-tier=${tier.name}>
    <div class="line"><strong>${label}</strong><span>${bytes(used)}${budget ? t("of_bytes", { all: bytes(budget) }) : ` · ${t("no_limit")}`} <b>${budget ? percent(used / budget) : ""}</b></span></div>
    <${Bar} label=${label} parts=${parts} total=${budget || used} format=${bytes} legend=${false} />
    <div class="line muted"><span>${t("states", { n: tier.states })} · ${t("pinned_bytes", { size: bytes(pinned) })} · ${t("conversation_bytes", { size: bytes(talks) })}</span><span>${t("hits_n", { n: tier.hits })}</span></div>
  </div>`;
}

function Memory({ memory: { process, host, device } }) {
  const own = process.rss_bytes - process.mapped_bytes;
  const taken = host.total_bytes - host.available_bytes;
  const lines = [
    ["host", t("machine"), host.total_bytes, host.available_bytes, [
      part(t("this_process"), "device", own),
      part(t("mapped_files"), "host", process.mapped_bytes),
      part(t("others"), "shared", taken - own),
    ]],
    device && ["device", device.name, device.total_bytes, device.free_bytes, [
      part(t("this_process"), "device", device.reserved_bytes),
      part(t("others"), "shared", device.total_bytes - device.free_bytes - device.reserved_bytes),
    ]],
  ];
  return lines.filter(Boolean).map(([id, title, total, available, parts]) => html`<div class="tier" data-memory=${id}>
    <div class="line"><strong>${plain(title)}</strong><span>${t("available", { size: bytes(available), all: bytes(total) })}</span></div>
    <${Bar} label=${title} total=${total} format=${bytes} parts=${[...parts, part(t("free"), "sunken", available)]} />
  </div>`);
}

const moduleOf = ({ module, key }) => (module ? html`<${Name} text=${module} />` : html`<code>${key.slice(0, 12)}</code>`);
const LATEST = [
  column("module", "module", moduleOf),
  column("tier", "tier", ({ tier }) => html`<${Tier} id=${tier} />`),
  column("reason", "reason", ({ reason }) => word("reason", reason)),
  figured("nbytes", "size", bytes),
  timed("at", "when"),
];

function Evictions({ stats: { evictions }, latest }) {
  const tiers = Object.keys(evictions).filter((tier) => Object.values(evictions[tier]).some(Boolean));
  const known = new Set(tiers.flatMap((tier) => Object.keys(evictions[tier])));
  const reasons = [...known].filter((reason) => tiers.some((tier) => evictions[tier][reason]));
  if (!tiers.length && !latest.length) return html`<${Empty} title=${t("nothing_evicted")}>${t("nothing_evicted_text")}<//>`;
  const byTier = [
    column("tier", "tier", ({ id }) => sourceOf(id).label),
    ...reasons.map((reason) => ({ ...figured(reason, "reason"), title: word("reason", reason) })),
  ];
  const rows = tiers.map((id) => ({ id, ...Object.fromEntries(reasons.map((each) => [each, evictions[id][each] ?? 0])) }));
  return html`${rows.length > 0 && html`<${Table} label=${t("evictions_by")} columns=${byTier} rows=${rows} />`}
    ${latest.length > 0 && html`<${Table} label=${t("evictions_latest")} columns=${LATEST} rows=${latest} />`}`;
}

function Counters({ stats: { requests, engine, uptime } }) {
  const figures = {
    finished: count(requests.finished),
    failed: count(requests.failed),
    cancelled: count(requests.cancelled),
    steps: count(engine.steps),
    rows_per_step: fixed(engine.batch_mean, 1),
    queued: seconds(engine.queued_s),
    preempted: count(engine.preempted),
    uptime: span(uptime),
  };
  const each = ([name, value]) => html`<${Figure} name=${name} label=${t(name)} value=${value} />`;
  return html`<dl class="figures small">${Object.entries(figures).map(each)}</dl>`;
}
