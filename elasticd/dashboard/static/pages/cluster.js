// @ts-check
/** `/`: is everything all right, and if not, what is wrong? */

import { html, nothing } from "../vendor/lit.js";
import { STATES, legend } from "../heat.js";
import { counted, figure, listed, number, percent, slowdown, age as lasted } from "../format.js";
import { news } from "../news.js";
import { Page, chip, facts, head } from "../page.js";
import { deviceHref, jobHref, planHref, recording, to } from "../source.js";
/** @import { Abnormal, ClusterView, DeviceCell, EtcdView, JobRow, NodeRow } from "../../tools/api.d.ts" */
/** @import { Band } from "../heat.js" */

/** Nodes above which the map comes last. */
const LARGE = 64;
/** Rows of a table that are shown before all are asked for. */
const FIRST = 50;

const SORTS = /** @type {Record<string, (row: Abnormal) => string | number>} */ ({
  name: (row) => row.name,
  state: (row) => row.state,
  slowdown: (row) => -(row.slowdown ?? 0),
  since: (row) => -(row.since ?? 0),
});

/** Tone and sign of a job's phase. @type {Record<string, [string, string]>} */
const PHASES = {
  running: ["ok", "✓"],
  "restart mode": ["ok", "✓"],
  done: ["ok", "■"],
  proposed: ["info", "⇄"],
  aborting: ["info", "⇄"],
  recovering: ["warn", "↻"],
  stopped: ["ok", "■"],
  failed: ["bad", "✕"],
};

/** @param {string} phase @returns {[string, string]} */
export const toned = (phase) => PHASES[phase] ?? ["info", "…"];

/** Nothing follows: the job is done, was stopped, or failed. @param {JobRow} job */
export const over = (job) => ["done", "stopped", "failed"].includes(job.phase);

/** Phases in which steps are made. */
const TRAINS = ["running", "restart mode", "proposed", "aborting"];

class ClusterPage extends Page {
  static properties = {
    place: { state: true },
    sort: { state: true },
    all: { state: true },
  };

  constructor() {
    super();
    this.place = "";
    this.sort = "";
    this.all = false;
    /** @type {WeakMap<NodeRow, Band>} A node that did not change keeps its band, and is not drawn again. */
    this.bands = new WeakMap();
    /** @type {NodeRow[] | null} */ this.known = null;
    /** @type {Band[]} */ this.listed = [];
  }

  connectedCallback() {
    super.connectedCallback();
    this.follow();
  }

  render() {
    const known = news.cluster;
    if (!known)
      return html`${head("Cluster", "Is everything all right?", "Waiting for the first word of the server …")}`;
    return html`${head(
        known.cluster,
        "Is everything all right, and if not, what is wrong?",
        answer(known),
        facts([
          ["devices", number(known.nodes.reduce((sum, node) => sum + node.devices.length, 0))],
          ["normal", number(known.counts.healthy ?? 0)],
          ["slow", number(known.counts.slow ?? 0)],
          ["nodes", number(known.nodes.length)],
          [
            "leader",
            known.leader.name ? html`${known.leader.name} <small>epoch ${known.leader.epoch}</small>` : "none",
          ],
          ["etcd", writes(known.etcd)],
        ]),
      )}
      <div class="panels">${this.panels(known)}</div>`;
  }

  /** What is wrong comes before a map that fills the screen. @param {ClusterView} known */
  panels(known) {
    const large = known.nodes.length > LARGE;
    const map = html`<section class="panel ${large ? "" : "wide"}" aria-labelledby="map-title">
      ${this.map(known)}
    </section>`;
    const jobs = html`<section class="panel" aria-labelledby="jobs-title">${this.jobs(known)}</section>`;
    const abnormal = html`<section class="panel ${large ? "" : "narrow"}" aria-labelledby="abnormal-title">
      ${this.abnormal(known)}
    </section>`;
    const slow = known.links.length
      ? html`<section class="panel half" aria-labelledby="links-title">${links(known)}</section>`
      : nothing;
    return large ? [jobs, abnormal, slow, map] : [map, abnormal, jobs, slow];
  }

