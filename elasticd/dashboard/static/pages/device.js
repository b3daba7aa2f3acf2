// @ts-check
/** `/devices/NODE/RANK`: is this device the culprit, and why? */

import { html, nothing } from "../vendor/lit.js";
import { events } from "../event-list.js";
import { STATES } from "../heat.js";
import { bytes, capital, counted, figure, listed, moment, number, slowdown } from "../format.js";
import { news } from "../news.js";
import "../output.js";
import { Page, chip, facts, head } from "../page.js";
import { jobHref, part, planHref, recording } from "../source.js";
import { PARTS } from "./job.js";
/** @import { DeviceView, JobMoment } from "../../tools/api.d.ts" */

class DevicePage extends Page {
  static properties = {
    node: { type: String },
    rank: { type: String },
    view: { state: true },
  };

  constructor() {
    super();
    this.node = "";
    this.rank = "";
    /** @type {DeviceView | null} */ this.view = null;
  }

  connectedCallback() {
    super.connectedCallback();
    const path = `/api/devices/${part(this.node)}/${part(this.rank)}`;
    const name = `${this.node}/${this.rank}`;
    const again = (/** @type {number} */ least) =>
      this.ask(
        path,
        (value) => {
          this.view = value;
        },
        least,
      );
    again(0);
    this.on("hello", () => again(500));
    this.on("step", (step) => {
      if (this.view && step.job === this.view.cell.job) again(2500);
    });
    this.on("devices", (changed) => {
      if (changed.devices.some((/** @type {{name: string}} */ cell) => cell.name === name)) again(500);
    });
    this.on("event", (event) => {
      if (event.device === name || event.node === this.node) again(500);
    });
    this.follow();
  }

  render() {
    const view = this.view;
    const title = html`<span class="mono">${this.node}/${this.rank}</span>`;
    const question = "Is this device the culprit, and why?";
    if (!view) return html`${head(title, question, this.error ? "" : "Waiting …")}${this.trouble()}`;
    const now = news.cluster?.nodes
      .find((each) => each.node === this.node)
      ?.devices.find((each) => each.name === view.cell.name);
    const cell = {
      slowdown: 1,
      state: /** @type {const} */ ("healthy"),
      job: "",
      pace: 1,
      ...view.cell,
      ...now,
    };
    const known = STATES[cell.state];
    return html`${head(
        title,
        question,
        html`${chip(known.tone, known.glyph, cell.state)} ${verdict(view, cell)}`,
        facts([
          ["slowdown", slowdown(cell.slowdown)],
          ["kind", view.kind || "–"],
          ["memory", bytes(view.memory)],
          ["job", cell.job ? html`<a href=${jobHref(cell.job)}>${cell.job}</a>` : "none"],
        ]),
      )}
      ${this.trouble()}
      <div class="panels">
        <section class="panel two-thirds" aria-labelledby="slow-title">
          <header>
            <h2 id="slow-title">Slowdown over time</h2>
            <p>1 is a normal device; plans are made with the decided value</p>
          </header>
          ${slow(view)}
        </section>
        <section class="panel third" aria-labelledby="cause-title">${causes(view)}</section>
        <section class="panel half" aria-labelledby="cusum-title">${evidence(view)}</section>
        <section class="panel half" aria-labelledby="parts-title">
          <header><h2 id="parts-title">Its last step</h2></header>
          ${
            Object.keys(view.parts).length
              ? html`<ed-bars
                  share
                  label="Seconds of the last step"
                  .kinds=${PARTS}
                  .rows=${[{ label: view.cell.name, parts: view.parts }]}
                ></ed-bars>`
              : html`<p class="empty">Not measured.</p>`
          }
        </section>
        ${view.hang ? hang(view.hang) : nothing}
        ${
          recording
            ? nothing
            : html`<section class="panel" aria-labelledby="output-title">
                <ed-output .node=${this.node} .rank=${this.rank}></ed-output>
              </section>`
        }
        <section class="panel" aria-labelledby="health-title">${health(view)}</section>
        <section class="panel half" aria-labelledby="use-title">${plans(view)}</section>
        <section class="panel half" aria-labelledby="events-title">
          <header><h2 id="events-title">Events about it</h2></header>
          <div class="scroll tall" tabindex="0" role="group" aria-label="Events about it">
            ${events(view.events, { dates: true })}
          </div>
        </section>
      </div>`;
  }
}

