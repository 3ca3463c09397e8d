// The page for people who operate: its menu, and the view that the address names.
import { get, reached } from "../api.js";
import { plain, span, t } from "../format.js";
import { Brand, Menu, Settings, start } from "../shell.js";
import { html, Icon, useEffect, usePolled, useState, useStore } from "../ui.js";
import { Collections } from "./collections.js";
import { Jobs } from "./jobs.js";
import { Kept } from "./kept.js";
import { Keys } from "./keys.js";
import { Modules } from "./modules.js";
import { Overview } from "./overview.js";
import { Modes, Replicas, Requests } from "./service.js";

const VIEWS = {
  overview: Overview,
  requests: Requests,
  collections: Collections,
  modules: Modules,
  kept: Kept,
  jobs: Jobs,
  modes: Modes,
  replicas: Replicas,
  keys: Keys,
};
const STATUS_SECONDS = 10;

function address() {
  const [id, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { id: id in VIEWS ? id : "overview", query: new URLSearchParams(query) };
}

function Admin() {
  const [at, go] = useState(address);
  useEffect(() => {
    const moved = () => {
      go(address());
      document.getElementById("main").focus({ preventScroll: true });
      window.scrollTo(0, 0);
    };
    window.addEventListener("hashchange", moved);
    return () => window.removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    document.title = `${t(`view_${at.id}`)} · ragcache`;
  }, [at.id]);
  const View = VIEWS[at.id];
  return html`<div class="adminpage">
    <aside class="rail">
      <${Brand} href="../" />
      <${Menu}>
        <nav aria-label=${t("views")}>
          <a href="../"><${Icon} name="ask" /><span>${t("ask")}</span></a>
          ${Object.keys(VIEWS).map((id) => html`<a href="#/${id}" data-view=${id} aria-current=${id === at.id ? "page" : undefined}><${Icon} name=${id} /><span>${t(`view_${id}`)}</span></a>`)}
        </nav>
        <${Server} />
        <${Settings} />
      <//>
    </aside>
    <main id="main" tabindex="-1">
      <header class="head"><h1>${t(`view_${at.id}`)}</h1><p class="muted">${t(`about_${at.id}`)}</p></header>
      <div class="view ${at.id}"><${View} key=${`${at.id}?${at.query}`} query=${at.query} /></div>
    </main>
  </div>`;
}

function Server() {
  const up = useStore(reached);
  const { value } = usePolled((signal) => get("admin/stats", { signal }), STATUS_SECONDS, [up]);
  return html`<div class="server">
    <i class="dot ${up ? "ok" : "bad"}"></i>
    <span><strong><bdi>${plain(value?.model ?? "–")}</bdi></strong><small class="muted">${up ? (value ? t("up_for", { time: span(value.uptime) }) : "…") : t("gone_short")}</small></span>
  </div>`;
}

start(Admin);
