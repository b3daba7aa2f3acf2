// @ts-check
/** `/jobs/JOB/switch`: how far is the switch, and whom does it wait for? */

import { html, nothing, svg } from "../vendor/lit.js";
import { Measured } from "../element.js";
import { events } from "../event-list.js";
import { bytes, moment, number, seconds } from "../format.js";
import { Page, chip, facts, head } from "../page.js";
import { deviceHref, jobHref, part, planHref } from "../source.js";
/** @import { RankProgress, SwitchView } from "../../tools/api.d.ts" */

/** @type {Record<SwitchView["phase"], [string, string]>} */
const PHASES = {
  none: ["hollow", "·"],
  preparing: ["info", "⇄"],
  voting: ["info", "⇄"],
  moving: ["info", "⇄"],
  done: ["ok", "✓"],
  aborted: ["bad", "✕"],
};

class SwitchPage extends Page {
  static properties = {
    job: { type: String },
    number: { type: Number },
    view: { state: true },
  };

  constructor() {
    super();
    this.job = "";
    /** 0: the newest, live. */ this.number = 0;
    /** @type {SwitchView | null} */ this.view = null;
  }

  connectedCallback() {
    super.connectedCallback();
    const path = `/api/jobs/${part(this.job)}/switch${this.number ? `?number=${this.number}` : ""}`;
    const again = () =>
      this.ask(path, (value) => {
        this.view = value;
      });
    again();
    this.on("hello", again);
    this.on("progress", (/** @type {SwitchView} */ value) => {
      if (value.job === this.job && (!this.number || value.number === this.number)) this.view = value;
    });
    this.on("plan", (plan) => {
      if (plan.row.job === this.job) again();
    });
    this.on("event", (event) => {
      if (event.job === this.job) again();
    });
  }

  render() {
    const view = this.view;
    const plan = view?.number ? html`<a href=${planHref(this.job, view.number)}>${view.number}</a>` : nothing;
    const title = html`${view?.number ? html`Switch to plan ${plan}` : "Switches"} of
      <a href=${jobHref(this.job)}>${this.job}</a>`;
    const question = "How far is the switch, and whom does it wait for?";
    if (!view) return html`${head(title, question, this.error ? "" : "Waiting …")}${this.trouble()}`;
    const [tone, glyph] = PHASES[view.phase];
    const lacking = view.ranks.reduce((sum, rank) => sum + (rank.bytes_lacking ?? 0), 0);
    const sent = view.ranks.reduce((sum, rank) => sum + (rank.bytes_sent ?? 0), 0);
    return html`${head(
      title,
      question,
      html`${chip(tone, glyph, view.phase)} ${view.sentence}`,
      facts([
        ["proposed", moment(view.proposed)],
        [
          "from then to recorded",
          view.recorded !== null && view.proposed !== null ? seconds(view.recorded - view.proposed) : "–",
        ],
        ["pause", seconds(view.pause)],
        ["step", number(view.step)],
        ["sent", html`${bytes(sent)} <small>least ${bytes(lacking)}</small>`],
      ]),
    )}
    ${this.trouble()}
    ${
      view.number === 0
        ? html`<p class="empty">This job has had no switch yet.</p>`
        : html`<div class="panels">
            <section class="panel" aria-labelledby="ranks-title">
              <header>
                <h2 id="ranks-title">Rank by rank</h2>
                <p>seconds since the proposal${view.recovery ? "; a recovery: there is no vote" : ""}</p>
              </header>
              ${ranks(view)}
            </section>
            <section class="panel third" aria-labelledby="links-title">
              <header><h2 id="links-title">Bytes by link</h2></header>
              ${
                view.links.length
                  ? html`<table class="data">
                      <thead>
                        <tr>
                          <th scope="col">from</th>
                          <th scope="col">to</th>
                          <th scope="col" class="num">sent</th>
                        </tr>
                      </thead>
                      <tbody>
                        ${view.links.map(
                          (link) =>
                            html`<tr>
                              <td class="mono">${link.source}</td>
                              <td class="mono">${link.target}</td>
                              <td class="num">${bytes(link.bytes)}</td>
                            </tr>`,
                        )}
                      </tbody>
                    </table>`
                  : html`<p class="empty">Nothing was sent between nodes.</p>`
              }
            </section>
            <section class="panel two-thirds" aria-labelledby="events-title">
              <header><h2 id="events-title">What happened</h2></header>
              ${events(view.events)}
            </section>
          </div>`
    }`;
  }
}

/** @param {SwitchView} view */
function ranks(view) {
  const most = Math.max(...view.ranks.map((rank) => Math.max(rank.prepared ?? 0, rank.moved ?? 0)), 1e-6);
  return html`<div class="scroll" tabindex="0" role="group" aria-label="Rank by rank">
    <table class="data">
      <thead>
        <tr>
          <th scope="col" class="num">rank</th>
          <th scope="col">device</th>
          <th scope="col">state</th>
          <th scope="col" class="num">prepared</th>
          <th scope="col" class="num">moved</th>
          <th scope="col" class="num">pause</th>
          <th scope="col" class="num">sent</th>
          <th scope="col" class="num">lacked</th>
          <th scope="col"><span class="hidden-text">progress</span></th>
        </tr>
      </thead>
      <tbody>
        ${view.ranks.map(
          (rank) =>
            html`<tr>
              <td class="num">${rank.rank < 0 ? "leaves" : rank.rank}</td>
              <th scope="row">
                <a class="mono" href=${deviceHref(rank.device)}>${rank.device}</a>
              </th>
              <td>${state(rank, view)}</td>
              <td class="num">${seconds(rank.prepared)}</td>
              <td class="num">${seconds(rank.moved)}</td>
              <td class="num">${seconds(rank.pause)}</td>
              <td class="num">${bytes(rank.bytes_sent)}</td>
              <td class="num">${bytes(rank.bytes_lacking)}</td>
              <td><ed-progress .rank=${rank} .most=${most}></ed-progress></td>
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** @param {RankProgress} rank  @param {SwitchView} view */
function state(rank, view) {
  if (rank.kept) return chip("", "·", "stayed");
  if (rank.moved !== null) return chip("ok", "✓", rank.rank < 0 ? "left" : "swapped");
  if (view.phase === "aborted") return chip("bad", "✕", "aborted");
  if (view.phase === "done") return chip("ok", "✓", rank.rank < 0 ? "left" : "done");
  return rank.prepared !== null ? chip("info", "⇄", "prepared") : chip("warn", "…", "preparing");
}

class Progress extends Measured {
  static properties = {
    rank: { attribute: false },
    most: { attribute: false },
  };

  constructor() {
    super();
    /** @type {RankProgress | null} */ this.rank = null;
    this.most = 1;
  }

  render() {
    const { rank, most } = this;
    if (!rank || !this.width) return nothing;
    const scale = (this.width - 2) / most;
    const prepared = rank.prepared ?? 0;
    const moved = (rank.moved ?? 0) - prepared;
    return html`<svg width=${this.width} height="12" aria-hidden="true">
      <rect class="bar-ground" width=${this.width} height="12" rx="2" />
      <rect class="k6" width=${prepared * scale} height="12" rx="2" />
      ${moved > 0 ? svg`<rect class="k3" x=${prepared * scale} width=${moved * scale} height="12" rx="2" />` : nothing}
    </svg>`;
  }
}

customElements.define("ed-progress", Progress);
customElements.define("ed-switch", SwitchPage);