  /** @param {ClusterView} known */
  map(known) {
    const placed = known.jobs.filter((job) => !over(job) && job.plan !== null && job.devices > 0);
    const job = placed.find((each) => each.job === this.place);
    const drawn = job ? byPlace(known, job) : null;
    const bands = drawn?.bands ?? this.hosts(known.nodes);
    return html`<header>
        <h2 id="map-title">Devices by slowdown</h2>
        <span class="grow"></span>
        <div class="segmented" role="group" aria-label="Order of the devices">
          <button
            aria-pressed=${job ? "false" : "true"}
            @click=${() => {
              this.place = "";
            }}
          >
            by host
          </button>
          ${placed.slice(0, 4).map(
            (each) =>
              html`<button
                aria-pressed=${each === job ? "true" : "false"}
                @click=${() => {
                  this.place = each.job;
                }}
              >
                by place in ${placed.length > 1 ? each.job : "the plan"}
              </button>`,
          )}
        </div>
      </header>
      ${
        bands.length
          ? html`<ed-heat
                .bands=${bands}
                .heads=${drawn?.heads ?? []}
                ?rows=${Boolean(drawn)}
                label=${job ? `Devices by place in the plan of ${job.job}` : "Devices by host"}
              ></ed-heat
              >${legend(known.counts)}`
          : html`<p class="empty">
              No agent is connected: start one on each node with
              <code>elasticd-agent</code>.
            </p>`
      }`;
  }

  /** A band for each node; the same list as long as no node changed. @param {NodeRow[]} nodes */
  hosts(nodes) {
    if (this.known !== nodes) {
      this.known = nodes;
      this.listed = nodes.map((node) => this.band(node));
    }
    return this.listed;
  }

  /** @param {NodeRow} node */
  band(node) {
    let found = this.bands.get(node);
    if (!found) {
      found = {
        key: node.node,
        label: node.node,
        cells: /** @type {Required<DeviceCell>[]} */ (node.devices),
      };
      this.bands.set(node, found);
    }
    return found;
  }

  /** @param {ClusterView} known */
  abnormal(known) {
    const order = SORTS[this.sort];
    const rows = order
      ? known.abnormal.slice().sort((a, b) => (order(a) < order(b) ? -1 : order(a) > order(b) ? 1 : 0))
      : known.abnormal;
    const shown = this.all ? rows : rows.slice(0, FIRST);
    /** @param {string} key  @param {string} label */
    const column = (key, label) =>
      html`<th
        class=${key === "slowdown" ? "num" : ""}
        scope="col"
        aria-sort=${this.sort === key ? "ascending" : "none"}
      >
        <button
          class="sort"
          @click=${() => {
            this.sort = this.sort === key ? "" : key;
          }}
        >
          ${label}
        </button>
      </th>`;
    return html`<header>
        <h2 id="abnormal-title">Not normal</h2>
        <p>${counted(rows.length, "row")}, the worst first</p>
      </header>
      ${
        rows.length === 0
          ? html`<p class="empty">✓ Every device, node and link is normal.</p>`
          : html`<div class="scroll tall" tabindex="0" role="group" aria-label="Not normal">
                <table class="data">
                  <thead>
                    <tr>
                      ${column("name", "what")}${column("state", "state")}${column("slowdown", "slowdown")}
                      ${column("since", "since")}
                    </tr>
                  </thead>
                  <tbody>
                    ${shown.map(
                      (row) =>
                        html`<tr>
                          <th scope="row">${named(row)}</th>
                          <td>
                            ${chip(STATES[row.state]?.tone ?? "warn", STATES[row.state]?.glyph ?? "!", row.state)}
                            ${row.why ? html`<div class="small muted">${row.why}</div>` : nothing}
                          </td>
                          <td class="num">${row.slowdown === null ? "" : slowdown(row.slowdown)}</td>
                          <td class="nowrap">${row.since === null ? "" : lasted(news.now() - row.since)}</td>
                        </tr>`,
                    )}
                  </tbody>
                </table>
              </div>
              ${
                rows.length > shown.length
                  ? html`<button
                      class="quiet"
                      @click=${() => {
                        this.all = true;
                      }}
                    >
                      Show all ${number(rows.length)}
                    </button>`
                  : nothing
              }`
      }`;
  }

