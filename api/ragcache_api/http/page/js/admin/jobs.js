// Documents on their way in: the form, and the jobs that read and encode them.
import { get } from "../api.js";
import { plain, seconds, t } from "../format.js";
import { Button, Empty, html, Moment, Panel, Polled, usePolled } from "../ui.js";
import { removed } from "./changes.js";
import { useNames } from "./lists.js";
import { ENDED, Job, Upload, useDrop } from "../upload.js";

const PERIOD = 2;
const LISTED = 50;

export function Jobs({ query }) {
  const names = useNames();
  useDrop();
  const state = usePolled((signal) => get(`v1/jobs?limit=${LISTED}`, { signal }), PERIOD);
  return html`<div class="panels">
    <${Panel} title=${t("add_documents")}><${Upload} collection=${query.get("collection")} names=${names} changed=${() => state.again()} /><//>
    <${Panel} title=${t("view_jobs")} note=${t("newest_first")}>
      <${Polled} state=${state}>${({ items }) => items.length
        ? items.map((job) => html`<${Job} key=${job.id} job=${job}><${When} job=${job} again=${state.again} /><//>`)
        : html`<${Empty} title=${t("no_jobs")}>${t("no_jobs_text")}<//>`}<//>
    <//>
  </div>`;
}

function When({ job: { id, status, started_at: started, finished_at: finished, target }, again }) {
  const cancel = () => removed(again, t("job_cancel"), t("job_cancel_text", { name: plain(target) }), `v1/jobs/${id}`);
  if (!ENDED.includes(status))
    return html`<${Button} kind="small" data-act="cancel-job" onClick=${cancel}>${t("job_cancel")}<//>`;
  return html`<span>${started && finished && `${t("took", { time: seconds(finished - started) })} · `}<${Moment} at=${finished} /></span>`;
}
