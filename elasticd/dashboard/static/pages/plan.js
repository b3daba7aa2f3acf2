// @ts-check
/** `/jobs/JOB/plans/NUMBER`: what is this plan, why was it chosen, and what did it bring? */

import { html, nothing } from "../vendor/lit.js";
import { bytes, counted, moment, number, percent, seconds } from "../format.js";
import { Page, chip, facts, head } from "../page.js";
import { deviceHref, jobHref, part, planHref, to } from "../source.js";
/** @import { PlanList, PlanRow, PlanView } from "../../tools/api.d.ts" */

/** @type {Record<PlanRow["outcome"], [string, string]>} */
const OUTCOMES = {
  "in force": ["ok", "✓"],
  replaced: ["", "·"],
  proposed: ["info", "⇄"],
  aborted: ["bad", "✕"],
  unknown: ["hollow", "?"],
};

class PlanPage extends Page {
  static properties = {
    job: { type: String },
    number: { type: Number },
    view: { state: true },
    list: { state: true },
  };

  constructor() {
    super();
    this.job = "";
    this.number = 0;
    /** @type {PlanView | null} */ this.view = null;
    /** @type {PlanList | null} */ this.list = null;
  }

  connectedCallback() {
    super.connectedCallback();
    const path = `/api/jobs/${part(this.job)}/plans`;
    const again = () => {
      this.ask(`${path}/${this.number}`, (value) => {
        this.view = value;
      });
      this.ask(path, (value) => {
        this.list = value;
      });
    };
    again();
    this.on("hello", again);
    this.on("plan", (plan) => {
      if (plan.row.job === this.job) again();
    });
    this.on("event", (event) => {
      if (event.job === this.job && ["gained", "recorded", "swapped"].includes(event.kind)) again();
    });
  }

  render() {
    const view = this.view;
    const title = html`Plan ${this.number} of <a href=${jobHref(this.job)}>${this.job}</a>`;
    const question = "What is this plan, why was it chosen, and what did it bring?";
    if (!view) return html`${head(title, question, this.error ? "" : "Waiting …")}${this.trouble()}`;
    const row = view.row;
    const [tone, glyph] = OUTCOMES[row.outcome];
    const real =
      row.measured_seconds && row.predicted_seconds && !row.guessed
        ? row.measured_seconds / row.predicted_seconds
        : null;
    const first = row.first_predicted_seconds;
    const several = new Set(view.timeline.map((lane) => lane.module)).size > 1;
    const predicted = row.guessed
      ? "guessed: no step had been measured"
      : `a step${first === null ? "" : `; ${seconds(first)} when it was made`}`;
    return html`${head(
        title,
        question,
        html`${chip(tone, glyph, row.outcome)} ${row.reason}`,
        facts([
          ["predicted", html`${seconds(row.predicted_seconds)} <small>${predicted}</small>`],
          [
            "measured",
            html`${seconds(row.measured_seconds)}
              <small>${real === null ? `${counted(row.steps, "step")}` : `${percent(real, 0)} of it`}</small>`,
          ],
          ["pause", seconds(row.pause_seconds)],
          ["sent", bytes(row.bytes_sent)],
        ]),
      )}
      ${this.trouble()} ${this.neighbours(view)}
      <div class="panels">
        <section class="panel" aria-labelledby="picture-title">
          <header>
            <h2 id="picture-title">Pipelines and stages</h2>
            <p>a box as wide as its layers; a device's bar as long as its share; the line below: load</p>
          </header>
          <ed-plan-picture .pipelines=${view.pipelines}></ed-plan-picture>
          ${several ? places(view.pipelines) : nothing}
          ${view.idle.length ? html`<p>Standby: ${devices(view.idle)}</p>` : nothing}
          ${view.carriers.length ? html`<p>Keep state alone: ${devices(view.carriers)}</p>` : nothing}
        </section>
        ${
          view.timeline.length
            ? html`<section class="panel" aria-labelledby="timeline-title">
                <header>
                  <h2 id="timeline-title">${several ? "The order as predicted" : "1F1B as predicted"}</h2>
                  <p>
                    ${several ? "all modules on one axis of time; the last pass ends after" : "the slowest lane takes"}
                    ${seconds(view.timeline_seconds)}, before the gradients' reduction
                  </p>
                </header>
                <ed-timeline .lanes=${view.timeline} .pipelines=${several ? view.pipelines : []}></ed-timeline>
              </section>`
            : nothing
        }
        <section class="panel half" aria-labelledby="why-title">
          <header>
            <h2 id="why-title">Why</h2>
            <p><code>elasticd why ${this.job} ${this.number}</code></p>
          </header>
          <div class="scroll" tabindex="0" role="group" aria-label="Why">
            <pre class="why">${view.why}</pre>
          </div>
        </section>
        <div class="half stack">${view.policy ? policy(view.policy) : nothing}${diff(view)}</div>
        <section class="panel" aria-labelledby="communication-title">${communications(view)}</section>
        ${
          this.list
            ? html`<section class="panel" aria-labelledby="plans-title">
                ${plans(this.list, this.number)}
              </section>`
            : nothing
        }
      </div>`;
  }