  /** Those that run; in a report all, for it is of a job that may be over. @param {ClusterView} known */
  jobs(known) {
    const shown = recording ? known.jobs : known.jobs.filter((job) => !over(job));
    const more = known.jobs.length - shown.length;
    const others = more
      ? html`<p>
          <a href=${to("/jobs")}>${counted(more, "job")} ${more === 1 ? "is" : "are"} over</a>
        </p>`
      : nothing;
    return html`<header>
        <h2 id="jobs-title">Jobs</h2>
        ${others}
      </header>
      ${
        shown.length === 0
          ? html`<p class="empty">
              No job runs: start one with
              <code>elasticd run SCRIPT</code>.
            </p>`
          : jobTable(shown)
      }`;
  }
}

/** A row for each job. @param {JobRow[]} jobs */
export const jobTable = (jobs) =>
  html`<div class="scroll" tabindex="0" role="group" aria-label="Jobs">
    <table class="data">
      <thead>
        <tr>
          <th scope="col">job</th>
          <th scope="col">phase</th>
          <th scope="col" class="num">step</th>
          <th scope="col" class="num">loss</th>
          <th scope="col" class="num">tokens/s</th>
          <th scope="col" class="num">of predicted</th>
          <th scope="col" class="num">of bound</th>
          <th scope="col" class="num">ETTR</th>
          <th scope="col" class="num">plan</th>
          <th scope="col" class="num">devices</th>
          <th scope="col">last event</th>
        </tr>
      </thead>
      <tbody>
        ${jobs.map(row)}
      </tbody>
    </table>
  </div>`;

/** @param {JobRow} job */
function row(job) {
  const [tone, glyph] = toned(job.phase);
  const of = (/** @type {number | null} */ most) => (job.within_steps && most ? job.within_steps / most : null);
  return html`<tr>
    <th scope="row"><a href=${jobHref(job.job)}>${job.job}</a></th>
    <td>${chip(tone, glyph, job.phase)}</td>
    <td class="num">${number(job.step)}</td>
    <td class="num">${number(job.loss, 4)}</td>
    <td class="num">${number(job.tokens_per_second)}</td>
    <td class="num">${percent(of(job.predicted), 0)}</td>
    <td class="num">${percent(of(job.bound), 0)}</td>
    <td class="num">${percent(job.ettr)}</td>
    <td class="num">
      ${job.plan === null ? "–" : html`<a href=${planHref(job.job, job.plan)}>${job.plan}</a>`}${
        job.proposal === null
          ? nothing
          : html` →
              <a href=${to(`/jobs/${encodeURIComponent(job.job)}/switch`)}>${job.proposal}</a>`
      }
    </td>
    <td class="num">
      ${job.devices}${job.standby ? html` <span class="muted">+${job.standby} standby</span>` : nothing}
    </td>
    <td class="words">
      ${job.last_event ? html`<a href=${to(`/events?id=${job.last_event.id}`)}>${job.last_event.text}</a>` : nothing}
    </td>
  </tr>`;
}

/** @param {Abnormal} row */
function named(row) {
  if (row.what === "device") return html`<a class="mono" href=${deviceHref(row.name)}>${row.name}</a>`;
  if (row.what === "job") return html`job <a href=${jobHref(row.name)}>${row.name}</a>`;
  return html`${row.what} <span class="mono">${row.name}</span>`;
}

