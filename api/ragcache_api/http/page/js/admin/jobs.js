// Documents on their way in: the form, and the jobs that read and encode them.
import { everything, get, remove } from "../api.js";
import { plain, seconds, t } from "../format.js";
import { Button, complain, confirmed, Empty, html, Moment, Panel, Polled, useEffect, usePolled, useState } from "../ui.js";
import { ENDED, Job, Upload } from "../upload.js";

const PERIOD = 2;
const LISTED = 50;

export function Jobs({ query }) {
  const [names, setNames] = useState([]);
  const state = usePolled((signal) => get(`v1/jobs?limit=${LISTED}`, { signal }), PERIOD);
  const list = () => everything("v1/collections").then((items) => setNames(items.map(({ name }) => name)), complain);
  useEffect(() => void list(), []);
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
  const cancel = async () => {
    if (!(await confirmed(t("job_cancel"), t("job_cancel_text", { name: plain(target) })))) return;
    await remove(`v1/jobs/${id}`).catch(complain);
    again();
  };
  if (!ENDED.includes(status))
    return html`<${Button} kind="small" data-act="cancel-job" onClick=${cancel}>${t("job_cancel")}<//>`;
  return html`<span>${started && finished && `${t("took", { time: seconds(finished - started) })} · `}<${Moment} at=${finished} /></span>`;
}