/** @param {DeviceView} view  @param {{slowdown: number, state: string, pace: number}} cell */
function verdict(view, cell) {
  const said = [];
  if (cell.slowdown > 1) said.push(`It takes ${slowdown(cell.slowdown)} the normal time.`);
  if (cell.pace !== 1) said.push(`Chaos slows it ${slowdown(cell.pace)} on purpose.`);
  if (view.kind) said.push(`Its slowness is ${view.kind}: ${view.kind_reason}.`);
  if (!view.connected) said.push("Its node's agent cannot be reached.");
  if (view.draining) said.push("Its node is drained.");
  if (view.use) said.push(`${capital(view.use)}.`);
  return said.join(" ") || "It runs at normal speed.";
}

/** The curves are sampled where they changed, and broken where nothing was measured. @param {DeviceView} view */
function slow(view) {
  const { time, measured, decided } = view.slowdown;
  const limits = view.thresholds;
  if (!time.length) return html`<p class="empty">No step was measured on it yet.</p>`;
  return html`<ed-chart
    label="Slowdown"
    unit="times the normal"
    time
    .x=${time}
    .height=${220}
    .levels=${
      limits
        ? [
            { value: limits.slow, label: `slow from ${slowdown(limits.slow)}` },
            {
              value: limits.recovered,
              label: `normal below ${slowdown(limits.recovered)}`,
            },
          ]
        : []
    }
    .curves=${[
      { label: "measured", hue: 1, values: measured, steps: true },
      { label: "decided", hue: 4, dash: [8, 3], values: decided, steps: true },
    ]}
  ></ed-chart>`;
}

/** @param {DeviceView} view */
function evidence(view) {
  const known = view.slowdown;
  const limit = view.thresholds?.cusum ?? null;
  return html`<header>
      <h2 id="cusum-title">Evidence of a change (CUSUM)</h2>
      <p>
        ${limit === null ? nothing : `a change is decided at ${figure(limit)}`}${
          view.thresholds ? `, after ${counted(view.thresholds.min_steps, "step")} at least` : ""
        }
      </p>
    </header>
    ${
      known.cusum.some((value) => value !== null)
        ? html`<ed-chart
            label="Evidence"
            unit="CUSUM"
            time
            .x=${known.time}
            .height=${150}
            .levels=${limit === null ? [] : [{ value: limit, label: "decided" }]}
            .curves=${[{ label: "evidence", hue: 3, values: known.cusum }]}
          ></ed-chart>`
        : html`<p class="empty">Not known.</p>`
    }`;
}

/** @param {DeviceView} view */
const causes = (view) =>
  html`<header><h2 id="cause-title">Causes and episodes</h2></header>
    ${
      view.causes.length
        ? html`<ul>
            ${view.causes.map((cause) => html`<li>${cause}</li>`)}
          </ul>`
        : html`<p class="empty">Nothing is known that slows it.</p>`
    }
    ${view.throttled.length ? html`<p>${chip("warn", "▲", "clocks held down")} ${listed(view.throttled)}</p>` : nothing}
    ${view.xids.length ? html`<p>${chip("bad", "✕", "XID")} ${view.xids.join(", ")}</p>` : nothing}
    ${
      view.episodes.length === 0
        ? html`<p class="empty">It was never slow.</p>`
        : html`<div class="scroll tall" tabindex="0" role="group" aria-label="Episodes">
            <table class="data">
              <caption>
                Episodes, the newest first
              </caption>
              <thead>
                <tr>
                  <th scope="col">job</th>
                  <th scope="col">from</th>
                  <th scope="col">to</th>
                  <th scope="col" class="num">slowdown</th>
                </tr>
              </thead>
              <tbody>
                ${view.episodes
                  .slice()
                  .reverse()
                  .map(
                    (each) =>
                      html`<tr>
                        <th scope="row"><a href=${jobHref(each.start.job)}>${each.start.job}</a></th>
                        <td>${instant(each.start)}</td>
                        <td>${each.now ? "now" : each.stop ? instant(each.stop) : "the job's end"}</td>
                        <td class="num">${slowdown(each.slowdown)}</td>
                      </tr>`,
                  )}
              </tbody>
            </table>
          </div>`
    }`;