/** The first line of the page. @param {ClusterView} known */
function answer(known) {
  const said = ["unreachable", "hung", "slow", "draining", "drained"]
    .filter((state) => known.counts[state])
    .map((state) => `${counted(known.counts[state], "device")} ${state}`);
  const nodes = known.abnormal
    .filter((each) => each.what === "link" || each.what === "job")
    .map((each) => `${each.what} ${each.name} ${each.state}`);
  const wrong = [...said, ...nodes.slice(0, 3)];
  const live = recording ? known.jobs : known.jobs.filter((job) => !over(job));
  const running = live.filter((job) => TRAINS.includes(job.phase)).length;
  const all = live.length;
  const jobs =
    all === 0
      ? "No job runs."
      : all === 1
        ? `Job ${live[0].job} ${running ? "trains" : `does not train: it is ${live[0].phase}`}.`
        : `${running} of ${all} jobs ${running === 1 ? "trains" : "train"}.`;
  return wrong.length
    ? html`${chip("warn", "▲", listed(wrong))} ${jobs}`
    : html`${chip("ok", "✓", "All is normal")} ${jobs}`;
}

/** Pipelines and lanes down, stages across. @param {ClusterView} known  @param {JobRow} job */
function byPlace(known, job) {
  /** @type {Map<string, {label: string, order: number[], stages: Map<number, [number, Required<DeviceCell>][]>}>} */
  const found = new Map();
  /** @type {Map<number, number>} */
  const widths = new Map();
  const modules = new Set();
  const lanes = new Set();
  for (const node of known.nodes) {
    for (const each of node.devices) {
      const cell = /** @type {Required<DeviceCell>} */ (each);
      if (cell.job !== job.job || !cell.place) continue;
      const [module, pipeline, lane, stage, position] = cell.place;
      modules.add(module);
      lanes.add(lane);
      const key = `${module}/${pipeline}/${lane}`;
      const band = found.get(key) ?? {
        label: "",
        order: [module, pipeline, lane],
        stages: new Map(),
      };
      found.set(key, band);
      const members = band.stages.get(stage) ?? [];
      band.stages.set(stage, members);
      members.push([position, cell]);
      widths.set(stage, Math.max(widths.get(stage) ?? 0, members.length));
    }
  }
  const stages = [...widths.keys()].sort((a, b) => a - b);
  /** @type {Map<number, number>} */
  const starts = new Map();
  let column = 0;
  for (const stage of stages) {
    starts.set(stage, column);
    column += Math.max(2, widths.get(stage) ?? 1) + 0.5;
  }
  /** @type {Band[]} */
  const bands = [...found.entries()]
    .sort(([, a], [, b]) => a.order[0] - b.order[0] || a.order[1] - b.order[1] || a.order[2] - b.order[2])
    .map(([key, { order, stages: members }]) => {
      const cells = [];
      const columns = [];
      for (const stage of stages) {
        for (const [position, cell] of (members.get(stage) ?? []).sort((a, b) => a[0] - b[0])) {
          cells.push(cell);
          columns.push((starts.get(stage) ?? 0) + position);
        }
      }
      const module = modules.size > 1 ? `module ${order[0]} ` : "";
      const lane = lanes.size > 1 ? ` lane ${order[2]}` : "";
      return {
        key,
        label: `${module}pipeline ${order[1]}${lane}`,
        cells,
        columns,
      };
    });
  return {
    bands,
    heads: stages.map((stage) => ({
      column: starts.get(stage) ?? 0,
      label: `stage ${stage}`,
    })),
  };
}

/** @param {EtcdView} etcd */
const writes = (etcd) => {
  if (!etcd.reachable) return "away";
  return etcd.unwritten_seconds > 0 ? html`behind by ${lasted(etcd.unwritten_seconds)}` : "answers";
};

/** @param {ClusterView} known */
const links = (known) =>
  html`<header><h2 id="links-title">Slow links</h2></header>
    <table class="data">
      <thead>
        <tr>
          <th scope="col">link</th>
          <th scope="col" class="num">slowdown</th>
          <th scope="col" class="num">MB/s</th>
          <th scope="col" class="num">latency, ms</th>
        </tr>
      </thead>
      <tbody>
        ${known.links.map(
          (link) =>
            html`<tr>
              <th scope="row" class="mono">${link.link}</th>
              <td class="num">${slowdown(link.slowdown)}</td>
              <td class="num">${figure(link.bandwidth / 1e6)}</td>
              <td class="num">${figure(1e3 * link.latency)}</td>
            </tr>`,
        )}
      </tbody>
    </table>`;

customElements.define("ed-cluster", ClusterPage);
