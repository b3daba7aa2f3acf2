// @ts-check
/** `/jobs`: which jobs are there, those that run and those that are over? */

import { html } from "../vendor/lit.js";
import { counted } from "../format.js";
import { news } from "../news.js";
import { Page, head } from "../page.js";
import { jobTable, over } from "./cluster.js";

class JobsPage extends Page {
  connectedCallback() {
    super.connectedCallback();
    this.follow();
  }

  render() {
    const question = "Which jobs run, and which are over?";
    const jobs = news.cluster?.jobs;
    if (!jobs) return html`${head("Jobs", question, "Waiting …")}`;
    const running = jobs.filter((job) => !over(job));
    const ended = jobs.filter(over);
    const answer = `${counted(running.length, "job")} ${running.length === 1 ? "runs" : "run"}, ${ended.length} ${
      ended.length === 1 ? "is" : "are"
    } over.`;
    return html`${head("Jobs", question, answer)}
      <div class="panels">
        <section class="panel" aria-labelledby="running-title">
          <header><h2 id="running-title">Running</h2></header>
          ${running.length ? jobTable(running) : html`<p class="empty">No job runs.</p>`}
        </section>
        <section class="panel" aria-labelledby="over-title">
          <header>
            <h2 id="over-title">Over</h2>
            <p>until <code>elasticd forget JOB</code>, or for the days that the coordinator keeps them</p>
          </header>
          ${ended.length ? jobTable(ended) : html`<p class="empty">None.</p>`}
        </section>
      </div>`;
  }
}

customElements.define("ed-jobs", JobsPage);