  /** @param {PlanView} view */
  neighbours(view) {
    const at = view.numbers.indexOf(this.number);
    const before = view.numbers[at - 1];
    const after = at < 0 ? undefined : view.numbers[at + 1];
    return html`<p class="row">
      ${before === undefined ? nothing : html`<a rel="prev" href=${planHref(this.job, before)}>← plan ${before}</a>`}
      ${after === undefined ? nothing : html`<a rel="next" href=${planHref(this.job, after)}>plan ${after} →</a>`}
      <a href=${to(`/jobs/${part(this.job)}/switch?number=${this.number}`)}>The switch to it, rank by rank</a>
    </p>`;
  }
}

/** Devices of a plan of several modules that have a line of their own; the rest is counted. */
const MOST_DEVICES = 64;

/** The places of each device in all modules beside each other, and how long it computes for them.
 * @param {PlanView["pipelines"]} pipelines */
function places(pipelines) {
  const modules = [...new Set(pipelines.map((row) => row.module))];
  /** @type {Map<string, {load: number, of: Map<string, string>}>} */ const found = new Map();
  for (const row of pipelines)
    for (const stage of row.stages)
      for (const device of stage.devices) {
        const own = found.get(device) ?? { load: 0, of: new Map() };
        own.load += stage.load;
        const text = `layers ${stage.named}, ${percent(stage.load, 0)}`;
        own.of.set(row.module, own.of.has(row.module) ? `${own.of.get(row.module)}; ${text}` : text);
        found.set(device, own);
      }
  const most = Math.max(...[...found.values()].map((each) => each.load), 1e-12);
  const listed = [...found].sort((one, other) => other[1].load - one[1].load);
  return html`<div class="scroll tall" tabindex="0" role="group" aria-label="Devices and their modules">
      <table class="data">
        <thead>
          <tr>
            <th scope="col">device</th>
            ${modules.map((module) => html`<th scope="col">${module}</th>`)}
            <th scope="col" class="num">computes, of the busiest</th>
          </tr>
        </thead>
        <tbody>
          ${listed.slice(0, MOST_DEVICES).map(
            ([device, own]) =>
              html`<tr>
                <th scope="row"><a class="mono" href=${deviceHref(device)}>${device}</a></th>
                ${modules.map((module) => html`<td>${own.of.get(module) ?? ""}</td>`)}
                <td class="num">${percent(own.load / most, 0)}</td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${listed.length > MOST_DEVICES ? html`<p class="muted">and ${listed.length - MOST_DEVICES} more</p>` : nothing}`;
}

/** @param {string[]} names */
const devices = (names) => names.map((name) => html`<a class="mono" href=${deviceHref(name)}>${name}</a> `);

/** @param {NonNullable<PlanView["policy"]>} known */
function policy(known) {
  const {
    current_seconds: current,
    new_seconds: newer,
    steps,
    saving_seconds: saving,
    price_seconds: price,
  } = known;
  const pays = saving !== null && price !== null ? saving > price : null;
  return html`<section class="panel" aria-labelledby="policy-title">
    <header>
      <h2 id="policy-title">Was it worth its switch?</h2>
      <p>${pays === null ? "" : pays ? "saving > price" : "saving ≤ price"}</p>
    </header>
    <dl class="chain">
      <dt>saving</dt>
      <dd>
        ${
          saving === null
            ? "not known"
            : html`(${seconds(current)} − ${seconds(newer)}) × ${number(steps)} steps =
                <b>${seconds(saving)}</b>`
        }
      </dd>
      <dt>price</dt>
      <dd><b>${seconds(price)}</b> for the switch</dd>
      <dt>decided</dt>
      <dd>${known.text}</dd>
    </dl>
  </section>`;
}

/** @param {PlanView} view */
function diff(view) {
  const known = view.diff;
  return html`<section class="panel" aria-labelledby="diff-title">
    <header><h2 id="diff-title">Difference to the plan before</h2></header>
    ${
      known === null
        ? html`<p class="empty">It is the first plan, or the one before is not kept.</p>`
        : html` ${facts([
            ["state in all", bytes(known.bytes_state)],
            ["lacking, so the least", bytes(known.bytes_lacking)],
            ["sent", bytes(known.bytes_sent)],
            ["sent / least", known.ratio === null ? "–" : `${number(known.ratio, 3)}`],
          ])}
          ${
            known.devices.length === 0
              ? html`<p class="empty">No device's part changes.</p>`
              : html`<div class="scroll tall" tabindex="0" role="group" aria-label="Devices whose part changes">
                  <table class="data">
                    <thead>
                      <tr>
                        <th scope="col">device</th>
                        <th scope="col">under plan ${known.before}</th>
                        <th scope="col">under this plan</th>
                        <th scope="col" class="num">lacks</th>
                      </tr>
                    </thead>
                    <tbody>
                      ${known.devices.map(
                        (each) =>
                          html`<tr>
                            <th scope="row">
                              <a class="mono" href=${deviceHref(each.device)}>${each.device}</a>
                            </th>
                            <td>${each.before}</td>
                            <td>${each.after}</td>
                            <td class="num">${bytes(each.bytes_lacking)}</td>
                          </tr>`,
                      )}
                    </tbody>
                  </table>
                </div>`
          }`
    }
  </section>`;
}