/** A moment in a job. @param {JobMoment} at */
const instant = (at) =>
  html`${at.step === null ? "before the first step" : `step ${number(at.step)}`}
    <div class="small muted nowrap">${moment(at.time)}</div>`;

/** Units that are too small to be read, and by what they are divided.
 * @type {Record<string, [number, string]>} */
const LARGER = {
  part: [0.01, "%"],
  Hz: [1e6, "MHz"],
  bytes: [2 ** 20, "MiB"],
  B: [2 ** 20, "MiB"],
  "bytes/s": [1e6, "MB/s"],
  "B/s": [1e6, "MB/s"],
};

/** @param {DeviceView} view */
function health(view) {
  const columns = Object.entries(view.health.values).filter(([, values]) =>
    values.some((value) => value !== null),
  );
  const charts = columns.map(([name, values], index) => {
    const unit = view.health.units[name] ?? "";
    const [by, larger] = LARGER[unit] ?? [1, unit];
    const scaled = by === 1 ? values : values.map((value) => (value === null ? null : value / by));
    const curves = [
      {
        label: name.replaceAll("_", " "),
        hue: (index % 4) + 1,
        values: scaled,
      },
    ];
    return html`<div class="small-chart">
      <ed-chart
        label=${name}
        unit=${larger}
        time
        .x=${view.health.time}
        .height=${110}
        .curves=${curves}
      ></ed-chart>
    </div>`;
  });
  return html`<header>
      <h2 id="health-title">Health, as the node's agent sees it</h2>
    </header>
    ${
      charts.length
        ? html`<div class="panels">${charts}</div>`
        : html`<p class="empty">The system offers nothing about this device.</p>`
    }`;
}

/** @param {DeviceView} view */
const plans = (view) =>
  html`<header><h2 id="use-title">What plans did with it</h2></header>
    ${
      view.plans.length === 0
        ? html`<p class="empty">No plan yet.</p>`
        : html`<div class="scroll tall" tabindex="0" role="group" aria-label="What plans did with it">
            <table class="data">
              <thead>
                <tr>
                  <th scope="col" class="num">plan</th>
                  <th scope="col" class="num">made for</th>
                  <th scope="col">use</th>
                </tr>
              </thead>
              <tbody>
                ${view.plans
                  .slice()
                  .sort((a, b) => b[0] - a[0])
                  .map(
                    ([plan, made, use]) =>
                      html`<tr>
                        <th scope="row" class="num">
                          ${view.cell.job ? html`<a href=${planHref(view.cell.job, plan)}>${plan}</a>` : plan}
                        </th>
                        <td class="num">${slowdown(made)}</td>
                        <td>${use}</td>
                      </tr>`,
                  )}
              </tbody>
            </table>
          </div>`
    }`;

/** @param {NonNullable<DeviceView["hang"]>} known */
const hang = (known) =>
  html`<section class="panel" aria-labelledby="hang-title">
    <header>
      <h2 id="hang-title">${known.now ? "Its main thread stands still" : "Its main thread stood still"}</h2>
      <p>
        ${known.step < 0 ? "between two steps" : `step ${known.step}`}, ${moment(known.time)}: ${known.place}
      </p>
    </header>
    ${
      known.stack
        ? html`<div class="scroll" tabindex="0" role="group" aria-label="Stack">
            <pre class="why">${known.stack}</pre>
          </div>`
        : nothing
    }
  </section>`;

customElements.define("ed-device", DevicePage);