/** @param {PlanView} view */
const communications = (view) =>
  html`<header>
      <h2 id="communication-title">Communication of a step</h2>
      <p>as <code>elasticd plan --explain</code> derives it</p>
    </header>
    ${
      view.communications.length === 0
        ? html`<p class="empty">${view.communications_missing || "There is none."}</p>`
        : html` <div class="scroll" tabindex="0" role="group" aria-label="Communication of a step">
            <table class="data">
              <thead>
                <tr>
                  <th scope="col">for</th>
                  <th scope="col">operation</th>
                  <th scope="col" class="num">groups</th>
                  <th scope="col">devices of the first</th>
                  <th scope="col" class="num">times</th>
                  <th scope="col" class="num">bytes by level</th>
                  <th scope="col" class="num">time</th>
                </tr>
              </thead>
              <tbody>
                ${view.communications.map(
                  (each) =>
                    html`<tr>
                      <th scope="row">${each.purpose}</th>
                      <td>${each.operation}</td>
                      <td class="num">${each.groups}</td>
                      <td class="mono words">
                        ${each.devices.slice(0, 8).join(" ")}${each.devices.length > 8 ? ` + ${each.devices.length - 8}` : ""}
                      </td>
                      <td class="num">${each.times}</td>
                      <td class="num">
                        ${Object.entries(each.bytes).map(([level, size]) => html`${level} ${bytes(size)}<br />`)}
                      </td>
                      <td class="num">${seconds(each.seconds)}</td>
                    </tr>`,
                )}
              </tbody>
            </table>
          </div>`
    }`;

/** @param {PlanList} list  @param {number} current */
const plans = (list, current) =>
  html`<header><h2 id="plans-title">All plans</h2></header>
    <div class="scroll tall" tabindex="0" role="group" aria-label="All plans">
      <table class="data">
        <thead>
          <tr>
            <th scope="col" class="num">plan</th>
            <th scope="col">outcome</th>
            <th scope="col">proposed</th>
            <th scope="col">why</th>
            <th scope="col" class="num">predicted</th>
            <th scope="col" class="num">measured</th>
            <th scope="col" class="num">steps</th>
            <th scope="col" class="num">pause</th>
            <th scope="col" class="num">sent</th>
          </tr>
        </thead>
        <tbody>
          ${list.plans.map(
            (row) =>
              html`<tr>
                <th scope="row" class="num">
                  ${
                    row.number === current
                      ? row.number
                      : html`<a href=${planHref(list.job, row.number)}>${row.number}</a>`
                  }
                </th>
                <td>${chip(OUTCOMES[row.outcome][0], OUTCOMES[row.outcome][1], row.outcome)}</td>
                <td class="nowrap">${moment(row.time)}</td>
                <td class="words">${row.reason}</td>
                <td class="num">${seconds(row.predicted_seconds)}${row.guessed ? " ?" : ""}</td>
                <td class="num">${seconds(row.measured_seconds)}</td>
                <td class="num">${number(row.steps)}</td>
                <td class="num">${seconds(row.pause_seconds)}</td>
                <td class="num">${bytes(row.bytes_sent)}</td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>`;

customElements.define("ed-plan", PlanPage);
